"""Simulates a tile schedule: when each tile starts and ends, given the times of flags and the durations of tiles.

flag 0  ▏raised at 0
flag 1  ▏........ raised at 5
worker  ▏[tile A][tile B]....[tile C][tile D]      A, B need flag 0; C, D need flag 1; the dots are idle
        0        2       4   5       7       9
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moe_comm.errors import InputError
from moe_comm.overlap.options import at_least_one
from moe_comm.overlap.schedule import TileSchedule
from moe_comm.overlap.tiles import Ints, Ragged

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TileTimeline:
    """Start time, end time and worker of each of N tiles, in the schedule's order."""

    start_N: Times
    finish_N: Times
    worker_N: Ints
    signals: Ragged
    num_flags: int

    @property
    def finish(self) -> float:
        """End of the last tile; 0 without tiles."""
        return float(self.finish_N.max(initial=0.0))

    @property
    def idle(self) -> float:
        """Total idle time of the workers, each until its last tile starts."""
        last = np.zeros(int(self.worker_N.max(initial=-1)) + 1)
        np.maximum.at(last, self.worker_N, self.finish_N)
        return float(last.sum() - (self.finish_N - self.start_N).sum())

    def raised_F(self) -> Times:
        """Return when each counter of a producer schedule is complete; 0 if no tile signals it."""
        times_F = np.zeros(self.num_flags)
        np.maximum.at(times_F, self.signals.values, self.finish_N[self.signals.owners()])
        return times_F


def simulate(
    schedule: TileSchedule,
    arrivals_F: ArrayLike | None,
    tile_times_N: ArrayLike,
    *,
    workers: int = 1,
    in_order: bool = True,
) -> TileTimeline:
    """Simulate a schedule.

    Args:
        schedule: The tiles in order.
        arrivals_F: [F] when each flag is raised; None: all at time 0, as for schedules whose tiles need none.
        tile_times_N: [N] duration of each tile, in the schedule's order; or one number for all tiles.
        workers: Programs that compute concurrently. With ``in_order``, worker w has tiles w, w + workers, ...
        in_order: A worker waits for its next tile (persistent kernels). If False, it takes the first tile whose flags
            are raised (a host that polls).

    Raises:
        InputError: arrays of another length, or times that are negative, infinite or NaN.
        ConfigError: ``workers`` is below one.
    """
    at_least_one("workers", workers)
    num_tiles = len(schedule)
    durations = np.asarray(tile_times_N, np.float64)
    times_N = np.full(num_tiles, durations) if durations.ndim == 0 else durations
    flags_F = np.zeros(schedule.num_flags) if arrivals_F is None else np.asarray(arrivals_F, np.float64)
    for name, times, length in (("tile_times_N", times_N, num_tiles), ("arrivals_F", flags_F, schedule.num_flags)):
        if times.shape != (length,):
            raise InputError(f"{name} must have {length} times; got shape {times.shape}")
        if not (np.isfinite(times) & (times >= 0)).all():
            raise InputError(f"{name} must be finite and not negative")
    ready_N = schedule.needs.extreme(np.maximum, flags_F).astype(np.float64)
    run = _in_order if in_order else _first_ready
    start_N, worker_N = run(ready_N, times_N, workers)
    return TileTimeline(start_N, start_N + times_N, worker_N, schedule.signals, schedule.num_flags)


def _in_order(ready_N: Times, times_N: Times, workers: int) -> tuple[Times, Ints]:
    start_N = np.zeros_like(ready_N)
    for worker in range(min(workers, len(ready_N))):
        ready, times = ready_N[worker::workers], times_N[worker::workers]
        # start = total duration of the earlier tiles + the longest delay of a tile so far
        earlier_work = np.cumsum(times) - times
        start = earlier_work + np.maximum.accumulate(ready - earlier_work).clip(min=0)
        start_N[worker::workers] = np.maximum(start, ready)  # the sum may have been rounded down
    return start_N, np.arange(len(ready_N)) % workers


def _first_ready(ready_N: Times, times_N: Times, workers: int) -> tuple[Times, Ints]:
    start_N, worker_N = np.zeros_like(ready_N), np.zeros(len(ready_N), np.int64)
    pending = [(float(ready_N[tile]), int(tile)) for tile in np.argsort(ready_N, kind="stable")[::-1]]
    free = [(0.0, worker) for worker in range(workers)]
    ready: list[int] = []  # heap of tiles whose flags are raised, by position in the schedule
    while pending or ready:
        now, worker = heapq.heappop(free)
        while pending and pending[-1][0] <= now:
            heapq.heappush(ready, pending.pop()[1])
        if not ready:  # try again at that time, after workers that are free earlier
            heapq.heappush(free, (pending[-1][0], worker))
            continue
        tile = heapq.heappop(ready)
        start_N[tile], worker_N[tile] = now, worker
        heapq.heappush(free, (now + float(times_N[tile]), worker))
    return start_N, worker_N
