"""What ``moe-comm tune`` measures: each operator with inputs of a shape. Another is a class and a line in CASES."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.meeting import channel_of
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.overlap.cost import Work
from moe_comm.overlap.dispatch_matmul import dispatch_matmul
from moe_comm.overlap.gather_matmul import gather_matmul
from moe_comm.overlap.matmul_combine import matmul_combine
from moe_comm.overlap.matmul_scatter import matmul_scatter
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ExpertPlacement

EXPERTS, TOP_K = 8, 2
"""Of an MoE layer: experts of a rank, and of a token."""


@dataclass
class Ground:
    """What cases of one run share."""

    group: ProcessGroup
    dtype: torch.dtype
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)

    @cached_property
    def channel(self) -> Channel:
        """Of linear layers. Collective."""
        return channel_of(self.group)

    @cached_property
    def dispatcher(self) -> AllToAllDispatcher:
        """Of MoE layers. Collective."""
        placement = ExpertPlacement.of(EXPERTS * self.world, self.world)
        return AllToAllDispatcher(placement, self.group, self.rank)

    def draw(self, *shape: int) -> Tensor:
        """Normal numbers of this rank's own, which take a gradient."""
        generator = torch.Generator().manual_seed(self.seed * 64 + self.rank)
        return torch.randn(*shape, generator=generator).to(self.device, self.dtype).requires_grad_()


class Case(ABC):
    """One operator. ``rows`` of each rank; ``sent`` columns travel, ``other`` do not."""

    operator: ClassVar[str]

    def __init__(self, ground: Ground, rows: int, sent: int, other: int) -> None:
        self.ground, self.rows, self.sent, self.other = ground, rows, sent, other

    leaves: tuple[Tensor, ...]
    """Whose gradients backward computes."""
    copies, groups = 1, 1
    """Of a row, and products that all rows are spread over."""

    @property
    def channel(self) -> Channel:
        return self.ground.channel

    def work(self, direction: str) -> Work:
        """As the operator asks for it, where it is asked for ``auto``."""
        rows, world = self.rows * self.copies, self.ground.world
        rows *= world if self.groups == 1 else 1
        return Work(self.operator, direction, rows, self.sent, self.other, self.ground.dtype, world, self.groups)

    @abstractmethod
    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        """The forward pass. Collective."""


class GatherMatmul(Case):
    operator = "gather_matmul"

    def __init__(self, ground: Ground, rows: int, sent: int, other: int) -> None:
        super().__init__(ground, rows, sent, other)
        self.leaves = ground.draw(rows, sent), ground.draw(other, sent)

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        x, w = self.leaves
        return lambda: gather_matmul(x, w, self.ground.group, overlap)


class MatmulScatter(Case):
    operator = "matmul_scatter"

    def __init__(self, ground: Ground, rows: int, sent: int, other: int) -> None:
        super().__init__(ground, rows, sent, other)
        self.leaves = ground.draw(rows * ground.world, other), ground.draw(sent, other)

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        x, w = self.leaves
        return lambda: matmul_scatter(x, w, self.ground.group, overlap)


class _OfExperts(Case):
    """rows: tokens of each rank, each for ``TOP_K`` experts in turn, so that all get as many."""

    copies, groups = TOP_K, EXPERTS

    def __init__(self, ground: Ground, rows: int, sent: int, other: int) -> None:
        super().__init__(ground, rows, sent, other)
        first = torch.arange(rows) * TOP_K + ground.rank * EXPERTS
        self.ids_TK = ((first[:, None] + torch.arange(TOP_K)) % (EXPERTS * ground.world)).to(ground.device)

    @property
    def channel(self) -> Channel:
        return self.ground.dispatcher.channel


class DispatchMatmul(_OfExperts):
    operator = "dispatch_matmul"

    def __init__(self, ground: Ground, rows: int, sent: int, other: int) -> None:
        super().__init__(ground, rows, sent, other)
        self.leaves = ground.draw(rows, sent), ground.draw(EXPERTS, other, sent)

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        x, w = self.leaves
        return lambda: dispatch_matmul(self.ground.dispatcher, x, self.ids_TK, w, overlap)[0]


class MatmulCombine(_OfExperts):
    """The dispatch before it, which says in how many chunks its rows come back, is not timed."""

    operator = "matmul_combine"

    def __init__(self, ground: Ground, rows: int, sent: int, other: int) -> None:
        super().__init__(ground, rows, sent, other)
        self._sent_TD = torch.zeros(rows, sent, dtype=ground.dtype, device=ground.device)
        self._weights_TK = ground.draw(rows, TOP_K)
        received = ground.dispatcher.dispatch(self._sent_TD, self.ids_TK).handle.num_rows
        self.leaves = ground.draw(received, other), ground.draw(EXPERTS, sent, other), self._weights_TK

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        rows, w, weights = self.leaves
        none_EGD = self._sent_TD.new_zeros(EXPERTS, 1, self.sent)
        _, dispatch = dispatch_matmul(self.ground.dispatcher, self._sent_TD, self.ids_TK, none_EGD, overlap)
        return lambda: matmul_combine(rows, w, weights, dispatch)


CASES: dict[str, type[Case]] = {
    case.operator: case for case in (GatherMatmul, MatmulScatter, DispatchMatmul, MatmulCombine)
}
