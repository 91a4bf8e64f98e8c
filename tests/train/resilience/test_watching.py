"""Watching in a training run as configured in ``[watch]``. Each fault is recorded once in the run's folder."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from moe_comm.errors import CheckpointError, PeerError
from moe_comm.observe.records import FAULTS, FaultRecord, read_lines
from moe_comm.runtime.event_reader import read_open
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.watch.graph import SLOW_KINDS
from moe_comm.runtime.watch.status_table import Phase, StatusTable
from moe_comm.train import run as run_training
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience import attempts as watching
from moe_comm.train.resilience.attempts import attempt_of, watch_run
from moe_comm.train.resilience.inject import Injector
from tests.pool import RankPool
from tests.train.common import config_of, session, write_text


def run(rank: int, world: int, settings: list[str]) -> tuple[str, str]:
    """Return the folder of the run, and the error that ended it."""
    try:
        return str(run_training(None, settings).folder), ""
    except (PeerError, CheckpointError) as error:
        return "", "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_a_killed_rank_is_recorded_once_and_named_in_the_error(pool2: RankPool, tmp_path: Path) -> None:
    settings = [*write_text(tmp_path), 'faults.plan=["kill:rank=1,step=3"]']
    (_, caught), _ = pool2.run(run, settings, timeout=150, expect_dead={1})
    (folder,) = (tmp_path / "runs").iterdir()
    (record,) = read_lines(folder / FAULTS, FaultRecord)
    assert (record.kind, record.ranks, record.step, record.action, record.attempt) == ("died", [1], 3, "stop", 0)
    assert 0 <= record.noticed_s < 30  # one second on an idle machine
    report = folder / "faults" / "rank-00000-step3.txt"
    assert str(report) in caught
    assert "rank 0  waits for rank 1 in " in report.read_text() or "rank 0  caught" in report.read_text()


def run_with_sigterm(rank: int, world: int, settings: list[str]) -> tuple[str, str]:
    """Call ``run``. SIGTERM, as from the agent, arrives while the fault is recorded and the main thread leaves."""
    main_has_left, leave, write = threading.Event(), StatusTable.leave, watching.dump

    def leave_and_notify(table: StatusTable, phase: Phase, message: str = "") -> None:
        leave(table, phase, message)
        main_has_left.set()

    def dump_after_sigterm(folder: Path, summary: str) -> None:
        assert main_has_left.wait(120)
        os.kill(os.getpid(), signal.SIGTERM)
        write(folder, summary)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StatusTable, "leave", leave_and_notify)
        patch.setattr(watching, "dump", dump_after_sigterm)
        return run(rank, world, settings)


def test_a_fault_is_recorded_although_the_agent_ends_the_rank(pool2: RankPool, tmp_path: Path) -> None:
    settings = [*write_text(tmp_path), 'faults.plan=["kill:rank=1,step=3"]']
    (_, caught), _ = pool2.run(run_with_sigterm, settings, timeout=150, expect_dead={1})
    (folder,) = (tmp_path / "runs").iterdir()
    (record,) = read_lines(folder / FAULTS, FaultRecord)
    assert (record.kind, record.ranks) == ("died", [1]) and "Noticed" in caught
    assert [path.name for path in (folder / "dumps").glob("*/*")] == ["rank-00000.jsonl"]


@pytest.mark.parametrize(("background", "steps"), [("true", 4), ("false", 2)])
def test_a_rank_that_does_not_take_part_in_a_save_is_reported(
    pool2: RankPool, tmp_path: Path, background: str, steps: int
) -> None:
    """The other ranks wait in the exchange of the checkpoint, on a background thread or at the end of the run."""
    plan = 'faults.plan=["hold_gil:rank=1,step=2,at=end,seconds=200"]'
    more = ["checkpoint.every=2", f"checkpoint.background={background}", f"run.steps={steps}", "watch.stuck_s=2.0"]
    (_, caught), _ = pool2.run(run, [*write_text(tmp_path), plan, *more], timeout=150, expect_dead={1})
    (folder,) = (tmp_path / "runs").iterdir()
    (record,) = read_lines(folder / FAULTS, FaultRecord)
    assert (record.kind, record.ranks, record.step, record.action) == ("stuck", [1], 2, "stop")
    assert "lock is held" in record.what and "rank 1" in caught


def test_a_run_without_faults_has_no_reports(pool2: RankPool, tmp_path: Path) -> None:
    reported: list[Any] = pool2.run(run, write_text(tmp_path), timeout=150)
    folder = Path(reported[0][0])
    assert folder.is_dir()
    assert not (folder / "faults").exists()
    assert not (folder / FAULTS).exists()
    assert attempt_of(folder) == 0


class Disk(StepHook):
    """A sink and a hook that record whether a span of ``SLOW_KINDS`` is open."""

    on_disk = True

    def __init__(self) -> None:
        self.slow_span_open: list[bool] = []

    def observe(self) -> None:
        self.slow_span_open.append(any(span.kind in SLOW_KINDS for span in read_open(EVENTS.region)))

    def write(self, report: StepReport) -> None:
        self.observe()

    def before_step(self, step: int) -> None:
        self.observe()

    def after_step(self, report: StepReport) -> None:
        self.observe()

    def summary(self, step: int, values: Any) -> None:
        pass


def test_hooks_and_sinks_on_disk_run_inside_a_span_of_a_slow_kind(tmp_path: Path) -> None:
    disk = Disk()
    settings = [*write_text(tmp_path), "run.steps=1", "parallel.ep=1"]
    with session(settings, sinks=[disk], hooks=[disk]) as run:
        run.trainer.fit()
    assert disk.slow_span_open == [True] * 3
    assert not Injector.on_disk, "the time of injected faults must not count as slow disk work"


def watcher_and_new_threads(rank: int, world: int, settings: list[str]) -> tuple[bool, list[str]]:
    before = {thread.name for thread in threading.enumerate()}
    watcher = watch_run(config_of(settings), Ranks.make(), Path("nowhere"), print)
    return watcher is None, sorted({thread.name for thread in threading.enumerate()} - before)


def test_without_watching_or_with_one_rank_there_is_no_thread(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(watcher_and_new_threads, [*write_text(tmp_path), "watch.enabled=false"]) == [(True, [])] * 2
    assert watcher_and_new_threads(0, 1, write_text(tmp_path)) == (True, [])
