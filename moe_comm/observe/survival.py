"""What became of faults on purpose: after how long each was noticed, and after how long the run was past it.

injected.jsonl    kill, step 5 ──┐ noticed: the first record or start of the ranks after it
faults.jsonl      died         ◀─┤
attempts.jsonl    start        ◀─┤
progress.jsonl    step 6 ended ◀─┘ recovered: the first end of a later step
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

PROGRESS = "progress.jsonl"
"""When each step ended, by the clock, written by rank 0 of runs with faults on purpose: also of steps done again."""


@dataclass(frozen=True)
class Answer:
    """What followed an injection. Seconds after it; NaN: never. noticed: by what, "" where nothing was to be noticed.

    Whatever is noticed before the run is past the fault is taken for an answer to it, so faults that lie closer
    together than that share theirs.
    """

    injection: Injection
    noticed: str
    detected_s: float
    recovered_s: float


def answers(run: Path) -> list[Answer]:
    """Of every injection of the run whose folder is ``run``, in order of time."""
    signs: list[tuple[float, str]] = [
        (one.time_s, f"{one.kind} rank {','.join(map(str, one.ranks))}: {one.action}")
        for one in read_lines(run / FAULTS, FaultRecord)
    ]
    damaged = [sign for sign in signs if sign[1].startswith("checkpoint")]
    signs += [(one.started_s, f"start {one.number}, {one.source}") for one in read_lines(run / ATTEMPTS, Attempt)]
    signs.sort()
    steps = _progress(run / PROGRESS)
    times = [time_s for time_s, _, _ in steps]
    found = []
    for injection in read_injections(run / INJECTED):
        began = injection.time_s
        first = injection.attempt + (injection.kind in FATAL | DAMAGE)  # by ranks that were started again
        after = steps[bisect.bisect_right(times, began) :]
        past = next((time_s for time_s, step, start in after if step > injection.step and start >= first), math.inf)
        those = damaged if injection.kind in DAMAGE else signs
        sign = next((one for one in those if began < one[0] <= past), None)
        found.append(
            Answer(
                injection,
                sign[1] if sign else "",
                sign[0] - began if sign else math.nan,
                past - began if past < math.inf else math.nan,
            )
        )
    return found


def summary(found: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """By kind: how many, and median, p99 and worst of the seconds; None where nothing was noticed."""
    kinds = sorted({answer.injection.kind for answer in found})
    return {
        kind: {
            "count": len(same := [answer for answer in found if answer.injection.kind == kind]),
            "detected": _spread([answer.detected_s for answer in same]),
            "recovered": _spread([answer.recovered_s for answer in same]),
        }
        for kind in kinds
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    known = sorted(value for value in seconds if math.isfinite(value))
    if not known:
        return None
    names = {"median": 0.5, "p99": 0.99, "worst": 1.0}
    return {name: known[math.ceil(share * len(known)) - 1] for name, share in names.items()}


def next_attempt(run: Path) -> int:
    """The number of a start of the ranks now: above those of all faults and steps that are written down, also of the
    faults that an earlier folder of the run had."""
    known = [one.attempt for one in read_injections(run / INJECTED)]
    return 1 + max([*known, *(attempt for _, _, attempt in _progress(run / PROGRESS))], default=-1)


def _progress(path: Path) -> list[tuple[float, int, int]]:
    """When a step ended, which, and in which start of the ranks."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            values = json.loads(line)
            found.append((float(values["time_s"]), int(values["step"]), int(values["attempt"])))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return sorted(found)
