"""Cost model: predicted time of an operator for each number of chunks. All constants are measured on the group.

    transfer(bytes)  = latency + bytes / bandwidth             GEMM(rows) = FLOP / rate(rows), at least one call

    gathers    network   [t(0) ][t(1) ][t(2) ]                 the GEMM of a chunk starts when the chunk is received
               compute   [own ][g(0) ][g(1) ][g(2) ]           and the GEMM before it is complete

    scatters   compute   [g(0) ][g(1) ][g(2) ][ weight ]       a chunk is sent when its GEMM is complete and the chunk
               network          [t(0) ][t(1) ][t(2) ]          before it has been sent

    in place   compute   [own ][peer 1][peer 2] ...            ranks of one host read each other's rows in place
                                                               (``shared.py``): each rank copies its own rows only

Chunks have three costs in the model. Small GEMMs run at a lower rate. Each chunk has its own latency and GEMM call. And
transfers use the cores that compute: ``hides`` is the fraction of a transfer that overlaps with a GEMM, 0 if the cores
copy the rows themselves, near 1 if the network works independently. With ``hides`` 0 the model never predicts a gain
from chunks; reading in place can still be faster.

All functions are pure arithmetic, without process group or tensors. The same constants give the same choice on each
rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from moe_comm.errors import ConfigError

CHUNKS = (1, 2, 4, 8, 16)
"""Candidates for the number of chunks."""
MARGIN = 0.05
"""Minimum predicted saving of several chunks, as a fraction of the time of one chunk: about the model's error."""
GATHERS = ("gather_matmul", "swap_matmul", "dispatch_matmul")
SCATTERS = ("matmul_scatter", "matmul_swap", "matmul_combine")
EXPERTS = ("dispatch_matmul", "matmul_combine")
"""Operators whose chunk is one grouped GEMM over all ranks' rows. The others have one GEMM for each rank."""
SWAPS = ("swap_matmul", "matmul_swap")
"""Operators whose rows are all local, and whose columns are exchanged (``ulysses.py``)."""
FUSED = ("gather_matmul", "matmul_scatter", "dispatch_matmul", "matmul_combine")
"""Operators that also have a Triton kernel. The model does not cover the kernels."""
IN_PLACE = ("gather_matmul", "matmul_scatter")
"""Operators that can read peers' rows in place. All numbers of chunks above one are then the same."""
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class OperatorWork:
    """One operator in one direction, with its sizes.

    rows: rows of this rank's GEMM: all ranks' rows for a linear layer, own rows for a Ulysses operator, the rows of
        this rank's experts for an MoE layer (the mean over ranks, because all ranks must pass the same number).
    sent: columns that are transferred. other: columns that are not. groups: experts of this rank.

    Raises:
        ConfigError: an unknown operator or direction, or a negative size.
    """

    operator: str
    direction: str
    rows: int
    sent: int
    other: int
    dtype: torch.dtype
    world: int
    groups: int = 1

    def __post_init__(self) -> None:
        if self.operator not in GATHERS + SCATTERS or self.direction not in DIRECTIONS:
            known = f"{', '.join(GATHERS + SCATTERS)}; {', '.join(DIRECTIONS)}"
            raise ConfigError(f"unknown work {self.operator!r} {self.direction!r}; known: {known}")
        if min(self.rows, self.sent, self.other) < 0 or min(self.world, self.groups) < 1:
            raise ConfigError(f"sizes must not be negative, world and groups at least 1; got {self}")

    def __str__(self) -> str:
        return f"{self.operator} {self.direction} of {self.rows} x {self.sent}, {self.other}"

    def bucket(self) -> OperatorWork:
        """Return the same work with rows rounded to a power of two. All work in a bucket shares one choice."""
        return _bucket(self)

    @property
    def part_bytes(self) -> int:
        """Transferred bytes of one rank's rows."""
        return self.rows // self.world * self.sent * self.dtype.itemsize

    def load(self) -> OperatorLoad:
        """Return the transfers and GEMMs of the work."""
        gathers, forward = self.operator in GATHERS, self.direction == "forward"
        moved = self.rows * (self.world - 1) // self.world * self.sent * self.dtype.itemsize
        swaps, in_place = self.operator in SWAPS, self.operator in IN_PLACE
        gemms = 1 if self.operator in EXPERTS else self.world
        handshakes = 0
        if self.operator in EXPERTS:  # combine's backward also sends the routing weights and their gradients
            handshakes = 3 if self.operator == "matmul_combine" and not forward else 1
        if gathers == forward:  # y of received rows; or, of a received gradient, grad_x and then grad_w
            gemm = GemmShape(self.rows, self.sent, self.other, self.groups)
            return OperatorLoad(moved, 0, gemm, self.world, gemms, True, not forward, in_place, handshakes, swaps)
        # y or grad_x, which is sent; with grad_x also grad_w, for which a linear layer gathers x again
        gemm = GemmShape(self.rows, self.other, self.sent, self.groups)
        again = moved if self.operator == "gather_matmul" else 0
        return OperatorLoad(again, moved, gemm, self.world, gemms, False, gathers, in_place, handshakes, swaps)


@lru_cache(maxsize=4096)
def _bucket(work: OperatorWork) -> OperatorWork:
    return replace(work, rows=1 << round(math.log2(work.rows)) if work.rows else 0)


@dataclass(frozen=True)
class GemmShape:
    """[rows, inner] @ [inner, columns], as ``groups`` GEMMs of equally many rows."""

    rows: int
    inner: int
    columns: int
    groups: int = 1

    def with_rows(self, rows: float) -> GemmShape:
        return replace(self, rows=math.ceil(rows))


@dataclass(frozen=True)
class OperatorLoad:
    """Transfers and GEMMs of one operator in one direction.

    gathered, scattered: bytes transferred before and after the GEMM.
    gemms_per_chunk: one GEMM for each rank whose rows are in the chunk, or one in all.
    gemm_needs_gathered: whether the GEMM multiplies the gathered rows.
    weight: whether the weights' gradient is computed too. It needs all gathered rows and takes as long as the GEMM.
    in_place: whether peers' rows can be read in place if the group shares memory.
    handshakes: exchanges of a few bytes. swaps: whether a chunk is all columns of some rows, exchanged by columns.
    """

    gathered: int
    scattered: int
    gemm: GemmShape
    world: int
    gemms_per_chunk: int
    gemm_needs_gathered: bool
    weight: bool
    in_place: bool
    handshakes: int
    swaps: bool = False


@dataclass(frozen=True)
class GroupRates:
    """Measured rates of a group's network and cores, in seconds, bytes/s and FLOP/s; those of the slowest rank.

    latency_s: of an exchange of a few bytes. bytes_per_s: received by a rank. hides: fraction of a transfer that
    overlaps with a GEMM, 0 to 1. chunk_s: to start one more transfer. call_s: of a GEMM of minimal size. gemm: (rows,
    FLOP/s) points, by rows; rates in between are interpolated. shared: whether ranks read each other's memory.
    """

    latency_s: float
    bytes_per_s: float
    hides: float
    chunk_s: float
    call_s: float
    gemm: tuple[tuple[int, float], ...]
    shared: bool = False

    def transfer_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes else 0.0

    def gemm_s(self, gemm: GemmShape) -> float:
        """Return the seconds of a GEMM. Each group takes at least one call, and at least the time of the fewest
        rows."""
        if not gemm.rows:
            return 0.0
        rows = max(gemm.rows / gemm.groups, self.gemm[0][0])
        flops = 2.0 * rows * gemm.inner * gemm.columns
        return gemm.groups * max(self.call_s, flops / self._rate(rows))

    def _rate(self, rows: float) -> float:
        """Return FLOP/s for a number of rows, interpolated linearly in the logarithm of rows."""
        above = next((i for i, point in enumerate(self.gemm) if point[0] > rows), None)
        if above is None:
            return self.gemm[-1][1]
        (low, slow), (high, fast) = self.gemm[max(above - 1, 0)], self.gemm[above]
        return slow + (fast - slow) * math.log(rows / low) / math.log(high / low)


def predict(load: OperatorLoad, rates: GroupRates, chunks: int) -> float:
    """Return the predicted seconds of the operator for a number of chunks."""
    handshakes_s = load.handshakes * rates.latency_s
    if chunks > 1 and load.in_place and rates.shared:
        return handshakes_s + _in_place(load, rates)
    if load.gemm_needs_gathered:
        return handshakes_s + (_gather_columns if load.swaps else _gather)(load, rates, chunks)
    return handshakes_s + (_scatter_columns if load.swaps else _scatter)(load, rates, chunks)


def _in_place(load: OperatorLoad, rates: GroupRates) -> float:
    """Each rank copies its own gathered rows once; the peers read them. Sums read as many bytes without a copy."""
    moved = load.gathered / load.world + load.scattered / 2
    gemms = load.world * rates.gemm_s(load.gemm.with_rows(load.gemm.rows / load.world))
    return rates.transfer_s(moved) + gemms + (rates.gemm_s(load.gemm) if load.weight else 0.0)


def _gather(load: OperatorLoad, rates: GroupRates, chunks: int) -> float:
    receive = rates.transfer_s(load.gathered / chunks)
    gemm = rates.gemm_s(load.gemm)
    weight = gemm if load.weight else 0.0
    if chunks == 1:
        return receive + gemm + weight
    own = load.gemm.rows / load.world
    gemms = max(load.gemms_per_chunk - 1, 1)  # the own rows are not part of a chunk
    chunk_s = gemms * rates.gemm_s(load.gemm.with_rows((load.gemm.rows - own) / gemms / chunks))
    now = chunks * (rates.chunk_s + receive * (1 - rates.hides)) + rates.gemm_s(load.gemm.with_rows(own))
    for chunk in range(1, chunks + 1):
        now = max(now, chunk * receive) + chunk_s
    return now + weight


def _gather_columns(load: OperatorLoad, rates: GroupRates, chunks: int) -> float:
    """An all-to-all, then the GEMM. Only the weight gradient of the own columns needs no transfer."""
    receive = rates.transfer_s(load.gathered / chunks)
    weight = rates.gemm_s(load.gemm) if load.weight else 0.0
    chunk_s = rates.gemm_s(load.gemm.with_rows(load.gemm.rows / chunks))
    start = chunks * rates.chunk_s if chunks > 1 else 0.0
    now = start + (chunks * receive * (1 - rates.hides) if chunks > 1 or load.weight else 0.0) + weight / load.world
    for chunk in range(1, chunks + 1):
        now = max(now, chunk * receive) + chunk_s
    return now + weight * (load.world - 1) / load.world


def _scatter(load: OperatorLoad, rates: GroupRates, chunks: int) -> float:
    receive, send = (rates.transfer_s(num_bytes / chunks) for num_bytes in (load.gathered, load.scattered))
    gemm = rates.gemm_s(load.gemm)
    gemms = load.gemms_per_chunk if chunks > 1 else 1
    chunk_s = gemms * rates.gemm_s(load.gemm.with_rows(load.gemm.rows / gemms / chunks))
    if chunks == 1 and load.handshakes:  # serial experts: nothing is in flight during a GEMM
        return gemm + send + (gemm if load.weight else 0.0)
    now, network = _send_chunks(rates, chunks, chunk_s, send, chunks * receive)
    if load.weight:
        now = max(now, chunks * receive) + gemm
    return max(now, network)


def _scatter_columns(load: OperatorLoad, rates: GroupRates, chunks: int) -> float:
    """GEMMs of the peers' columns of each chunk, each then sent by an all-to-all, then the own columns of all rows."""
    send, world, gemm = rates.transfer_s(load.scattered / chunks), load.world, load.gemm
    columns = replace(gemm, columns=math.ceil(gemm.columns / world))
    gemms = world - 1 if chunks > 1 else world  # one chunk includes the own columns
    chunk_s = gemms * rates.gemm_s(columns.with_rows(gemm.rows / chunks))
    now, network = _send_chunks(rates, chunks, chunk_s, send, 0.0)
    now += rates.gemm_s(columns) if chunks > 1 else 0.0
    return max(now + (rates.gemm_s(gemm) if load.weight else 0.0), network)


def _send_chunks(rates: GroupRates, chunks: int, chunk_s: float, send: float, network: float) -> tuple[float, float]:
    """Compute and send each chunk, after transfers that take until ``network``. Return when cores and network end."""
    blocks_cores, start = 1 - rates.hides, rates.chunk_s if chunks > 1 else 0.0
    now = network * blocks_cores
    for _ in range(chunks):
        now += chunk_s + start
        network = max(network, now) + send
        now += send * blocks_cores
    return now, network


def cheapest(work: OperatorWork, rates: GroupRates, candidates: Sequence[int] = CHUNKS, margin: float = MARGIN) -> int:
    """Return the number of chunks with the shortest prediction; 1 unless another one saves ``margin`` of its time."""
    load = work.load()
    if not load.gathered and not load.scattered:
        return 1
    serial = predict(load, rates, 1)
    seconds, chunks = min((predict(load, rates, c), c) for c in candidates)
    return chunks if seconds < serial * (1 - margin) else 1
