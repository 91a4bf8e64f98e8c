"""The ranks of a host share a board that nothing outlives, and hold each other's processes, not their numbers."""

from __future__ import annotations

import fcntl
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
from moe_comm.runtime.event_reader import read_calls, read_open, read_spans, read_state
from moe_comm.runtime.events import Recorder
from moe_comm.runtime.watch import views
from moe_comm.runtime.watch.status_table import NOTICE_BYTES, Board, Phase
from tests.pool import RankPool

RECORDS = 64


@pytest.fixture
def alone() -> Iterator[Board]:
    board = Board.meet(0, lambda text: [text], records=RECORDS)
    yield board
    board.close()


def soon(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether it becomes true in time; looks again and again, since another process makes it so."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
    return True


def test_a_rank_reads_what_another_records_and_says(pool2: RankPool) -> None:
    pids = pool2.pids
    first, second = pool2.run(meet_and_tell, timeout=60)
    assert first == {"spans": [("mine", 1)], "open": ["mine"], "calls": 1, "phase": Phase.STEP, "patience": 7.5}
    assert second == {"notice": "something happened", "sequence": 1}
    assert not [name for name in os.listdir("/dev/shm") if any(f".{pid}." in name for pid in pids)]


def meet_and_tell(rank: int, world: int, arg: Any) -> dict[str, Any]:
    board = Board.meet(rank, records=RECORDS)
    recorder = Recorder(RECORDS)
    recorder.attach(board.region(rank), rank, RECORDS)
    try:
        if rank == 1:
            board.say(Phase.STEP, 7.5)
            with recorder.span(Kind.COLLECTIVE, "mine", group=recorder.group(range(world))):
                dist.barrier()
                assert soon(lambda: board.sequence == 1)
                board.acknowledge(1)
                dist.barrier()
            return {"notice": board.notice(), "sequence": board.sequence}
        dist.barrier()
        region = board.region(1)
        state = read_state(region)
        assert state is not None
        assert (state.rank, state.pid) == (1, board.members[1].pid)
        page = board.page(1)
        found = {
            "spans": [(span.name, span.rank) for span in read_spans(region)],
            "open": [span.name for span in read_open(region)],
            "calls": read_calls(region)[(0, 1), Kind.COLLECTIVE],
            "phase": page.phase,
            "patience": page.patience_s,
        }
        board.post("something happened", 0)
        assert soon(lambda: board.page(1).acknowledged == 1)
        dist.barrier()
        return found
    finally:
        board.close()


def test_of_ranks_that_tell_at_once_one_is_heard(pool2: RankPool) -> None:
    first, second = pool2.run(tell_at_once, timeout=60)
    numbers = range(1, AT_ONCE + 1)
    assert [max(pair) for pair in zip(first["told"], second["told"], strict=True)] == list(numbers)
    assert [min(pair) for pair in zip(first["told"], second["told"], strict=True)] == [0] * AT_ONCE
    speakers = ["0" if told else "1" for told in first["told"]]
    assert first["notices"] == second["notices"] == speakers


AT_ONCE = 200


def tell_at_once(rank: int, world: int, arg: Any) -> dict[str, Any]:
    board = Board.meet(rank, records=RECORDS)
    told, notices = [], []
    try:
        for number in range(AT_ONCE):
            dist.barrier()
            told.append(board.post(str(rank), number))
            dist.barrier()
            notices.append(board.notice())
        return {"told": told, "notices": notices}
    finally:
        board.close()


def test_a_rank_that_is_stopped_while_it_tells_does_not_keep_others_from_it(alone: Board) -> None:
    other = os.open(f"/proc/self/fd/{alone._stacks[0]}", os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(other, fcntl.LOCK_EX)
    assert alone.post("late", 0) == 1
    os.close(other)
    assert alone.post("again", 0) == 0
    assert alone.notice() == "late"


def test_stacks_come_from_a_rank_that_holds_the_lock_of_its_interpreter(pool2: RankPool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    text, _ = pool2.run(stacks_of_second, str(tmp_path / "lock"), timeout=60)
    assert "hold_the_lock" in text


def stacks_of_second(rank: int, world: int, fifo: str) -> str:
    """Rank 1 holds its lock until rank 0 has what it wants, or has given up."""
    board = Board.meet(rank, records=RECORDS)
    held = os.open(fifo, os.O_RDWR)
    try:
        if rank == 1:
            hold_the_lock(held)
            return ""
        text = ""
        end = time.monotonic() + 20
        while "hold_the_lock" not in text and time.monotonic() < end:
            text = board.stacks(1, 1.0)
        return text
    finally:
        os.write(held, b"!")
        dist.barrier()
        os.close(held)
        board.close()


def hold_the_lock(held: int) -> None:
    import ctypes

    libc, byte = ctypes.PyDLL(None), ctypes.create_string_buffer(1)
    while libc.read(held, byte, 1) != 1:  # the signal that asks for stacks may end it
        pass


def test_the_end_of_a_process_wakes_its_neighbour_and_a_stopped_one_is_told_apart(pool2: RankPool) -> None:
    found, _ = pool2.run(stop_and_kill, timeout=60, expect_dead={1})
    assert found == {"alive": (False, False), "stopped": (True, False), "stacks": True, "again": True, "ended": True}


def stop_and_kill(rank: int, world: int, arg: Any) -> dict[str, Any]:
    board = Board.meet(rank, records=RECORDS)
    if rank == 1:
        signal.pause()
    found: dict[str, Any] = {"alive": (board.stopped(1), board.ended(1))}
    os.kill(board.members[1].pid, signal.SIGSTOP)
    assert soon(lambda: board.stopped(1))
    assert "stopped" in board.stacks(1, 1.0)
    found["stopped"] = (board.stopped(1), board.ended(1))
    found["stacks"] = "stop_and_kill" in board.stacks(1, 10.0, resume=True)
    found["again"] = soon(lambda: board.stopped(1))
    assert board.kill(1)
    board.wait(20.0)
    found["ended"] = board.ended(1) and board.letter(1) in ("", "Z", "X")
    assert not board.kill(1) or board.letter(1) == "Z"
    board.close()
    return found


def test_where_one_rank_cannot_share_all_raise(pool2: RankPool) -> None:
    told = pool2.run(one_fails, timeout=60)
    assert len(set(told)) == 1
    assert "rank 1 cannot open" in told[0]


def one_fails(rank: int, world: int, arg: Any) -> str:
    from moe_comm.runtime.watch import status_table as module

    def refuse(path: str, size: int) -> NoReturn:
        raise OSError("no")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(module, "_map", refuse)
        try:
            Board.meet(rank, records=RECORDS)
        except HeapError as error:
            return str(error)
    return "it met"


def test_numbers_of_groups_stay_good_on_a_new_region_and_calls_count_anew(alone: Board) -> None:
    recorder = Recorder(RECORDS)
    group = recorder.group([3, 7])
    with recorder.span(Kind.DISPATCH, "before", group=group):
        pass
    recorder.attach(alone.region(0), 3, RECORDS)
    with recorder.span(Kind.DISPATCH, "after", group=group):
        for number in range(2 * RECORDS):
            with recorder.span(Kind.COMPUTE, f"inner {number % 3}"):
                pass
    with recorder.span(Kind.DISPATCH, "again", group=group):
        (found,) = read_open(alone.region(0))
    assert (found.name, found.group, found.call) == ("again", (3, 7), 2)
    assert read_calls(alone.region(0)) == {((3, 7), Kind.DISPATCH): 2}
    assert read_open(alone.region(0)) == []


def test_nothing_of_a_board_has_a_name(alone: Board) -> None:
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "moe_comm-board" in line]
    assert maps
    assert all("/memfd:moe_comm-board (deleted)" in line for line in maps)
    assert len(alone.region(0)) == region_bytes(RECORDS)


def test_a_long_notice_is_cut_and_words_of_a_failed_rank_are_kept(alone: Board) -> None:
    assert alone.post("x" * (NOTICE_BYTES + 5), 0) == 1
    assert alone.notice() == "x" * (NOTICE_BYTES - 1)
    assert alone.post("short", 1) == 2
    assert alone.notice() == "short"
    alone.leave(Phase.FAILED, "ValueError: é" + "y" * 5000)
    page = alone.page(0)
    assert page.phase == Phase.FAILED
    assert page.words.startswith("ValueError: éyyy")
    assert page.left_ns > 0


def test_a_board_takes_a_signal_that_nobody_has_and_does_not_end_by_it_later() -> None:
    board = Board.meet(0, lambda text: [text], records=RECORDS)
    number = board.members[0].signal
    others = set(range(signal.SIGRTMIN, signal.SIGRTMAX)) - {number}
    before = {other: signal.getsignal(other) for other in others}
    assert "test_board" in board.stacks(0, 5.0)
    board.leave(Phase.LEFT)
    assert board.stacks(0, 5.0) == "(none: it has left)"
    board.close()
    assert signal.getsignal(number) is signal.SIG_IGN
    os.kill(os.getpid(), number)
    again = Board.meet(0, lambda text: [text], records=RECORDS)
    assert again.members[0].signal == number
    again.close()
    assert {other: signal.getsignal(other) for other in others} == before


@pytest.mark.parametrize("missing", ["memfd_create", "eventfd", "pidfd_open", "pidfd_send_signal"])
def test_where_this_python_lacks_a_call_all_are_told_so(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def texts(text: str) -> list[str]:
        told.append(text)
        return [text]

    Board.meet(0, texts, records=RECORDS).close()
    collectives = len(told)
    monkeypatch.delattr(signal if missing == "pidfd_send_signal" else os, missing)
    handles = os.listdir("/proc/self/fd")
    with pytest.raises(HeapError, match=f"rank 0 cannot .*{missing}"):
        Board.meet(0, texts, records=RECORDS)
    assert len(told) == 2 * collectives, "or the others wait for this rank"
    assert len(os.listdir("/proc/self/fd")) == len(handles)


def test_time_without_a_core_is_no_silence(alone: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    delays = iter([10_000_000_000, 12_000_000_000, 99_000_000_000])
    monkeypatch.setattr(views, "run_delay_ns", lambda pid: next(delays))
    recorder = Recorder(RECORDS)
    recorder.attach(alone.region(0), 0, RECORDS)
    with recorder.span(Kind.MARK, "now"):
        pass
    state = read_state(alone.region(0))
    assert state is not None
    viewer = views.Viewer(alone, 4.5, 300.0, 0)
    second = 1_000_000_000
    assert viewer.silent_s(0, state.active_ns + second // 2) == 0.5, "the kernel is not asked"
    assert viewer.silent_s(0, state.active_ns + second) == 1.0, "from here on it counts"
    assert viewer.silent_s(0, state.active_ns + 6 * second) == 4.0
    assert viewer.starved_s[0] == 2.0
    assert viewer.silent_s(0, state.active_ns + 7 * second) == 0.0
    viewer.since_ns = state.active_ns + 7 * second
    assert viewer.view(0, state.active_ns + 7 * second).silent_s == 0.0


def test_the_kernel_says_how_long_a_thread_found_no_core() -> None:
    assert views.run_delay_ns(os.getpid()) >= 0
    assert views.run_delay_ns(2**31 - 1) == 0
