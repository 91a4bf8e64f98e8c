"""The status table of a host is in shared memory without a name and uses process handles instead of pids."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from moe_comm.errors import HeapError
from moe_comm.runtime.event_layout import Kind, region_bytes
from moe_comm.runtime.event_reader import read_calls, read_header, read_open, read_spans
from moe_comm.runtime.events import EventRecorder
from moe_comm.runtime.watch import watcher
from moe_comm.runtime.watch.status_table import FAULT_BYTES, Phase, StatusTable
from tests.pool import RankPool, on_ranks

RECORDS = 64


@pytest.fixture
def alone() -> Iterator[StatusTable]:
    table = StatusTable.create(0, lambda text: [text], records=RECORDS)
    yield table
    table.close()


def soon(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return whether ``condition`` becomes true within ``seconds``. Another process makes it true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def test_a_rank_reads_the_spans_and_the_entry_of_another(pool2: RankPool) -> None:
    pids = pool2.pids
    first, second = pool2.run(publish_and_read, timeout=150)
    assert first == {"spans": [("mine", 1)], "open": ["mine"], "calls": 1, "phase": Phase.STEP, "timeout": 7.5}
    assert second == {"fault": "a fault", "number": 1}
    assert not [name for name in os.listdir("/dev/shm") if any(f".{pid}." in name for pid in pids)]


def publish_and_read(rank: int, world: int, arg: Any) -> dict[str, Any]:
    table = StatusTable.create(rank, records=RECORDS)
    recorder = EventRecorder(RECORDS)
    recorder.attach(table.region(rank), rank, RECORDS)
    try:
        if rank == 1:
            table.publish(Phase.STEP, 7.5)
            with recorder.span(Kind.COLLECTIVE, "mine", group=recorder.group(range(world))):
                dist.barrier()
                assert soon(lambda: table.fault_number == 1)
                table.acknowledge(1)
                dist.barrier()
            return {"fault": table.fault_text(), "number": table.fault_number}
        dist.barrier()
        region = table.region(1)
        state = read_header(region)
        assert state is not None
        assert (state.rank, state.pid) == (1, table.members[1].pid)
        entry = table.entry(1)
        result = {
            "spans": [(span.name, span.rank) for span in read_spans(region)],
            "open": [span.name for span in read_open(region)],
            "calls": read_calls(region)[(0, 1), Kind.COLLECTIVE],
            "phase": entry.phase,
            "timeout": entry.timeout_s,
        }
        table.post_fault("a fault", 0)
        assert soon(lambda: table.entry(1).acknowledged == 1)
        dist.barrier()
        return result
    finally:
        table.close()


def test_of_faults_posted_at_once_one_is_accepted(pool2: RankPool) -> None:
    first, second = pool2.run(post_at_once, timeout=150)
    numbers = range(1, AT_ONCE + 1)
    assert [max(pair) for pair in zip(first["numbers"], second["numbers"], strict=True)] == list(numbers)
    assert [min(pair) for pair in zip(first["numbers"], second["numbers"], strict=True)] == [0] * AT_ONCE
    posters = ["0" if reported else "1" for reported in first["numbers"]]
    assert first["texts"] == second["texts"] == posters


AT_ONCE = 200


def post_at_once(rank: int, world: int, arg: Any) -> dict[str, Any]:
    table = StatusTable.create(rank, records=RECORDS)
    numbers, texts = [], []
    try:
        for number in range(AT_ONCE):
            dist.barrier()
            numbers.append(table.post_fault(str(rank), number))
            dist.barrier()
            texts.append(table.fault_text())
        return {"numbers": numbers, "texts": texts}
    finally:
        table.close()


def test_a_rank_that_is_stopped_while_it_posts_does_not_block_others(alone: StatusTable) -> None:
    other = os.open(f"/proc/self/fd/{alone._stacks[0]}", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert alone.post_fault("late", 0) == 1
    os.close(other)
    assert alone.post_fault("again", 0) == 0
    assert alone.fault_text() == "late"


def test_stacks_of_a_rank_that_holds_the_interpreter_lock(pool2: RankPool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    text, _ = pool2.run(stacks_of_second, str(tmp_path / "lock"), timeout=150)
    assert "hold_the_lock" in text


def stacks_of_second(rank: int, world: int, fifo: str) -> str:
    """Rank 1 holds its lock until rank 0 has its stacks or gives up."""
    table = StatusTable.create(rank, records=RECORDS)
    pipe = os.open(fifo, os.O_RDWR)
    try:
        if rank == 1:
            hold_the_lock(pipe)
            return ""
        text = ""
        end = time.monotonic() + 60
        while "hold_the_lock" not in text and time.monotonic() < end:
            text = table.stacks(1, 1.0)
        return text
    finally:
        os.write(pipe, b"!")
        dist.barrier()
        os.close(pipe)
        table.close()


def hold_the_lock(pipe: int) -> None:
    import ctypes

    libc, byte = ctypes.PyDLL(None), ctypes.create_string_buffer(1)
    while libc.read(pipe, byte, 1) != 1:  # the signal that requests the stacks may interrupt it
        pass


def test_wait_returns_when_a_process_ends_and_a_stopped_process_is_distinguished(pool2: RankPool) -> None:
    result, _ = pool2.run(stop_and_kill, timeout=150, expect_dead={1})
    assert result == {"alive": (False, False), "stopped": (True, False), "stacks": 1, "again": True, "ended": True}


def stop_and_kill(rank: int, world: int, arg: Any) -> dict[str, Any]:
    table = StatusTable.create(rank, records=RECORDS)
    while rank == 1:
        signal.pause()  # returns after each request of stacks
    result: dict[str, Any] = {"alive": (table.stopped(1), table.ended(1))}
    os.kill(table.members[1].pid, signal.SIGSTOP)
    assert soon(lambda: table.stopped(1))
    assert "stopped" in table.stacks(1, 1.0)
    result["stopped"] = (table.stopped(1), table.ended(1))
    result["stacks"] = table.stacks(1, 60.0, resume=True).count(" in stop_and_kill\n")  # the pending request counts
    result["again"] = soon(lambda: table.stopped(1))
    assert table.kill(1)
    table.wait(60.0)
    result["ended"] = table.ended(1) and table.letter(1) in ("", "Z", "X")
    assert soon(lambda: not table.kill(1))  # once its parent has reaped it
    table.close()
    return result


@on_ranks(2, timeout=150)
def test_all_ranks_raise_if_one_cannot_share_memory(rank: int) -> None:
    def refuse(path: str, size: int) -> NoReturn:
        raise OSError("no")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("moe_comm.runtime.watch.status_table._map", refuse)
        with pytest.raises(HeapError, match="rank 1 cannot open"):
            StatusTable.create(rank, records=RECORDS)


def test_group_numbers_remain_valid_in_a_new_region_and_calls_restart(alone: StatusTable) -> None:
    recorder = EventRecorder(RECORDS)
    group = recorder.group([3, 7])
    with recorder.span(Kind.DISPATCH, "before", group=group):
        pass
    recorder.attach(alone.region(0), 3, RECORDS)
    with recorder.span(Kind.DISPATCH, "after", group=group):
        for number in range(2 * RECORDS):
            with recorder.span(Kind.COMPUTE, f"inner {number % 3}"):
                pass
    with recorder.span(Kind.DISPATCH, "again", group=group):
        (open_span,) = read_open(alone.region(0))
    assert (open_span.name, open_span.group, open_span.call) == ("again", (3, 7), 2)
    assert read_calls(alone.region(0)) == {((3, 7), Kind.DISPATCH): 2}
    assert read_open(alone.region(0)) == []


def test_a_status_table_has_no_name_in_a_file_system(alone: StatusTable) -> None:
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "moe_comm-status" in line]
    assert maps
    assert all("/memfd:moe_comm-status (deleted)" in line for line in maps)
    assert len(alone.region(0)) == region_bytes(RECORDS)


def test_a_long_fault_is_truncated_and_the_message_of_a_failed_rank_is_stored(alone: StatusTable) -> None:
    assert alone.post_fault("x" * (FAULT_BYTES + 5), 0) == 1
    assert alone.fault_text() == "x" * (FAULT_BYTES - 1)
    assert alone.post_fault("short", 1) == 2
    assert alone.fault_text() == "short"
    alone.leave(Phase.FAILED, "ValueError: é" + "y" * 5000)
    entry = alone.entry(0)
    assert entry.phase == Phase.FAILED
    assert entry.message.startswith("ValueError: éyyy")
    assert entry.left_ns > 0


def test_a_status_table_uses_a_free_signal_which_is_ignored_after_close() -> None:
    table = StatusTable.create(0, lambda text: [text], records=RECORDS)
    number = table.members[0].signal
    others = set(range(signal.SIGRTMIN, signal.SIGRTMAX)) - {number}
    before = {other: signal.getsignal(other) for other in others}
    assert "test_status_table" in table.stacks(0, 60.0)
    table.leave(Phase.LEFT)
    assert table.stacks(0, 60.0) == "(none: it has left)"
    table.close()
    assert signal.getsignal(number) is signal.SIG_IGN
    os.kill(os.getpid(), number)
    again = StatusTable.create(0, lambda text: [text], records=RECORDS)
    assert again.members[0].signal == number
    again.close()
    assert {other: signal.getsignal(other) for other in others} == before


@pytest.mark.parametrize("missing", ["memfd_create", "eventfd", "pidfd_open", "pidfd_send_signal"])
def test_all_ranks_raise_if_python_lacks_a_call(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    def gather(text: str) -> list[str]:
        texts.append(text)
        return [text]

    StatusTable.create(0, gather, records=RECORDS).close()
    collectives = len(texts)
    monkeypatch.delattr(signal if missing == "pidfd_send_signal" else os, missing)
    gc.collect()  # files of earlier tests must not be closed in between
    handles = os.listdir("/proc/self/fd")
    with pytest.raises(HeapError, match=f"rank 0 cannot .*{missing}"):
        StatusTable.create(0, gather, records=RECORDS)
    assert len(texts) == 2 * collectives, "otherwise the other ranks wait for this one"
    assert len(os.listdir("/proc/self/fd")) == len(handles)


def test_time_without_a_core_does_not_count_as_stalled(alone: StatusTable, monkeypatch: pytest.MonkeyPatch) -> None:
    delays = iter([10_000_000_000, 12_000_000_000, 99_000_000_000])
    monkeypatch.setattr(watcher, "run_delay_ns", lambda pid: next(delays))
    recorder = EventRecorder(RECORDS)
    recorder.attach(alone.region(0), 0, RECORDS)
    with recorder.span(Kind.MARK, "now"):
        pass
    state = read_header(alone.region(0))
    assert state is not None
    reader = watcher.StatusReader(alone, 4.5, 300.0, 0)
    second = 1_000_000_000
    assert reader.stalled_s(0, state.active_ns + second // 2) == 0.5, "the run delay is not read"
    assert reader.stalled_s(0, state.active_ns + second) == 1.0, "the run delay counts from here on"
    assert reader.stalled_s(0, state.active_ns + 6 * second) == 4.0
    assert reader.starved_s[0] == 2.0
    assert reader.stalled_s(0, state.active_ns + 7 * second) == 0.0
    reader.since_ns = state.active_ns + 7 * second
    assert reader.status(0, state.active_ns + 7 * second).stalled_s == 0.0


def test_run_delay_is_read_and_is_zero_for_a_missing_process() -> None:
    assert watcher.run_delay_ns(os.getpid()) >= 0
    assert watcher.run_delay_ns(2**31 - 1) == 0
