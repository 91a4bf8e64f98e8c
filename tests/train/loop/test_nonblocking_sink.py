"""An unresponsive sink: training logs it, continues and ends; buffered reports are written if possible."""

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
from moe_comm.train.loop import job, recording as nonblocking_sink
from moe_comm.train.loop.recording import NonblockingSink
from moe_comm.train.metrics import NO_LOAD, StepReport, StepTimes
from tests.pool import RankPool
from tests.train.common import session, write_text

LONG_S, SHORT_S = 60.0, 0.02
"""Timeouts for sinks that respond on a busy machine, and for sinks that never respond."""


class Gated:
    """A sink that blocks until it is opened, and records the written steps."""

    def __init__(self) -> None:
        self.opened, self.written, self.closed = threading.Event(), list[int](), threading.Event()

    def write(self, report: StepReport) -> None:
        assert self.opened.wait(LONG_S)
        self.written.append(report.step)

    def summary(self, step: int, values: dict[str, float]) -> None:
        pass

    def close(self) -> None:
        self.closed.set()


class SinkLog:
    """Log lines and fault records of a ``NonblockingSink``."""

    def __init__(self) -> None:
        self.lines, self.records = list[str](), list[FaultRecord]()

    def wrap(self, sink: Any, patience_s: float) -> NonblockingSink:
        return NonblockingSink(sink, "numbers", self.lines.append, self.records.append, patience_s)

    @property
    def messages(self) -> list[str]:
        _join("writes a fault")
        return [record.what for record in self.records]


def report(step: int) -> StepReport:
    return StepReport(step, 1.0, 0.1, 1.0, 8, StepTimes(1.0, 1.0, 0.0, 0.0, 0.0), NO_LOAD, 0)


def _join(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(LONG_S)


def test_training_continues_with_a_blocked_sink_and_logs_it_once(tmp_path: Path) -> None:
    gated, sink_log = Gated(), SinkLog()
    sink = sink_log.wrap(gated, SHORT_S)
    with session(write_text(tmp_path), sinks=[sink]) as active:
        assert active.trainer.fit() == "finished"
        active.trainer.evaluate()
    assert not gated.written and len(sink_log.messages) == 1
    expected = "numbers did not accept the report of step 1 within 0.02 s; training continues"
    assert sink_log.messages[0].startswith(expected)
    assert sink_log.lines == [f"step 1: {sink_log.messages[0]}"]
    sink.close()
    assert sink_log.messages[1].startswith("numbers lost 5 report(s) and was not closed"), "four steps, one evaluation"
    gated.opened.set()
    assert gated.closed.wait(LONG_S), "buffered reports are written when the sink responds"
    assert gated.written == [1, 2, 3, 4]


def test_a_sink_that_responds_again_gets_the_buffered_reports_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonblocking_sink, "MAX_REPORTS", 3)
    gated, sink_log = Gated(), SinkLog()
    sink = sink_log.wrap(gated, SHORT_S)
    for step in range(1, 6):
        sink.write(report(step))
    gated.opened.set()
    with sink._changed:
        assert sink._changed.wait_for(lambda: not sink._calls, LONG_S)
    sink._patience_s = LONG_S
    sink.write(report(6))
    assert gated.written == [1, 2, 3, 6], "a responsive sink has written the report when the call returns"
    assert sink_log.messages[1:] == ["numbers accepts reports again; 2 report(s) were lost"]
    sink.close()
    sink.close()
    assert gated.closed.is_set() and sink_log.messages[2:] == ["numbers lost 2 report(s)"]
    _join("writes numbers")
    assert "writes numbers" not in {thread.name for thread in threading.enumerate()}


def test_errors_of_a_sink_are_raised_by_the_call() -> None:
    class Full(Gated):
        def write(self, report: StepReport) -> None:
            raise OSError(28, "No space left on device")

    sink_log = SinkLog()
    sink = sink_log.wrap(Full(), LONG_S)
    with pytest.raises(OSError, match="No space left"):
        sink.write(report(1))
    sink.close()
    assert not sink_log.lines


class Fifo:
    """Write to a full FIFO without a reader."""

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
    """Return the result of the run, and whether the sink was still blocked at its end."""

    def wrap(sink: Any, name: str, *sink_log: Any) -> NonblockingSink:
        return NonblockingSink(sink, name, *sink_log, SHORT_S if isinstance(sink, Fifo) else LONG_S)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "TensorBoardSink", Fifo)
        patch.setattr(job, "NonblockingSink", wrap)
        result = run(None, settings)
    stuck = "writes tensorboard" in {thread.name for thread in threading.enumerate()}
    if stuck:
        os.close(Fifo.reader)  # the blocked write fails with EPIPE
        _join("writes tensorboard")
        _join("writes a fault")
    return result, stuck


def _run(rank: int, world: int, settings: list[str]) -> RunResult:
    return run(None, settings)


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_a_blocked_tensorboard_sink_ends_with_all_other_files(
    pool2: RankPool, settings: list[str], tmp_path: Path
) -> None:
    (result, stuck), (_, other_stuck) = pool2.run(_run_into_a_fifo, settings, timeout=90)
    plain = pool2.run(_run, [*settings, f"run.folder={tmp_path / 'plain'}"], timeout=90)[0]
    assert stuck and not other_stuck, "the sink must still block when the run ends, and only on the rank that writes"
    assert (result.status, result.steps, result.last_loss) == ("finished", 4, plain.last_loss)
    lines, expected_lines = _metrics(result.folder), _metrics(plain.folder)
    assert [entry.get("loss") for entry in lines] == [entry.get("loss") for entry in expected_lines]
    assert lines[-1]["validation/loss"] == expected_lines[-1]["validation/loss"]
    faults = list(read_lines(result.folder / FAULTS, FaultRecord))
    assert [(fault.step, fault.kind, fault.action) for fault in faults] == [(1, "error", "none"), (4, "error", "none")]
    assert "tensorboard did not accept the report of step 1" in faults[0].what
    assert "tensorboard lost 5 report(s) and was not closed" in faults[1].what
    assert json.loads((result.folder / "result.json").read_text())["status"] == "finished"
    assert not (plain.folder / FAULTS).exists()
