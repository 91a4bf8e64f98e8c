"""A sink that does not answer: training goes on, says so, and ends; what can still be written is."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from moe_comm.observe.records import FAULTS, FaultRecord, read_lines
from moe_comm.train import RunResult, run
from moe_comm.train.loop import job, nonblocking_sink
from moe_comm.train.loop.nonblocking_sink import NonblockingSink
from moe_comm.train.metrics import NO_LOAD, StepReport, StepTimes
from tests.pool import RankPool
from tests.train.common import session, write_text

LONG_S, SHORT_S = 60.0, 0.02
"""Patience with what answers, however busy the machine, and with what never does."""


class Gated:
    """A sink that waits to be opened, and keeps the steps that it has written."""

    def __init__(self) -> None:
        self.opened, self.written, self.closed = threading.Event(), list[int](), threading.Event()

    def write(self, report: StepReport) -> None:
        assert self.opened.wait(LONG_S)
        self.written.append(report.step)

    def summary(self, step: int, values: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        self.closed.set()


class Told:
    """What a ``NonblockingSink`` says."""

    def __init__(self) -> None:
        self.said, self.records = list[str](), list[FaultRecord]()

    def patient(self, sink: Any, patience_s: float) -> NonblockingSink:
        return NonblockingSink(sink, "numbers", self.said.append, self.records.append, patience_s)

    @property
    def whats(self) -> list[str]:
        _join("writes a fault")
        return [record.what for record in self.records]


def report(step: int) -> StepReport:
    return StepReport(step, 1.0, 0.1, 1.0, 8, StepTimes(1.0, 1.0, 0.0, 0.0, 0.0), NO_LOAD, 0)


def _join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(LONG_S)


def test_training_goes_on_past_a_sink_that_waits_and_says_so_once(tmp_path: Path) -> None:
    gated, told = Gated(), Told()
    sink = told.patient(gated, SHORT_S)
    with session(write_text(tmp_path), sinks=[sink]) as here:
        assert here.trainer.fit() == "finished"
        here.trainer.evaluate()
    assert not gated.written and len(told.whats) == 1
    assert told.whats[0].startswith("numbers has not taken the report of step 1 for 0.02 s; training goes on")
    assert told.said == [f"step 1: {told.whats[0]}"]
    sink.close()
    assert told.whats[1].startswith("numbers lacks 5 report(s), and is not closed"), "four steps, one evaluation"
    gated.opened.set()
    assert gated.closed.wait(LONG_S), "what had been kept is written should the sink still come back"
    assert gated.written == [1, 2, 3, 4]


def test_a_sink_that_comes_back_gets_what_was_kept_for_it_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonblocking_sink, "KEPT", 3)
    gated, told = Gated(), Told()
    sink = told.patient(gated, SHORT_S)
    for step in range(1, 6):
        sink.write(report(step))
    gated.opened.set()
    with sink._changed:
        assert sink._changed.wait_for(lambda: not sink._calls, LONG_S)
    sink._patience_s = LONG_S
    sink.write(report(6))
    assert gated.written == [1, 2, 3, 6], "written when the call returns, as ever"
    assert told.whats[1:] == ["numbers takes reports again, without 2 report(s)"]
    sink.close()
    sink.close()
    assert gated.closed.is_set() and told.whats[2:] == ["numbers lacks 2 report(s)"]
    _join("writes numbers")
    assert "writes numbers" not in {thread.name for thread in threading.enumerate()}


def test_what_a_sink_raises_is_raised_by_the_call() -> None:
    class Full(Gated):
        def write(self, report: StepReport) -> None:
            raise OSError(28, "No space left on device")

    told = Told()
    sink = told.patient(Full(), LONG_S)
    with pytest.raises(OSError, match="No space left"):
        sink.write(report(1))
    sink.close()
    assert not told.said


class Fifo:
    """Writes into a FIFO that nobody reads, and that is full."""

    reader = -1

    def __init__(self, path: Path, *_: Any) -> None:
        os.mkfifo(path)
        Fifo.reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.end = os.open(path, os.O_WRONLY)
        os.write(self.end, bytes(fcntl.fcntl(self.end, fcntl.F_SETPIPE_SZ, 4096)))

    def write(self, report: StepReport) -> None:
        os.write(self.end, bytes(3000))

    def summary(self, step: int, values: dict[str, float]) -> None:
        os.write(self.end, bytes(3000))

    def close(self) -> None:
        os.close(self.end)


def _run_into_a_fifo(rank: int, world: int, settings: list[str]) -> tuple[RunResult, bool]:
    """The run's result, and whether the sink was still stuck when there was one."""

    def patient(sink: Any, name: str, *told: Any) -> NonblockingSink:
        return NonblockingSink(sink, name, *told, SHORT_S if isinstance(sink, Fifo) else LONG_S)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "TensorBoardSink", Fifo)
        patch.setattr(job, "NonblockingSink", patient)
        result = run(None, settings)
    stuck = "writes tensorboard" in {thread.name for thread in threading.enumerate()}
    if stuck:
        os.close(Fifo.reader)  # what waits to write is told that nobody will ever read
        _join("writes tensorboard")
        _join("writes a fault")
    return result, stuck


def _run(rank: int, world: int, settings: list[str]) -> RunResult:
    return run(None, settings)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_whose_tensorboard_is_a_fifo_that_nobody_reads_ends_with_all_else_it_has(
    pool2: RankPool, settings: list[str], tmp_path: Path
) -> None:
    (result, stuck), (_, other) = pool2.run(_run_into_a_fifo, settings, timeout=90)
    plain = pool2.run(_run, [*settings, f"run.folder={tmp_path / 'plain'}"], timeout=90)[0]
    assert stuck and not other, "it was waiting still when the run had ended, on the rank that writes"
    assert (result.status, result.steps, result.last_loss) == ("finished", 4, plain.last_loss)
    ours, theirs = _metrics(result.folder), _metrics(plain.folder)
    assert [line.get("loss") for line in ours] == [line.get("loss") for line in theirs]
    assert ours[-1]["validation/loss"] == theirs[-1]["validation/loss"]
    found = list(read_lines(result.folder / FAULTS, FaultRecord))
    assert [(one.step, one.kind, one.action) for one in found] == [(1, "error", "none"), (4, "error", "none")]
    assert "tensorboard has not taken the report of step 1" in found[0].what
    assert "tensorboard lacks 5 report(s), and is not closed" in found[1].what
    assert json.loads((result.folder / "result.json").read_text())["status"] == "finished"
    assert not (plain.folder / FAULTS).exists()
