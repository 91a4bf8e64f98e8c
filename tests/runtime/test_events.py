"""Spans are recorded in a ring and read back, in the same process or after the recording process was killed."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from moe_comm.runtime import event_reader
from moe_comm.runtime.event_layout import NAMES_BYTES, NO_NAME, ROWS_WORDS, Kind, group_text, ranks_of, region_bytes
from moe_comm.runtime.event_reader import read_header, read_spans
from moe_comm.runtime.events import COMMUNICATION, EVENTS, EventRecorder, communication_span


def new_recorder(records: int = 64, rank: int = 3) -> EventRecorder:
    recorder = EventRecorder(records)
    recorder.attach(memoryview(bytearray(region_bytes(records))), rank, records)
    return recorder


def record(recorder: EventRecorder, kind: Kind, names: Sequence[str], **what: int) -> None:
    for name in names:
        with recorder.span(kind, name, **what):  # type: ignore[arg-type]
            pass


def test_a_span_is_read_back_with_all_its_fields() -> None:
    recorder = new_recorder()
    recorder.begin_step(7)
    recorder.micro = 2
    group = recorder.group((1, 3))
    with recorder.span(Kind.DISPATCH, "dispatch", layer="layers.0", group=group, peer=1, nbytes=5) as span:
        span.put_rows([4, 0, 9], 11)
        (open_span,) = read_spans(recorder.region)
        assert open_span.open and open_span.begin_ns > 0
    (result,) = read_spans(recorder.region)
    assert (result.rank, result.kind, result.name, result.layer) == (3, Kind.DISPATCH, "dispatch", "layers.0")
    assert (result.step, result.micro, result.group, result.call, result.peer) == (7, 2, (1, 3), 1, 1)
    assert (result.nbytes, result.rows, result.thread, result.device_ns) == (11, (4, 0, 9), 0, (0, 0))
    assert result.end_ns >= result.begin_ns and not result.open
    state = read_header(recorder.region)
    assert state is not None and (state.rank, state.pid, state.step, state.head) == (3, os.getpid(), 7, 1)


def test_a_full_ring_keeps_the_newest_spans() -> None:
    recorder = new_recorder(64)
    old = recorder.span(Kind.STEP, "old").__enter__()
    record(recorder, Kind.COMPUTE, [f"span {n % 10}" for n in range(200)])
    old.__exit__()
    old.put_rows([1], 1)
    old.put(name="older")
    old.put_device(1, 2)
    spans = read_spans(recorder.region)
    assert [span.index for span in spans] == list(range(137, 201))
    assert [span.name for span in spans] == [f"span {(n - 1) % 10}" for n in range(137, 201)]
    assert all(span.end_ns and not span.rows and span.device_ns == (0, 0) for span in spans)
    assert [span.index for span in read_spans(recorder.region, last=3)] == [198, 199, 200]
    assert [span.index for span in read_spans(recorder.region, since=199)] == [199, 200]


CHILD = """
import mmap, signal, sys
from moe_comm.runtime.event_layout import Kind, region_bytes
from moe_comm.runtime.events import EVENTS
EVENTS.attach(memoryview(mmap.mmap(int(sys.argv[1]), region_bytes(64))), 5, 64)
EVENTS.begin_step(9)
group = EVENTS.group(range(0, 16, 5))
with EVENTS.span(Kind.COMBINE, "combine", group=group):
    pass
with EVENTS.span(Kind.STEP, "step"), EVENTS.span(Kind.COMBINE, "combine", layer="layers.2", group=group):
    print("in it", flush=True)
    signal.pause()
"""


def test_a_span_that_is_overwritten_while_it_is_read_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer begins spans while the reader has copied the records, which is where the reader calls ``fence``."""
    recorder = new_recorder(8)
    record(recorder, Kind.COMPUTE, [f"span {n}" for n in range(20)])
    assert [span.index for span in read_spans(recorder.region)] == list(range(12, 20))
    for begun in (1, 3):
        calls: list[int] = []

        def fence(begun: int = begun, calls: list[int] = calls) -> None:
            calls.append(0)
            if len(calls) == 2:
                record(recorder, Kind.COMPUTE, ["new"] * begun)

        first = event_reader.LONG.unpack_from(recorder.region, event_reader.HEAD_AT)[0] - 8
        monkeypatch.setattr(event_reader, "fence", fence)
        assert [span.index for span in read_spans(recorder.region)] == list(range(first + begun, first + 8))


def test_expert_rows_that_are_overwritten_while_they_are_read_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = new_recorder()
    with recorder.span(Kind.DISPATCH, "dispatch") as span:
        span.put_rows([1, 2], 3)
    (result,) = event_reader.read_records(recorder.region)

    def overwrite() -> None:
        with recorder.span(Kind.DISPATCH, "next") as later:
            later.put_rows([0] * ROWS_WORDS, 0)

    assert event_reader.read_rows(recorder.region, result[7], result[16]) == (1, 2)
    monkeypatch.setattr(event_reader, "fence", overwrite)
    assert event_reader.read_rows(recorder.region, result[7], result[16]) == ()


def test_open_spans_of_a_killed_process_can_be_read() -> None:
    memory = os.memfd_create("test_events")
    try:
        os.ftruncate(memory, region_bytes(64))
        region = memoryview(mmap.mmap(memory, region_bytes(64)))
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(memory)], stdout=subprocess.PIPE, pass_fds=[memory])
        assert child.stdout is not None and child.stdout.readline() == b"in it\n"
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        child.stdout.close()
    finally:
        os.close(memory)
    state = read_header(region)
    assert state is not None and (state.rank, state.pid, state.step) == (5, child.pid, 9)
    completed, step, combine = read_spans(region)
    assert not completed.open and step.open and combine.open
    assert (combine.layer, combine.group, combine.call) == ("layers.2", (0, 5, 10, 15), 2)


def test_calls_are_numbered_separately_for_each_group_and_kind() -> None:
    recorder = new_recorder()
    pair, trio = recorder.group((0, 1)), recorder.group((0, 1, 2))
    for group, kind in ((pair, Kind.DISPATCH), (pair, Kind.COLLECTIVE), (pair, Kind.COLLECTIVE), (trio, Kind.DISPATCH)):
        record(recorder, kind, ["x"], group=group)
    record(recorder, Kind.DISPATCH, ["alone"])
    record(recorder, Kind.DISPATCH, ["x"], group=pair)
    assert [span.call for span in read_spans(recorder.region)] == [1, 1, 2, 1, 0, 2]
    recorder.reset_call_counts()
    record(recorder, Kind.DISPATCH, ["x"], group=pair)
    assert read_spans(recorder.region)[-1].call == 1


def test_threads_record_concurrently_and_their_spans_have_no_call_number() -> None:
    recorder = new_recorder(4096)
    group = recorder.group((0, 1))

    def work(name: str) -> None:
        record(recorder, Kind.COLLECTIVE, [name] * 300, group=group, nbytes=1)

    threads = [threading.Thread(target=work, args=(f"thread {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    record(recorder, Kind.COLLECTIVE, ["main"] * 300, group=group, nbytes=1)
    for thread in threads:
        thread.join()
    spans = read_spans(recorder.region)
    assert [span.index for span in spans] == list(range(1500)) and all(span.end_ns for span in spans)
    assert [span.call for span in spans if span.thread == 0] == list(range(1, 301))
    assert {(span.call, span.name[:6]) for span in spans if span.thread} == {(0, "thread")}
    assert recorder.take().nbytes == {Kind.COLLECTIVE: 300}


def test_names_that_do_not_fit_are_omitted_and_spans_are_still_recorded() -> None:
    recorder = new_recorder()
    assert recorder.name("kept") != NO_NAME
    numbers = [recorder.name("x" * 1000 + str(n)) for n in range(NAMES_BYTES // 1000 + 2)]
    assert NO_NAME in numbers and numbers[0] != NO_NAME
    assert recorder.name("y" * 10**6) == NO_NAME
    record(recorder, Kind.COMPUTE, ["kept", "z" * 2000])
    assert [span.name for span in read_spans(recorder.region)] == ["kept", ""]


def test_a_name_that_two_threads_add_has_one_number() -> None:
    recorder = EventRecorder(8)
    number = recorder.name("a")
    assert recorder._add_name("a") == number, "another thread has added the name"
    with recorder._lock:
        assert recorder.name("b") != number, "a span can begin while the lock is held"


def test_expert_rows_of_a_span_are_its_own_or_empty() -> None:
    recorder = new_recorder(64)
    experts = ROWS_WORDS // 5
    for n in range(12):
        with recorder.span(Kind.DISPATCH, "dispatch") as span:
            span.put_rows([n] * experts, 0)
    spans = read_spans(recorder.region)
    assert all(span.rows in ((), (n,) * experts) for n, span in enumerate(spans))
    assert all(span.rows for span in spans[-4:]) and not any(span.rows for span in spans[:4])
    with recorder.span(Kind.DISPATCH, "dispatch") as span:
        span.put_rows(range(ROWS_WORDS + 5), 0)
    assert read_spans(recorder.region)[-1].rows == tuple(range(ROWS_WORDS))


def test_a_new_region_is_empty_and_ignores_spans_that_began_in_the_old_one() -> None:
    recorder = new_recorder()
    recorder.begin_step(4)
    before = recorder.region
    group = recorder.group((0, 1))
    with recorder.span(Kind.DISPATCH, "old", group=group) as span:
        used = bytearray(region_bytes(32))
        used[:] = b"\xff" * len(used)
        recorder.attach(memoryview(used), 1, 32)
        span.put_rows([3], 3)
    assert read_spans(recorder.region) == [] and read_spans(before)[0].open
    state = read_header(recorder.region)
    assert state is not None and (state.rank, state.step, state.head) == (1, 4, 0)
    record(recorder, Kind.DISPATCH, ["new"], group=recorder.group((0, 1)))
    (result,) = read_spans(recorder.region)
    assert (result.name, result.group, result.call) == ("new", (0, 1), 1)
    with pytest.raises(ValueError, match="a region of 32 records needs"):
        recorder.attach(memoryview(bytearray(100)), 0, 32)


def test_put_replaces_the_name_and_other_fields_of_a_span() -> None:
    recorder = new_recorder()
    with recorder.span(Kind.TRANSFER, "between passes") as span:
        recorder.micro = 3
        span.put(name="receive activations", layer="stages 0-1", peer=2, nbytes=8)
        span.put_device(10, 20)
    (result,) = read_spans(recorder.region)
    assert (result.name, result.layer, result.peer, result.nbytes, result.micro) == (
        "receive activations",
        "stages 0-1",
        2,
        8,
        3,
    )
    assert result.device_ns == (10, 20) and result.end_ns


def test_totals_count_nested_spans_once() -> None:
    recorder = new_recorder()
    pair = recorder.group((0, 3))
    with recorder.span(Kind.DISPATCH, "dispatch", group=pair, nbytes=100) as span:
        record(recorder, Kind.COLLECTIVE, ["inside"], group=pair, nbytes=30)
        span.put_rows([2, 5], 100)
    with recorder.span(Kind.COMBINE, "combine"):  # has no bytes of its own
        record(recorder, Kind.COLLECTIVE, ["a", "b"], group=pair, nbytes=7)
    with recorder.span(Kind.TRANSFER, "between passes"):
        record(recorder, Kind.TRANSFER, ["send"], peer=1, nbytes=50)
    record(recorder, Kind.COMPUTE, ["compute"], nbytes=1)
    spans = {span.name: span for span in read_spans(recorder.region)}
    totals = recorder.take()
    outer = {Kind.DISPATCH: "dispatch", Kind.COMBINE: "combine", Kind.TRANSFER: "between passes"}
    assert totals.ns == {kind: spans[name].end_ns - spans[name].begin_ns for kind, name in outer.items()}
    assert totals.nbytes == {Kind.DISPATCH: 100, Kind.COMBINE: 14, Kind.TRANSFER: 50}
    assert (totals.peers, totals.groups, totals.rows) == ({1: 50}, {pair: 114}, 7)
    assert recorder.take().ns == {}


def test_a_recorder_that_is_off_writes_nothing() -> None:
    recorder = new_recorder()
    recorder.enabled = False
    with recorder.span(Kind.DISPATCH, "dispatch") as span:
        span.put_rows([1], 1)
        span.put(name="other")
    assert read_spans(recorder.region) == [] and recorder.take().rows == 0


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"kind": 99}, ValueError),
        ({"kind": "dispatch"}, TypeError),
        ({"name": 3}, TypeError),
        ({"layer": b"layers.0"}, TypeError),
        ({"group": "0,1"}, TypeError),
        ({"nbytes": 1.5}, TypeError),
        ({"nbytes": 1 << 70}, OverflowError),
        ({"bytes": 1}, TypeError),
    ],
)
def test_invalid_span_fields_are_refused(fields: dict[str, Any], error: type[Exception]) -> None:
    recorder = new_recorder()
    arguments = {"kind": Kind.DISPATCH, "name": "dispatch", **fields}
    with pytest.raises(error):
        recorder.span(arguments.pop("kind"), arguments.pop("name"), **arguments)
    with recorder.span(Kind.DISPATCH, "dispatch") as span:
        with pytest.raises(TypeError):
            span.put_rows(3, 1)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            span.put(name=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            span.put(kind=3)  # type: ignore[call-arg]
    (result,) = read_spans(recorder.region)
    assert (result.name, result.rows, result.open) == ("dispatch", (), False)


def test_spans_and_recorders_do_not_leak() -> None:
    region = memoryview(bytearray(region_bytes(8)))
    recorder = EventRecorder(8)
    recorder.attach(region, 0, 8)
    name = "a name of " + str(region.nbytes)
    before = sys.getrefcount(name)
    for _ in range(100):
        with recorder.span(Kind.DISPATCH, name, layer=name) as span:
            span.put(name=name, layer="x")
            span.put_rows([1, 2], 3)
    del span
    assert sys.getrefcount(name) == before + 1, "the table of names holds one reference"
    recorder_ref = weakref.ref(recorder)
    recorder.device = [recorder]  # a reference cycle
    del recorder
    gc.collect()
    assert recorder_ref() is None
    region.release()


def test_an_exception_ends_a_span() -> None:
    recorder = new_recorder()
    with pytest.raises(KeyError), recorder.span(Kind.COMPUTE, "fails"):
        raise KeyError
    assert not read_spans(recorder.region)[0].open


def test_communication_spans_are_recorded_and_counted() -> None:
    COMMUNICATION.take()
    with communication_span(Kind.COLLECTIVE, "a test's sum") as span:
        pass
    (result,) = [one for one in read_spans(EVENTS.region) if one.index == span.index]
    assert result.name == "a test's sum"
    assert COMMUNICATION.take() * 1e9 >= result.end_ns - result.begin_ns


@given(st.lists(st.integers(0, 10**8), unique=True, max_size=40))
def test_groups_are_read_as_they_were_written(ranks: list[int]) -> None:
    assert ranks_of(group_text(ranks)) == tuple(ranks)


@given(st.integers(0, 1000), st.integers(1, 100), st.integers(3, 5000))
def test_ranks_at_equal_distances_take_few_bytes(first: int, step: int, number: int) -> None:
    ranks = range(first, first + step * number, step)
    assert len(group_text(ranks)) < 20 and ranks_of(group_text(ranks)) == tuple(ranks)


@given(st.text(max_size=30) | st.from_regex(r"[0-9]{1,12}-[0-9]{1,12}:[0-9]{1,12}", fullmatch=True))
def test_any_text_gives_a_bounded_number_of_ranks(text: str) -> None:
    assert len(ranks_of(text)) <= 1 << 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, region_bytes(8) - 1), st.binary(min_size=1, max_size=16)), max_size=30))
def test_a_damaged_region_is_read_without_an_error(damage: list[tuple[int, bytes]]) -> None:
    recorder = new_recorder(8)
    with recorder.span(Kind.DISPATCH, "dispatch", layer="a layer", group=recorder.group((0, 1))) as span:
        span.put_rows([1, 2, 3], 4)
    region = recorder.region
    for offset, data in damage:
        region[offset : offset + len(data)] = data[: len(region) - offset]
    assert len(read_spans(region)) <= 8


def test_a_forked_process_does_not_write_into_its_parents_region() -> None:
    recorder = EventRecorder()
    with recorder.span(Kind.MARK, "before"):
        pass
    before = bytes(recorder.region)
    pid = os.fork()
    if pid == 0:
        try:
            recorder.name("a name of the child's own")
            with recorder.span(Kind.MARK, "the child's"):
                pass
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert bytes(recorder.region) == before
