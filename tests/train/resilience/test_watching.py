"""A run's ranks watch each other as ``[watch]`` says, and its folder tells what they noticed, once."""

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
from moe_comm.runtime.watch.graph import PATIENT_KINDS
from moe_comm.runtime.watch.status_table import Board, Phase
from moe_comm.train.hooks import StepHook
from moe_comm.train.loop.job import run_config
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience import watching
from moe_comm.train.resilience.inject import Injector
from moe_comm.train.resilience.watching import attempt_of, watch_run
from tests.pool import RankPool
from tests.train.common import config_of, session, write_text


def run(rank: int, world: int, settings: list[str]) -> tuple[str, str]:
    """Folder of the run, or what ended it."""
    try:
        return str(run_config(None, settings).folder), ""
    except (PeerError, CheckpointError) as error:
        return "", "\n".join([str(error), *getattr(error, "__notes__", [])])


def test_a_killed_rank_is_in_the_folder_once_and_in_the_error(pool2: RankPool, tmp_path: Path) -> None:
    settings = [*write_text(tmp_path), 'faults.plan=["kill:rank=1,step=3"]']
    (_, caught), _ = pool2.run(run, settings, timeout=90, expect_dead={1})
    (folder,) = (tmp_path / "runs").iterdir()
    (record,) = read_lines(folder / FAULTS, FaultRecord)
    assert (record.kind, record.ranks, record.step, record.action, record.attempt) == ("died", [1], 3, "stop", 0)
    assert 0 <= record.noticed_s < 10  # a second on a machine that does nothing else
    report = folder / "faults" / "rank-00000-step3.txt"
    assert str(report) in caught
    assert "rank 0  waits for rank 1 in " in report.read_text() or "rank 0  caught" in report.read_text()


def run_told_to_end(rank: int, world: int, settings: list[str]) -> tuple[str, str]:
    """``run``, with the agent's SIGTERM while what was noticed is written and the main thread leaves."""
    out, leave, write = threading.Event(), Board.leave, watching.dump

    def left(board: Board, phase: Phase, words: str = "") -> None:
        leave(board, phase, words)
        out.set()

    def told(folder: Path, what: str) -> None:
        assert out.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)
        write(folder, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Board, "leave", left)
        patch.setattr(watching, "dump", told)
        return run(rank, world, settings)


def test_what_was_noticed_is_written_though_the_agent_ends_the_rank(pool2: RankPool, tmp_path: Path) -> None:
    settings = [*write_text(tmp_path), 'faults.plan=["kill:rank=1,step=3"]']
    (_, caught), _ = pool2.run(run_told_to_end, settings, timeout=90, expect_dead={1})
    (folder,) = (tmp_path / "runs").iterdir()
    (record,) = read_lines(folder / FAULTS, FaultRecord)
    assert (record.kind, record.ranks) == ("died", [1]) and "Noticed" in caught
    assert [path.name for path in (folder / "dumps").glob("*/*")] == ["rank-00000.jsonl"]


@pytest.mark.parametrize("background", ["true", "false"])
@pytest.mark.parametrize("steps", [2, 4])
def test_a_rank_that_does_not_come_to_save_is_named(
    pool2: RankPool, tmp_path: Path, background: str, steps: int
) -> None:
    """The others are in the checkpoint's own exchange, in a thread beside the main one; at the end of the run, too."""
    plan = 'faults.plan=["hold_gil:rank=1,step=2,at=end,seconds=100"]'
    more = ["checkpoint.every=2", f"checkpoint.background={background}", f"run.steps={steps}", "watch.stuck_s=2.0"]
    (_, caught), _ = pool2.run(run, [*write_text(tmp_path), plan, *more], timeout=90, expect_dead={1})
    (folder,) = (tmp_path / "runs").iterdir()
    (record,) = read_lines(folder / FAULTS, FaultRecord)
    assert (record.kind, record.ranks, record.step, record.action) == ("stuck", [1], 2, "stop")
    assert "lock is held" in record.what and "rank 1" in caught


def test_a_run_without_faults_has_no_reports(pool2: RankPool, tmp_path: Path) -> None:
    told: list[Any] = pool2.run(run, write_text(tmp_path), timeout=90)
    folder = Path(told[0][0])
    assert folder.is_dir()
    assert not (folder / "faults").exists()
    assert not (folder / FAULTS).exists()
    assert attempt_of(folder) == 0


class Disk(StepHook):
    """A sink and a hook that note whether others would take them for stuck."""

    on_disk = True

    def __init__(self) -> None:
        self.found: list[bool] = []

    def look(self) -> None:
        self.found.append(any(span.kind in PATIENT_KINDS for span in read_open(EVENTS.region)))

    def write(self, report: StepReport) -> None:
        self.look()

    def before_step(self, step: int) -> None:
        self.look()

    def after_step(self, report: StepReport) -> None:
        self.look()

    def summary(self, step: int, values: Any) -> None:
        pass


def test_writing_what_is_known_of_a_step_may_take_as_long_as_the_disk(tmp_path: Path) -> None:
    disk = Disk()
    settings = [*write_text(tmp_path), "run.steps=1", "parallel.ep=1"]
    with session(settings, sinks=[disk], hooks=[disk]) as here:
        here.trainer.fit()
    assert disk.found == [True] * 3
    assert not Injector.on_disk, "where harm is done on purpose, it is noticed as ever"


def off(rank: int, world: int, settings: list[str]) -> tuple[bool, list[str]]:
    before = {thread.name for thread in threading.enumerate()}
    watcher = watch_run(config_of(settings), Ranks.make(), Path("nowhere"), print)
    return watcher is None, sorted({thread.name for thread in threading.enumerate()} - before)


def test_where_it_is_off_or_a_rank_is_alone_there_is_no_thread(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(off, [*write_text(tmp_path), "watch.enabled=false"]) == [(True, [])] * 2
    assert off(0, 1, write_text(tmp_path)) == (True, [])
