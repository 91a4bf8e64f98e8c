"""Detection and recovery times of injected faults.

injected.jsonl    kill, step 5 ──┐ detected: by the first fault record or start of the ranks after it
faults.jsonl      died         ◀─┤
attempts.jsonl    start        ◀─┤
progress.jsonl    step 6 ended ◀─┘ recovered: at the first end of a later step
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_comm.observe.faults import DAMAGE, FATAL, Injection, read_injections
from moe_comm.observe.records import ATTEMPTS, FAULTS, INJECTED, Attempt, FaultRecord, read_lines
from moe_comm.runtime.untrusted import lines_of

PROGRESS = "progress.jsonl"
"""End time of each step, also of repeated ones; written by rank 0 of runs with fault injection."""


@dataclass(frozen=True)
class FaultOutcome:
    """Detection and recovery of a fault, in seconds after the injection (NaN: never). noticed: the detecting event.

    The first event between injection and recovery counts as the detection. Faults in quick succession can share events.
    """

    injection: Injection
    noticed: str
    detected_s: float
    recovered_s: float


def fault_outcomes(run: Path) -> list[FaultOutcome]:
    """Return the outcome of each injection of the run in the folder ``run``, sorted by time."""
    events: list[tuple[float, str]] = [
        (record.time_s, f"{record.kind} rank {','.join(map(str, record.ranks))}: {record.action}")
        for record in read_lines(run / FAULTS, FaultRecord)
    ]
    checkpoint_events = [event for event in events if event[1].startswith("checkpoint")]
    attempts = read_lines(run / ATTEMPTS, Attempt)
    events += [(attempt.started_s, f"start {attempt.number}, {attempt.source}") for attempt in attempts]
    events.sort()
    steps = _progress(run / PROGRESS)
    times = [time_s for time_s, _, _ in steps]
    outcomes = []
    for injection in read_injections(run / INJECTED):
        began = injection.time_s
        first_attempt = injection.attempt + (injection.kind in FATAL | DAMAGE)  # the first attempt that can recover
        later_steps = steps[bisect.bisect_right(times, began) :]
        recoveries = (
            time_s for time_s, step, attempt in later_steps if step > injection.step and attempt >= first_attempt
        )
        recovered = next(recoveries, math.inf)
        candidates = checkpoint_events if injection.kind in DAMAGE else events
        event = next((event for event in candidates if began < event[0] <= recovered), None)
        outcomes.append(
            FaultOutcome(
                injection,
                event[1] if event else "",
                event[0] - began if event else math.nan,
                recovered - began if recovered < math.inf else math.nan,
            )
        )
    return outcomes


def summary(outcomes: Sequence[FaultOutcome]) -> dict[str, dict[str, Any]]:
    """Return count, and median, p99 and worst of the seconds, by kind; None if no fault was detected or recovered."""
    kinds = sorted({outcome.injection.kind for outcome in outcomes})
    return {
        kind: {
            "count": len(same := [outcome for outcome in outcomes if outcome.injection.kind == kind]),
            "detected": _quantiles([outcome.detected_s for outcome in same]),
            "recovered": _quantiles([outcome.recovered_s for outcome in same]),
        }
        for kind in kinds
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    finite = sorted(value for value in seconds if math.isfinite(value))
    if not finite:
        return None
    shares = {"median": 0.5, "p99": 0.99, "worst": 1.0}
    return {name: finite[math.ceil(share * len(finite)) - 1] for name, share in shares.items()}


def next_attempt(run: Path) -> int:
    """Return the number of a new start of the ranks: one more than the largest in recorded injections and steps."""
    attempts = [injection.attempt for injection in read_injections(run / INJECTED)]
    return 1 + max([*attempts, *(attempt for _, _, attempt in _progress(run / PROGRESS))], default=-1)


def _progress(path: Path) -> list[tuple[float, int, int]]:
    """Return (end time, step, attempt) of each step, sorted by time."""
    ends = []
    for line in lines_of(path) if path.exists() else ():
        try:
            values = json.loads(line)
            ends.append((float(values["time_s"]), int(values["step"]), int(values["attempt"])))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return sorted(ends)
