"""What an operator will take, by number of chunks: a model with few constants, all of them measured on the group.

    transfer(bytes)  = latency + bytes / bandwidth             product(rows) = FLOP / rate(rows), at least one call

    gathers    network   [t(0) ][t(1) ][t(2) ]                 a chunk's product begins when the chunk is there and
               compute   [own ][p(0) ][p(1) ][p(2) ]           the product before it is done

    scatters   compute   [p(0) ][p(1) ][p(2) ][ weight ]       a chunk leaves when its product is done and the chunk
               network          [t(0) ][t(1) ][t(2) ]          before it has left

    in place   compute   [own ][peer 1][peer 2] ...            ranks of one host that read each other's rows where they
                                                               stand (``shared.py``): no transfer but the own copy

Two things keep chunks from being free, and are in the model: small products run at a lower rate, and every chunk has
its latency and its call. A third is what transfers take from the cores that compute: ``hides`` is the share of a
transfer during which a product goes on, 0 where rows move by the core's own copying, near 1 where the network works by
itself. With ``hides`` 0 no number of chunks can win, and the model says so; reading in place can.

Everything is arithmetic: no process group, no tensors. The same constants give the same choice on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from moe_comm.errors import ConfigError

CHUNKS = (1, 2, 4, 8, 16)
"""Numbers of chunks to choose from."""
MARGIN = 0.05
"""Share of one chunk's time that more chunks must be predicted to save: the model errs by about that."""
GATHERS = ("gather_matmul", "swap_matmul", "dispatch_matmul")
SCATTERS = ("matmul_scatter", "matmul_swap", "matmul_combine")
EXPERTS = ("dispatch_matmul", "matmul_combine")
"""Those whose chunks are grouped products over all ranks' rows; others' are a product for each rank."""
SWAPS = ("swap_matmul", "matmul_swap")
"""Those whose rows are all a rank's own, and which cross by columns (``ulysses.py``)."""
FUSED = ("gather_matmul", "matmul_scatter", "dispatch_matmul", "matmul_combine")
"""Those that have a Triton kernel, too, of which the model says nothing."""
IN_PLACE = ("gather_matmul", "matmul_scatter")
"""Those that can read peers' rows in place; in how many chunks is then all one, if not in one."""
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Work:
    """One operator in one direction, as the model and the stored measurements know it.

    rows: of this rank's product: all ranks' rows in a linear layer, its own beside a swap, those of its experts in an
        MoE layer (for which ranks must give the same number, as the mean over ranks). sent: columns that travel. other:
        those that do not.
    groups: products that the rows are spread over: experts of this rank.

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

    def bucket(self) -> Work:
        """The same with rows as the nearest power of two: what one choice holds for."""
        return _bucket(self)

    @property
    def part_bytes(self) -> int:
        """What travels of one rank's rows."""
        return self.rows // self.world * self.sent * self.dtype.itemsize

    def load(self) -> Load:
        """What the work puts on the network and the cores."""
        gathers, forward = self.operator in GATHERS, self.direction == "forward"
        moved = self.rows * (self.world - 1) // self.world * self.sent * self.dtype.itemsize
        swaps, in_place = self.operator in SWAPS, self.operator in IN_PLACE
        pieces = 1 if self.operator in EXPERTS else self.world
        asked = 0
        if self.operator in EXPERTS:  # the handshake; and in combine's backward the weights, and their gradients
            asked = 3 if self.operator == "matmul_combine" and not forward else 1
        if gathers == forward:  # y of rows that arrive; or, of a gradient that arrives, grad_x and then grad_w
            product = Product(self.rows, self.sent, self.other, self.groups)
            return Load(moved, 0, product, self.world, pieces, True, not forward, in_place, asked, swaps)
        # y or grad_x, which leaves; with grad_x grad_w, for which a linear layer's x is gathered again
        product = Product(self.rows, self.other, self.sent, self.groups)
        again = moved if self.operator == "gather_matmul" else 0
        return Load(again, moved, product, self.world, pieces, False, gathers, in_place, asked, swaps)


@lru_cache(maxsize=4096)
def _bucket(work: Work) -> Work:
    return replace(work, rows=1 << round(math.log2(work.rows)) if work.rows else 0)


@dataclass(frozen=True)
class Product:
    """[rows, inner] @ [inner, columns], the rows in ``groups`` equal products."""

    rows: int
    inner: int
    columns: int
    groups: int = 1

    def of(self, rows: float) -> Product:
        return replace(self, rows=math.ceil(rows))


@dataclass(frozen=True)
class Load:
    """gathered, scattered: bytes that come before, and leave after, the product. pieces: products of a chunk: one for
    each rank whose rows it has, or one in all. waits: whether the product is of what comes. weight: whether the
    weights' gradient is computed, too; it needs everything that comes, and is as long as the product. in_place: whether
    peers' rows can be read where they stand, if the group's memory is shared. asked: exchanges of next to nothing.
    swaps: whether a chunk is of all columns of some rows, which cross by columns."""

    gathered: int
    scattered: int
    product: Product
    world: int
    pieces: int
    waits: bool
    weight: bool
    in_place: bool
    asked: int
    swaps: bool = False


@dataclass(frozen=True)
class Rates:
    """What a group's network and cores do. Seconds, bytes/s, FLOP/s; the slowest rank's.

    latency_s: of an exchange of next to nothing. bytes_per_s: that reach a rank. hides: share of a transfer during
    which a product goes on, 0 to 1. chunk_s: to begin one more transfer. call_s: of a product of next to nothing.
    gemm: (rows, FLOP/s) of products of few and of many rows, by rows; between them it is interpolated.
    shared: whether ranks read each other's memory.
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

    def product_s(self, product: Product) -> float:
        """Seconds of a product; each of its groups is at least one call, and no shorter than of the fewest rows."""
        if not product.rows:
            return 0.0
        rows = max(product.rows / product.groups, self.gemm[0][0])
        flops = 2.0 * rows * product.inner * product.columns
        return product.groups * max(self.call_s, flops / self._rate(rows))

    def _rate(self, rows: float) -> float:
        """FLOP/s of products of so many rows: linear in the logarithm of rows between what was measured."""
        above = next((i for i, point in enumerate(self.gemm) if point[0] > rows), None)
        if above is None:
            return self.gemm[-1][1]
        (low, slow), (high, fast) = self.gemm[max(above - 1, 0)], self.gemm[above]
        return slow + (fast - slow) * math.log(rows / low) / math.log(high / low)


def predict(load: Load, rates: Rates, chunks: int) -> float:
    """Seconds of the operator in so many chunks; in one there is one product, after or before the one transfer."""
    asked = load.asked * rates.latency_s
    if chunks > 1 and load.in_place and rates.shared:
        return asked + _in_place(load, rates)
    return asked + (_gathering if load.waits else _scattering)(load, rates, chunks)


def _in_place(load: Load, rates: Rates) -> float:
    """Rows that are gathered are copied once, by their own rank, not by each; sums are read as often, not copied."""
    moved = load.gathered / load.world + load.scattered / 2
    products = load.world * rates.product_s(load.product.of(load.product.rows / load.world))
    return rates.transfer_s(moved) + products + (rates.product_s(load.product) if load.weight else 0.0)


def _gathering(load: Load, rates: Rates, chunks: int) -> float:
    comes = rates.transfer_s(load.gathered / chunks)
    product = rates.product_s(load.product)
    weight = product if load.weight else 0.0
    if load.swaps:
        return _taking_columns(load, rates, chunks, weight)
    if chunks == 1:
        return comes + product + weight
    own = load.product.rows / load.world
    pieces = max(load.pieces - 1, 1)  # the own one needs no network
    each = pieces * rates.product_s(load.product.of((load.product.rows - own) / pieces / chunks))
    now = chunks * (rates.chunk_s + comes * (1 - rates.hides)) + rates.product_s(load.product.of(own))
    for chunk in range(1, chunks + 1):
        now = max(now, chunk * comes) + each
    return now + weight


def _taking_columns(load: Load, rates: Rates, chunks: int, weight: float) -> float:
    """A swap, then the product: nothing but the own columns' part of the weights' gradient is there at once."""
    comes = rates.transfer_s(load.gathered / chunks)
    each = rates.product_s(load.product.of(load.product.rows / chunks))
    begun = chunks * rates.chunk_s if chunks > 1 else 0.0
    now = begun + (chunks * comes * (1 - rates.hides) if chunks > 1 or load.weight else 0.0) + weight / load.world
    for chunk in range(1, chunks + 1):
        now = max(now, chunk * comes) + each
    return now + weight * (load.world - 1) / load.world


def _sending_columns(load: Load, rates: Rates, chunks: int) -> float:
    """The product, then a swap: the peers' columns of each chunk, then the own ones of all rows; a product each."""
    leaves, world, product = rates.transfer_s(load.scattered / chunks), load.world, load.product
    columns = replace(product, columns=math.ceil(product.columns / world))
    peers = world - 1 if chunks > 1 else world  # one chunk has the own columns in it
    each = peers * rates.product_s(columns.of(product.rows / chunks))
    begun, taken = rates.chunk_s if chunks > 1 else 0.0, 1 - rates.hides
    now = network = 0.0
    for _ in range(chunks):
        now += each + begun
        network = max(network, now) + leaves
        now += leaves * taken
    now += rates.product_s(columns) if chunks > 1 else 0.0
    return max(now + (rates.product_s(product) if load.weight else 0.0), network)


def _scattering(load: Load, rates: Rates, chunks: int) -> float:
    if load.swaps:
        return _sending_columns(load, rates, chunks)
    comes, leaves = (rates.transfer_s(num_bytes / chunks) for num_bytes in (load.gathered, load.scattered))
    product = rates.product_s(load.product)
    pieces = load.pieces if chunks > 1 else 1
    each = pieces * rates.product_s(load.product.of(load.product.rows / pieces / chunks))
    if chunks == 1 and load.asked:  # experts' step after the other: nothing is under way while anything is computed
        return product + leaves + (product if load.weight else 0.0)
    taken, begun = 1 - rates.hides, rates.chunk_s if chunks > 1 else 0.0
    network = chunks * comes
    now = network * taken
    for _ in range(chunks):
        now += each + begun
        network = max(network, now) + leaves
        now += leaves * taken
    if load.weight:
        now = max(now, chunks * comes) + product
    return max(now, network)


def cheapest(work: Work, rates: Rates, candidates: Sequence[int] = CHUNKS, margin: float = MARGIN) -> int:
    """The number of chunks with the shortest prediction; 1 unless another saves ``margin`` of one chunk's time."""
    load = work.load()
    if not load.gathered and not load.scattered:
        return 1
    alone = predict(load, rates, 1)
    seconds, chunks = min((predict(load, rates, c), c) for c in candidates)
    return chunks if seconds < alone * (1 - margin) else 1
