"""Effective training time: how much of the clock a run spent on steps that counted (the ETTR of ByteRobust).

    first start                    fault              steps again                         end
    │ start │ steps ... │ lost steps │ restart │ steps (again those lost) ... │ other │
            └ counted ──┘                       └ counted ──────────────────┘

    ratio = seconds of the steps that counted / seconds from the first start to the end

The ratio is that of ByteRobust, arXiv 2509.16293. A step counts once, when it was done for the last time and changed
the weights, without what it waited for checkpoints.
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


@dataclass(frozen=True)
class EffectiveTime:
    """Where a run's wall-clock went, in seconds that add up to ``wall_s``. Pauses do not count: from where the user
    ended the run to the next start.

    productive_s: steps that counted. start_s: from a start of the processes to the first step, where no fault came
    before. restart_s: from the last step before each fault to the first one after it: noticing it, starting again, and
    the step in progress.
    again_s: steps that were done and lost, or left the weights as they were. checkpoint_s: what the steps that counted
    waited for checkpoints and copies in memory. other_s: all the rest, such as evaluation and saving at the end.
    lost_steps: done more than once. attempts: starts of the ranks.
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
        known = self.productive_s + self.start_s + self.restart_s + self.again_s + self.checkpoint_s
        return max(self.wall_s - known, 0.0)

    def __str__(self) -> str:
        parts = [
            ("start", self.start_s),
            ("faults noticed and ranks started again", self.restart_s),
            (f"{self.lost_steps} steps again", self.again_s),
            ("checkpoints", self.checkpoint_s),
            ("other", self.other_s),
        ]
        lost = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts)
        return (
            f"effective training time: {self.ratio:.1%} of {self.wall_s:.1f} s in {self.attempts} attempt(s); "
            f"the rest: {lost}"
        )

    def as_dict(self) -> dict[str, float]:
        """For JSON, with ``ratio`` and ``other_s``."""
        return vars(self) | {"ratio": self.ratio, "other_s": self.other_s}


def effective_time(run: Path, end_s: float | None = None) -> EffectiveTime | None:
    """Of the run whose folder is ``run``; None where its ranks never came to a first step.

    Args:
        end_s: seconds since 1970; None: when its last step was written.

    Raises:
        CorruptFile: the run's ``attempts.jsonl`` is damaged.
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
    restart_s = paused_s = 0.0
    start_s = first.ready_s - first.started_s
    for before, attempt in pairwise(attempts):
        since = before.ready_s if math.isnan(attempt.last_s) else max(attempt.last_s, before.ready_s)
        if attempt.ended:
            paused_s += max(attempt.started_s - since, 0.0)
            start_s += attempt.ready_s - max(attempt.started_s, since)
        else:
            restart_s += max(attempt.ready_s - since, 0.0)
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
    """Of every step in ``metrics.jsonl``: its number, seconds in all, of these for checkpoints, whether it counted.

    Lines that are no steps, or were cut off, are left out.
    """
    path = run / METRICS
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                values: Any = json.loads(line)
                times = values["times"]
                found = int(values["step"]), float(times["total"]), float(times["checkpoint"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue
            if math.isfinite(found[1]) and math.isfinite(found[2]):
                yield *found, not values.get("skipped")


def last_step_s(run: Path) -> float:
    """When the last step was written, in seconds since 1970; NaN where there is none."""
    path = run / METRICS
    return path.stat().st_mtime if path.exists() else math.nan
