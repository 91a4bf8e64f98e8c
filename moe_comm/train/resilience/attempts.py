"""The attempts of a run (starts of its ranks), from which the effective time is computed, and the watcher of ranks."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from moe_comm.errors import CorruptFile, HeapError, MissingDependency
from moe_comm.observe.effective import last_step_s, step_times
from moe_comm.observe.rank_log import dump
from moe_comm.observe.records import ATTEMPTS, FAULTS, RESOLVED, Attempt, FaultRecord, append, read_lines, read_result
from moe_comm.runtime.launch import under_torchrun
from moe_comm.runtime.memory_server import start_ticks
from moe_comm.runtime.watch import Watcher, WatchOptions, watching
from moe_comm.runtime.watch.report import DetectedFault
from moe_comm.topology import ParallelMesh
from moe_comm.train.config import TrainConfig
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks


class AttemptLog(StepHook):
    """Appends a line to ``attempts.jsonl`` when the first step begins. Used on rank 0.

    Create it before the lines of repeated steps are removed from ``metrics.jsonl``. The run resumes after ``done``
    steps. ``earlier`` is the folder of the previous attempt, from ``carry_over``; None if it is ``run``.
    """

    def __init__(
        self, run: Path, mesh: ParallelMesh, done: int, source: str, hosts: list[str], earlier: Path | None = None
    ) -> None:
        self._path = run / ATTEMPTS
        previous = earlier or run
        lost = [total for step, total, _, counted in step_times(previous) if step > done and counted]
        number = sum(1 for _ in read_lines(self._path, Attempt))
        self._begun = False
        self.attempt = Attempt(
            number=number,
            world=mesh.config.world,
            started_s=process_start_s() if under_torchrun() else time.time(),
            ready_s=math.nan,
            first_step=done + 1,
            source=source,
            mapping=dict(mesh.sizes),
            hosts=hosts,
            last_s=last_step_s(previous) if number else math.nan,
            lost_steps=len(lost),
            lost_s=sum(lost),
            ended=ended_by_user(previous) if number else "",
        )

    on_disk = True

    def before_step(self, step: int) -> None:
        if not self._begun:
            self._begun = True
            append(self._path, Attempt(**vars(self.attempt) | {"ready_s": time.time()}))


def ended_by_user(run: Path) -> str:
    """Return the status of a run that finished, or was ended by its time limit or Ctrl-C; "" for other runs."""
    result = read_result(run)
    status = result.get("status")
    if status == "interrupted" and result.get("signal") != signal.SIGINT:
        return ""
    return status if status in ("interrupted", "finished", "time limit") else ""


def carry_over(run: Path, name: str) -> Path | None:
    """Copy the recorded attempts of a run that starts over in a new folder because it had saved nothing.

    Returns the folder of the newest attempt, or None. Each folder gets all earlier attempts.
    """
    earlier = None if (run / ATTEMPTS).exists() else folder_before(run, name)
    if earlier is None:
        return None
    try:
        attempts = list(read_lines(earlier / ATTEMPTS, Attempt))
    except CorruptFile:
        return None
    for attempt in attempts:
        append(run / ATTEMPTS, attempt)
    return earlier if attempts else None


def folder_before(run: Path, name: str) -> Path | None:
    """Return the folder of the previous run called ``name`` in the same parent, if it did not finish."""
    pattern = re.compile(re.escape(name) + r"-\d{8}-\d{6}(-\d+)?")
    folders = [path for path in run.parent.iterdir() if path != run and pattern.fullmatch(path.name)]
    folders = [path for path in folders if (path / RESOLVED).exists()]
    if not folders:
        return None
    newest = max(folders, key=lambda path: (path / RESOLVED).stat().st_mtime_ns)
    return None if read_result(newest).get("status") == "finished" else newest


def process_start_s() -> float:
    """Return the start time of this process in seconds since the epoch, with a resolution of 0.01 s."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


REPORTS = "faults"
"""Folder of a run's fault reports, next to ``FAULTS``."""


class WatchStepBegin(StepHook):
    """Begins a step for the watcher. It must be the first hook, so that other hooks are part of the step."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def before_step(self, step: int) -> None:
        self._watcher.begin_step()


class WatchStepEnd(StepHook):
    """Ends a step for the watcher. It must be the last hook."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def after_step(self, report: StepReport) -> None:
        self._watcher.end_step()


def watch_run(config: TrainConfig, ranks: Ranks, folder: Path, log: Callable[[str], None]) -> Watcher | None:
    """Return the watcher of this rank for a run in ``folder``. Collective.

    Returns None for a single rank, if watching is disabled, or if it is not available; ``log`` gets the reason.
    """
    settings = config.watch
    if not settings.enabled or ranks.world_group is None:
        return None
    options = WatchOptions(settings.stuck_s, settings.start_s, settings.end, config.observe.records)

    def record_fault(fault: DetectedFault) -> None:
        if fault.is_reporter:
            append(folder / FAULTS, record_of(fault, attempt_of(folder)))
        dump(folder, fault.summary)

    try:
        return watching(options, folder / REPORTS, [record_fault])
    except (HeapError, MissingDependency) as error:
        log(f"the ranks are not watched: {error}")
        return None


def record_of(fault: DetectedFault, attempt: int) -> FaultRecord:
    """Return the line for ``faults.jsonl``."""
    return FaultRecord(
        time_s=time.time(),
        step=fault.step,
        kind=fault.kind,
        ranks=list(fault.ranks),
        action=fault.action,
        what=fault.summary,
        noticed_s=fault.noticed_s,
        attempt=attempt,
    )


def attempt_of(folder: Path) -> int:
    """Return the number of the newest recorded attempt of a run."""
    return max((attempt.number for attempt in read_lines(folder / ATTEMPTS, Attempt)), default=0)
