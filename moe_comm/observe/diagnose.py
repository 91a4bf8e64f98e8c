"""Find the ranks, links and hosts that delayed a run.

Slow ones are found in the step records and the probes, hung and dead ranks in ``faults.jsonl``.

    compute of the ranks [S, W]           probes between hosts [H, H]        patterns as in C4 (arXiv 2406.04594)
      . . # .   one column is an outlier    . . .    one cell: the link
      . . # .   in its pipeline stage       # # #    a row: the host sends slowly
      . . # .                               . . .    a column: the host receives slowly

All ranks of a synchronous step take as long as the slowest, so only the time without waits is compared. It is compared
among the ranks of one pipeline stage, and corrected for the number of rows that each rank's experts received, because a
rank with popular experts is not slow. A rank or link is reported if it exceeds ``DiagnosisLimits`` and the noise among
the others. The confidence is the fraction of resampled sets of steps (bootstrap) with the same result.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from moe_comm.errors import InputError
from moe_comm.observe import records
from moe_comm.observe.records import FaultRecord
from moe_comm.observe.window import PARTS, Floats, Window, read_window
from moe_comm.runtime.safe_files import write_file

RESAMPLES = 200
_TINY = 1e-9
CULPRITS = {"stuck": "hang", "died": "death", "unreachable": "unreachable"}
"""Kind of the diagnosis for each kind of ``FaultRecord`` that names a culprit."""


@dataclass(frozen=True)
class DiagnosisLimits:
    """Thresholds of the diagnosis.

    Attributes:
        rank: minimum ratio of a rank's compute time to the median of its stage.
        link: minimum ratio of a probe time to the typical probe time.
        outlier: minimum excess, in multiples of the spread among the other ranks.
        least_s: minimum excess in seconds per step.
        sure: minimum confidence.
        steps: minimum number of steps.
    """

    rank: float = 1.25
    link: float = 2.0
    outlier: float = 4.0
    least_s: float = 0.002
    sure: float = 0.8
    steps: int = 5


@dataclass(frozen=True)
class Diagnosis:
    """A slow rank or link.

    Attributes:
        kind: "slow rank", "slow link", "slow sender", "slow receiver" or "slow host" (sends and receives slowly).
        ranks: the slow rank, or both ends of a link.
        sure: confidence, from 0 to 1.
        factor: slowdown relative to comparable ranks or links.
        lost_s: seconds lost per step.
        why: explanation.
    """

    kind: str
    ranks: tuple[int, ...]
    sure: float
    factor: float
    lost_s: float
    why: str


def diagnose(window: Window, limits: DiagnosisLimits | None = None) -> list[Diagnosis]:
    """Return the slow ranks and links in the steps of ``window``, the most expensive first."""
    limits = limits or DiagnosisLimits()
    if len(window.steps) < limits.steps:
        return []
    diagnoses = [*_slow_ranks(window, limits), *_slow_links(window, limits)]
    certain = [diagnosis for diagnosis in diagnoses if diagnosis.sure >= limits.sure]
    return sorted(certain, key=lambda diagnosis: -diagnosis.lost_s)


def _slow_ranks(window: Window, limits: DiagnosisLimits) -> list[Diagnosis]:
    """Find at most one slow rank per pipeline stage and kind of work."""
    diagnoses = []
    for part in PARTS:
        for stage in sorted(set(window.stage)):
            ranks = np.array([column for column, stage_of_rank in enumerate(window.stage) if stage_of_rank == stage])
            if len(ranks) < 2:
                continue
            own_SW, rows_SW = window.parts[part][:, ranks], window.rows_SW[:, ranks]
            # Compare only steps that all ranks of the stage have recorded.
            complete_S = (np.isfinite(own_SW) & np.isfinite(rows_SW)).all(1)
            own_SW = own_SW[complete_S]
            if part == "compute":
                own_SW = _without_routing(own_SW, rows_SW[complete_S])
            if len(own_SW) < limits.steps:
                continue
            outlier = _find_outlier(own_SW, limits)
            if outlier is None:
                continue
            confidence = _confidence(own_SW, limits, outlier)
            typical_s = np.median(np.delete(own_SW, outlier, 1))
            own_s = np.median(own_SW[:, outlier])
            lost_s = float(own_s - typical_s)
            factor = float(own_s / max(typical_s, _TINY))
            column = int(ranks[outlier])
            rank = window.ranks[column]
            why = (
                f"rank {rank} on {window.hosts[column]} spends {own_s * 1e3:.1f} ms per step on {part}, "
                f"the other ranks of its stage {typical_s * 1e3:.1f} ms"
            )
            diagnoses.append(Diagnosis("slow rank", (rank,), confidence, factor, lost_s, why))
    return diagnoses


def _without_routing(own_SW: Floats, rows_SW: Floats) -> Floats:
    """Return the seconds corrected to the mean number of rows on all ranks.

    The time per row is the slope of a rank's seconds over its rows across steps (the median over ranks), so that a
    constantly slow rank does not increase it.
    """
    if len(own_SW) < 5:
        return own_SW
    spread_W = rows_SW.std(0)
    if (spread_W <= 0.02 * np.maximum(rows_SW.mean(0), 1)).any():
        return own_SW  # the rows vary too little to estimate the time per row
    rows = rows_SW - rows_SW.mean(0)
    slope_W = (rows * (own_SW - own_SW.mean(0))).sum(0) / (rows**2).sum(0)
    seconds_per_row = float(np.clip(np.median(slope_W), 0, None))
    mean = rows_SW.mean(1, keepdims=True)
    return np.asarray(own_SW - seconds_per_row * (rows_SW - mean), dtype=np.float64)


def _find_outlier(own_SW: Floats, limits: DiagnosisLimits) -> int | None:
    """Return the column whose median exceeds all others beyond the limits."""
    median_W = np.median(own_SW, 0)
    slowest = int(median_W.argmax())
    other_medians = np.delete(median_W, slowest)
    typical = float(np.median(other_medians))
    excess = median_W[slowest] - typical
    if excess < limits.least_s or median_W[slowest] < limits.rank * max(typical, _TINY):
        return None
    # Compare with the spread among healthy ranks, and with the uncertainty of a median over steps.
    spread = float(np.median(np.abs(other_medians - typical)))
    noise_W = 1.4826 * np.median(np.abs(own_SW - median_W), 0) / np.sqrt(len(own_SW))
    if excess < limits.outlier * max(1.4826 * spread, float(np.median(noise_W)), _TINY):
        return None
    second_slowest = float(other_medians.max())
    return slowest if median_W[slowest] - second_slowest >= 0.5 * excess else None


def _confidence(own_SW: Floats, limits: DiagnosisLimits, outlier: int) -> float:
    """Return the fraction of bootstrap samples of the steps in which ``outlier`` is the outlier."""
    generator = np.random.default_rng(0)
    draws = generator.integers(len(own_SW), size=(RESAMPLES, len(own_SW)))
    return sum(_find_outlier(own_SW[draw], limits) == outlier for draw in draws) / RESAMPLES


def _slow_links(window: Window, limits: DiagnosisLimits) -> list[Diagnosis]:
    ends, links_SWW = window.links.matrices()
    if not len(links_SWW) or len(ends) < 2:
        return []
    slow_link = _find_slow_link(links_SWW, limits)
    if slow_link is None:
        return []
    generator = np.random.default_rng(0)
    draws = generator.integers(len(links_SWW), size=(RESAMPLES, len(links_SWW)))
    votes = Counter(_find_slow_link(links_SWW[draw], limits) for draw in draws)
    kind, source, target = slow_link
    seconds = _median_over_steps(links_SWW)
    probe_s = seconds[:, target] if source < 0 else seconds[source]
    slow_s = float(seconds[source, target] if kind == "slow link" else np.nanmedian(probe_s))
    typical_s = _typical_probe(seconds)
    host_of = dict(zip(window.ranks, window.hosts, strict=True))
    name = [f"{host_of[rank]} (rank {rank})" for rank in ends]
    subjects = {
        "slow link": f"a probe from {name[source]} to {name[target]}",
        "slow sender": f"a probe from {name[source]} to any other host",
        "slow receiver": f"a probe to {name[target]} from any other host",
        "slow host": f"a probe from or to {name[source]}",
    }
    ranks = tuple(rank for rank in (source, target) if rank >= 0)
    why = f"{subjects[kind]} takes {slow_s * 1e3:.1f} ms, other probes {typical_s * 1e3:.1f} ms"
    confidence = votes[slow_link] / RESAMPLES
    factor, lost = slow_s / max(typical_s, _TINY), slow_s - typical_s
    return [Diagnosis(kind, tuple(ends[rank] for rank in ranks), confidence, factor, lost, why)]


def _find_slow_link(links_SWW: Floats, limits: DiagnosisLimits) -> tuple[str, int, int] | None:
    """Return the kind, sending and receiving end of the slowest link; -1 for all ends."""
    seconds_WW = _median_over_steps(links_SWW)
    off_diagonal = ~np.eye(len(seconds_WW), dtype=bool) & np.isfinite(seconds_WW)
    if not off_diagonal.any():
        return None
    typical = _typical_probe(seconds_WW)
    excess_WW = seconds_WW - typical
    slow_WW = off_diagonal & (seconds_WW > limits.link * max(typical, _TINY)) & (excess_WW > limits.least_s)
    if not slow_WW.any():
        return None
    peers = len(seconds_WW) - 1
    rows, columns = slow_WW.sum(1), slow_WW.sum(0)
    if peers > 1 and rows.max() == peers:
        host = int(rows.argmax())
        return ("slow host", host, -1) if columns[host] == peers else ("slow sender", host, -1)
    if peers > 1 and columns.max() == peers:
        return "slow receiver", -1, int(columns.argmax())
    source, target = np.unravel_index(int(np.where(slow_WW, seconds_WW, -1).argmax()), seconds_WW.shape)
    return "slow link", int(source), int(target)


def _median_over_steps(links_SWW: Floats) -> Floats:
    """Return the median over the steps; NaN for links without any probe."""
    measured_WW = np.isfinite(links_SWW).any(0)
    return np.where(measured_WW, np.nanmedian(np.where(measured_WW, links_SWW, 0.0), 0), np.nan)


def _typical_probe(seconds_WW: Floats) -> float:
    """Return the probe time of healthy links.

    This is the lower quartile, not the median: with three hosts, two thirds of all links begin or end at one slow host.
    With two hosts, it is the faster direction.
    """
    between_hosts = seconds_WW[~np.eye(len(seconds_WW), dtype=bool)]
    between_hosts = between_hosts[np.isfinite(between_hosts)]
    return float(np.quantile(between_hosts, 0.25) if len(seconds_WW) > 2 else between_hosts.min())


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
        Culprit(Diagnosis(CULPRITS[fault.kind], tuple(fault.ranks), 1.0, 1.0, 0.0, fault.what), fault.step, fault.step)
        for fault in records.read_lines(run / records.FAULTS, FaultRecord)
        if fault.kind in CULPRITS and (steps is None or steps[0] <= fault.step <= steps[1])
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
    """Merge equal diagnoses of consecutive windows, but not faults (``CULPRITS``), which are separate events."""
    merged: list[Culprit] = []
    last: dict[tuple[str, tuple[int, ...]], int] = {}
    for culprit in culprits:
        key = culprit.finding.kind, culprit.finding.ranks
        previous = merged[last[key]] if key in last else None
        if previous is not None and previous.last_step + 1 == culprit.first_step and key[0] not in CULPRITS.values():
            worst = max(previous.finding, culprit.finding, key=lambda finding: finding.lost_s)
            merged[last[key]] = Culprit(worst, previous.first_step, culprit.last_step)
        else:
            last[key] = len(merged)
            merged.append(culprit)
    return merged
