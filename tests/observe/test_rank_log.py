"""Step lines and spans of a rank, and dumps after a fault."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_comm.errors import CorruptFile
from moe_comm.observe.rank_log import RankLog, StepParts, dump, span_lines, wall_minus_monotonic
from moe_comm.observe.records import (
    RANKS,
    SPANS,
    FaultRecord,
    RankStep,
    SpanLine,
    append,
    cut_after,
    read_folder,
    read_lines,
    to_json,
)
from moe_comm.runtime.event_layout import Kind, Totals, region_bytes
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import EventRecorder
from moe_comm.runtime.untrusted import printable_line

FAULT = FaultRecord(2.0, 7, "stuck", [1], "restart", noticed_s=1.0)
COMPLETE_LINE = to_json(FAULT)
PARTS = StepParts(100.0, 1.0, 0.5, 0.3, 0.1, 0.05, 4096)


@pytest.fixture
def recorder() -> EventRecorder:
    event_recorder = EventRecorder(256)
    event_recorder.attach(memoryview(bytearray(region_bytes(256))), 3, 256)
    return event_recorder


def steps(log: RankLog, recorder: EventRecorder, first: int, last: int) -> None:
    pair = recorder.group((1, 3))
    for step in range(first, last + 1):
        log.begin(step)
        recorder.begin_step(step)
        with recorder.span(Kind.DISPATCH, "dispatch", layer="layers.0", group=pair) as span:
            span.put_rows([step, 1], 10 * step)
        with recorder.span(Kind.TRANSFER, "send activations", peer=7, nbytes=5):
            pass
        log.end(step, PARTS)
        with recorder.span(Kind.CHECKPOINT, "save"):
            pass


def test_each_step_is_a_line_with_its_waits_and_bytes(tmp_path: Path, recorder: EventRecorder) -> None:
    with recorder.span(Kind.COLLECTIVE, "before the first step", nbytes=10**6):
        pass
    log = RankLog(tmp_path, 3, recorder=recorder)
    steps(log, recorder, 1, 3)
    log.close()
    records = list(read_folder(tmp_path / RANKS, RankStep))
    assert [line.step for line in records] == [1, 2, 3]
    for line in records:
        assert (line.rank, line.total, line.compute, line.memory_bytes) == (3, 1.0, 0.5, 4096)
        assert line.sent == {"dispatch": 10 * line.step, "transfer": 5}
        assert line.peers == {"1": 10 * line.step, "7": 5}, "bytes to a group of two go to the other rank"
        assert line.rows == line.step + 1
        assert line.waits.keys() == {"dispatch", "transfer"} and all(0 < wait < 60 for wait in line.waits.values())
    assert list(read_folder(tmp_path / SPANS, SpanLine)) == []


def test_spans_of_selected_steps_include_the_time_until_the_next_step(tmp_path: Path, recorder: EventRecorder) -> None:
    before = time.time_ns()
    log = RankLog(tmp_path, 3, every=2, skew_ns=77, recorder=recorder)
    steps(log, recorder, 1, 4)
    log.close()
    records = list(read_folder(tmp_path / SPANS, SpanLine))
    assert [(line.step, line.name) for line in records] == [
        (step, name) for step in (2, 4) for name in ("dispatch", "send activations", "save")
    ]
    assert records[0] == SpanLine(
        3,
        "dispatch",
        "dispatch",
        records[0].begin_ns,
        records[0].end_ns,
        2,
        layer="layers.0",
        group=[1, 3],
        call=2,
        nbytes=20,
        rows=[2, 1],
        skew_ns=77,
    )
    assert all(before - 10**8 <= line.begin_ns <= line.end_ns <= time.time_ns() + 10**8 for line in records)


def test_a_wait_has_the_begin_of_the_awaited_operation(tmp_path: Path, recorder: EventRecorder) -> None:
    log = RankLog(tmp_path, 3, every=1, skew_ns=77, recorder=recorder)
    log.begin(1)
    recorder.begin_step(1)
    with recorder.span(Kind.COLLECTIVE, "sum") as span:
        span.put_device(span.begin_ns - 5000, 0)
    log.end(1, PARTS)
    log.close()
    (wait,) = (line for line in read_folder(tmp_path / SPANS, SpanLine) if line.name == "sum")
    assert wait.begun_ns == wait.begin_ns - 5000 and wait.skew_ns == 77
    same = SpanLine.of(read_spans(recorder.region)[0], wait.begin_ns - read_spans(recorder.region)[0].begin_ns, 77)
    assert same == wait


def test_on_a_gpu_spans_are_written_when_their_times_are_available(tmp_path: Path, recorder: EventRecorder) -> None:
    class Device:
        polled = 0

        def begun(self, span: object) -> None: ...

        def ended(self, span: object) -> None: ...

        def poll(self) -> None:
            Device.polled += 1

    recorder.device = Device()
    log = RankLog(tmp_path, 3, every=2, recorder=recorder)
    steps(log, recorder, 1, 2)
    log.begin(3)
    path = tmp_path / SPANS / "rank-00003.jsonl"
    assert not path.exists()
    recorder.begin_step(3)
    log.end(3, PARTS)
    assert len(list(read_lines(path, SpanLine))) == 3
    log.close()


@pytest.mark.parametrize("skew_ns", [0, -5])
def test_span_lines_are_equal_to_the_json_of_span_objects(recorder: EventRecorder, skew_ns: int) -> None:
    names = ['a "quoted" \\ name', "two\nlines\r\t\x00\x7f", "Ünïcode 層 🚀 \u2028", "", "</script>", "{}%s"]
    recorder.begin_step(4)
    for index in range(300):  # more spans than the ring buffer holds
        name = names[index % len(names)]
        group = recorder.group(((0, 3), (3,), range(0, 8, 2))[index % 3]) if index % 4 else 0
        recorder.micro = index % 2
        with recorder.span(Kind.DISPATCH, name, layer=names[index % 5], group=group, peer=index % 3 - 1) as span:
            if index % 7:
                span.put_rows(range(index % 5), 8 * (index % 3))
        if index % 11 == 0:
            span.put_device(span.begin_ns + 5, span.begin_ns + 9)
        if index == 290:
            recorder.begin_step(5)
    recorder.span(Kind.MARK, "open").__enter__()
    for step in (4, 5):
        spans = [span for span in read_spans(recorder.region) if span.step == step and span.end_ns]
        defaults = vars(SpanLine(0, "", "", 0, 0, 0))
        all_fields = [vars(SpanLine.of(span, 10**18, skew_ns)) for span in spans]
        written = [{k: v for k, v in one.items() if k in list(defaults)[:6] or v != defaults[k]} for one in all_fields]
        records = span_lines(recorder.region, 3, 256, 0, step, 10**18, skew_ns)
        assert records == [json.dumps(one, separators=(",", ":")) + "\n" for one in written] and len(records) > 8


def test_a_step_line_is_read_back_to_the_nanosecond(
    tmp_path: Path, recorder: EventRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = 'a "host" \\ é\n'
    monkeypatch.setattr("socket.gethostname", lambda: host)
    log = RankLog(tmp_path, 3, recorder=recorder)
    parts = StepParts(1795301516.351605, 1 / 3, math.nan, 1e-7, 12345.678901234, math.inf, 7, {2: 0.25, 0: 1e-5})
    totals = Totals({Kind.DISPATCH: 5207971, Kind.COLLECTIVE: 0}, {Kind.DISPATCH: 1 << 40}, {5: 3, 1: 2}, {}, 11)
    monkeypatch.setattr(recorder, "take", lambda: totals)
    log.begin(1)
    log.end(1, parts)
    log.end(2, StepParts(1.0, 1.0, 0.5, 0.3, 0.1, 0.05, 4096))
    log.close()
    line, plain = read_folder(tmp_path / RANKS, RankStep)
    assert (line.step, line.rank, line.host, line.rows, line.memory_bytes) == (1, 3, printable_line(host), 11, 7)
    assert (line.begin_s, line.links) == (parts.begin_s, {"2": 0.25, "0": 1e-5})
    assert math.isnan(line.compute) and math.isnan(line.checkpoint), "NaN is written as null"
    for value, expected in ((line.total, 1 / 3), (line.communication, 1e-7), (line.data, 12345.678901234)):
        assert value == pytest.approx(expected, rel=0, abs=6e-10)
    assert line.waits == {"dispatch": 0.005207971, "collective": 0.0} and line.sent == {"dispatch": 1 << 40}
    assert list(line.peers.items()) == [("1", 2), ("5", 3)]
    written = [json.loads(row) for row in (tmp_path / RANKS / "rank-00003.jsonl").read_text().splitlines()]
    assert list(written[0]) == list(vars(plain)) and written[1]["links"] == {}


def test_a_resumed_run_writes_no_step_twice(tmp_path: Path, recorder: EventRecorder) -> None:
    first = RankLog(tmp_path, 3, every=1, recorder=recorder)
    steps(first, recorder, 1, 6)
    first.close()
    resumed = RankLog(tmp_path, 3, done=4, every=1, recorder=recorder)
    steps(resumed, recorder, 5, 7)
    resumed.close()
    assert [line.step for line in read_folder(tmp_path / RANKS, RankStep)] == [1, 2, 3, 4, 5, 6, 7]
    spans = [line.step for line in read_folder(tmp_path / SPANS, SpanLine)]
    assert spans == [step for step in range(1, 8) for _ in range(3)]


def test_a_truncated_line_is_removed_with_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step":1,"rank":0}\n[]\n{"step":3}\n{"step":2,"ra')
    cut_after(path, 2)
    assert path.read_text() == '{"step":1,"rank":0}\n'
    cut_after(tmp_path / "missing.jsonl", 2)
    assert not (tmp_path / "missing.jsonl").exists()


def test_invalid_lines_are_removed_too(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"step":1,"host":"\xff"}\n{"step":Infinity}\n{"step":2}\n')
    cut_after(path, 2)
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2]


@pytest.mark.parametrize(("tail", "readable"), [('{"time_s":2.0,"st', 1), ('{"time_s":2', 1), (COMPLETE_LINE, 2)])
def test_lines_appended_after_a_truncated_line_are_readable(tmp_path: Path, tail: str, readable: int) -> None:
    path = tmp_path / "faults.jsonl"
    append(path, FAULT)
    with path.open("a") as file:
        file.write(tail)
    append(path, FAULT)
    assert list(read_lines(path, FaultRecord)) == [FAULT] * (readable + 1)


@pytest.mark.parametrize("value", ["1" + "0" * 400, "9" * 30])
def test_a_number_out_of_range_is_corruption(tmp_path: Path, value: str) -> None:
    for line in (COMPLETE_LINE.replace("2.0", value), COMPLETE_LINE.replace(":7", f":{value}")):
        (tmp_path / "faults.jsonl").write_text(line + "\n")
        with pytest.raises(CorruptFile, match="beyond 64 bits"):
            list(read_lines(tmp_path / "faults.jsonl", FaultRecord))


@pytest.mark.parametrize("rank", [-1, 10**9])
def test_a_rank_out_of_range_is_corruption(tmp_path: Path, rank: int) -> None:
    (tmp_path / "spans.jsonl").write_text(json.dumps(vars(SpanLine(rank, "mark", "a", 1, 1, 1))) + "\n")
    with pytest.raises(CorruptFile, match="rank must be at least 0 and below"):
        list(read_lines(tmp_path / "spans.jsonl", SpanLine))


def spans_of(tmp_path: Path, records: int, count: int) -> list[SpanLine]:
    recorder = EventRecorder(records)
    log = RankLog(tmp_path, 0, every=1, recorder=recorder)
    log.begin(1)
    recorder.begin_step(1)
    for number in range(count):
        with recorder.span(Kind.COMPUTE, f"span {number % 100}"):
            pass
    log.end(1, PARTS)
    log.close()
    return list(read_folder(tmp_path / SPANS, SpanLine))


def test_all_spans_in_the_ring_are_written(tmp_path: Path) -> None:
    assert len(spans_of(tmp_path, 6000, 5000)) == 5000


def test_spans_that_did_not_fit_are_counted(tmp_path: Path) -> None:
    mark, *spans = spans_of(tmp_path, 64, 100)
    assert (mark.kind, mark.step, len(spans)) == ("mark", 1, 64)
    assert mark.name == "36 earlier spans of this step did not fit; set observe.records to more than 64"


def test_a_dump_has_the_clock_offset_of_rank_0(tmp_path: Path, recorder: EventRecorder) -> None:
    RankLog(tmp_path, 3, skew_ns=77, recorder=recorder).close()
    with recorder.span(Kind.COMPUTE, "forward"):
        pass
    path = dump(tmp_path, "late", recorder)
    assert path is not None and [line.skew_ns for line in read_lines(path, SpanLine)] == [77, 77]


def test_a_dump_has_the_reason_and_open_spans_first(tmp_path: Path, recorder: EventRecorder) -> None:
    recorder.begin_step(57)
    with recorder.span(Kind.STEP, "step"):
        for n in range(10):
            with recorder.span(Kind.COMPUTE, f"done {n}"):
                pass
        recorder.span(Kind.COMBINE, "combine", layer="layers.2", group=recorder.group((3, 4))).__enter__()
        path = dump(tmp_path, "rank 4 does not answer", recorder, last=6)
    assert path == tmp_path / "dumps" / "step-00000057" / "rank-00003.jsonl"
    mark, *lines = read_lines(path, SpanLine)
    assert (mark.kind, mark.name, mark.step) == ("mark", "rank 4 does not answer", 57)
    assert [line.name for line in lines] == ["combine", "done 5", "done 6", "done 7", "done 8", "done 9"]
    assert (lines[0].end_ns, lines[0].layer, lines[0].group) == (0, "layers.2", [3, 4])
    shift = wall_minus_monotonic()
    assert abs(mark.begin_ns - shift - time.monotonic_ns()) < 60 * 10**9
    dump(tmp_path, "again", recorder, last=2)
    assert [json.loads(line)["name"] for line in path.read_text().splitlines()][7] == "again"


def test_a_dump_that_cannot_be_written_returns_none(tmp_path: Path, recorder: EventRecorder) -> None:
    (tmp_path / "dumps").write_text("a file where the folder should be")
    assert dump(tmp_path, "no room", recorder) is None
    without_region: Any = SimpleNamespace(region=memoryview(bytearray(10)), skew_ns=0)
    assert dump(tmp_path, "no region", without_region) is None
