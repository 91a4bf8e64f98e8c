"""Run the MoE blocks of Hugging Face models expert-parallel, their attention and plain linears on several ranks too.

``swap_moe``, ``swap_attention`` and ``swap_linears`` change a loaded model; ``register`` brings ``"moe_comm"`` into the
two registries of transformers. ``MoETrainer``, ``MoETrainerMixin`` and ``prepare_accelerator`` train swapped models
with ``Trainer`` and accelerate; these names load their modules on first use, as importing ``Trainer`` takes seconds.
"""

from typing import TYPE_CHECKING

from moe_comm.errors import MissingDependency
from moe_comm.lazy import loads_on_use

try:
    from moe_comm.integrations.hugging_face.architecture import from_hugging_face, to_hugging_face
    from moe_comm.integrations.hugging_face.attention import gather_attention, swap_attention, swapped_attention
    from moe_comm.integrations.hugging_face.families import FAMILIES
    from moe_comm.integrations.hugging_face.linears import gather_linears, swap_linears, swapped_linears
    from moe_comm.integrations.hugging_face.registries import register
    from moe_comm.integrations.hugging_face.sequence import shard_inputs
    from moe_comm.integrations.hugging_face.state import gather_state_dict, save_swapped
    from moe_comm.integrations.hugging_face.swap import (
        EPExperts,
        expert_parameters,
        swap_moe,
        swapped_experts,
    )
    from moe_comm.layers.data_parallel import sum_replicated_gradients
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "moe_comm":
        raise
    raise MissingDependency(
        f"Hugging Face models need {error.name}, which is not installed; run: pip install 'moe_comm[hf]'"
    ) from error

if TYPE_CHECKING:
    from moe_comm.integrations.hugging_face.accelerator import prepare_accelerator
    from moe_comm.integrations.hugging_face.trainer import MoETrainer, MoETrainerMixin

__all__ = [
    "FAMILIES",
    "EPExperts",
    "MoETrainer",
    "MoETrainerMixin",
    "expert_parameters",
    "from_hugging_face",
    "gather_attention",
    "gather_linears",
    "gather_state_dict",
    "prepare_accelerator",
    "register",
    "save_swapped",
    "shard_inputs",
    "sum_replicated_gradients",
    "swap_attention",
    "swap_linears",
    "swap_moe",
    "swapped_attention",
    "swapped_experts",
    "swapped_linears",
    "to_hugging_face",
]

__getattr__ = loads_on_use(
    __name__,
    {
        "MoETrainer": f"{__name__}.trainer",
        "MoETrainerMixin": f"{__name__}.trainer",
        "prepare_accelerator": f"{__name__}.accelerator",
    },
)
