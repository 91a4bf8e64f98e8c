"""Optimizer state as the optimizers see it: pieces of parameters with their state, in a sweep per update.

``ResidentState`` keeps all state in memory, and each sweep is one list of whole parameters, or one per group. With
``StreamedState`` a sweep yields chunks, which are in memory until the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.train.parallel.parameters import OwnedParameter

MASTERS = "master"
"""Name of the master weights among the fields of a parameter."""
Opener = Callable[[bool], AbstractContextManager[Tensor]]
"""Opens a tensor that is not in memory; with True its values are only written. The tensor has the shape of the shard.
"""


def gradient(item: OwnedParameter) -> Tensor:
    """Return the reduced gradient. Raises ``InputError`` if ``DataParallel.reduce`` was not called."""
    if item.value.grad is None:
        raise InputError(f"{item.name} has no gradient; call DataParallel.reduce before the optimizer's step")
    return item.value.grad


@dataclass(frozen=True)
class Piece:
    """A range of elements of a parameter that are updated together, in memory.

    Attributes:
        item: the parameter.
        part: range of elements of the flat shard; None: the whole shard, in its shape.
        value: master weights of the range.
        state: optimizer state of the range by name, in the shape of ``value``.
    """

    item: OwnedParameter
    part: slice | None
    value: Tensor
    state: dict[str, Tensor]

    @property
    def grad(self) -> Tensor:
        """The reduced gradient of the range."""
        grad = gradient(self.item)
        return grad if self.part is None else grad.reshape(-1)[self.part]


class Sweep:
    """The parameters that one update of an optimizer visits, in groups.

    Iterating yields the number of a group and pieces of its parameters. All ranks of a stage have the same groups and
    visit them in the same order.
    """

    def __init__(self, chunks: Callable[[], Iterator[tuple[int, list[Piece]]]]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[tuple[int, list[Piece]]]:
        return self._chunks()


@dataclass(frozen=True)
class OffloadReport:
    """Statistics of the last update of this rank, or of the last forward and backward passes.

    Attributes:
        stored: bytes of state and masters of this rank, or the most bytes of activations at a time.
        budget, peak: bytes of memory that they may use, and the most used so far.
        read, written: bytes since the previous report.
        update_s: duration of the sweeps, or of the passes.
        waited_s: time in ``update_s`` without computation, because no chunk or no memory was available.
        busy_s: time since the previous report in which chunks were read or written.
    """

    stored: int
    budget: int
    peak: int
    read: int = 0
    written: int = 0
    update_s: float = 0.0
    waited_s: float = 0.0
    busy_s: float = 0.0

    @property
    def overlap(self) -> float:
        """The longer of computation and transfers, relative to the duration of the update: 1 if they overlap fully."""
        longest = max(self.update_s - self.waited_s, min(self.busy_s, self.update_s))
        return longest / self.update_s if self.update_s else 1.0


class ResidentState:
    """Optimizer state in memory, allocated when the optimizer is constructed.

    Attributes:
        tensors: state by parameter and name.
        report: statistics of the last update, if the state is not in memory.
    """

    resident = True
    report: OffloadReport | None = None

    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, Tensor]] = {}

    def add(
        self,
        owned: Sequence[OwnedParameter],
        names: Sequence[str],
        groups: Sequence[Sequence[OwnedParameter]] | None = None,
    ) -> Sweep:
        """Add state ``names`` of zeros, in the shape of each parameter, and return a sweep over the parameters.

        Args:
            groups: parameters whose whole shards must be in memory together; None: ranges of elements are enough.
        """
        for item in owned:
            self.tensors[item.name] = {name: torch.zeros_like(item.value, requires_grad=False) for name in names}

        def chunks() -> Iterator[tuple[int, list[Piece]]]:
            for number, group in enumerate([owned] if groups is None else groups):
                yield number, [Piece(item, None, item.value, self.tensors[item.name]) for item in group]

        return Sweep(chunks)

    def start(self) -> None:
        """Allocate the state, after the last ``add``. Collective."""

    def opener(self, name: str, field: str) -> Opener | None:
        """Return how to open a state tensor, or the masters, of a parameter; None: its tensor is in memory."""
        return None

    def finish(self) -> None:
        """End an update: raise an error of a transfer on every rank. Collective."""

    def close(self) -> None:
        """Release files, memory and threads."""
