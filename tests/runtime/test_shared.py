"""Ranks that share memory: names are removed, dead and stuck ranks are reported, counters wrap, forks are safe."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

_C = pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.comm import shared_heap as shared  # noqa: E402
from moe_comm.comm.group_setup import communicator_of, heap_of  # noqa: E402
from moe_comm.comm.shared_heap import SEGMENT_PREFIX  # noqa: E402
from moe_comm.dispatch.backends.local import LocalDispatcher  # noqa: E402
from moe_comm.dispatch.backends.native import SharedMemoryDispatcher  # noqa: E402
from moe_comm.dispatch.types import DispatchOptions  # noqa: E402
from moe_comm.errors import HeapError, PeerDied, PeerError, PeerTimeout, RankMismatch  # noqa: E402
from moe_comm.topology import ExpertPlacement  # noqa: E402
from tests.dispatch.workers import heap_constants  # noqa: E402
from tests.pool import RankFailure, RankPool, on_ranks, with_longer_deadline  # noqa: E402

SHM = Path("/dev/shm")
EXPERTS, HIDDEN, TOP_K = 8, 48, 2
DEAD_S = 1.0
"""Time within which the end of a rank must be reported."""
BUSY_S = 30.0
"""Extra time for a machine that is busy with other tests. The deadlines of the groups are far longer."""


def names_of(pids: list[int]) -> list[str]:
    return [path.name for pid in pids for path in SHM.glob(f"{SEGMENT_PREFIX}.{pid}.*")]


def dispatcher(
    rank: int, world: int, group: Any = None, timeout_s: float = 60.0, **constants: int
) -> SharedMemoryDispatcher:
    placement, options = ExpertPlacement.balanced(EXPERTS, world), DispatchOptions(timeout_s=timeout_s)
    with heap_constants(**constants):
        return SharedMemoryDispatcher(placement, group or dist.group.WORLD, rank, options)


def inputs(rank: int, world: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return x, ids and weights of every rank. Token counts differ and may be zero."""
    g = torch.Generator().manual_seed(step)
    inputs_by_rank = []
    for r in range(world):
        tokens = (7 * step + 5 * r) % 23
        x_TD = torch.randn(tokens, HIDDEN, generator=g)
        ids_TK = torch.randint(-1, EXPERTS, (tokens, TOP_K), generator=g)
        inputs_by_rank.append((x_TD, ids_TK, torch.rand(tokens, TOP_K, generator=g)))
    return inputs_by_rank


def step_is_right(d: SharedMemoryDispatcher, rank: int, world: int, step: int, label: str = "moe.3") -> bool:
    """Run dispatch, times two, combine and backward. Return whether the bits equal those of one rank in plain torch."""
    inputs_by_rank = inputs(rank, world, step)
    whole = [torch.cat(parts) for parts in zip(*inputs_by_rank, strict=True)]
    own_rows = slice(sum(len(e[0]) for e in inputs_by_rank[:rank]), sum(len(e[0]) for e in inputs_by_rank[: rank + 1]))
    results = []
    for run, (x, ids, w), rows in (
        (d, inputs_by_rank[rank], slice(None)),
        (LocalDispatcher(ExpertPlacement.balanced(EXPERTS, 1)), whole, own_rows),
    ):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        dispatched = run.dispatch(x, ids, label=label)
        y = run.combine(dispatched.rows_RD * 2, w, dispatched.handle)
        y.backward(torch.ones_like(y))
        assert x.grad is not None and w.grad is not None
        results.append([t[rows] for t in (y.detach(), x.grad, w.grad)])
    return all(map(torch.equal, *results))


def caught(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")


# --- names ---


def look_for_names(rank: int, world: int, pids: list[int]) -> tuple[str, list[str], bool]:
    d = dispatcher(rank, world)
    dist.barrier()
    names = names_of(pids)
    correct = step_is_right(d, rank, world, 1)
    return d.shared.heap.name, names + names_of(pids), correct


def test_names_are_random_and_removed_when_all_ranks_have_attached(pool2: RankPool) -> None:
    results = pool2.run(look_for_names, pool2.pids)
    for (name, names_left, correct), pid in zip(results, pool2.pids, strict=True):
        assert re.fullmatch(rf"/{SEGMENT_PREFIX}\.{pid}\.[0-9a-f]{{16}}", name)
        assert names_left == [] and correct
    assert results[0][0][-16:] != results[1][0][-16:]


def die_in_setup(rank: int, world: int, call: int) -> str:
    """Rank 1 is killed in collective number ``call`` of the group setup."""
    calls, gather = iter(range(10)), shared.gather_texts

    def gather_or_die(*args: Any) -> list[str]:
        if next(calls) == call and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(*args)

    shared.gather_texts = gather_or_die
    try:
        return repr(caught(lambda: dispatcher(rank, world)))
    finally:
        shared.gather_texts = gather


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_rank_killed_while_the_group_is_made_leaves_nothing_after_the_next_sweep(call: int) -> None:
    with RankPool(3) as pool:
        pids = pool.pids
        pool.run(die_in_setup, call, expect_dead={1})
    _C.sweep_stale(SEGMENT_PREFIX)  # every new group starts with this sweep
    assert names_of(pids) == []


def fail_to_create(rank: int, world: int, what: str) -> tuple[str, str, bool]:
    """Rank 1 fails to create its heap. Afterwards the setup of the same group succeeds."""
    group = dist.new_group()
    options: dict[str, Any] = {}
    if rank == 1:
        options = (
            {"RESERVE_BYTES": 1 << 62} if what == "reserve" else {"INITIAL_BYTES": 8 << 20, "RESERVE_BYTES": 4 << 20}
        )
    error = caught(lambda: dispatcher(rank, world, group, **options))
    dist.barrier()
    names_left = names_of([os.getpid()])
    return type(error).__name__, f"{error} {names_left}", step_is_right(dispatcher(rank, world, group), rank, world, 2)


@pytest.mark.parametrize("what", ["reserve", "initial"])
def test_a_rank_without_memory_is_a_heap_error_on_every_rank_and_leaves_no_name(pool3: RankPool, what: str) -> None:
    for rank, (kind, text, correct) in enumerate(pool3.run(fail_to_create, what)):
        assert kind == HeapError.__name__ and text.endswith("[]"), text
        assert rank == 1 or text.startswith("rank 1: ")
        assert correct


# --- peers that die or stop ---


def lose_rank_1(rank: int, world: int, arg: tuple[str, int]) -> tuple[str, str, str, float]:
    """A thread of rank 1 kills it in the middle of its calls; the other ranks run until they get an error."""
    folder, after = arg
    d = dispatcher(rank, world)
    d.set_step(17)
    x_TD = torch.randn(300, HIDDEN)
    ids_TK = torch.randint(0, EXPERTS, (300, TOP_K))
    weights_TK = torch.ones(300, TOP_K, requires_grad=True)
    kill_now = threading.Event()

    def killer() -> None:
        kill_now.wait()
        Path(folder, "died").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        threading.Thread(target=killer, daemon=True).start()
    started = time.monotonic()
    try:
        for call in range(100_000):
            if rank == 1 and call == after:
                kill_now.set()
            started = time.monotonic()
            dispatched = d.dispatch(x_TD.requires_grad_(), ids_TK, label="moe.3")
            started = time.monotonic()
            y_TD = d.combine(dispatched.rows_RD, weights_TK, dispatched.handle)
            started = time.monotonic()
            y_TD.sum().backward()
    except PeerError as error:
        raised_s = time.monotonic()
        again = caught(lambda: d.dispatch(x_TD.detach(), ids_TK))
        died = float(Path(folder, "died").read_text())
        return type(error).__name__, str(error), f"{type(again).__name__} {again}", raised_s - max(died, started)
    raise AssertionError("rank 1 did not die")


@pytest.mark.parametrize("after", [0, 3, 50])
def test_a_killed_rank_is_reported_on_every_other_within_a_second_and_leaves_nothing(
    pool3: RankPool, after: int
) -> None:
    pids = pool3.pids
    with tempfile.TemporaryDirectory() as folder:
        results = pool3.run(lose_rank_1, (folder, after), expect_dead={1})
    for rank in (0, 2):
        kind, text, again, seconds = results[rank]
        assert kind == PeerDied.__name__ and again == f"{kind} {text}", "every later call raises the same error at once"
        assert re.match(rf"rank {rank} in [a-z ]+ \(call \d+\) of layer 'moe.3' at step 17 waited for rank \d", text)
        assert "rank 1" in text.split("\n")[0] and " dead" in text.split("\n")[0]
        for peer in range(3):
            assert re.search(rf"\n  rank {peer}: (dead; |in |between operations |no call)", text), text
        assert re.search(
            r"\n  rank 1: dead; ((was in|its last call was) [a-z ]+ \(call \d+\)|it made no call)", text
        ), text
        assert seconds < DEAD_S + BUSY_S, seconds
    assert names_of(pids) == []


def stop_rank_1(rank: int, world: int, timeout_s: float) -> tuple[str, str, str]:
    dist.barrier()  # the start of new processes must not count towards the deadline
    d = dispatcher(rank, world, timeout_s=timeout_s)
    assert step_is_right(d, rank, world, 4)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    x_TD, ids_TK = torch.ones(3, HIDDEN), torch.zeros(3, TOP_K, dtype=torch.int64)
    error = caught(lambda: d.dispatch(x_TD, ids_TK, label="moe.5"))
    again = caught(lambda: d.dispatch(x_TD, ids_TK))
    return type(error).__name__, str(error), str(again)


def test_a_stopped_rank_is_a_timeout_that_names_the_state_of_every_rank(pool3: RankPool) -> None:
    def check(timeout_s: float) -> None:
        results = pool3.run(stop_rank_1, timeout_s, expect_dead={1})
        for rank in (0, 2):
            kind, text, again = results[rank]
            assert kind == PeerTimeout.__name__ and again == text
            assert text.startswith(f"rank {rank} in dispatch (call 5) of layer 'moe.5' waited for rank 1")
            assert re.search(
                r"\n  rank 1: between operations for \d+\.\d s, after dispatch backward \(call 4\) of layer 'moe.3'",
                text,
            )
            other = 2 - rank
            assert f"\n  rank {other}: in dispatch (call 5) of layer 'moe.5', waiting for rank 1 since" in text

    with_longer_deadline(check, 3.0, 30.0)


def raise_in_the_middle(rank: int, world: int, _: None) -> tuple[str, str]:
    """Rank 1's address range is too small to map the grown heap of rank 0."""
    d = dispatcher(rank, world, dist.new_group(), RESERVE_BYTES=(8 << 20) if rank == 1 else (1 << 30))
    x_TD = torch.ones(6000, HIDDEN * 8)
    error = caught(lambda: d.dispatch(x_TD, torch.zeros(6000, 1, dtype=torch.int64)))
    return type(error).__name__, str(error)


def test_an_error_in_the_middle_of_an_operation_reaches_every_rank(pool3: RankPool) -> None:
    results = pool3.run(raise_in_the_middle)
    assert results[1][0] == HeapError.__name__ and "rank 0" in results[1][1]
    for rank in (0, 2):
        assert (
            results[rank][0] == PeerError.__name__ and "rank 1 aborted the operation after an error" in results[rank][1]
        )


def interrupt_rank_0(rank: int, world: int, _: None) -> str:
    """A signal's Python handler raises while rank 0 waits for rank 1, which does not call dispatch."""
    d = dispatcher(rank, world, dist.new_group(), timeout_s=60.0)

    earlier_places: set[tuple[int, int]] = set()

    def interrupt(kind: int, frame: FrameType | None) -> None:
        assert frame is not None
        place = (id(frame), frame.f_lasti)
        if place in earlier_places:
            raise KeyboardInterrupt  # the frame has not advanced since an earlier signal, so it is waiting
        earlier_places.add(place)

    x_TD, ids_TK = torch.ones(3, HIDDEN), torch.zeros(3, TOP_K, dtype=torch.int64)
    if rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        with pytest.raises(KeyboardInterrupt):
            d.dispatch(x_TD, ids_TK)
        signal.setitimer(signal.ITIMER_REAL, 0)
    dist.barrier()
    return str(caught(lambda: d.dispatch(x_TD, ids_TK)))


def test_ctrl_c_ends_a_wait_and_the_peers_get_an_error(pool2: RankPool) -> None:
    own_error, peer_error = pool2.run(interrupt_rank_0)
    assert own_error.startswith("rank 0 aborted an operation after an error")
    assert "rank 0 aborted the operation after an error" in peer_error


# --- counters, threads, forks ---


@on_ranks(2)
@pytest.mark.parametrize("first", [2**32 - 6, 2**32 - 1, 2**31 - 9])
def test_counters_may_wrap(rank: int, world: int, first: int) -> None:
    d = dispatcher(rank, world, dist.new_group(), FIRST_PROGRESS=first)
    assert all(step_is_right(d, rank, world, step) for step in range(6))


@on_ranks(8)
def test_more_ranks_than_cores_is_normal(rank: int, world: int) -> None:
    d = dispatcher(rank, world, dist.new_group())
    assert all(step_is_right(d, rank, world, step) for step in range(6))


@on_ranks(2)
def test_threads_with_a_group_each_do_not_disturb_each_other(rank: int, world: int) -> None:
    """Use two groups in two threads. The groups share nothing, so all results must be correct."""
    dispatchers = [dispatcher(rank, world, dist.new_group()) for _ in range(2)]
    correct: list[bool] = []

    def run(d: SharedMemoryDispatcher, first: int) -> None:
        correct.extend(step_is_right(d, rank, world, first + i) for i in range(20))

    threads = [threading.Thread(target=run, args=(d, 100 * i)) for i, d in enumerate(dispatchers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert correct == [True] * 40


@on_ranks(2)
def test_threads_of_one_group_get_right_rows_or_a_mismatch(rank: int, world: int) -> None:
    """Two threads race on one group. The order of calls may differ between ranks, which must raise or be correct."""
    group = dist.new_group()
    dispatchers = [dispatcher(rank, world, group) for _ in range(2)]
    counts = [0, 0]  # wrong results, calls

    def run(thread: int) -> None:
        for i in range(40):
            x_TD, ids_TK, _ = inputs(rank, world, 50 * thread + i)[rank]
            all_inputs = inputs(rank, world, 50 * thread + i)
            expected = torch.cat(
                [x[(ids == e).nonzero()[:, 0]] for e in dispatchers[thread].local_experts for x, ids, _ in all_inputs]
            )
            try:
                dispatched = dispatchers[thread].dispatch(x_TD, ids_TK, label=f"thread {thread}, {i}")
                counts[0] += not torch.equal(dispatched.rows_RD, expected)
            except RankMismatch:
                pass
            counts[1] += 1

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [0, 80]


@on_ranks(2)
def test_a_forked_child_gets_an_error_and_its_parent_still_works(rank: int, world: int) -> None:
    d = dispatcher(rank, world)
    x_TD, ids_TK, weights_TK = inputs(rank, world, 3)[rank]
    dispatched = d.dispatch(x_TD, ids_TK)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            error = caught(lambda: d.combine(dispatched.rows_RD, weights_TK, dispatched.handle))
            code = 0 if "a forked child must create its own" in str(error) else 2
            del dispatched, d
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    y_TD = d.combine(dispatched.rows_RD, weights_TK, dispatched.handle)
    kept_weights = (ids_TK >= 0).float() * weights_TK
    assert status == 0 and step_is_right(d, rank, world, 5)
    torch.testing.assert_close(y_TD, x_TD * kept_weights.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_dispatchers_of_one_group_share_its_heap(rank: int, world: int) -> None:
    group = dist.new_group()
    first = dispatcher(rank, world, group)
    assert dispatcher(rank, world, group).shared is first.shared
    assert heap_of(communicator_of(group), 60.0) is first.shared


def test_a_rank_that_raises_between_operations_is_a_timeout_for_its_peer() -> None:
    def check(timeout_s: float) -> None:
        with RankPool(2) as pool, pytest.raises(RankFailure) as failed:
            pool.run(raise_before_combine, timeout_s, grace=60)
        assert failed.value.errors[1][0] == "ValueError"
        assert failed.value.errors[0][0] == PeerTimeout.__name__

    with_longer_deadline(check, 2.0, 30.0)


def raise_before_combine(rank: int, world: int, timeout_s: float) -> None:
    dist.barrier()  # the start of new processes must not count towards the deadline
    d = dispatcher(rank, world, timeout_s=timeout_s)
    dispatched = d.dispatch(torch.ones(2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64))
    if rank == 1:
        raise ValueError("the experts failed")
    d.combine(dispatched.rows_RD, torch.ones(2, 1), dispatched.handle)
