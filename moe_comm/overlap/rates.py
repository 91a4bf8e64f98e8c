"""The constants of the cost model, measured on a group: some exchanges and some products, a tenth of a second in all.

Every rank measures while the others do, since they may share cores and links, and all take the slowest rank's values:
so all ranks hold the same constants, to the bit.
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
from moe_comm.kernels.row_invariant import TILE, row_invariant_mm
from moe_comm.overlap.cost import Rates

WIDTH = 512
"""Inner width and columns of the products."""
GEMM_ROWS = (16, 64, 256, 1024)
LONG_S = 0.03
"""Products of more rows than one that took so long are not tried: their rate is the same."""
PART_BYTES = 1 << 20
"""Of each rank, to measure the bandwidth: many times what passes at once, 8 ms on 1 Gbit/s."""
DOING = "measuring a group's rates"


def measure_rates(channel: Channel, dtype: torch.dtype, device: torch.device, repeats: int = 3) -> Rates:
    """Collective: latency, bandwidth and products' rates, alike on every rank.

    Args:
        dtype: of the products. device: of their tensors and of what travels.
        repeats: of each measurement, of which the median counts, of products the best.
    """
    finish = partial(_finish, device)
    small, part = (torch.zeros(n, dtype=torch.uint8, device=device) for n in (64, PART_BYTES))

    def timed(work: Callable[[], object]) -> float:
        finish()
        began = time.perf_counter()
        work()
        finish()
        return time.perf_counter() - began

    def median(work: Callable[[], object], times: int = repeats) -> float:
        return statistics.median(timed(work) for _ in range(times))

    def gather(x: Tensor) -> Tensor:
        return channel.all_gather(x, DOING)

    # Not drawn: a training run's random numbers must not depend on what is measured.
    a = torch.ones(max(GEMM_ROWS), WIDTH, device=device, dtype=dtype)
    b = torch.ones(WIDTH, WIDTH, device=device, dtype=dtype)
    speeds: list[float] = []
    seconds = 0.0
    gather(small)
    for rows in GEMM_ROWS:
        if seconds < LONG_S:
            once = partial(row_invariant_mm, a[:rows], b)
            once()
            # The best, not the median: what else runs on these cores for a moment is not the products' rate.
            seconds = min(timed(once) for _ in range(repeats if rows > 64 else 3 * repeats))
            speeds.append(2.0 * rows * WIDTH**2 / seconds)
    speeds += [speeds[-1]] * (len(GEMM_ROWS) - len(speeds))
    tiny = partial(row_invariant_mm, a[:TILE, :TILE], b[:TILE, :TILE])
    tiny()
    call_s = median(tiny, 3 * repeats)
    gather(small)  # ranks come out of their products at different times
    latency_s = median(lambda: gather(small), 3 * repeats)
    started: list[Callable[[], Tensor]] = []
    begin_s = median(lambda: started.append(channel.start_all_gather(small, DOING)))
    for arrived in started:
        arrived()
    gather(part)
    transfer_s = median(lambda: gather(part))
    hides = statistics.median(
        _hides(channel, part, partial(row_invariant_mm, a[:256], b), timed) for _ in range(repeats)
    )
    said = torch.tensor(
        # An exchange of nothing that was disturbed may have taken as long as one of much.
        [
            latency_s,
            max(transfer_s - latency_s, transfer_s / 4),
            begin_s,
            call_s,
            -hides,
            *(1 / speed for speed in speeds),
        ],
        dtype=torch.float64,
    )
    # The host's numbers travel as everything else does, and the slowest rank's count.
    worst = channel.all_gather(said.to(channel.control_device), DOING).amax(0).tolist()
    received = max(channel.world - 1, 1) * PART_BYTES
    gemm = tuple((rows, 1 / pace) for rows, pace in zip(GEMM_ROWS, worst[5:], strict=True))
    shared = isinstance(channel, SharedChannel) and channel.adds(b)
    return Rates(worst[0], received / worst[1], min(max(-worst[4], 0.0), 1.0), worst[2], worst[3], gemm, shared)


def _hides(
    channel: Channel, part: Tensor, product: Callable[[], Tensor], timed: Callable[[Callable[[], object]], float]
) -> float:
    """Share of a transfer, or of products about as long if that is shorter, which both together do not cost."""
    alone = timed(lambda: channel.all_gather(part, DOING))
    times = max(1, min(100, round(alone / max(timed(product), 1e-7))))

    def products() -> None:
        for _ in range(times):
            product()

    def both() -> None:
        arrived = channel.start_all_gather(part, DOING)
        products()
        arrived()

    computing = timed(products)
    channel.all_gather(part[:64], DOING)
    return (alone + computing - timed(both)) / min(alone, computing)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
