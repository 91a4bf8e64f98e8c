"""Cost model of the device executor: predicts one forward pass of the experts for each budget of sending blocks.

    serial   [ push, all blocks ][ w13 ][ w2 ][ sum, all blocks ]
    device   [ push, few blocks     ]                     rows are received; a tile is ready after its share of push
               [ w13, other processors ]                  (the arrival curve); a GEMM waits if none is ready
                                       [ w2: 4 slices ]
                                          [ sum: 4 slices ]      each after its slice of w2

A budget of few blocks may send below the rate of the link; many blocks take processors from the GEMM. The model knows
both, and that tiles are ready in proportion to the rows that are sent, by expert (``csrc/cuda/order.h``). All functions
are pure arithmetic: equal constants give equal choices on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm.errors import ConfigError
from moe_comm.gpu.protocol import MAX_SLICES, TILE_ROWS
from moe_comm.overlap.tuning.cost import MARGIN

BUDGETS = (8, 16, 24)
"""Candidates for the number of thread blocks that send rows."""
STEPS = 64
"""Steps in which tiles become ready."""


@dataclass(frozen=True)
class DeviceRates:
    """Measured rates of the slowest GPU of a group.

    processors: multiprocessors of the GPU. block_bytes_per_s: bytes/s that one block of push writes. link_bytes_per_s:
    bytes/s that a rank sends to other ranks at most. copy_bytes_per_s: bytes/s that all blocks write to this GPU.
    flops_per_s: rate of a grouped GEMM on all processors. waiting: rate of the GEMM that waits for tiles, relative to
    it, on as many processors and with all rows received; 0 to 1. fixed_s: seconds that the device executor adds to a
    pass: its launches, and the waits for slices.
    """

    processors: int
    block_bytes_per_s: float
    link_bytes_per_s: float
    copy_bytes_per_s: float
    flops_per_s: float
    waiting: float
    fixed_s: float

    def __post_init__(self) -> None:
        positive = self.block_bytes_per_s, self.link_bytes_per_s, self.copy_bytes_per_s, self.flops_per_s, self.waiting
        if self.processors < 1 or min(positive) <= 0 or self.waiting > 1 or self.fixed_s < 0:
            raise ConfigError(f"rates must be positive, waiting at most 1; got {self}")

    def send_s(self, row_bytes: float, world: int, blocks: float) -> float:
        """Return the seconds to send ``row_bytes`` to all ranks in equal parts, on a number of blocks."""
        remote = row_bytes * (world - 1) / world
        rate = min(blocks * self.block_bytes_per_s, self.copy_bytes_per_s)
        return max(remote / self.link_bytes_per_s, row_bytes / rate)


@dataclass(frozen=True)
class DeviceWork:
    """One forward pass of a layer: rows that a rank receives (as many as it sends), D, F, element size, ranks."""

    rows: int
    hidden: int
    ffn: int
    itemsize: int
    world: int

    @property
    def row_bytes(self) -> int:
        return self.rows * self.hidden * self.itemsize

    @property
    def flops(self) -> tuple[float, float]:
        """FLOPs of the first GEMM (gate and up) and of the last one."""
        one = 2.0 * self.rows * self.hidden * self.ffn
        return 2 * one, one


@dataclass(frozen=True)
class DeviceForecast:
    """Predicted seconds of a pass. device_s and hidden: by budget of blocks. hidden is the fraction of the transfers
    that GEMMs hide. blocks: the best budget if the device executor saves ``MARGIN`` of the serial time, else None."""

    serial_s: float
    device_s: dict[int, float]
    hidden: dict[int, float]
    blocks: int | None

    def lines(self) -> list[str]:
        """Return the prediction and the choice as text."""
        text = [f"serial: {self.serial_s * 1e3:.3f} ms predicted"]
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
    """Predict a pass with the serial executor, and with the device executor for each budget of blocks."""
    move_s = rates.send_s(work.row_bytes, work.world, rates.processors)
    gemms = [flops / rates.flops_per_s for flops in work.flops]
    serial_s = 2 * move_s + sum(gemms)
    device_s, hidden = {}, {}
    for blocks in BUDGETS:
        if blocks >= rates.processors:
            continue
        device_s[blocks] = _device_s(work, rates, blocks)
        sends_s = rates.send_s(work.row_bytes, work.world, blocks)
        alone_s = sum(gemms) / rates.waiting
        exposed = device_s[blocks] - alone_s
        hidden[blocks] = min(1.0, max(0.0, 1 - exposed / (sends_s + move_s))) if sends_s + move_s else 0.0
    best = min(device_s, key=lambda blocks: device_s[blocks], default=None)
    if best is not None and device_s[best] >= serial_s * (1 - MARGIN):
        best = None
    return DeviceForecast(serial_s, device_s, hidden, best)


def _device_s(work: DeviceWork, rates: DeviceRates, blocks: int) -> float:
    push_s = rates.send_s(work.row_bytes, work.world, blocks)
    first, last = (flops / (rates.flops_per_s * rates.waiting) for flops in work.flops)
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
    return summed_s + rates.fixed_s


def _after(start_s: float, work_s: float, push_s: float, slowed: float) -> float:
    """Return the end of GEMM work that takes ``work_s`` on all processors, and ``slowed`` times as long during push."""
    during_s = max(0.0, min(work_s * slowed, push_s - start_s))
    return start_s + during_s + work_s - during_s / slowed
