"""Base class of modules that communicate."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self

from torch import nn
from torch.distributed import ProcessGroup


class ParallelModule(nn.Module):
    """A module whose copies (EMA, reference model) have their own weights but use the same process groups."""

    def shared_by_copies(self) -> list[Any]:
        """Return the attributes that copies share instead of copying them: process groups."""
        return [value for value in vars(self).values() if isinstance(value, ProcessGroup)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo.update({id(shared): shared for shared in self.shared_by_copies()})
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update({key: deepcopy(value, memo) for key, value in vars(self).items()})
        return copied
