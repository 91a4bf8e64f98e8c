"""Descriptions of MoE blocks whose forward pass ``swap_moe`` cannot run with probes.

@moe_comm.block_adapter(MyMoE)
def describe(block):
    return moe_comm.MoEBlock(
        first=("w_gate", "w_up"), last="w_down", activation="swiglu", route=MyMoE.route
    )
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.layers.moe.formula import MoEBlock

_adapters: dict[type, Callable[[Any], MoEBlock | None]] = {}


def block_adapter(
    kind: type[nn.Module],
) -> Callable[[Callable[[Any], MoEBlock | None]], Callable[[Any], MoEBlock | None]]:
    """Decorator: ``swap_moe`` swaps modules of class ``kind`` as the decorated function describes them.

    The function gets a block and returns a ``MoEBlock``, or None to leave the module unchanged with all that is in it.
    ``swap_moe`` compares each kind of block with a swapped copy of it before it changes the model.

    Raises:
        ConfigError: ``kind`` is no class of modules.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(f"block_adapter takes a class of modules; got {kind!r}")

    def register(describe: Callable[[Any], MoEBlock | None]) -> Callable[[Any], MoEBlock | None]:
        _adapters[kind] = describe
        return describe

    return register


def adapted_blocks(model: nn.Module) -> dict[str, MoEBlock | None]:
    """Return the result of the adapter of each module of ``model`` that has one, outside others of them.

    Raises:
        UnsupportedModel: an adapter raised, or returned something else.
    """
    results: dict[str, MoEBlock | None] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        describe = next((_adapters[base] for base in type(module).__mro__ if base in _adapters), None)
        if describe is None or is_inside(name, results):
            continue
        title = f"the adapter of {type(module).__name__}"
        try:
            results[name] = result = describe(module)
        except Exception as error:  # of the user's code: the other ranks wait
            raise UnsupportedModel(f"{title} raised {type(error).__name__}: {error}") from error
        if not (result is None or isinstance(result, MoEBlock)):
            raise UnsupportedModel(f"{title} must return a MoEBlock or None; got {type(result).__name__}")
    return results


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether the module ``name`` is one of ``modules``, or in one."""
    return any(f"{name}.".startswith(f"{module}.".lstrip(".")) for module in modules)
