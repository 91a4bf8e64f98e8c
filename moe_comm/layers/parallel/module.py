"""Base class of modules that communicate."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self

from torch import nn
from torch.distributed import ProcessGroup

from moe_comm.comm.communicator import refuse_pickling
from moe_comm.dispatch import Dispatcher


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
