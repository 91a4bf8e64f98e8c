"""The plugin: SGLang calls it in each of its processes, and its MoE layers then get ``MoeCommDispatcher``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from moe_comm.errors import ConfigError, MoeCommError
from moe_comm.runtime.versions import require

VARIABLE = "MOE_COMM_SGLANG"
FACTORY = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"
LAYER = "sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.__init__"

logger = logging.getLogger(__name__)


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

    for target, hook, kind in (FACTORY, _create_dispatcher, HookType.AROUND), (LAYER, _use_runner, HookType.AFTER):
        resolve_name(target)  # SGLang only logs a target that does not exist
        if any(known is hook for _, known, _ in HookRegistry._hooks.get(target, ())):
            continue
        if target in HookRegistry._patched:
            raise ConfigError(f"SGLang has applied the hooks of {target} already; call plugin() before load_plugins()")
        HookRegistry.register(target, hook, kind)


def _create_dispatcher(original: Callable[..., Any], moe_runner_config: Any, quant_method: Any) -> Any:
    """Return the dispatcher of a layer, in place of ``create_moe_dispatcher``.

    Raises:
        ConfigError: SGLang's options select another dispatcher than DeepEP's in normal mode.
    """
    from sglang.srt.layers.moe.utils import get_deepep_mode, get_moe_a2a_backend
    from sglang.srt.runtime_context import get_flags

    from moe_comm.integrations.sglang.dispatcher import MoeCommDispatcher

    a2a = get_moe_a2a_backend()
    if get_flags().moe.in_speculative_scope and not a2a.is_deepep():
        logger.warning("moe_comm does not dispatch the draft model, which has the a2a backend %s", a2a.value)
        return original(moe_runner_config, quant_method)
    if not (a2a.is_deepep() and get_deepep_mode().is_normal()):
        raise ConfigError(
            f"{VARIABLE}=1 needs --moe-a2a-backend deepep --deepep-mode normal; got {a2a.value} and "
            f"{get_deepep_mode().value}"
        )
    dispatcher = MoeCommDispatcher(moe_runner_config)
    name = "standard" if dispatcher.is_standard else "deepep_normal"
    logger.info("moe_comm dispatches layer %s in the format %s", moe_runner_config.layer_id, name)
    return dispatcher


def _use_runner(result: None, layer: Any, *args: Any, **settings: Any) -> None:
    """Make a layer with ``MoeCommDispatcher`` call its MoE runner, which SGLang does for DeepGEMM only."""
    from moe_comm.integrations.sglang.dispatcher import MoeCommDispatcher

    if isinstance(layer.dispatcher, MoeCommDispatcher):
        layer.deprecate_flag = True
