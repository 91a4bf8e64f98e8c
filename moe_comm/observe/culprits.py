"""What a run's folder says of who held it up: stuck and dead ranks from ``faults.jsonl``, slow ones from its steps."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from moe_comm.errors import InputError
from moe_comm.observe import records
from moe_comm.observe.diagnose import Finding, Limits, diagnose
from moe_comm.observe.records import FaultRecord
from moe_comm.observe.window import Window, read_window

HELD_UP = {"stuck": "hang", "died": "death", "unreachable": "unreachable"}


@dataclass(frozen=True)
class Culprit:
    """A finding and the steps, both included, in which it holds."""

    finding: Finding
    first_step: int
    last_step: int

    def __str__(self) -> str:
        one = self.finding
        who = "rank" if len(one.ranks) == 1 else "ranks"
        steps = f"step {self.first_step}" if self.first_step == self.last_step else f"steps {self._span}"
        return f"{steps}: {one.kind}, {who} {', '.join(map(str, one.ranks))} ({one.sure:.0%} sure): {one.why}"

    @property
    def _span(self) -> str:
        return f"{self.first_step} to {self.last_step}"


def culprits(
    run: Path, steps: tuple[int, int] | None = None, size: int = 50, limits: Limits | None = None
) -> list[Culprit]:
    """Who held up or slowed down the run in ``folder``, by step. The same one in windows that follow each other is one.

    Args:
        steps: the first and last to look at, as one window; None: all, ``size`` at a time.

    Raises:
        InputError: nothing was recorded of any rank. CorruptFile: a record is damaged.
    """
    found = [
        Culprit(Finding(HELD_UP[fault.kind], tuple(fault.ranks), 1.0, 1.0, 0.0, fault.what), fault.step, fault.step)
        for fault in records.read_lines(run / records.FAULTS, FaultRecord)
        if fault.kind in HELD_UP and (steps is None or steps[0] <= fault.step <= steps[1])
    ]
    try:
        whole = read_window(run)
    except InputError:
        if found:
            return found
        raise
    for part in [whole.between(*steps)] if steps is not None else _cut(whole, size):
        found += [Culprit(one, part.steps[0], part.steps[-1]) for one in diagnose(part, limits)]
    return _joined(sorted(found, key=lambda one: (one.first_step, one.finding.kind)))


def save(found: list[Culprit], path: Path) -> None:
    """Write ``found`` as a JSON list."""
    path.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n", encoding="utf-8")


def _cut(window: Window, size: int) -> list[Window]:
    """Windows of ``size`` steps; a rest too short to judge goes with the one before."""
    cuts = list(range(0, len(window.steps), size))
    if len(cuts) > 1 and len(window.steps) - cuts[-1] < Limits().steps:
        cuts.pop()
    ends = [window.steps[at] for at in cuts] + [window.steps[-1] + 1]
    return [window.between(first, after - 1) for first, after in pairwise(ends)]


def _joined(found: list[Culprit]) -> list[Culprit]:
    joined: list[Culprit] = []
    last: dict[tuple[str, tuple[int, ...]], int] = {}
    for one in found:
        key = one.finding.kind, one.finding.ranks
        before = joined[last[key]] if key in last else None
        if before is not None and before.last_step + 1 == one.first_step and one.finding.kind not in HELD_UP.values():
            better = max(before.finding, one.finding, key=lambda finding: finding.lost_s)
            joined[last[key]] = Culprit(better, before.first_step, one.last_step)
        else:
            last[key] = len(joined)
            joined.append(one)
    return joined
