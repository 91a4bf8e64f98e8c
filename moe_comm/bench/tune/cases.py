"""Operators that ``moe-comm tune`` measures. A new operator needs a class and an entry in ``CASES``."""

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
from moe_comm.comm.group_setup import channel_of
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.overlap.dispatch_matmul import dispatch_matmul
from moe_comm.overlap.gather_matmul import gather_matmul
from moe_comm.overlap.matmul_combine import matmul_combine
from moe_comm.overlap.matmul_scatter import matmul_scatter
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.tuning.cost import OperatorWork
from moe_comm.topology import ExpertPlacement

EXPERTS, TOP_K = 8, 2
"""Experts per rank, and experts that each token selects."""


@dataclass
class TuneContext:
    """Group, dtype and device of all cases of a run."""

    group: ProcessGroup
    dtype: torch.dtype
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)

    @cached_property
    def channel(self) -> Channel:
        """Channel of linear layers. Collective."""
        return channel_of(self.group)

    @cached_property
    def dispatcher(self) -> AllToAllDispatcher:
        """Dispatcher of MoE layers. Collective."""
        placement = ExpertPlacement.of(EXPERTS * self.world, self.world)
        return AllToAllDispatcher(placement, self.group, self.rank)

    def draw(self, *shape: int) -> Tensor:
        """Return normally distributed values that require a gradient, different on each rank."""
        generator = torch.Generator().manual_seed(self.seed * 64 + self.rank)
        return (
            torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
            .to(self.device, self.dtype)
            .requires_grad_()
        )


class TuneCase(ABC):
    """One operator with ``rows`` rows per rank. Rows of width ``sent`` are transferred, those of ``other`` are not.

    Attributes:
        leaves: tensors whose gradients the backward pass computes.
        copies: number of copies of a row.
        groups: number of GEMMs over which the rows are distributed.
    """

    operator: ClassVar[str]

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        self.context, self.rows, self.sent, self.other = context, rows, sent, other

    leaves: tuple[Tensor, ...]
    copies, groups = 1, 1

    @property
    def channel(self) -> Channel:
        return self.context.channel

    def work(self, direction: str) -> OperatorWork:
        """Return the work as the operator describes it to the tuner for ``Overlap("auto")``."""
        rows, world = self.rows * self.copies, self.context.world
        rows *= world if self.groups == 1 else 1
        return OperatorWork(
            self.operator, direction, rows, self.sent, self.other, self.context.dtype, world, self.groups
        )

    @abstractmethod
    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        """Return the forward pass. Collective."""


class GatherMatmulCase(TuneCase):
    operator = "gather_matmul"

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        super().__init__(context, rows, sent, other)
        self.leaves = context.draw(rows, sent), context.draw(other, sent)

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        x, w = self.leaves
        return lambda: gather_matmul(x, w, self.context.group, overlap)


class MatmulScatterCase(TuneCase):
    operator = "matmul_scatter"

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        super().__init__(context, rows, sent, other)
        self.leaves = context.draw(rows * context.world, other), context.draw(sent, other)

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        x, w = self.leaves
        return lambda: matmul_scatter(x, w, self.context.group, overlap)


class _ExpertCase(TuneCase):
    """``rows`` are the tokens per rank. Consecutive tokens select consecutive experts, so experts are balanced."""

    copies, groups = TOP_K, EXPERTS

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        super().__init__(context, rows, sent, other)
        first = torch.arange(rows, device="cpu") * TOP_K + context.rank * EXPERTS
        self.ids_TK = ((first[:, None] + torch.arange(TOP_K, device="cpu")) % (EXPERTS * context.world)).to(
            context.device
        )

    @property
    def channel(self) -> Channel:
        return self.context.dispatcher.channel


class DispatchMatmulCase(_ExpertCase):
    operator = "dispatch_matmul"

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        super().__init__(context, rows, sent, other)
        self.leaves = context.draw(rows, sent), context.draw(EXPERTS, other, sent)

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        x, w = self.leaves
        return lambda: dispatch_matmul(self.context.dispatcher, x, self.ids_TK, w, overlap)[0]


class MatmulCombineCase(_ExpertCase):
    """The preceding dispatch, which determines the number of chunks, is not timed."""

    operator = "matmul_combine"

    def __init__(self, context: TuneContext, rows: int, sent: int, other: int) -> None:
        super().__init__(context, rows, sent, other)
        self._sent_TD = torch.zeros(rows, sent, dtype=context.dtype, device=context.device)
        self._weights_TK = context.draw(rows, TOP_K)
        received = context.dispatcher.dispatch(self._sent_TD, self.ids_TK).handle.num_rows
        self.leaves = context.draw(received, other), context.draw(EXPERTS, sent, other), self._weights_TK

    def prepare(self, overlap: Overlap) -> Callable[[], Tensor]:
        rows, w, weights = self.leaves
        zero_weight_EGD = self._sent_TD.new_zeros(EXPERTS, 1, self.sent)
        _, dispatch = dispatch_matmul(self.context.dispatcher, self._sent_TD, self.ids_TK, zero_weight_EGD, overlap)
        return lambda: matmul_combine(rows, w, weights, dispatch)


CASES: dict[str, type[TuneCase]] = {
    case.operator: case for case in (GatherMatmulCase, MatmulScatterCase, DispatchMatmulCase, MatmulCombineCase)
}
