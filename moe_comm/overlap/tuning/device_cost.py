"""Cost model of the device executor: predicts the passes of the experts for each budget of sending blocks.

    serial   [ push, all blocks ][ first GEMM ][ last GEMM ][ sum, all blocks ]
    device   [ push, few blocks     ]                     rows are received; a tile is ready after its share of push
               [ first, other processors ]                (the arrival curve); a GEMM waits if none is ready
                                         [ last: 4 slices ][ weight gradients ]
                                            [ sum: 4 slices ]    each after its slice of the last GEMM

Forward, the first GEMM is w13 and the last one w2; backward, the other way round, and weight gradients follow. A budget
of few blocks may send below the rate of the link; many blocks take processors from the GEMM. The model knows both, and
the arrival curve: rows are sent by expert (``csrc/cuda/order.h``), so tiles are ready in proportion to the rows sent.
All functions are pure arithmetic: equal constants give equal choices on all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_comm.errors import ConfigError
from moe_comm.gpu.protocol import MAX_SLICES, TILE_ROWS
from moe_comm.overlap.tuning.cost import MARGIN

BUDGETS = (8, 16, 24)
"""Candidates for the number of thread blocks that send rows."""
STEPS = 64
"""Steps in which tiles become ready."""
MAX_PROCESSORS, MAX_SOURCE = 100_000, 100
"""Limits of ``DeviceRates``, whose text rank 0 sends to all ranks."""


@dataclass(frozen=True)
class DeviceRates:
    """Rates of the slowest GPU of a group.

    processors: multiprocessors of the GPU. block_bytes_per_s: bytes/s that one block of push writes. link_bytes_per_s:
    bytes/s that a rank sends to other ranks at most. copy_bytes_per_s: bytes/s that all blocks write to this GPU, which
    read as many at the same time. flops_per_s: rate of a grouped GEMM on all processors. waiting: rate of the GEMM that
    waits for tiles, relative to it, on as many processors and with all rows received; 0 to 1. fixed_s: seconds that the
    device executor adds to a pass: its launches, and the waits for slices. source: where they are from, for messages.
    """

    processors: int
    block_bytes_per_s: float
    link_bytes_per_s: float
    copy_bytes_per_s: float
    flops_per_s: float
    waiting: float
    fixed_s: float
    source: str = "given"

    def __post_init__(self) -> None:
        positive = self.block_bytes_per_s, self.link_bytes_per_s, self.copy_bytes_per_s, self.flops_per_s, self.waiting
        known = all(0 < rate < math.inf for rate in positive) and 0 <= self.fixed_s < math.inf
        if not known or not 1 <= self.processors <= MAX_PROCESSORS or self.waiting > 1 or len(self.source) > MAX_SOURCE:
            raise ConfigError(
                f"rates must be positive and finite, waiting at most 1, processors at most {MAX_PROCESSORS}, source at "
                f"most {MAX_SOURCE} characters; got {self}"
            )

    def send_s(self, row_bytes: float, world: int, blocks: float) -> float:
        """Return the seconds to send ``row_bytes`` to all ranks in equal parts, on a number of blocks."""
        remote = row_bytes * (world - 1) / world
        rate = min(blocks * self.block_bytes_per_s, self.copy_bytes_per_s)
        return max(remote / self.link_bytes_per_s, row_bytes / rate)


H100 = DeviceRates(
    132,
    36.8e9,  # a copy on 8 blocks reads and writes 589 GB/s
    350e9,  # not measured here, with one GPU: NVLink by copies of a kernel in arXiv 2511.13940
    1.44e12,  # a copy on 132 blocks reads and writes 2875 GB/s
    628e12,  # the slowest forward GEMM of experts with 1024 rows; the fastest has 701
    0.82,  # the GEMM that waits loads without TMA; the slowest gradient of rows without it
    1e-4,  # 4 slices, each with the kernel times of the handshakes of dispatch and combine, 14 and 10 us
    "constants of an H100 (benchmarks/results/nvidia-h100-80gb-hbm3), NVLink from the literature",
)
"""Used where nothing is calibrated, on GPUs of the same compute capability."""
CAPABILITY = (9, 0)
"""Compute capability of the GPUs that ``H100`` is used for."""


@dataclass(frozen=True)
class DeviceWork:
    """One call of the experts of a rank.

    rows: that a rank receives, and sends, on average. hidden, ffn: D, F. itemsize: bytes of an element. world: ranks.
    experts: of this rank, with two or three matrices that a GEMM reads once; 0: their bytes do not count. gradients:
    whether a backward pass follows.
    """

    rows: int
    hidden: int
    ffn: int
    itemsize: int
    world: int
    experts: int = 0
    gradients: bool = False

    @property
    def row_bytes(self) -> int:
        return self.rows * self.hidden * self.itemsize

    @property
    def flops(self) -> tuple[float, float]:
        """FLOPs of the first GEMM (gate and up) and of the last one, forward."""
        one = 2.0 * self.rows * self.hidden * self.ffn
        return 2 * one, one

    @property
    def passes(self) -> tuple[tuple[int, int, int], ...]:
        """The GEMMs of each pass in units of w2's: the first, the last, and those of weights behind it."""
        forward = ((2, 1, 0),)
        return (*forward, (1, 2, 3)) if self.gradients else forward

    def unit_s(self, rates: DeviceRates, waiting: float = 1.0) -> float:
        """Return the seconds of the GEMM of w2: those of its FLOPs, or those in which its weights are read."""
        weights = self.experts * self.hidden * self.ffn * self.itemsize
        return max(self.flops[1] / (rates.flops_per_s * waiting), weights / (2 * rates.copy_bytes_per_s))


@dataclass(frozen=True)
class DeviceForecast:
    """Predicted seconds of the passes. device_s and hidden: by budget of blocks. hidden is the fraction of the
    transfers that GEMMs hide. blocks: the best budget if the device executor saves ``MARGIN`` of the serial time, else
    None. source: of the rates."""

    serial_s: float
    device_s: dict[int, float]
    hidden: dict[int, float]
    blocks: int | None
    source: str = "given"

    def lines(self) -> list[str]:
        """Return the prediction and the choice as text."""
        text = [f"rates: {self.source}", f"serial: {self.serial_s * 1e3:.3f} ms predicted"]
        for blocks, seconds in self.device_s.items():
            text.append(
                f"device, {blocks} blocks send: {seconds * 1e3:.3f} ms predicted, {self.hidden[blocks]:.0%} of the "
                "transfers hidden"
            )
        if self.blocks is None:
            return [*text, f"choice: serial; the device executor must save {MARGIN:.0%}"]
        return [*text, f"choice: device with {self.blocks} blocks"]


def ready_shares(rows: int, blocks: int) -> list[float]:
    """Return the arrival curve: the share of push after which each of ``STEPS`` equal groups of tiles is ready.

    A tile is ready once the rows before it are sent, and those that all blocks send at the same time.
    """
    in_flight = min(1.0, blocks * TILE_ROWS / max(rows, 1))
    return [min(1.0, (step + 1) / STEPS + in_flight) for step in range(STEPS)]


def forecast(work: DeviceWork, rates: DeviceRates) -> DeviceForecast:
    """Predict the passes with the serial executor, and with the device executor for each budget of blocks."""
    move_s = rates.send_s(work.row_bytes, work.world, rates.processors)
    passes = work.passes
    gemms_s = work.unit_s(rates) * sum(map(sum, passes))
    serial_s = 2 * move_s * len(passes) + gemms_s
    device_s, hidden = {}, {}
    for blocks in BUDGETS:
        if blocks >= rates.processors:
            continue
        device_s[blocks] = sum(_device_s(work, rates, blocks, gemms) for gemms in passes)
        moves_s = (rates.send_s(work.row_bytes, work.world, blocks) + move_s) * len(passes)
        alone_s = sum(
            (one + two) * work.unit_s(rates, rates.waiting) + w * work.unit_s(rates) for one, two, w in passes
        )
        exposed = device_s[blocks] - alone_s
        hidden[blocks] = min(1.0, max(0.0, 1 - exposed / moves_s)) if moves_s else 0.0
    best = min(device_s, key=lambda blocks: device_s[blocks], default=None)
    if best is not None and device_s[best] >= serial_s * (1 - MARGIN):
        best = None
    return DeviceForecast(serial_s, device_s, hidden, best, rates.source)


def _device_s(work: DeviceWork, rates: DeviceRates, blocks: int, gemms: tuple[int, int, int]) -> float:
    push_s = rates.send_s(work.row_bytes, work.world, blocks)
    unit_s = work.unit_s(rates, rates.waiting)
    first, last, weights = gemms[0] * unit_s, gemms[1] * unit_s, gemms[2] * work.unit_s(rates)
    slowed = rates.processors / (rates.processors - blocks)
    end_s = 0.0
    for share in ready_shares(work.rows, blocks):
        end_s = _after(max(end_s, share * push_s), first / STEPS, push_s, slowed)
    # Slices of the last GEMM, and the sum of each on the processors that it leaves free, at most at the link's rate.
    sum_s = rates.send_s(work.row_bytes, work.world, blocks) / MAX_SLICES
    summed_s = end_s
    for _ in range(MAX_SLICES):
        end_s += last * slowed / MAX_SLICES
        summed_s = max(summed_s, end_s) + sum_s
    return max(summed_s, end_s + weights) + rates.fixed_s


def _after(start_s: float, work_s: float, push_s: float, slowed: float) -> float:
    """Return the end of GEMM work that takes ``work_s`` on all processors, and ``slowed`` times as long during push."""
    during_s = max(0.0, min(work_s * slowed, push_s - start_s))
    return start_s + during_s + work_s - during_s / slowed
