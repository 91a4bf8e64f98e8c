"""The shardings of all parameters of a model over the ranks of its pipeline stage."""

from __future__ import annotations

from torch import nn

from moe_comm.layers.parallel.names import state_key
from moe_comm.topology import Sharding


def shardings_of(module: nn.Module) -> dict[str, Sharding]:
    """Return the sharding of each parameter by its name in a state dict, in order of ``named_parameters``.

    A module that splits parameters has a method ``shardings``, which returns their shardings by local name. All other
    parameters are replicated over the stage. Names of wrappers (activation checkpointing, FSDP) are removed, and a
    parameter that two modules share is listed once, under its first name.
    """
    split: dict[str, Sharding] = {}
    for name, child in module.named_modules():
        describe = getattr(child, "shardings", None)
        if callable(describe):
            prefix = (name,) if name else ()
            split.update({state_key(*prefix, local_name): sharding for local_name, sharding in describe().items()})
    names = ((state_key(name), param) for name, param in module.named_parameters())
    return {name: split.get(name, Sharding(tuple(param.shape))) for name, param in names}
