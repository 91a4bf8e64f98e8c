"""GEMMs that share their time with a collective over the same rows, cut into chunks. Any torch.distributed backend.

What both operators for linear layers (``gather_matmul``, ``matmul_scatter``) and their backward passes are made of.
Each rank's S rows are cut into chunks; a chunk of all ranks travels in one asynchronous collective:

    gathered_mm     network   [chunk 0]  [chunk 1]  [chunk 2]            own rows need no network: their GEMM fills
                    GEMM      [own rows ][peers' 0 ][peers' 1 ][peers' 2]    the wait for the first chunk

    scattered_mm    GEMM      [chunk 0  ][chunk 1  ][chunk 2  ][ what the caller has yet to do ]
                    network              [chunk 0]  [chunk 1]  [chunk 2]     the last wait is for what is left of it

Chunks are whole tiles of rows and products are ``row_invariant_mm``: the bits do not depend on the number of chunks.
Sums over ranks are added in order of rank, in fp32, and rounded once, as the collectives in ``layers`` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.dispatch.channels import channel_of
from moe_comm.dispatch.exchange import SharedChannel
from moe_comm.dispatch.plain import added_in_order
from moe_comm.errors import InputError
from moe_comm.kernels.row_invariant import TILE, row_invariant_mm
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.tiles import at_least_one, chunk_rows

Seen = Callable[["Arrival"], None] | None


@dataclass(frozen=True)
class Overlap:
    """How an operator overlaps its collective.

    chunks: parts in which a rank's rows travel. 1: all at once.
    chunk_bytes: no smaller parts than this, and so fewer: each costs a round trip, which must be short beside it.
    deterministic: weight gradients are one product over all rows, the same bits for every number of chunks, and wait
        for the last of them. False: they are added up as rows arrive, which hides more.

    Raises:
        ConfigError: chunks is not a whole number of at least 1.
    """

    chunks: int = 4
    chunk_bytes: int = 128 << 10
    deterministic: bool = True

    def __post_init__(self) -> None:
        at_least_one("chunks", self.chunks)
        at_least_one("chunk_bytes", self.chunk_bytes)

    def chunks_of(self, num_bytes: int) -> int:
        """In how many parts ``num_bytes`` travel."""
        return min(self.chunks, max(1, num_bytes // self.chunk_bytes))


@dataclass(frozen=True)
class Lines:
    """One operator's group: its channel, the order of its peers, and where its rows are cut.

    spans: first and end row of each chunk within a rank's rows. doing: what errors say.
    """

    channel: SharedChannel
    ring: Ring
    spans: tuple[tuple[int, int], ...]
    doing: str

    @classmethod
    def of(cls, group: ProcessGroup, rows: int, like: Tensor, columns: int, overlap: Overlap, doing: str) -> Lines:
        """For ``rows`` rows a rank, which travel as ``columns`` elements like those of ``like``. The first call for a
        group is collective."""
        channel = channel_of(group)
        chunks = overlap.chunks_of(rows * columns * like.element_size())
        doing = f"{doing}, {rows} x {columns} by {chunks}"
        channel.compare(doing, like)
        ends = chunk_rows([rows], chunks, TILE)[0].cumsum().tolist()
        spans = tuple((first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True) if end > first)
        return cls(channel, Ring(channel.rank, channel.world), spans, doing)

    def start_gather(self, x_SD: Tensor) -> Iterator[Arrival]:
        """Begin to gather the ranks' rows; yields them as they arrive, this rank's own at once."""
        started = [(a, b, self.channel.start_all_gather(x_SD[a:b], self.doing)) for a, b in self.spans]

        def arrivals() -> Iterator[Arrival]:
            yield Arrival(self.ring.rank, 0, x_SD.shape[0], x_SD)
            for first, end, arrived in started:
                parts_WsD = arrived()
                yield from (Arrival(peer, first, end, parts_WsD[peer]) for peer in self.ring.arrivals[1:])

        return arrivals()


@dataclass(frozen=True)
class Arrival:
    """Rows [first, end) of ``rank``, [end - first, D]."""

    rank: int
    first: int
    end: int
    rows: Tensor

    def of(self, whole_WSD: Tensor) -> Tensor:
        """The same rows in a tensor of all ranks' rows."""
        return whole_WSD[self.rank, self.first : self.end]


def gathered_mm(lines: Lines, arrivals: Iterator[Arrival], rows: int, b_DN: Tensor, also: Seen = None) -> Tensor:
    """[W, S, N] = the arriving [S, D] of every rank @ b. also: called with each arrival after its product."""
    y_WSN = b_DN.new_empty(lines.ring.world, rows, b_DN.shape[1])
    for arrival in arrivals:
        row_invariant_mm(arrival.rows, b_DN, out=arrival.of(y_WSN))
        if also is not None:
            also(arrival)
    return y_WSN


def scattered_mm(lines: Lines, x_WSK: Tensor, b_KN: Tensor) -> Callable[[], Tensor]:
    """Begin the sum over ranks of x @ b, of which each keeps its own rows; the call returned gives them, [S, N]."""
    world, rows, columns = lines.ring.world, x_WSK.shape[1], b_KN.shape[1]
    ones = [1] * world
    started = []
    for first, end in lines.spans:
        parts_WsN = x_WSK.new_empty(world, end - first, columns)
        for peer in lines.ring.scatters:
            row_invariant_mm(x_WSK[peer, first:end], b_KN, out=parts_WsN[peer])
        started.append((first, end, lines.channel.start_all_to_all(parts_WsN, ones, ones, lines.doing)))

    def finish() -> Tensor:
        y_SN = x_WSK.new_empty(rows, columns)
        for first, end, arrived in started:
            y_SN[first:end] = added_in_order(arrived())
        return y_SN

    return finish


class WeightGradient:
    """grad.T @ x over the rows of all ranks, one of which this rank has, while the other's rows arrive.

    Args:
        known_WSA: the one that is here. width: of the one that arrives.
        known_is_grad: whether the known one is the gradient.
    """

    def __init__(self, known_WSA: Tensor, width: int, known_is_grad: bool, deterministic: bool) -> None:
        self._known, self._known_is_grad, self._deterministic = known_WSA, known_is_grad, deterministic
        world, rows, known = known_WSA.shape
        shape = (world, rows, width) if deterministic else (known, width) if known_is_grad else (width, known)
        self._kept = known_WSA.new_empty(shape) if deterministic else known_WSA.new_zeros(shape)

    def add(self, arrival: Arrival) -> None:
        """Take in rows that have arrived."""
        if self._deterministic:
            arrival.of(self._kept).copy_(arrival.rows)
        else:
            with without_autocast(self._known):
                self._kept.addmm_(*self._factors(arrival.of(self._known), arrival.rows))

    def result(self) -> Tensor:
        """[N, D], after all rows."""
        if not self._deterministic:
            return self._kept
        return exact_mm(*self._factors(self._known.flatten(0, 1), self._kept.flatten(0, 1)))

    def _factors(self, known_TA: Tensor, arrived_TB: Tensor) -> tuple[Tensor, Tensor]:
        return (known_TA.t(), arrived_TB) if self._known_is_grad else (arrived_TB.t(), known_TA)


def without_autocast(x: Tensor) -> torch.autocast:
    """The operators compute in the dtype they are given: chunks in another one would differ from the rest."""
    return torch.autocast(x.device.type, enabled=False)


def exact_mm(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a @ b in their own dtype."""
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
