"""Recorded timelines of two ranks, and their trace and picture files."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.bench.overlap.timeline import (
    PRODUCT,
    ROWS,
    TRACKS,
    TRANSFER,
    WAIT,
    TimelineSpan,
    TimelineStep,
    lanes,
    perfetto,
    picture,
    record,
    recording,
)
from moe_comm.comm.channel import Channel
from moe_comm.comm.group_setup import communicator_of
from moe_comm.kernels import row_invariant
from moe_comm.kernels.cpu_gemm import ExpertWeights
from moe_comm.overlap import chunked
from tests.pool import RankPool


def late_transfer(rank: int, world: int, arg: None) -> TimelineStep:
    """A transfer that cannot complete before rank 0 has computed, because rank 1 sends only then."""
    group = dist.group.WORLD
    assert group is not None
    channel = Channel(communicator_of(group), 60.0)
    a, out, done = torch.ones(16, 16), torch.empty(16, 16), torch.zeros(1)

    def step() -> None:
        if rank == 1:
            dist.recv(done, 0)
        pending = channel.start_all_gather(a, "rows of a step")
        row_invariant.row_invariant_mm(a, a, out)
        if rank == 0:
            dist.send(done, 1)
        pending()

    return record("late transfer", "overlapped", step)


@pytest.fixture(scope="module")
def step(pool2: RankPool) -> TimelineStep:
    """A step recorded on two ranks."""
    first, second = pool2.run(late_transfer, None, timeout=60)
    assert first == second
    step: TimelineStep = first
    return step


def of_kind(spans: tuple[TimelineSpan, ...], kind: str) -> TimelineSpan:
    (only,) = [span for span in spans if span.kind == kind]
    return only


def test_gemms_waits_and_transfers_are_spans_of_each_rank(step: TimelineStep) -> None:
    for spans in step.ranks:
        assert sorted(span.kind for span in spans) == [PRODUCT, TRANSFER, WAIT]
        product, transfer, wait = (of_kind(spans, kind) for kind in (PRODUCT, TRANSFER, WAIT))
        assert product.name == "16 x 16 x 16" and transfer.name == wait.name == "rows of a step"
        assert all(0 <= span.start_ns <= span.end_ns <= step.end_ns for span in spans)
        assert transfer.start_ns <= product.start_ns and product.end_ns <= wait.start_ns


def test_a_transfer_span_lasts_until_completion_and_overlaps_a_gemm(step: TimelineStep) -> None:
    product, transfer = (of_kind(step.ranks[0], kind) for kind in (PRODUCT, TRANSFER))
    assert transfer.start_ns <= product.start_ns <= product.end_ns <= transfer.end_ns
    # All ranks use one clock: the transfer completes after rank 1 started it.
    assert of_kind(step.ranks[1], TRANSFER).start_ns <= transfer.end_ns


def test_recording_restores_the_library() -> None:
    before = (ExpertWeights.multiply, chunked.exact_mm, Channel._start)
    a, out = torch.ones(4, 16), torch.empty(4, 16)
    with recording() as recorder:
        assert chunked.exact_mm is not before[1] and Channel._start is not before[2]
        ExpertWeights(torch.eye(16)[None]).add(a, out.zero_(), (4,))
        with pytest.raises(RuntimeError):
            chunked.exact_mm(a, a)
    assert (ExpertWeights.multiply, chunked.exact_mm, Channel._start) == before
    assert [span.kind for span in recorder.spans] == [PRODUCT, PRODUCT] and torch.equal(out, a)
    with pytest.raises(KeyError), recording():
        raise KeyError
    assert (ExpertWeights.multiply, chunked.exact_mm, Channel._start) == before


STEPS = (
    TimelineStep(
        "a",
        "serial",
        (
            (
                TimelineSpan(TRANSFER, "t", 0, 900),
                TimelineSpan(WAIT, "w", 0, 900),
                TimelineSpan(PRODUCT, "p", 900, 2000),
            ),
            (),
        ),
    ),
    TimelineStep(
        "a",
        "overlapped",
        (
            (
                TimelineSpan(TRANSFER, "t0", 0, 900),
                TimelineSpan(TRANSFER, "t1", 0, 1000),
                TimelineSpan(TRANSFER, "t2", 950, 1100),
            ),
            (TimelineSpan(ROWS, "lands", 0, 50), TimelineSpan(WAIT, "w", 0, 40), TimelineSpan(PRODUCT, "p", 50, 1100)),
        ),
    ),
)


def test_spans_that_overlap_are_in_different_lanes() -> None:
    assert [(lane, span.name) for lane, span in lanes(STEPS[1].ranks[0])] == [(0, "t0"), (1, "t1"), (0, "t2")]


def slices(data: bytes) -> dict[tuple[str, str], list[tuple[str, int, int]]]:
    """Return name, begin and end of all slices of a trace by process and track. Fails unless they nest."""
    pytest.importorskip("perfetto")
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

    trace: Any = Trace()
    trace.ParseFromString(data)
    described = {p.track_descriptor.uuid: p.track_descriptor for p in trace.packet if p.HasField("track_descriptor")}
    opened: dict[int, list[tuple[str, int]]] = defaultdict(list)
    slices_by_track = defaultdict(list)
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        track = described[event.track_uuid]
        key = described[track.parent_uuid].process.process_name, track.name
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            opened[event.track_uuid].append((event.name, packet.timestamp))
        else:
            name, begin = opened[event.track_uuid].pop()
            assert begin <= packet.timestamp
            slices_by_track[key].append((name, begin, packet.timestamp))
    assert not any(opened.values())
    return slices_by_track


def test_a_trace_read_back_has_every_span_on_its_ranks_tracks() -> None:
    pytest.importorskip("perfetto")
    by_track = slices(perfetto(STEPS))
    assert {process for process, _ in by_track} == {"rank 0", "rank 1"} and {track for _, track in by_track} == set(
        TRACKS
    )
    second = 2000 + 5_000_000
    assert sorted(by_track["rank 0", "network"]) == [
        ("t", 0, 900),
        ("t0", second, second + 900),
        ("t1", second, second + 1000),
        ("t2", second + 950, second + 1100),
    ]
    assert sorted(by_track["rank 1", "processor"]) == [
        ("lands", second, second + 50),
        ("p", second + 50, second + 1100),
        ("w", second, second + 40),
    ]
    assert [name for name, _, _ in by_track["rank 0", "step"]] == ["a, serial", "a, overlapped"]


def test_the_trace_of_a_recorded_step_has_a_transfer_during_a_gemm(step: TimelineStep) -> None:
    pytest.importorskip("perfetto")
    by_track = slices(perfetto([step]))
    ((_, begin, completed),) = by_track["rank 0", "network"]
    ((_, start, end),) = [one for one in by_track["rank 0", "processor"] if one[0] == "16 x 16 x 16"]
    assert begin <= start <= end <= completed


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture([*STEPS, TimelineStep("b", "overlapped", ((), ()))], tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
