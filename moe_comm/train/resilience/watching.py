"""A run's ranks watch each other: ``moe_comm.runtime.watch`` set up from ``[watch]``, and told of steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from moe_comm.errors import HeapError, MissingDependency
from moe_comm.observe.rank_log import dump
from moe_comm.observe.records import ATTEMPTS, FAULTS, Attempt, FaultRecord, append, read_lines
from moe_comm.runtime.watch import Watcher, WatchOptions, watching
from moe_comm.runtime.watch.report import Fault
from moe_comm.train.config import TrainConfig
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks

REPORTS = "faults"
"""Folder of a run's reports, beside ``FAULTS``."""


class StepBegins(StepHook):
    """Tells the watcher that a step begins. First among hooks: what the others do belongs to the step."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def before_step(self, step: int) -> None:
        self._watcher.begin_step(step)


class StepEnds(StepHook):
    """Tells the watcher that it is over. Last among hooks."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def after_step(self, report: StepReport) -> None:
        self._watcher.end_step()


def watch_run(config: TrainConfig, ranks: Ranks, folder: Path, say: Callable[[str], None]) -> Watcher | None:
    """The watcher of this rank, for a run in ``folder``; None for a rank alone, and where it is not wanted or cannot
    be had. Collective."""
    settings = config.watch
    if not settings.enabled or ranks.world_group is None:
        return None
    options = WatchOptions(settings.stuck_s, settings.start_s, settings.end, config.observe.records)

    def noticed(fault: Fault) -> None:
        if fault.speaks:
            append(folder / FAULTS, record_of(fault, attempt_of(folder)))
        dump(folder, fault.what)

    try:
        return watching(options, folder / REPORTS, [noticed])
    except (HeapError, MissingDependency) as error:
        say(f"the ranks are not watched: {error}")
        return None


def record_of(fault: Fault, attempt: int) -> FaultRecord:
    """A line of ``faults.jsonl``."""
    return FaultRecord(
        time_s=time.time(),
        step=fault.step,
        kind=fault.kind,
        ranks=list(fault.ranks),
        action=fault.action,
        what=fault.what,
        noticed_s=fault.noticed_s,
        attempt=attempt,
    )


def attempt_of(folder: Path) -> int:
    """The newest start of a run's ranks that is written down."""
    return max((one.number for one in read_lines(folder / ATTEMPTS, Attempt)), default=0)
