"""Set up ``moe_comm.runtime.watch`` for a training run from ``[watch]``."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from moe_comm.errors import HeapError, MissingDependency
from moe_comm.observe.rank_log import dump
from moe_comm.observe.records import ATTEMPTS, FAULTS, Attempt, FaultRecord, append, read_lines
from moe_comm.runtime.watch import Watcher, WatchOptions, watching
from moe_comm.runtime.watch.report import DetectedFault
from moe_comm.train.config import TrainConfig
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks

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
