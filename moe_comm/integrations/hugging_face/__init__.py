"""Expert, tensor and context parallelism for Hugging Face models.

``swap_moe``, ``swap_attention`` and ``swap_linears`` change a loaded model in place. ``register`` adds ``"moe_comm"``
and ``"moe_comm_fp8"`` to the two registries of transformers. ``MoETrainer``, ``MoETrainerMixin`` and
``prepare_accelerator`` train swapped models with ``Trainer`` and accelerate. Their modules load on first use because
importing ``Trainer`` takes seconds.
"""

from moe_comm.errors import MissingDependency, pip_install
from moe_comm.lazy import attach_stub

try:
    import transformers as _transformers  # noqa: F401  raises here if the extra is not installed
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] == "moe_comm":
        raise
    raise MissingDependency(
        f"Hugging Face models need {error.name}, which is not installed; run: {pip_install('hf')}"
    ) from error

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
