"""What a schedule comes to in time: when each tile begins and ends, given when flags rise and how long tiles take.

flag 0  ▏up at 0
flag 1  ▏........ up at 5
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
from moe_comm.overlap.schedule import Schedule
from moe_comm.overlap.tiles import Ints, Ragged

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each of N tiles began and ended, in the schedule's order and unit of time, and which worker had it."""

    start_N: Times
    finish_N: Times
    worker_N: Ints
    signals: Ragged
    num_flags: int

    @property
    def finish(self) -> float:
        """When the last tile ended; 0 without tiles."""
        return float(self.finish_N.max(initial=0.0))

    @property
    def idle(self) -> float:
        """What workers waited, together, each until its last tile began."""
        last = np.zeros(int(self.worker_N.max(initial=-1)) + 1)
        np.maximum.at(last, self.worker_N, self.finish_N)
        return float(last.sum() - (self.finish_N - self.start_N).sum())

    def raised_F(self) -> Times:
        """When each counter of a producing schedule is full; 0 where no tile signals it."""
        times_F = np.zeros(self.num_flags)
        np.maximum.at(times_F, self.signals.values, self.finish_N[self.signals.owners()])
        return times_F


def simulate(
    schedule: Schedule,
    arrivals_F: ArrayLike | None,
    tile_times_N: ArrayLike,
    *,
    workers: int = 1,
    in_order: bool = True,
) -> Timeline:
    """Play a schedule.

    Args:
        arrivals_F: [F] when each flag rises; None: all up at 0, as for schedules whose tiles need none.
        tile_times_N: [N] how long each tile takes, in the schedule's order; or one number for all.
        workers: programs that compute at the same time. In order, worker w has tiles w, w + workers, ...
        in_order: a worker waits for its next tile (persistent kernels); else it takes the first tile whose flags are
            up (a host that asks what has come).

    Raises:
        InputError: arrays of another length, or times that are negative, infinite or NaN. ConfigError: no worker.
    """
    at_least_one("workers", workers)
    num = len(schedule)
    given = np.asarray(tile_times_N, np.float64)
    times_N = np.full(num, given) if given.ndim == 0 else given
    flags_F = np.zeros(schedule.num_flags) if arrivals_F is None else np.asarray(arrivals_F, np.float64)
    for name, times, length in (("tile_times_N", times_N, num), ("arrivals_F", flags_F, schedule.num_flags)):
        if times.shape != (length,):
            raise InputError(f"{name} must have {length} times; got shape {times.shape}")
        if not (np.isfinite(times) & (times >= 0)).all():
            raise InputError(f"{name} must be finite and not negative")
    ready_N = schedule.needs.extreme(np.maximum, flags_F).astype(np.float64)
    play = _in_order if in_order else _first_ready
    start_N, worker_N = play(ready_N, times_N, workers)
    return Timeline(start_N, start_N + times_N, worker_N, schedule.signals, schedule.num_flags)


def _in_order(ready_N: Times, times_N: Times, workers: int) -> tuple[Times, Ints]:
    start_N = np.zeros_like(ready_N)
    for worker in range(min(workers, len(ready_N))):
        ready, times = ready_N[worker::workers], times_N[worker::workers]
        # start = what was computed before + the longest lag that a tile so far had to be waited for
        before = np.cumsum(times) - times
        start = before + np.maximum.accumulate(ready - before).clip(min=0)
        start_N[worker::workers] = np.maximum(start, ready)  # where the sum was rounded down
    return start_N, np.arange(len(ready_N)) % workers


def _first_ready(ready_N: Times, times_N: Times, workers: int) -> tuple[Times, Ints]:
    start_N, worker_N = np.zeros_like(ready_N), np.zeros(len(ready_N), np.int64)
    pending = [(float(ready_N[at]), int(at)) for at in np.argsort(ready_N, kind="stable")[::-1]]
    free = [(0.0, worker) for worker in range(workers)]
    up: list[int] = []  # tiles whose flags are up, the first of the schedule on top
    while pending or up:
        now, worker = heapq.heappop(free)
        while pending and pending[-1][0] <= now:
            heapq.heappush(up, pending.pop()[1])
        if not up:  # asked again then, after those who are free before
            heapq.heappush(free, (pending[-1][0], worker))
            continue
        at = heapq.heappop(up)
        start_N[at], worker_N[at] = now, worker
        heapq.heappush(free, (now + float(times_N[at]), worker))
    return start_N, worker_N
