"""How every parameter of a model lies over the ranks of its pipeline stage, collected from the modules that know."""

from __future__ import annotations

from torch import nn

from moe_comm.layers.parallel.names import state_key
from moe_comm.topology import Sharding


def shardings_of(module: nn.Module) -> dict[str, Sharding]:
    """The sharding of every parameter of ``module``, by its name as in a state dict, in order of ``named_parameters``.

    A module that cuts parameters has a method ``shardings`` that describes them by their names within it; what nobody
    describes is dense and alike on all ranks of the stage. Wrappers (activation checkpointing, FSDP) do not show in
    the names, and a parameter that two modules share comes once, under its first name.
    """
    cut: dict[str, Sharding] = {}
    for name, child in module.named_modules():
        describe = getattr(child, "shardings", None)
        if callable(describe):
            prefix = (name,) if name else ()
            cut.update({state_key(*prefix, own): sharding for own, sharding in describe().items()})
    names = ((state_key(name), param) for name, param in module.named_parameters())
    return {name: cut.get(name, Sharding(tuple(param.shape))) for name, param in names}
