"""A forked child never waits for a lock that a thread of its parent held, and does not disturb its parent's ranks."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_comm import make_dispatcher
from moe_comm.comm.communicator import registry
from moe_comm.errors import PeerError
from moe_comm.runtime.events import COMMUNICATION, EVENTS
from tests.pool import RankPool

_C = pytest.importorskip("moe_comm._C", reason="the native core is not built")

MIB = 1 << 20
HELD_BYTES = 192 * MIB
"""Memory whose pages take the kernel long enough to fork meanwhile."""
DEADLINE_S = 30.0


def in_a_child(work: Callable[[], bool]) -> bool:
    """Return ``work()`` of a forked child; False if it raised, or did not end within the deadline."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    handle = os.pidfd_open(child)
    if not select.select([handle], [], [], DEADLINE_S)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(handle)
    return os.waitpid(child, 0)[1] == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("shared", [False, True])
def test_a_fork_while_a_thread_allocates_leaves_a_usable_heap(shared: bool) -> None:
    heap = _C.Heap(f"/moe_comm_test_fork_{os.getpid()}" if shared else "", 0, 0, 2 * HELD_BYTES)
    heap.unlink()
    before, kept = resident_bytes(), []
    thread = threading.Thread(target=lambda: kept.append(heap.tensor(1, HELD_BYTES // 4, 0)))
    thread.start()
    while resident_bytes() < before + 8 * MIB and thread.is_alive():
        pass  # from then on, the thread holds the mutex of the heap

    def child() -> bool:
        if not shared:
            own = heap.tensor(1, 1, 0)
            return bool(heap.blocks == 2 and own is not None)
        return bool(heap.blocks == 1 and heap.used == heap.peak == HELD_BYTES)

    assert in_a_child(child)
    thread.join()
    assert heap.blocks == 1


def fork_during_a_dispatch(rank: int, world: int, _: None) -> tuple[bool, bool]:
    """Rank 0 forks while its thread waits for rank 1 in dispatch, and holds the mutex of the communicator."""
    dispatcher = make_dispatcher(4, dist.group.WORLD, backend="shared_memory")
    x_TD, ids_TK = torch.ones(3, 8), torch.zeros(3, 1, dtype=torch.int64)
    results = []

    def work() -> None:
        results.append(dispatcher.dispatch(x_TD, ids_TK).rows_RD.shape[0])

    def child() -> bool:
        try:
            dispatcher.dispatch(x_TD, ids_TK)
        except PeerError as error:
            return "a forked child must create its own group" in str(error)
        return False

    dispatcher.dispatch(x_TD, ids_TK)
    correct = True
    if rank == 0:
        thread = threading.Thread(target=work)
        thread.start()
        asleep = 0
        while asleep < 200:  # it neither runs nor waits for the interpreter's lock
            state = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 1 if state == "S" else 0
        correct = in_a_child(child)
        dist.barrier()
        thread.join()
    else:
        dist.barrier()
        work()
    return correct, results == [6 if rank == 0 else 0]


def test_a_fork_while_a_thread_dispatches_leaves_both_processes_right(pool2: RankPool) -> None:
    assert pool2.run(fork_during_a_dispatch) == [(True, True)] * 2


def test_locks_of_spans_and_groups_are_free_in_a_child() -> None:
    """The private locks are taken because no call holds them for a time that a test can control."""
    locks = [EVENTS._lock, COMMUNICATION._lock, registry.lock]
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        held.set()
        done.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def child() -> bool:
        with COMMUNICATION, registry.lock:
            return EVENTS.name(f"a name that is new in process {os.getpid()}") > 0

    try:
        assert in_a_child(child)
    finally:
        done.set()
        thread.join()
