"""GEMMs overlapped with a chunked collective over the same rows, for any torch.distributed backend.

The linear-layer operators (``gather_matmul``, ``matmul_scatter``) and their backward passes consist of these functions.
Each rank's S rows are cut into chunks. One asynchronous collective transfers a chunk of all ranks:

    gathered_mm     network   [chunk 0]  [chunk 1]  [chunk 2]            the GEMM of the own rows needs no transfer
                    GEMM      [own rows ][peers' 0 ][peers' 1 ][peers' 2]    and overlaps the first chunk

    scattered_mm    GEMM      [chunk 0  ][chunk 1  ][chunk 2  ][ other work of the caller ]
                    network              [chunk 0]  [chunk 1]  [chunk 2]     the caller waits for the last chunk

With one chunk there is one transfer and one GEMM over all ranks' rows, without overlap. That is the fastest for few
rows; ``Overlap("auto")`` selects it (``overlap/tuning``).

Chunks consist of whole tiles of rows and GEMMs are ``row_invariant_mm``, so the bits do not depend on the number of
chunks. Sums over ranks are taken in rank order in fp32 and rounded once, as the collectives in ``layers`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.group_setup import channel_of
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.autograd import sum_in_rank_order, without_autocast
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.options import CHUNKED, SHARED, TILE, TRITON, Overlap
from moe_comm.overlap.tuning.choose import choose
from moe_comm.overlap.tuning.cost import FUSED, OperatorWork
from moe_comm.overlap.tuning.store import OverlapChoice
from moe_comm.runtime.memory import as_tensors

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Ring:
    """The order in which ``rank`` of ``world`` ranks uses its peers: no two ranks use the same peer in the same step.

        rank        0           1           2           3
        arrivals    0 1 2 3     1 2 3 0     2 3 0 1     3 0 1 2     sources of rows: own rows first
        scatters    1 2 3 0     2 3 0 1     3 0 1 2     0 1 2 3     destinations of results: own results last

    In each step each link carries one transfer, and each rank serves one peer.
    """

    rank: int
    world: int

    @cached_property
    def arrivals(self) -> tuple[int, ...]:
        """Source ranks in order of arrival, from this rank on."""
        return (*range(self.rank, self.world), *range(self.rank))

    @cached_property
    def scatters(self) -> tuple[int, ...]:
        """Destinations of results, from rank + 1 on. Own results need no transfer, so they are computed last."""
        return (*self.arrivals[1:], self.rank)


@dataclass(frozen=True)
class OperatorPlan:
    """How one call of an operator runs on its group.

    bounds: first and end row of each chunk within a rank's rows. description: operator and shape, for error messages.
    """

    channel: SharedChannel
    ring: Ring
    bounds: Bounds
    description: str
    choice: OverlapChoice

    @classmethod
    def of(
        cls, group: ProcessGroup, work: OperatorWork, like: Tensor, overlap: Overlap, rows: int | None = None
    ) -> OperatorPlan:
        """Plan ``work``, whose rows have the dtype and device of ``like``. The first call for a group is collective.

        Args:
            rows: Rows of each rank that are cut into chunks; None: the rows of ``work`` divided by the ranks.
        """
        channel = channel_of(group)
        if overlap.backend == TRITON and work.operator not in FUSED:
            raise ConfigError(
                f"there is no Triton kernel for {work.operator}, only for {', '.join(FUSED)}; use backend='auto' for it"
            )
        if overlap.chunks == "auto" and not (overlap.backend == TRITON and overlap.programs):
            channel.compare(str(work), like)  # before the collective that agrees on the choice
            choice = choose(work, channel, like.device, overlap.backends)
            bounds, description = _bounds_and_description(work, choice, rows)
        else:
            bounds, description, choice = _fixed_plan(work, overlap, rows)
            channel.compare(description, like)
        return cls(channel, cached_ring(channel.rank, channel.world), bounds, description, choice)

    @property
    def is_serial(self) -> bool:
        """Whether there is one chunk, so that nothing overlaps."""
        return len(self.bounds) == 1

    def start_gather(self, x_SD: Tensor) -> Iterator[GatheredRows]:
        """Start to gather the ranks' rows. Yields this rank's rows at once and the others as they are received; with
        one chunk all of them together."""
        channel, description = self.channel, self.description
        started = [(first, end, channel.start_all_gather(x_SD[first:end], description)) for first, end in self.bounds]
        rank, *peers = self.ring.arrivals

        def gathered() -> Iterator[GatheredRows]:
            if self.is_serial:
                yield GatheredRows(slice(0, self.ring.world), 0, x_SD.shape[0], started[0][2]())
                return
            yield GatheredRows(slice(rank, rank + 1), 0, x_SD.shape[0], x_SD[None])
            for first, end, pending in started:
                chunk_WsD = pending()
                for peer in peers:
                    ranks = slice(peer, peer + 1)
                    yield GatheredRows(ranks, first, end, chunk_WsD[ranks])

        return gathered()

    def scattered_mm(self, x_WSK: Tensor, b_KN: Tensor) -> Callable[[], Tensor]:
        """Start the reduce-scatter of x @ b. The returned call waits for this rank's rows, [S, N]."""
        world, rows, columns = self.ring.world, x_WSK.shape[1], b_KN.shape[1]

        def start(first: int, end: int) -> Callable[[], Tensor]:
            parts_WsN = x_WSK.new_empty(world, end - first, columns)
            if self.is_serial:
                row_invariant_mm(x_WSK.flatten(0, 1), b_KN, out=parts_WsN.flatten(0, 1))
            else:
                for peer in self.ring.scatters:
                    row_invariant_mm(x_WSK[peer, first:end], b_KN, out=parts_WsN[peer])
            pending = self.channel.start_swap(parts_WsN, self.description)
            return lambda: sum_in_rank_order(pending())

        started = [start(first, end) for first, end in self.bounds]
        if self.is_serial:
            return started[0]

        def finish() -> Tensor:
            y_SN = x_WSK.new_empty(rows, columns)
            for (first, end), pending in zip(self.bounds, started, strict=True):
                y_SN[first:end] = pending()
            return y_SN

        return finish


# This function and the next ones are cached: for few rows they would take as long as the GEMMs.
@lru_cache(maxsize=1024)
def _bounds_and_description(work: OperatorWork, choice: OverlapChoice, rows: int | None) -> tuple[Bounds, str]:
    bounds = chunk_bounds(work.rows // work.world if rows is None else rows, choice.chunks)
    return bounds, f"{work} by {choice if choice.backend == TRITON else choice.chunks}"


@lru_cache(maxsize=1024)
def _fixed_plan(work: OperatorWork, overlap: Overlap, rows: int | None) -> tuple[Bounds, str, OverlapChoice]:
    """Plan with settings that need neither measurements nor the cost model."""
    if overlap.backend == TRITON:
        choice = OverlapChoice(TRITON, 1, overlap.programs or 0)
    else:
        choice = OverlapChoice(SHARED if overlap.backend == "auto" else CHUNKED, overlap.chunks_of(work.part_bytes))
    return *_bounds_and_description(work, choice, rows), choice


@lru_cache(maxsize=1024)
def chunk_bounds(rows: int, chunks: int) -> Bounds:
    """Return the first and end row of each chunk that is not empty: even, and cut at multiples of ``TILE``."""
    tiles = -(-rows // TILE)
    cuts = [min(tiles * chunk // chunks * TILE, rows) for chunk in range(chunks + 1)]
    return tuple((first, end) for first, end in pairwise(cuts) if end > first)


cached_ring = lru_cache(maxsize=64)(Ring)


@dataclass(frozen=True)
class GatheredRows:
    """Rows [first, end) of each of ``ranks``: one rank, or all rows of all ranks.

    rows: [ranks, end - first, D], dense.
    """

    ranks: slice
    first: int
    end: int
    rows: Tensor

    def select(self, all_WSD: Tensor) -> Tensor:
        """Return a view of the same rows of a tensor of all ranks' rows, [ranks * (end - first), D]."""
        return all_WSD[self.ranks, self.first : self.end].flatten(0, 1)


def gathered_mm(
    plan: OperatorPlan,
    gathered: Iterator[GatheredRows],
    rows: int,
    b_DN: Tensor,
    after: Callable[[GatheredRows], None] | None = None,
) -> Tensor:
    """Return [W, S, N]: the gathered [S, D] of each rank, times b.

    Args:
        after: Called with each received chunk after its GEMM.
    """
    y_WSN = b_DN.new_empty(plan.ring.world, rows, b_DN.shape[1])
    for chunk in gathered:
        row_invariant_mm(chunk.rows.flatten(0, 1), b_DN, out=chunk.select(y_WSN))
        if after is not None:
            after(chunk)
    return y_WSN


PER_RANK_ROWS = 1024
"""Rows of a rank from which a deterministic weight gradient is one GEMM for each rank, summed in ring order, so that
the GEMM of the own rows overlaps the transfer. With fewer rows it is one GEMM over all ranks, which is faster."""


class WeightGradient:
    """Accumulates grad.T @ x over the rows of all ranks. One factor is local; the other is received in chunks.

    Args:
        order: Ranks, in the order in which their GEMMs are summed.
        local_WSA: The factor that this rank has.
        width: Columns of the received factor.
        local_is_grad: Whether the local factor is the gradient.
    """

    def __init__(
        self, order: Sequence[int], local_WSA: Tensor, width: int, local_is_grad: bool, deterministic: bool
    ) -> None:
        self._local_WSA, self._width = local_WSA, width
        self._local_is_grad, self._deterministic = local_is_grad, deterministic
        rows = local_WSA.shape[1]
        # In 16 bits, adding the products rank by rank would round the sum once for each rank.
        self._per_rank = deterministic and local_WSA.element_size() >= 4 and rows >= PER_RANK_ROWS
        self._missing_rows = dict.fromkeys(order, rows)
        self._products: dict[int, Tensor] = {}
        self._received_WSB: Tensor | None = None
        self._sum_ND: Tensor | None = None

    def add(self, chunk: GatheredRows) -> None:
        """Add received rows."""
        if not self._deterministic:
            factors = self._factors(chunk.select(self._local_WSA), chunk.rows.flatten(0, 1))
            if self._sum_ND is None:
                self._sum_ND = exact_mm(*factors)
            else:
                with without_autocast(self._local_WSA):
                    self._sum_ND.addmm_(*factors)
            return
        world, rows, _ = self._local_WSA.shape
        if chunk.rows.shape[0] == world:
            self._received_WSB = chunk.rows
        elif self._per_rank and chunk.end - chunk.first == rows:
            self._add_rank(chunk.ranks.start, chunk.rows[0])
            return
        else:
            if self._received_WSB is None:
                self._received_WSB = chunk.rows.new_empty(world, rows, self._width)
            chunk.select(self._received_WSB).copy_(chunk.rows[0])
        if self._per_rank:
            for rank in range(world)[chunk.ranks]:
                self._missing_rows[rank] -= chunk.end - chunk.first
                if not self._missing_rows[rank]:
                    self._add_rank(rank, self._received_WSB[rank])

    def _add_rank(self, rank: int, received_SB: Tensor) -> None:
        """Multiply all rows of ``rank``, and add the products that are next in order."""
        self._products[rank] = exact_mm(*self._factors(self._local_WSA[rank], received_SB))
        while (next_rank := next(iter(self._missing_rows), None)) in self._products:
            assert next_rank is not None
            del self._missing_rows[next_rank]
            product_ND = self._products.pop(next_rank)
            self._sum_ND = product_ND if self._sum_ND is None else self._sum_ND.add_(product_ND)

    def result(self) -> Tensor:
        """Return the gradient, [N, D]. Called after all rows have been added."""
        if self._sum_ND is not None:
            return self._sum_ND
        assert self._received_WSB is not None
        return exact_mm(*self._factors(self._local_WSA.flatten(0, 1), self._received_WSB.flatten(0, 1)))

    def _factors(self, local_TA: Tensor, received_TB: Tensor) -> tuple[Tensor, Tensor]:
        return (local_TA.t(), received_TB) if self._local_is_grad else (received_TB.t(), local_TA)


def exact_mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return a @ b in their own dtype, also under autocast."""
    with without_autocast(a_MK):
        return torch.mm(a_MK, b_KN)


def readable_operands(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with their values in memory, or raise InputError."""
    tensors, fault = as_tensors(x=x, weight=weight)
    if fault is not None:
        raise fault
    return tensors[0], tensors[1]


def check_linear(x: Tensor, weight: Tensor, operator: str) -> None:
    """Raise InputError unless x [rows, D] and weight [N, D] match in shape, dtype and device."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise InputError(
            f"{operator} takes x [rows, D] and weight [N, D]; got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype or x.device != weight.device:
        raise InputError(
            f"{operator} takes x and weight of one dtype on one device; got {x.dtype} on {x.device} and "
            f"{weight.dtype} on {weight.device}"
        )
