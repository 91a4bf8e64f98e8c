"""The entry point: it replaces vLLM's choice of the steps around the experts, if the user asks for that."""

from __future__ import annotations

import os
import sys
from functools import partial

from moe_comm.errors import ConfigError
from moe_comm.runtime.versions import require

SWITCH = "MOE_COMM_VLLM"
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

    from moe_comm.integrations.vllm.prepare_finalize import choose

    original = getattr(all2all_utils, CHOICE)
    if getattr(original, "func", None) is choose:
        return
    replacement = partial(choose, original)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and getattr(module, CHOICE, None) is original:
            setattr(module, CHOICE, replacement)
