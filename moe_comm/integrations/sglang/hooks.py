"""The plugin: SGLang calls it in each of its processes, and its MoE layers then get ``MoeCommDispatcher``."""

from __future__ import annotations

import os
from pkgutil import resolve_name

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.runtime.versions import require

VARIABLE = "MOE_COMM_SGLANG"
FACTORY = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"
LAYER = "sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.__init__"


def plugin() -> None:
    """Make SGLang's MoE layers dispatch with moe_comm if the environment variable ``MOE_COMM_SGLANG`` is 1.

    SGLang calls it through the entry point ``sglang.srt.plugins``. A second call changes nothing.

    Raises:
        SystemExit: the variable is set, but moe_comm cannot be used. SGLang logs other exceptions of a plugin and
            continues without it.
    """
    value = os.environ.get(VARIABLE, "")
    if value in ("", "0"):
        return
    try:
        if value != "1":
            raise ConfigError(f"it must be 1 or 0; got {value!r}")
        require("sglang", "the plugin of moe_comm")
        _register()
    except (MoeCommError, ImportError, AttributeError) as error:
        raise SystemExit(f"{VARIABLE}={value}: {error}") from error


def _register() -> None:
    """Register the hooks, once."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from moe_comm.integrations.sglang.dispatcher import create_dispatcher, use_runner

    for target, hook, kind in (FACTORY, create_dispatcher, HookType.AROUND), (LAYER, use_runner, HookType.AFTER):
        resolve_name(target)  # SGLang only logs a target that does not exist
        if any(known is hook for _, known, _ in HookRegistry._hooks.get(target, ())):
            continue
        if target in HookRegistry._patched:
            raise ConfigError(f"SGLang has applied the hooks of {target} already; call plugin() before load_plugins()")
        HookRegistry.register(target, hook, kind)
