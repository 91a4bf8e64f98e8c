"""Spans in a ring: what a reader finds of them, in this process or after another one was killed."""

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

from moe_comm.runtime.event_layout import NAMES_BYTES, NO_NAME, ROWS_WORDS, Kind, group_text, ranks_of, region_bytes
from moe_comm.runtime.event_reader import read_header, read_spans
from moe_comm.runtime.events import COMMUNICATION, EVENTS, EventRecorder, communication_span


def fresh(records: int = 64, rank: int = 3) -> EventRecorder:
    recorder = EventRecorder(records)
    recorder.attach(memoryview(bytearray(region_bytes(records))), rank, records)
    return recorder


def record(recorder: EventRecorder, kind: Kind, names: Sequence[str], **what: int) -> None:
    for name in names:
        with recorder.span(kind, name, **what):  # type: ignore[arg-type]
            pass


def test_a_span_is_read_back_with_all_that_was_said_of_it() -> None:
    recorder = fresh()
    recorder.begin_step(7)
    recorder.micro = 2
    group = recorder.group((1, 3))
    with recorder.span(Kind.DISPATCH, "dispatch", layer="layers.0", group=group, peer=1, nbytes=5) as span:
        span.put_rows([4, 0, 9], 11)
        (seen,) = read_spans(recorder.region)
        assert seen.open and seen.begin_ns > 0
    (found,) = read_spans(recorder.region)
    assert (found.rank, found.kind, found.name, found.layer) == (3, Kind.DISPATCH, "dispatch", "layers.0")
    assert (found.step, found.micro, found.group, found.call, found.peer) == (7, 2, (1, 3), 1, 1)
    assert (found.nbytes, found.rows, found.thread, found.device_ns) == (11, (4, 0, 9), 0, (0, 0))
    assert found.end_ns >= found.begin_ns and not found.open
    state = read_header(recorder.region)
    assert state is not None and (state.rank, state.pid, state.step, state.head) == (3, os.getpid(), 7, 1)


def test_the_ring_keeps_the_newest_spans_when_it_has_gone_round() -> None:
    recorder = fresh(64)
    old = recorder.span(Kind.STEP, "old").__enter__()
    record(recorder, Kind.COMPUTE, [f"span {n % 10}" for n in range(200)])
    old.__exit__()
    old.put_rows([1], 1)
    old.put(name="older")
    old.put_device(1, 2)
    found = read_spans(recorder.region)
    assert [span.index for span in found] == list(range(137, 201))
    assert [span.name for span in found] == [f"span {(n - 1) % 10}" for n in range(137, 201)]
    assert all(span.end_ns and not span.rows and span.device_ns == (0, 0) for span in found)
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


def test_what_a_process_was_in_the_middle_of_is_read_after_it_was_killed() -> None:
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
    done, step, combine = read_spans(region)
    assert not done.open and step.open and combine.open
    assert (combine.layer, combine.group, combine.call) == ("layers.2", (0, 5, 10, 15), 2)


def test_calls_are_numbered_for_each_group_and_kind_by_itself() -> None:
    recorder = fresh()
    one, other = recorder.group((0, 1)), recorder.group((0, 1, 2))
    for group, kind in ((one, Kind.DISPATCH), (one, Kind.COLLECTIVE), (one, Kind.COLLECTIVE), (other, Kind.DISPATCH)):
        record(recorder, kind, ["x"], group=group)
    record(recorder, Kind.DISPATCH, ["alone"])
    record(recorder, Kind.DISPATCH, ["x"], group=one)
    assert [span.call for span in read_spans(recorder.region)] == [1, 1, 2, 1, 0, 2]
    recorder.reset_call_counts()
    record(recorder, Kind.DISPATCH, ["x"], group=one)
    assert read_spans(recorder.region)[-1].call == 1


def test_threads_record_side_by_side_and_their_spans_are_no_calls_of_a_group() -> None:
    recorder = fresh(4096)
    group = recorder.group((0, 1))

    def work(name: str) -> None:
        record(recorder, Kind.COLLECTIVE, [name] * 300, group=group, nbytes=1)

    threads = [threading.Thread(target=work, args=(f"thread {n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    record(recorder, Kind.COLLECTIVE, ["main"] * 300, group=group, nbytes=1)
    for thread in threads:
        thread.join()
    found = read_spans(recorder.region)
    assert [span.index for span in found] == list(range(1500)) and all(span.end_ns for span in found)
    assert [span.call for span in found if span.thread == 0] == list(range(1, 301))
    assert {(span.call, span.name[:6]) for span in found if span.thread} == {(0, "thread")}
    assert recorder.take().nbytes == {Kind.COLLECTIVE: 300}


def test_names_that_find_no_room_are_left_out_and_spans_go_on() -> None:
    recorder = fresh()
    assert recorder.name("kept") != NO_NAME
    numbers = [recorder.name("x" * 1000 + str(n)) for n in range(NAMES_BYTES // 1000 + 2)]
    assert NO_NAME in numbers and numbers[0] != NO_NAME
    assert recorder.name("y" * 10**6) == NO_NAME
    record(recorder, Kind.COMPUTE, ["kept", "z" * 2000])
    assert [span.name for span in read_spans(recorder.region)] == ["kept", ""]


def test_a_name_that_two_threads_add_has_one_number() -> None:
    recorder = EventRecorder(8)
    number = recorder.name("a")
    assert recorder._add_name("a") == number, "another thread was faster"
    with recorder._lock:
        assert recorder.name("b") != number, "as a span does that begins"


def test_rows_of_experts_are_never_those_of_another_span() -> None:
    recorder = fresh(64)
    experts = ROWS_WORDS // 5
    for n in range(12):
        with recorder.span(Kind.DISPATCH, "dispatch") as span:
            span.put_rows([n] * experts, 0)
    found = read_spans(recorder.region)
    assert all(span.rows in ((), (n,) * experts) for n, span in enumerate(found))
    assert all(span.rows for span in found[-4:]) and not any(span.rows for span in found[:4])
    with recorder.span(Kind.DISPATCH, "dispatch") as span:
        span.put_rows(range(ROWS_WORDS + 5), 0)
    assert read_spans(recorder.region)[-1].rows == tuple(range(ROWS_WORDS))


def test_a_new_region_begins_empty_and_forgets_what_is_under_way() -> None:
    recorder = fresh()
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
    (found,) = read_spans(recorder.region)
    assert (found.name, found.group, found.call) == ("new", (0, 1), 1)
    with pytest.raises(ValueError, match="a region of 32 records needs"):
        recorder.attach(memoryview(bytearray(100)), 0, 32)


def test_what_a_span_turns_out_to_be_replaces_what_it_was_called() -> None:
    recorder = fresh()
    with recorder.span(Kind.TRANSFER, "between passes") as span:
        recorder.micro = 3
        span.put(name="receive activations", layer="stages 0-1", peer=2, nbytes=8)
        span.put_device(10, 20)
    (found,) = read_spans(recorder.region)
    assert (found.name, found.layer, found.peer, found.nbytes, found.micro) == (
        "receive activations",
        "stages 0-1",
        2,
        8,
        3,
    )
    assert found.device_ns == (10, 20) and found.end_ns


def test_sums_count_what_is_nested_once() -> None:
    recorder = fresh()
    pair = recorder.group((0, 3))
    with recorder.span(Kind.DISPATCH, "dispatch", group=pair, nbytes=100) as span:
        record(recorder, Kind.COLLECTIVE, ["inside"], group=pair, nbytes=30)
        span.put_rows([2, 5], 100)
    with recorder.span(Kind.COMBINE, "combine"):  # knows no bytes itself
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
    recorder = fresh()
    recorder.enabled = False
    with recorder.span(Kind.DISPATCH, "dispatch") as span:
        span.put_rows([1], 1)
        span.put(name="other")
    assert read_spans(recorder.region) == [] and recorder.take().rows == 0


@pytest.mark.parametrize(
    ("said", "error"),
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
def test_what_no_span_can_be_is_refused(said: dict[str, Any], error: type[Exception]) -> None:
    recorder = fresh()
    given = {"kind": Kind.DISPATCH, "name": "dispatch", **said}
    with pytest.raises(error):
        recorder.span(given.pop("kind"), given.pop("name"), **given)
    with recorder.span(Kind.DISPATCH, "dispatch") as span:
        with pytest.raises(TypeError):
            span.put_rows(3, 1)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            span.put(name=3)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            span.put(kind=3)  # type: ignore[call-arg]
    (found,) = read_spans(recorder.region)
    assert (found.name, found.rows, found.open) == ("dispatch", (), False)


def test_spans_and_recorders_leave_nothing_behind() -> None:
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
    assert sys.getrefcount(name) == before + 1, "the table of names holds it"
    kept = weakref.ref(recorder)
    recorder.device = [recorder]  # a cycle
    del recorder
    gc.collect()
    assert kept() is None
    region.release()


def test_an_exception_ends_a_span() -> None:
    recorder = fresh()
    with pytest.raises(KeyError), recorder.span(Kind.COMPUTE, "fails"):
        raise KeyError
    assert not read_spans(recorder.region)[0].open


def test_what_moves_data_is_recorded_and_counted() -> None:
    COMMUNICATION.take()
    with communication_span(Kind.COLLECTIVE, "a test's sum") as span:
        pass
    (found,) = [one for one in read_spans(EVENTS.region) if one.index == span.index]
    assert found.name == "a test's sum"
    assert COMMUNICATION.take() * 1e9 >= found.end_ns - found.begin_ns


@given(st.lists(st.integers(0, 10**8), unique=True, max_size=40))
def test_groups_are_read_as_they_were_written(ranks: list[int]) -> None:
    assert ranks_of(group_text(ranks)) == tuple(ranks)


@given(st.integers(0, 1000), st.integers(1, 100), st.integers(3, 5000))
def test_ranks_at_equal_distances_take_few_bytes(first: int, step: int, number: int) -> None:
    ranks = range(first, first + step * number, step)
    assert len(group_text(ranks)) < 20 and ranks_of(group_text(ranks)) == tuple(ranks)


@given(st.text(max_size=30) | st.from_regex(r"[0-9]{1,12}-[0-9]{1,12}:[0-9]{1,12}", fullmatch=True))
def test_any_text_gives_some_ranks(text: str) -> None:
    assert len(ranks_of(text)) <= 1 << 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, region_bytes(8) - 1), st.binary(min_size=1, max_size=16)), max_size=30))
def test_a_damaged_region_is_read_without_an_error(damage: list[tuple[int, bytes]]) -> None:
    recorder = fresh(8)
    with recorder.span(Kind.DISPATCH, "dispatch", layer="a layer", group=recorder.group((0, 1))) as span:
        span.put_rows([1, 2, 3], 4)
    region = recorder.region
    for at, data in damage:
        region[at : at + len(data)] = data[: len(region) - at]
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
