"""The entry point: it replaces vLLM's choice of the steps around the experts, if the user asks for that."""

from __future__ import annotations

import os
import sys
from functools import wraps
from typing import Any

from moe_comm.errors import ConfigError
from moe_comm.runtime.versions import require

SWITCH = "MOE_COMM_VLLM"
"""Environment variable: "1" makes ``plugin`` replace vLLM's transport."""
CHOICE = "maybe_make_prepare_finalize"
"""vLLM's function that chooses the transport of a layer. Modules import it by name."""


def plugin() -> None:
    """Move the rows of vLLM's expert-parallel MoE layers with this library, if the environment has ``MOE_COMM_VLLM=1``.

    vLLM calls it in every process, possibly several times. Further calls change nothing. Without the variable nothing
    is imported or changed. Layers that cannot be served stay with vLLM, which is logged once with the reason.

    Raises:
        MissingDependency: vLLM is absent or older than supported.
        ConfigError: vLLM is newer than supported, or the variable is neither 0 nor 1.
    """
    switch = os.environ.get(SWITCH, "0")
    if switch not in ("0", "1"):
        raise ConfigError(f"{SWITCH} must be 0 or 1; got {switch!r}")
    if switch == "0":
        return
    require("vllm", "moe_comm.integrations.vllm")
    from vllm.model_executor.layers.fused_moe import all2all_utils

    original = getattr(all2all_utils, CHOICE)
    if hasattr(original, "moe_comm"):
        return
    replacement = _replacement(original)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and getattr(module, CHOICE, None) is original:
            setattr(module, CHOICE, replacement)


def _replacement(original: Any) -> Any:
    """Return ``original`` without the layers that this library serves."""
    from vllm.logger import init_logger

    logger = init_logger("vllm.moe_comm")

    @wraps(original)
    def choose(moe: Any, quant_config: Any, *args: Any, **kwargs: Any) -> Any:
        reason = _obstacle(moe, quant_config, *args, **kwargs)
        if reason is None:
            return _served()
        logger.warning_once("moe_comm leaves MoE layers to vLLM: %s", reason)
        return original(moe, quant_config, *args, **kwargs)

    choose.moe_comm = True  # type: ignore[attr-defined]
    return choose


def _obstacle(
    moe: Any,
    quant_config: Any,
    routing_tables: Any = None,
    allow_new_interface: bool = False,
    use_monolithic: bool = False,
    all2all_manager: Any = None,
    **ignored: Any,
) -> str | None:
    """Return why a layer stays with vLLM, or None. The arguments are those of vLLM's function."""
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform

    layout = moe.moe_parallel_config
    ranks_with_tokens = layout.dp_size * layout.pcp_size * layout.sp_size
    obstacles = {
        "they need enable_expert_parallel, and data_parallel_size above 1": not layout.use_all2all_kernels,
        f"all2all_backend is {layout.all2all_backend}": layout.all2all_backend != "allgather_reducescatter",
        "tensor-parallel ranks have the same tokens": layout.ep_size != ranks_with_tokens,
        f"the device is {current_platform.device_type}": not (current_platform.is_cpu() or current_platform.is_cuda()),
        "weights or activations are quantized": quant_config is not None
        and (quant_config.quant_dtype is not None or quant_config.weight_quant_dtype is not None),
        "the kernel of the experts routes the tokens": use_monolithic or not allow_new_interface,
        "they have adapters (LoRA)": moe.is_lora_enabled,
        "experts change their ranks (enable_eplb, enable_elastic_ep)": layout.enable_eplb
        or get_current_vllm_config().parallel_config.enable_elastic_ep
        or all2all_manager is not None,
    }
    return next((reason for reason, found in obstacles.items() if found), None)


def _served() -> Any:
    """Return the transport of a layer.

    Raises:
        ConfigError: the model is compiled, or runs as a CUDA graph.
    """
    from vllm.config import CompilationMode, CUDAGraphMode, get_current_vllm_config
    from vllm.distributed import get_ep_group
    from vllm.platforms import current_platform

    from moe_comm.integrations.vllm.prepare_finalize import MoeCommPrepareAndFinalize

    graphs = get_current_vllm_config().compilation_config
    cpu = current_platform.is_cpu()
    # A compiled model on the CPU is one graph; on GPUs an operator hides the layer from the compiler.
    if graphs.mode != CompilationMode.NONE if cpu else graphs.cudagraph_mode != CUDAGraphMode.NONE:
        raise ConfigError(
            f"{SWITCH}=1: moe_comm exchanges numbers of rows on the host, which "
            f"{'a compiled model' if cpu else 'a CUDA graph'} cannot contain; use enforce_eager=True"
        )
    return MoeCommPrepareAndFinalize(get_ep_group().device_group, per_rank=not cpu)
