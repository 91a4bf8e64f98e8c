"""Measures the constants of the cost model on a group: a few exchanges and GEMMs, which take a tenth of a second.

All ranks measure at the same time, because they may share cores and links, and use the values of the slowest rank. So
all ranks hold the same constants, bit for bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moe_comm.comm.channel import Channel
from moe_comm.comm.shared_channel import SharedChannel
from moe_comm.kernels.row_invariant import row_invariant_mm
from moe_comm.overlap.options import TILE
from moe_comm.overlap.tuning.cost import GroupRates

WIDTH = 512
"""Inner width and columns of the GEMMs."""
GEMM_ROWS = (16, 64, 256, 1024)
LONG_S = 0.03
"""After a GEMM of this duration, more rows are not measured: their rate is the same."""
TRANSFER_BYTES = 1 << 20
"""Bytes of each rank in the bandwidth measurement: 8 ms at 1 Gbit/s."""
DESCRIPTION = "measuring a group's rates"


def measure_rates(channel: Channel, dtype: torch.dtype, device: torch.device, repeats: int = 3) -> GroupRates:
    """Measure latency, bandwidth and GEMM rates of a group. Collective; returns the same values on every rank.

    Args:
        channel: Channel of the group.
        repeats: Repetitions of each measurement. The result is the median; for GEMMs the minimum.
    """
    finish = partial(_finish, device)
    small, large = (torch.zeros(n, dtype=torch.uint8, device=device) for n in (64, TRANSFER_BYTES))

    def timed(function: Callable[[], object]) -> float:
        finish()
        start = time.perf_counter()
        function()
        finish()
        return time.perf_counter() - start

    def median(function: Callable[[], object], times: int = repeats) -> float:
        return statistics.median(timed(function) for _ in range(times))

    def gather(x: Tensor) -> Tensor:
        return channel.all_gather(x, DESCRIPTION)

    # Constant values: measurements must not change the random state of a training run.
    a = torch.ones(max(GEMM_ROWS), WIDTH, device=device, dtype=dtype)
    b = torch.ones(WIDTH, WIDTH, device=device, dtype=dtype)
    speeds: list[float] = []
    seconds = 0.0
    gather(small)
    for rows in GEMM_ROWS:
        if seconds < LONG_S:
            run_gemm = partial(row_invariant_mm, a[:rows], b)
            run_gemm()
            # The minimum, not the median: other processes on these cores must not lower the rate.
            seconds = min(timed(run_gemm) for _ in range(repeats if rows > 64 else 3 * repeats))
            speeds.append(2.0 * rows * WIDTH**2 / seconds)
    speeds += [speeds[-1]] * (len(GEMM_ROWS) - len(speeds))
    smallest_gemm = partial(row_invariant_mm, a[:TILE, :TILE], b[:TILE, :TILE])
    smallest_gemm()
    call_s = median(smallest_gemm, 3 * repeats)
    gather(small)  # synchronize: the ranks' GEMMs end at different times
    latency_s = median(lambda: gather(small), 3 * repeats)
    started: list[Callable[[], Tensor]] = []
    start_s = median(lambda: started.append(channel.start_all_gather(small, DESCRIPTION)))
    for pending in started:
        pending()
    gather(large)
    transfer_s = median(lambda: gather(large))
    hides = statistics.median(
        _hidden_fraction(channel, large, partial(row_invariant_mm, a[:256], b), timed) for _ in range(repeats)
    )
    values = torch.tensor(
        # The latency measurement may have been disturbed, so the bandwidth term is at least a quarter of the transfer.
        [
            latency_s,
            max(transfer_s - latency_s, transfer_s / 4),
            start_s,
            call_s,
            -hides,
            *(1 / speed for speed in speeds),
        ],
        dtype=torch.float64,
        device="cpu",
    )
    slowest = channel.all_gather(values.to(channel.control_device), DESCRIPTION).amax(0).tolist()
    received = max(channel.world - 1, 1) * TRANSFER_BYTES
    gemm = tuple((rows, 1 / s_per_flop) for rows, s_per_flop in zip(GEMM_ROWS, slowest[5:], strict=True))
    shared = isinstance(channel, SharedChannel) and channel.can_sum_in_memory(b)
    return GroupRates(
        slowest[0], received / slowest[1], min(max(-slowest[4], 0.0), 1.0), slowest[2], slowest[3], gemm, shared
    )


def _hidden_fraction(
    channel: Channel, x: Tensor, gemm: Callable[[], Tensor], timed: Callable[[Callable[[], object]], float]
) -> float:
    """Return the fraction of a transfer, or of GEMMs of about its duration if shorter, that is saved by overlap."""
    transfer_s = timed(lambda: channel.all_gather(x, DESCRIPTION))
    repeats = max(1, min(100, round(transfer_s / max(timed(gemm), 1e-7))))

    def gemms() -> None:
        for _ in range(repeats):
            gemm()

    def overlapped() -> None:
        pending = channel.start_all_gather(x, DESCRIPTION)
        gemms()
        pending()

    gemms_s = timed(gemms)
    channel.all_gather(x[:64], DESCRIPTION)
    return (transfer_s + gemms_s - timed(overlapped)) / min(transfer_s, gemms_s)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
