"""A module named ``deep_ep`` for programs that import DeepEP."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from moe_comm.dispatch import BACKENDS
from moe_comm.errors import ConfigError
from moe_comm.integrations.deepep.elastic import ElasticBuffer, EPHandle
from moe_comm.integrations.deepep.events import Config, EventHandle, EventOverlap
from moe_comm.integrations.deepep.legacy import Buffer

API_VERSION = "2.1.0"
"""Version of DeepEP whose interface is provided."""
MARK = "__moe_comm__"
NAMES = ("deep_ep", "deep_ep.utils", "deep_ep.utils.event")
CALLERS = (
    "megatron.core.transformer.moe.fused_a2a",
    "nemo_automodel.components.moe.megatron.fused_a2a",
)
"""Modules that look for DeepEP once, when they are imported, and set ``HAVE_DEEP_EP``."""


def install(*, backend: str = "auto", timeout_s: float = 300.0, replace: bool = False) -> ModuleType:
    """Put a module ``deep_ep`` into ``sys.modules`` whose buffers dispatch with moe_comm.

    Programs that import DeepEP after this call use it, on CPU ranks too. A second call with other settings replaces the
    module; programs that have imported its classes keep those.

    Args:
        backend: dispatch backend; see ``make_dispatcher``.
        timeout_s: seconds to wait for a live peer.
        replace: also hide an installed DeepEP.

    Returns:
        The module.

    Raises:
        ConfigError: DeepEP is installed, or a program that uses it was imported before, or ``backend`` is unknown.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"unknown dispatch backend {backend!r}; known: {', '.join(BACKENDS)}")
    existing = sys.modules.get("deep_ep")
    if not hasattr(existing, MARK) and not replace:
        spec = find_spec("deep_ep")
        if spec is not None:
            raise ConfigError(
                f"DeepEP is installed ({spec.origin}), and install() would hide it; uninstall it, or call "
                "install(replace=True)"
            )
    early = [name for name in CALLERS if getattr(sys.modules.get(name), "HAVE_DEEP_EP", True) is False]
    if early:
        raise ConfigError(
            f"{', '.join(early)} was imported before install() and found no DeepEP; call "
            "moe_comm.integrations.deepep.install() first"
        )
    settings = {"backend": backend, "timeout_s": timeout_s, "__module__": "deep_ep"}
    events = {"EventHandle": EventHandle, "EventOverlap": EventOverlap}
    modules = {name: ModuleType(name) for name in NAMES}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=name != NAMES[-1])
        module.__path__ = []
        module.__dict__.update(events)
    root = modules["deep_ep"]
    names: dict[str, Any] = {
        MARK: True,
        "__version__": API_VERSION,
        "Buffer": type("Buffer", (Buffer,), settings),
        "ElasticBuffer": type("ElasticBuffer", (ElasticBuffer,), settings),
        "EPHandle": EPHandle,
        "Config": Config,
        "topk_idx_t": torch.int64,
        "utils": modules["deep_ep.utils"],
    }
    root.__dict__.update(names)
    modules["deep_ep.utils"].__dict__["event"] = modules["deep_ep.utils.event"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "deep_ep"]:
        del sys.modules[name]
    sys.modules.update(modules)
    return root


def uninstall() -> None:
    """Remove the modules of ``install``. Programs that have imported their classes keep those. May be called twice."""
    if hasattr(sys.modules.get("deep_ep"), MARK):
        for name in NAMES:
            sys.modules.pop(name, None)
