"""Expert parallelism for SGLang: a dispatcher of its MoE layers, and the plugin that selects it.

SGLang imports this package in each of its processes, so only ``MoeCommDispatcher`` needs SGLang on import.
"""

from typing import Any

from moe_comm.lazy import attach_stub
from moe_comm.runtime.versions import require

_load, __dir__, __all__ = attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "MoeCommDispatcher":
        require("sglang", "moe_comm.integrations.sglang.MoeCommDispatcher")
    return _load(name)
