"""Effective training time ratio (ETTR) of ByteRobust, arXiv 2509.16293: the fraction of time spent on useful steps.

    first start                    fault              repeated steps                      end
    │ start │ steps ... │ lost steps │ restart │ steps (incl. the lost ones) ... │ other │
            └ counted ──┘                       └ counted ─────────────────────┘

    ratio = seconds of counted steps / seconds from the first start to the end

If a step was repeated, only its last execution counts, and only if it updated the weights. Waiting for checkpoints does
not count.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_comm.observe.records import ATTEMPTS, METRICS, Attempt, read_lines
from moe_comm.runtime.untrusted import lines_of


@dataclass(frozen=True)
class EffectiveTime:
    """Wall time of a run by activity, in seconds that add up to ``wall_s``.

    Pauses between the end of a run by the user and its next start are excluded.

    Attributes:
        attempts: number of starts of the ranks.
        steps: number of counted steps.
        lost_steps: steps that were executed more than once.
        wall_s: seconds from the first start to the end, without pauses.
        productive_s: counted steps.
        start_s: from a start of the processes to the first step, if no fault preceded the start.
        restart_s: from the last step before each fault to the first step after it (detection, restart, lost step).
        again_s: steps that were lost or did not update the weights.
        checkpoint_s: waiting of counted steps for checkpoints and snapshots.
    """

    attempts: int
    steps: int
    lost_steps: int
    wall_s: float
    productive_s: float
    start_s: float
    restart_s: float
    again_s: float
    checkpoint_s: float

    @property
    def ratio(self) -> float:
        """The effective training time ratio, from 0 to 1."""
        return min(self.productive_s / self.wall_s, 1.0) if self.wall_s > 0 else 0.0

    @property
    def other_s(self) -> float:
        accounted = self.productive_s + self.start_s + self.restart_s + self.again_s + self.checkpoint_s
        return max(self.wall_s - accounted, 0.0)

    def __str__(self) -> str:
        parts = [
            ("start", self.start_s),
            ("fault detection and restart", self.restart_s),
            (f"{self.lost_steps} repeated steps", self.again_s),
            ("checkpoints", self.checkpoint_s),
            ("other", self.other_s),
        ]
        lost = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts)
        return (
            f"effective training time: {self.ratio:.1%} of {self.wall_s:.1f} s in {self.attempts} attempt(s); "
            f"remaining time: {lost}"
        )

    def as_dict(self) -> dict[str, float]:
        """Return all values for JSON, including ``ratio`` and ``other_s``."""
        return vars(self) | {"ratio": self.ratio, "other_s": self.other_s}


def effective_time(run: Path, end_s: float | None = None) -> EffectiveTime | None:
    """Return the effective training time of a run; None if no step began.

    Args:
        run: the run folder.
        end_s: end of the run in seconds since 1970; None: the time when the last step was written.
    """
    attempts = list(read_lines(run / ATTEMPTS, Attempt))
    if not attempts:
        return None
    first = attempts[0]
    if end_s is None:
        end_s = max(last_step_s(run), attempts[-1].ready_s)
    productive_s = again_s = checkpoint_s = 0.0
    steps = 0
    for _, total, checkpoint, counted in step_times(run):
        if counted:
            steps += 1
            productive_s += total - checkpoint
            checkpoint_s += checkpoint
        else:
            again_s += total
    # The time between the last step of an attempt and the first one of the next is a pause if the user ended the
    # attempt, and a restart after a fault.
    restart_s = paused_s = 0.0
    start_s = first.ready_s - first.started_s
    for previous, attempt in pairwise(attempts):
        last_step_end = previous.ready_s if math.isnan(attempt.last_s) else max(attempt.last_s, previous.ready_s)
        if attempt.ended:
            paused_s += max(attempt.started_s - last_step_end, 0.0)
            start_s += attempt.ready_s - max(attempt.started_s, last_step_end)
        else:
            restart_s += max(attempt.ready_s - last_step_end, 0.0)
    return EffectiveTime(
        attempts=len(attempts),
        steps=steps,
        lost_steps=sum(attempt.lost_steps for attempt in attempts),
        wall_s=max(end_s - first.started_s - paused_s, 0.0),
        productive_s=productive_s,
        start_s=start_s,
        restart_s=restart_s,
        again_s=again_s + sum(attempt.lost_s for attempt in attempts),
        checkpoint_s=checkpoint_s,
    )


def step_times(run: Path) -> Iterator[tuple[int, float, float, bool]]:
    """Yield (step, total seconds, checkpoint seconds, whether it updated the weights) of ``metrics.jsonl``.

    Invalid and truncated lines are skipped.
    """
    path = run / METRICS
    if not path.exists():
        return
    for line in lines_of(path):
        try:
            values: Any = json.loads(line)
            step, times = int(values["step"]), values["times"]
            total, checkpoint = float(times["total"]), float(times["checkpoint"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
        if math.isfinite(total) and math.isfinite(checkpoint):
            yield step, total, checkpoint, not values.get("skipped")


def last_step_s(run: Path) -> float:
    """Return the time when the last step was written, in seconds since 1970; NaN if there is none."""
    path = run / METRICS
    return path.stat().st_mtime if path.exists() else math.nan
