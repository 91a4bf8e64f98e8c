"""Find the ranks that delayed a run: hung and dead ranks from ``faults.jsonl``, slow ranks from the step records."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from moe_comm.errors import InputError
from moe_comm.observe import records
from moe_comm.observe.diagnose import Diagnosis, DiagnosisLimits, diagnose
from moe_comm.observe.records import FaultRecord
from moe_comm.observe.window import Window, read_window
from moe_comm.runtime.safe_files import write_file

KINDS = {"stuck": "hang", "died": "death", "unreachable": "unreachable"}
"""Kind of the diagnosis for each kind of ``FaultRecord`` that names a culprit."""


@dataclass(frozen=True)
class Culprit:
    """A diagnosis and its first and last step."""

    finding: Diagnosis
    first_step: int
    last_step: int

    def __str__(self) -> str:
        diagnosis, first, last = self.finding, self.first_step, self.last_step
        label = "rank" if len(diagnosis.ranks) == 1 else "ranks"
        ranks = ", ".join(map(str, diagnosis.ranks))
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        return f"{steps}: {diagnosis.kind}, {label} {ranks} ({diagnosis.sure:.0%} confidence): {diagnosis.why}"


def culprits(
    run: Path, steps: tuple[int, int] | None = None, size: int = 50, limits: DiagnosisLimits | None = None
) -> list[Culprit]:
    """Return the ranks and links that delayed the run, by step. Equal diagnoses of consecutive windows are merged.

    Args:
        steps: first and last step of a single window; None: all steps, in windows of ``size``.
    """
    results = [
        Culprit(Diagnosis(KINDS[fault.kind], tuple(fault.ranks), 1.0, 1.0, 0.0, fault.what), fault.step, fault.step)
        for fault in records.read_lines(run / records.FAULTS, FaultRecord)
        if fault.kind in KINDS and (steps is None or steps[0] <= fault.step <= steps[1])
    ]
    try:
        window = read_window(run)
    except InputError:
        if results:
            return results
        raise
    for section in [window.between(*steps)] if steps is not None else _split(window, size):
        results += [Culprit(diagnosis, section.steps[0], section.steps[-1]) for diagnosis in diagnose(section, limits)]
    return _merge(sorted(results, key=lambda culprit: (culprit.first_step, culprit.finding.kind)))


def save(culprits: list[Culprit], path: Path) -> None:
    """Write ``culprits`` as a JSON list."""
    write_file(path, json.dumps([asdict(culprit) for culprit in culprits], indent=2) + "\n")


def _split(window: Window, size: int) -> list[Window]:
    """Split into windows of ``size`` steps; a remainder too short for a diagnosis is added to the last one."""
    cuts = list(range(0, len(window.steps), size))
    if len(cuts) > 1 and len(window.steps) - cuts[-1] < DiagnosisLimits().steps:
        cuts.pop()
    ends = [window.steps[index] for index in cuts] + [window.steps[-1] + 1]
    return [window.between(first, following - 1) for first, following in pairwise(ends)]


def _merge(culprits: list[Culprit]) -> list[Culprit]:
    """Merge equal diagnoses of consecutive windows, but not faults (``KINDS``), which are separate events."""
    merged: list[Culprit] = []
    last: dict[tuple[str, tuple[int, ...]], int] = {}
    for culprit in culprits:
        key = culprit.finding.kind, culprit.finding.ranks
        previous = merged[last[key]] if key in last else None
        if previous is not None and previous.last_step + 1 == culprit.first_step and key[0] not in KINDS.values():
            worst = max(previous.finding, culprit.finding, key=lambda finding: finding.lost_s)
            merged[last[key]] = Culprit(worst, previous.first_step, culprit.last_step)
        else:
            last[key] = len(merged)
            merged.append(culprit)
    return merged
