"""Base class of modules that communicate, and names and shardings of their parameters."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self

from torch import nn
from torch.distributed import ProcessGroup

from moe_comm.comm.communicator import refuse_pickling
from moe_comm.dispatch import Dispatcher
from moe_comm.topology import Sharding

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def state_key(*path: str) -> str:
    """Return the state-dict key of ``path``, without the names of checkpointing and ``torch.compile`` wrappers."""
    return ".".join(name for name in ".".join(path).split(".") if name and name not in _WRAPPERS)


class ParallelModule(nn.Module):
    """A module whose copies (EMA, reference model) have their own weights but use the same process groups.

    Pickling it raises ``UnsupportedModel``, unless it has neither a process group nor a dispatcher.
    """

    def shared_by_copies(self) -> list[Any]:
        """Return the attributes that copies share instead of copying them: process groups."""
        return [value for value in vars(self).values() if isinstance(value, ProcessGroup)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo.update({id(shared): shared for shared in self.shared_by_copies()})
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update({key: deepcopy(value, memo) for key, value in vars(self).items()})
        return copied

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if any(map(_communicates, self.shared_by_copies())):
            refuse_pickling(self)
        return super().__reduce_ex__(protocol)


def _communicates(shared: Any) -> bool:
    held = (shared, *getattr(shared, "__dict__", {}).values())
    return any(isinstance(value, ProcessGroup | Dispatcher) for value in held)


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
