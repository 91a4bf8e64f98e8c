"""Run the MoE blocks of Hugging Face models expert-parallel.

``swap_moe`` changes a loaded model; ``register`` brings ``"moe_comm"`` into the two registries of transformers.
"""

from moe_comm.integrations.hugging_face.families import FAMILIES
from moe_comm.integrations.hugging_face.registries import register
from moe_comm.integrations.hugging_face.state import gather_state_dict, save_swapped
from moe_comm.integrations.hugging_face.swap import (
    EPExperts,
    expert_parameters,
    sum_replicated_gradients,
    swap_moe,
    swapped_experts,
)

__all__ = [
    "FAMILIES",
    "EPExperts",
    "expert_parameters",
    "gather_state_dict",
    "register",
    "save_swapped",
    "sum_replicated_gradients",
    "swap_moe",
    "swapped_experts",
]
