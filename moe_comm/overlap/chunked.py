"""GEMMs that share their time with a collective over the same rows, cut into chunks. Any torch.distributed backend.

What both operators for linear layers (``gather_matmul``, ``matmul_scatter``) and their backward passes are made of.
Each rank's S rows are cut into chunks; a chunk of all ranks travels in one asynchronous collective:

    gathered_mm     network   [chunk 0]  [chunk 1]  [chunk 2]            own rows need no network: their GEMM fills
                    GEMM      [own rows ][peers' 0 ][peers' 1 ][peers' 2]    the wait for the first chunk

    scattered_mm    GEMM      [chunk 0  ][chunk 1  ][chunk 2  ][ what the caller has yet to do ]
                    network              [chunk 0]  [chunk 1]  [chunk 2]     the last wait is for what is left of it

One chunk is one step after the other: one transfer, and one product over all ranks' rows. Few rows are best served so
(their products are all overhead), and ``Overlap("auto")`` finds where that ends: ``overlap/tuning.py``.

Chunks are whole tiles of rows and products are ``row_invariant_mm``: the bits do not depend on the number of chunks.
Sums over ranks are added in order of rank, in fp32, and rounded once, as the collectives in ``layers`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.comm.channel import Channel
from moe_comm.comm.meeting import channel_of
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.autocast import without_autocast
from moe_comm.kernels.row_invariant import TILE, row_invariant_mm
from moe_comm.kernels.wide import added_in_order
from moe_comm.overlap.cost import FUSED, Work
from moe_comm.overlap.options import CHUNKED, SHARED, TRITON, Overlap
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.store import Choice
from moe_comm.overlap.tiles import chunk_rows
from moe_comm.overlap.tuning import choose

Seen = Callable[["Arrival"], None] | None


def choice_of(overlap: Overlap, work: Work, channel: Channel, device: torch.device) -> Choice:
    """How ``work`` is run over ``channel``; a fixed number of chunks in place where it can be. With chunks "auto" the
    first call for a group, and for a shape, is collective.

    Raises:
        ConfigError: Triton is asked for, and has no kernel for this.
    """
    if isinstance(overlap.chunks, str) and not (overlap.backend == TRITON and overlap.programs):
        _check_fused(overlap, work.operator)
        return choose(work, channel, device, overlap.backends)
    return fixed_choice(overlap, work)


def fixed_choice(overlap: Overlap, work: Work) -> Choice:
    """``choice_of`` where the settings alone say it."""
    _check_fused(overlap, work.operator)
    if overlap.backend == TRITON:
        return Choice(TRITON, 1, overlap.programs or 0)
    return Choice(SHARED if overlap.backend == "auto" else CHUNKED, overlap.chunks_of(work.part_bytes))


def _check_fused(overlap: Overlap, operator: str) -> None:
    """Raise ConfigError if Triton is asked for where there is no kernel."""
    if overlap.backend == TRITON and operator not in FUSED:
        raise ConfigError(
            f"there is no Triton kernel for {operator}, only for {', '.join(FUSED)}; use backend='auto' for it"
        )


@dataclass(frozen=True)
class Lines:
    """One operator's group: its channel, the order of its peers, and where its rows are cut.

    spans: first and end row of each chunk within a rank's rows. description: what errors say. choice: how it is run.
    """

    channel: SharedChannel
    ring: Ring
    spans: tuple[tuple[int, int], ...]
    description: str
    choice: Choice

    @classmethod
    def of(cls, group: ProcessGroup, work: Work, like: Tensor, overlap: Overlap, rows: int | None = None) -> Lines:
        """For ``work``, whose rows travel as elements like those of ``like``. The first call for a group is
        collective.

        Args:
            rows: of each rank, which are cut; None: those of the work, over the ranks.

        Raises:
            ConfigError: Triton is asked for, and has no kernel for this.
        """
        channel = channel_of(group)
        if isinstance(overlap.chunks, str):
            channel.compare(str(work), like)  # before ranks meet to choose
            choice = choice_of(overlap, work, channel, like.device)
            spans, description = _cut(work, choice, rows)
        else:
            spans, description, choice = _fixed_cut(work, overlap, rows)
            channel.compare(description, like)
        return cls(channel, ring_of(channel.rank, channel.world), spans, description, choice)

    @property
    def at_once(self) -> bool:
        """Whether all rows travel at once: one step after the other."""
        return len(self.spans) == 1

    def start_gather(self, x_SD: Tensor) -> Iterator[Arrival]:
        """Begin to gather the ranks' rows; yields them as they arrive, this rank's own at once."""
        started = [(a, b, self.channel.start_all_gather(x_SD[a:b], self.description)) for a, b in self.spans]
        own, peers = self.ring.arrivals[0], self.ring.arrivals[1:]

        def arrivals() -> Iterator[Arrival]:
            yield Arrival(slice(own, own + 1), 0, x_SD.shape[0], x_SD[None])
            for first, end, arrived in started:
                parts_WsD = arrived()
                for peer in peers:
                    ranks = slice(peer, peer + 1)
                    yield Arrival(ranks, first, end, parts_WsD[ranks])

        return arrivals()


@lru_cache(maxsize=1024)
def _cut(work: Work, choice: Choice, rows: int | None) -> tuple[tuple[tuple[int, int], ...], str]:
    """``Lines.spans`` and ``Lines.description``. Kept, as ``spans_of`` is: a product of few rows takes no longer."""
    spans = spans_of(work.rows // work.world if rows is None else rows, choice.chunks)
    return spans, f"{work} by {choice if choice.backend == TRITON else choice.chunks}"


@lru_cache(maxsize=1024)
def _fixed_cut(work: Work, overlap: Overlap, rows: int | None) -> tuple[tuple[tuple[int, int], ...], str, Choice]:
    """``_cut`` by a choice that is always the same, and the choice."""
    choice = fixed_choice(overlap, work)
    return *_cut(work, choice, rows), choice


@lru_cache(maxsize=1024)
def spans_of(rows: int, chunks: int) -> tuple[tuple[int, int], ...]:
    """First and end row of each chunk that is not empty. Kept: few rows are computed in less time than this takes."""
    ends = chunk_rows([rows], chunks, TILE)[0].cumsum().tolist()
    return tuple((first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True) if end > first)


ring_of = lru_cache(maxsize=64)(Ring)


@dataclass(frozen=True)
class Arrival:
    """Rows [first, end) of ``ranks``: of one, or all rows of all. rows: [ranks, end - first, D], dense."""

    ranks: slice
    first: int
    end: int
    rows: Tensor

    def of(self, whole_WSD: Tensor) -> Tensor:
        """A view of the same rows in a tensor of all ranks' rows, [ranks * (end - first), D]."""
        return whole_WSD[self.ranks, self.first : self.end].flatten(0, 1)

    def whole(self, ranks: int) -> bool:
        """Whether these are all rows of all ``ranks``."""
        return self.rows.shape[0] == ranks


def gathered_mm(lines: Lines, arrivals: Iterator[Arrival], rows: int, b_DN: Tensor, also: Seen = None) -> Tensor:
    """[W, S, N] = the arriving [S, D] of every rank @ b. also: called with each arrival after its product."""
    y_WSN = b_DN.new_empty(lines.ring.world, rows, b_DN.shape[1])
    for arrival in arrivals:
        row_invariant_mm(arrival.rows.flatten(0, 1), b_DN, out=arrival.of(y_WSN))
        if also is not None:
            also(arrival)
    return y_WSN


def scattered_mm(lines: Lines, x_WSK: Tensor, b_KN: Tensor) -> Callable[[], Tensor]:
    """Begin the sum over ranks of x @ b, of which each keeps its own rows; the call returned gives them, [S, N]."""
    world, rows, columns = lines.ring.world, x_WSK.shape[1], b_KN.shape[1]

    def start(first: int, end: int) -> Callable[[], Tensor]:
        parts_WsN = x_WSK.new_empty(world, end - first, columns)
        for peer in lines.ring.scatters:
            row_invariant_mm(x_WSK[peer, first:end], b_KN, out=parts_WsN[peer])
        return start_sum(lines.channel, parts_WsN, lines.description)

    started = [start(first, end) for first, end in lines.spans]

    def finish() -> Tensor:
        y_SN = x_WSK.new_empty(rows, columns)
        for (first, end), arrived in zip(lines.spans, started, strict=True):
            y_SN[first:end] = arrived()
        return y_SN

    return finish


def start_sum(channel: Channel, parts_WSN: Tensor, description: str) -> Callable[[], Tensor]:
    """Begin the sum over ranks of what each has for each; the call returned gives this rank's, [S, N]."""
    ones = [1] * channel.world
    arrived = channel.start_all_to_all(parts_WSN, ones, ones, description)
    return lambda: added_in_order(arrived())


RANK_BY_RANK = 1024
"""Rows of a rank from which a deterministic weight gradient is a product for each rank, added up in the order of the
ring: the one of the own rows fills the wait for the others. With fewer it is one product, which costs less."""


class WeightGradient:
    """grad.T @ x over the rows of all ranks, one of which this rank has, while the other's rows arrive.

    Args:
        known_WSA: the one that is here. width: of the one that arrives.
        known_is_grad: whether the known one is the gradient. order: of the ranks, in which they are added up.
    """

    def __init__(
        self, order: Sequence[int], known_WSA: Tensor, width: int, known_is_grad: bool, deterministic: bool
    ) -> None:
        self._known_WSA, self._width = known_WSA, width
        self._known_is_grad, self._deterministic = known_is_grad, deterministic
        rows = known_WSA.shape[1]
        # 16 bits would be rounded once more for every rank.
        wide = known_WSA.element_size() >= 4
        self._by_rank = deterministic and wide and rows >= RANK_BY_RANK
        self._missing = dict.fromkeys(order, rows)
        self._parts: dict[int, Tensor] = {}
        self._arrived_WSB: Tensor | None = None
        self._sum_ND: Tensor | None = None

    def add(self, arrival: Arrival) -> None:
        """Take in rows that have arrived."""
        if not self._deterministic:
            factors = self._factors(arrival.of(self._known_WSA), arrival.rows.flatten(0, 1))
            if self._sum_ND is None:
                self._sum_ND = exact_mm(*factors)
            else:
                with without_autocast(self._known_WSA):
                    self._sum_ND.addmm_(*factors)
            return
        if arrival.whole(self._known_WSA.shape[0]):
            self._arrived_WSB = arrival.rows
        elif self._by_rank and arrival.end - arrival.first == self._known_WSA.shape[1]:
            self._add_rank(arrival.ranks.start, arrival.rows[0])
            return
        else:
            if self._arrived_WSB is None:
                self._arrived_WSB = arrival.rows.new_empty(*self._known_WSA.shape[:2], self._width)
            arrival.of(self._arrived_WSB).copy_(arrival.rows[0])
        if self._by_rank:
            for rank in range(self._known_WSA.shape[0])[arrival.ranks]:
                self._count(rank, arrival.end - arrival.first)

    def _count(self, rank: int, rows: int) -> None:
        """So many rows of ``rank`` more are here; with the last of them they are multiplied."""
        assert self._arrived_WSB is not None
        self._missing[rank] -= rows
        if not self._missing[rank]:
            self._add_rank(rank, self._arrived_WSB[rank])

    def _add_rank(self, rank: int, arrived_SB: Tensor) -> None:
        """Multiply all rows of ``rank``. What comes out of turn is kept until it is its turn."""
        self._parts[rank] = exact_mm(*self._factors(self._known_WSA[rank], arrived_SB))
        while (first := next(iter(self._missing), None)) in self._parts:
            assert first is not None
            del self._missing[first]
            part_ND = self._parts.pop(first)
            self._sum_ND = part_ND if self._sum_ND is None else self._sum_ND.add_(part_ND)

    def result(self) -> Tensor:
        """[N, D], after all rows."""
        if self._sum_ND is not None:
            return self._sum_ND
        assert self._arrived_WSB is not None
        return exact_mm(*self._factors(self._known_WSA.flatten(0, 1), self._arrived_WSB.flatten(0, 1)))

    def _factors(self, known_TA: Tensor, arrived_TB: Tensor) -> tuple[Tensor, Tensor]:
        return (known_TA.t(), arrived_TB) if self._known_is_grad else (arrived_TB.t(), known_TA)


def weight_gradient(
    order: Sequence[int], known_WSA: Tensor, arrived_WSB: Tensor, known_is_grad: bool, deterministic: bool
) -> Tensor:
    """``WeightGradient`` of rows that have all arrived."""
    if known_WSA.shape[1] < RANK_BY_RANK:
        known_TA, arrived_TB = known_WSA.flatten(0, 1), arrived_WSB.flatten(0, 1)
        return exact_mm(known_TA.t(), arrived_TB) if known_is_grad else exact_mm(arrived_TB.t(), known_TA)
    weight = WeightGradient(order, known_WSA, arrived_WSB.shape[2], known_is_grad, deterministic)
    weight.add(Arrival(slice(None), 0, known_WSA.shape[1], arrived_WSB))
    return weight.result()


def exact_mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b in their own dtype: chunks in another one would differ from the rest."""
    with without_autocast(a_MK):
        return torch.mm(a_MK, b_KN)


def check_linear(x: Tensor, weight: Tensor, operator: str) -> None:
    """Raise InputError unless x [rows, D] and weight [N, D] fit each other, in shape, dtype and device."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise InputError(
            f"{operator} takes x [rows, D] and weight [N, D]; got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype or x.device != weight.device:
        raise InputError(
            f"{operator} takes x and weight of one dtype on one device; got {x.dtype} on {x.device} and "
            f"{weight.dtype} on {weight.device}"
        )
