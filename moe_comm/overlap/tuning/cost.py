"""Cost model: predict the time of an operator for a number of chunks. All constants are measured on the group.

    transfer(bytes)  = latency + bytes / bandwidth             GEMM(rows) = FLOP / rate(rows), at least one call

t(i) and g(i) are the transfer and the GEMM of chunk i. "own" is the GEMM of this rank's rows, which need no transfer.

    gather     network   [t(0) ][t(1) ][t(2) ]                 g(i) starts when chunk i is received and g(i - 1) is
               compute   [own ][g(0) ][g(1) ][g(2) ]           completed

    scatter    compute   [g(0) ][g(1) ][g(2) ][ weight ]       t(i) starts when g(i) and t(i - 1) are completed;
               network          [t(0) ][t(1) ][t(2) ]          "weight" is the GEMM of the weight gradient

    in place   compute   [own ][peer 1][peer 2] ...            ranks of one host read each other's rows in place
                                                               (``shared.py``); each rank copies only its own rows

Operators that run while rows are in flight (a shared expert, the dense branch of a shortcut) count as GEMMs
(``beside``) that run concurrently with the operator of the experts. Gathers compute them before the first chunk,
scatters after the last one; with one chunk, no transfer is in flight during them.

In the model, chunks have three costs. Small GEMMs run at a lower rate. Each chunk adds a latency and a GEMM call.
Transfers use cores that compute: ``hides`` is the fraction of a transfer that overlaps with a GEMM. It is 0 if the
cores copy the rows, and near 1 if the network works independently. With ``hides`` 0 the model never predicts a gain
from chunks, but reading in place can still be faster.

All functions are pure arithmetic, without a process group or tensors. Equal constants give equal choices on all ranks.
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
"""Minimum predicted saving of several chunks, as a fraction of the time with one chunk: about the model's error."""
GATHERS = ("gather_matmul", "swap_matmul", "dispatch_matmul")
"""Operators whose forward pass transfers rows, then multiplies them. Backward is the reverse."""
SCATTERS = ("matmul_scatter", "matmul_swap", "matmul_combine")
"""Operators whose forward pass multiplies rows, then transfers the results. Backward is the reverse."""
EXPERTS = ("dispatch_matmul", "matmul_combine")
"""Operators with one grouped GEMM per chunk, over the rows of all ranks. Others have one GEMM per rank and chunk."""
SWAPS = ("swap_matmul", "matmul_swap")
"""Ulysses operators: the GEMM runs on local rows, and an all-to-all exchanges columns (``ulysses.py``)."""
FUSED = ("gather_matmul", "matmul_scatter")
"""Operators that also have a Triton kernel. The model does not predict the time of the kernels."""
IN_PLACE = ("gather_matmul", "matmul_scatter")
"""Operators that can read peers' rows in place. The execution is then the same for any number of chunks above one."""
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class OperatorWork:
    """One operator in one direction, with its sizes.

    rows: rows of this rank's GEMM. Linear layer: rows of all ranks. Ulysses: rows of this rank. MoE layer: rows of this
        rank's experts, as the mean over the ranks, because all ranks must pass the same number.
    sent: columns of the side (input or output) that is transferred. other: columns of the other side.
    world: number of ranks. groups: local experts. beside: work that runs concurrently with the forward pass of this
        operator, as the columns of a GEMM of ``rows`` with ``sent`` columns and the same FLOPs. Backward is twice as
        much.
    """

    operator: str
    direction: str
    rows: int
    sent: int
    other: int
    dtype: torch.dtype
    world: int
    groups: int = 1
    beside: int = 0

    def __post_init__(self) -> None:
        if self.operator not in GATHERS + SCATTERS or self.direction not in DIRECTIONS:
            names = f"{', '.join(GATHERS + SCATTERS)}; {', '.join(DIRECTIONS)}"
            raise ConfigError(f"unknown work {self.operator!r} {self.direction!r}; known: {names}")
        if min(self.rows, self.sent, self.other, self.beside) < 0 or min(self.world, self.groups) < 1:
            raise ConfigError(f"sizes must not be negative, world and groups at least 1; got {self}")

    def __str__(self) -> str:
        return f"{self.operator} {self.direction} of {self.rows} x {self.sent}, {self.other}"

    def bucket(self) -> OperatorWork:
        """Return the work with rows rounded to a power of two. One choice of chunks applies to the whole bucket."""
        return _bucket(self)

    @property
    def part_bytes(self) -> int:
        """Transferred bytes per rank: its share of the rows times the sent columns."""
        return self.rows // self.world * self.sent * self.dtype.itemsize

    @property
    def weight(self) -> bool:
        """Whether the weight gradient is computed too. It needs all gathered rows and takes as long as ``gemm``."""
        return self.direction == "backward"

    @property
    def receives(self) -> bool:
        """Whether the GEMM multiplies rows that are gathered before it; else its results are scattered after it."""
        return (self.operator in GATHERS) != self.weight

    @property
    def gathered(self) -> int:
        """Bytes transferred before the GEMM. A linear layer gathers x again for the weight gradient."""
        return self._moved if self.receives or self.operator == "gather_matmul" else 0

    @property
    def scattered(self) -> int:
        """Bytes transferred after the GEMM."""
        return 0 if self.receives else self._moved

    @property
    def _moved(self) -> int:
        return self.rows * (self.world - 1) // self.world * self.sent * self.dtype.itemsize

    @property
    def gemm(self) -> GemmShape:
        """The GEMM of y, or of the gradient of x."""
        inner, columns = (self.sent, self.other) if self.receives else (self.other, self.sent)
        return GemmShape(self.rows, inner, columns, self.groups)

    @property
    def gemms_per_chunk(self) -> int:
        """The number of ranks if each rank's rows of a chunk have their own GEMM, else 1."""
        return 1 if self.operator in EXPERTS else self.world

    @property
    def beside_gemm(self) -> GemmShape:
        """GEMM of the operators that run while the transfers are in flight."""
        return GemmShape(self.rows, self.sent, self.beside * (2 if self.weight else 1))

    @property
    def handshakes(self) -> int:
        """Exchanges of a few bytes. Combine's backward also sends the routing weights and their gradients."""
        if self.operator not in EXPERTS:
            return 0
        return 3 if self.operator == "matmul_combine" and self.weight else 1


@lru_cache(maxsize=4096)
def _bucket(work: OperatorWork) -> OperatorWork:
    return replace(work, rows=1 << round(math.log2(work.rows)) if work.rows else 0)


@dataclass(frozen=True)
class GemmShape:
    """[rows, inner] @ [inner, columns], as ``groups`` GEMMs with the same number of rows."""

    rows: int
    inner: int
    columns: int
    groups: int = 1

    def with_rows(self, rows: float) -> GemmShape:
        return replace(self, rows=math.ceil(rows))


@dataclass(frozen=True)
class GroupRates:
    """Measured rates of the slowest rank of a group, in seconds, bytes/s and FLOP/s.

    latency_s: seconds of an exchange of a few bytes. bytes_per_s: bandwidth at which a rank receives. hides: fraction
    of a transfer that overlaps with a GEMM, 0 to 1. chunk_s: seconds to start an additional transfer. call_s: seconds
    of a GEMM of minimal size. gemm: (rows, FLOP/s) points in ascending order; rates in between are interpolated.
    shared: whether ranks can read each other's memory.
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
        """Return the seconds of a GEMM.

        Each group takes at least ``call_s``, and at least the time of the smallest measured number of rows.
        """
        if not gemm.rows or not gemm.columns:
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


def predict(work: OperatorWork, rates: GroupRates, chunks: int) -> float:
    """Return the predicted seconds of the operator for a number of chunks."""
    handshakes_s = work.handshakes * rates.latency_s
    if chunks > 1 and work.operator in IN_PLACE and rates.shared:
        return handshakes_s + _in_place(work, rates)
    if work.receives:
        return handshakes_s + (_gather_columns if work.operator in SWAPS else _gather)(work, rates, chunks)
    return handshakes_s + (_scatter_columns if work.operator in SWAPS else _scatter)(work, rates, chunks)


def _in_place(work: OperatorWork, rates: GroupRates) -> float:
    """Return the seconds if ranks read each other's rows in place.

    Each rank copies its own rows once, and the peers read them. Scattered results are read but not copied, so they
    count half.
    """
    num_bytes = work.gathered / work.world + work.scattered / 2
    gemms = work.world * rates.gemm_s(work.gemm.with_rows(work.gemm.rows / work.world))
    return rates.transfer_s(num_bytes) + gemms + (rates.gemm_s(work.gemm) if work.weight else 0.0)


def _gather(work: OperatorWork, rates: GroupRates, chunks: int) -> float:
    receive = rates.transfer_s(work.gathered / chunks)
    gemm = rates.gemm_s(work.gemm)
    weight = gemm if work.weight else 0.0
    if chunks == 1:
        return receive + gemm + weight + rates.gemm_s(work.beside_gemm)
    own_rows = work.gemm.rows / work.world
    gemms = max(work.gemms_per_chunk - 1, 1)  # this rank's rows are not part of a chunk
    chunk_s = gemms * rates.gemm_s(work.gemm.with_rows((work.gemm.rows - own_rows) / gemms / chunks))
    start = chunks * (rates.chunk_s + receive * (1 - rates.hides)) + rates.gemm_s(work.beside_gemm)
    cores_free = start + rates.gemm_s(work.gemm.with_rows(own_rows))
    for chunk in range(1, chunks + 1):
        cores_free = max(cores_free, chunk * receive) + chunk_s
    return cores_free + weight


def _gather_columns(work: OperatorWork, rates: GroupRates, chunks: int) -> float:
    """Return the seconds of an all-to-all followed by a GEMM.

    Only the weight gradient of this rank's columns needs no transfer.
    """
    receive = rates.transfer_s(work.gathered / chunks)
    weight = rates.gemm_s(work.gemm) if work.weight else 0.0
    chunk_s = rates.gemm_s(work.gemm.with_rows(work.gemm.rows / chunks))
    start = chunks * rates.chunk_s if chunks > 1 else 0.0
    transfer_cores = chunks * receive * (1 - rates.hides) if chunks > 1 or work.weight else 0.0
    cores_free = start + transfer_cores + weight / work.world
    for chunk in range(1, chunks + 1):
        cores_free = max(cores_free, chunk * receive) + chunk_s
    return cores_free + weight * (work.world - 1) / work.world


def _scatter(work: OperatorWork, rates: GroupRates, chunks: int) -> float:
    receive, send = (rates.transfer_s(num_bytes / chunks) for num_bytes in (work.gathered, work.scattered))
    gemm = rates.gemm_s(work.gemm)
    gemms = work.gemms_per_chunk if chunks > 1 else 1
    chunk_s = gemms * rates.gemm_s(work.gemm.with_rows(work.gemm.rows / gemms / chunks))
    if chunks == 1 and work.handshakes:  # serial execution of experts: no transfer is in flight during a GEMM
        return gemm + send + (gemm if work.weight else 0.0) + rates.gemm_s(work.beside_gemm)
    cores_free, network = _send_chunks(rates, chunks, chunk_s, send, chunks * receive)
    if work.weight:
        cores_free = max(cores_free, chunks * receive) + gemm
    return max(cores_free + rates.gemm_s(work.beside_gemm), network)


def _scatter_columns(work: OperatorWork, rates: GroupRates, chunks: int) -> float:
    """Return the seconds of GEMMs followed by an all-to-all per chunk.

    The GEMMs of the peers' columns come first, chunk by chunk. The GEMM of this rank's columns comes last and covers
    all rows.
    """
    send, world, gemm = rates.transfer_s(work.scattered / chunks), work.world, work.gemm
    columns = replace(gemm, columns=math.ceil(gemm.columns / world))
    gemms = world - 1 if chunks > 1 else world  # with one chunk, it includes this rank's columns
    chunk_s = gemms * rates.gemm_s(columns.with_rows(gemm.rows / chunks))
    cores_free, network = _send_chunks(rates, chunks, chunk_s, send, 0.0)
    cores_free += rates.gemm_s(columns) if chunks > 1 else 0.0
    return max(cores_free + (rates.gemm_s(gemm) if work.weight else 0.0), network)


def _send_chunks(rates: GroupRates, chunks: int, chunk_s: float, send: float, network: float) -> tuple[float, float]:
    """Return the times at which the cores and the network complete if each chunk is computed and then sent.

    Args:
        chunk_s: seconds of the GEMMs of one chunk.
        send: seconds of the transfer of one chunk.
        network: time until which earlier transfers occupy the network.
    """
    cores_fraction, start = 1 - rates.hides, rates.chunk_s if chunks > 1 else 0.0
    cores_free = network * cores_fraction
    for _ in range(chunks):
        cores_free += chunk_s + start
        network = max(network, cores_free) + send
        cores_free += send * cores_fraction
    return cores_free, network


def cheapest(work: OperatorWork, rates: GroupRates, candidates: Sequence[int] = CHUNKS, margin: float = MARGIN) -> int:
    """Return the number of chunks with the shortest predicted time.

    Return 1 if no other number saves at least the fraction ``margin`` of the time with one chunk.
    """
    if not work.gathered and not work.scattered:
        return 1
    serial = predict(work, rates, 1)
    seconds, chunks = min((predict(work, rates, c), c) for c in candidates)
    return chunks if seconds < serial * (1 - margin) else 1
