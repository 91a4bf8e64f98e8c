"""The order of transfers and GEMMs, for every operator and executor that overlaps them.

    arrivals     rank 1 delays its last transfer until rank 0 has computed the rows that it received before
    departures   rank 0 delays a GEMM until rank 1 has the results of the GEMMs before it

The ranks wait for each other through a store, so a version that receives everything before it computes, or computes
everything before it sends, waits until the store's deadline and fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.channel import Channel, PendingTensor
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.backends.native import NativeIncomingRows, NativeOutgoingRows, SharedMemoryDispatcher
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.errors import HeapError
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.cpu_gemm import ExpertWeights
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.overlap.chunk_plan import RowRange, RowSegments
from moe_comm.overlap.executors import pipelined
from moe_comm.overlap.executors.choice import dispatch_rows
from moe_comm.overlap.executors.pipelined import run_ranges
from moe_comm.overlap.executors.transport import RowReturn, RowSend
from moe_comm.overlap.expert_operators import dispatch_matmul, matmul_combine
from moe_comm.overlap.linear import gather_matmul, matmul_scatter
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.ulysses import matmul_swap, swap_matmul
from moe_comm.topology import ExpertPlacement
from tests.layers.reference import draw
from tests.pool import RankPool, on_ranks
from tests.support.launches import HookedLauncher

D, F, ROWS, TOKENS = 16, 32, 64, 8
CHUNKED = Overlap(2, 1, backend="chunked", executor="pipelined")
MIN_ELEMENTS = 64
"""Minimum number of elements of a transfer of rows. Handshakes and weights are smaller."""

Run = Callable[[int], Tensor]
"""A rank's forward pass."""

GATED = activation_of("geglu")
"""GEMMs of SwiGLU experts are not separate calls."""


@dataclass
class Gate:
    """An event of one rank that another rank waits for."""

    store: dist.Store
    name: str
    timeout_s: float = 60.0
    used: bool = False

    def open(self) -> None:
        self.used = True
        self.store.set(self.name, "")

    def wait(self) -> None:
        self.used = True
        self.store.wait([self.name], timedelta(seconds=self.timeout_s))


@contextlib.contextmanager
def _transfers(before: Callable[[int], None], received: Callable[[int], None]) -> Iterator[None]:
    """Call ``before`` before this rank starts its n-th transfer of rows, and ``received`` after it has the result."""
    count = 0

    def recording(real: Callable[..., PendingTensor]) -> Callable[..., PendingTensor]:
        def start(self: Channel, rows: Tensor, *args: Any) -> PendingTensor:
            nonlocal count
            if rows.numel() < MIN_ELEMENTS or not rows.is_floating_point():
                return real(self, rows, *args)
            number, count = count, count + 1
            before(number)
            pending = real(self, rows, *args)

            def wait() -> Tensor:
                tensor = pending()
                received(number)
                return tensor

            return replace(pending, wait=wait)

        return start

    with (
        mock.patch.object(Channel, "start_all_to_all", recording(Channel.start_all_to_all)),
        mock.patch.object(Channel, "start_all_gather", recording(Channel.start_all_gather)),
    ):
        yield


@contextlib.contextmanager
def _gemms(before: Callable[[int], None], after: Callable[[int], None]) -> Iterator[None]:
    """Call ``before`` and ``after`` around this rank's n-th GEMM."""
    count = 0

    def recording(real: Callable[..., Any]) -> Callable[..., Any]:
        def gemm(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            number, count = count, count + 1
            before(number)
            result = real(*args, **kwargs)
            after(number)
            return result

        return gemm

    with mock.patch.object(ExpertWeights, "multiply", recording(ExpertWeights.multiply)):
        yield


def _do_nothing(_: int) -> None:
    pass


def _linear(operator: Callable[..., Tensor], rows: int, columns: int, weight: tuple[int, int]) -> Run:
    def run(rank: int) -> Tensor:
        x = draw(rows, columns, seed=rank).requires_grad_()
        return operator(x, draw(*weight, seed=9), dist.group.WORLD, CHUNKED)

    return run


def _dispatcher(rank: int, world: int) -> AllToAllDispatcher:
    group = dist.group.WORLD
    assert group is not None
    return AllToAllDispatcher(ExpertPlacement.of(2 * world, world), group, rank, DispatchOptions(timeout_s=90))


def _other_ranks_experts(rank: int) -> Tensor:
    """Return ids [T, 1] for two ranks with two experts each: all tokens go to the other rank.

    So no GEMM computes own rows, and a chunk is one expert.
    """
    return (torch.arange(TOKENS) % 2 + 2 * (1 - rank)).unsqueeze(1)


def _run_dispatch_matmul(rank: int) -> Tensor:
    x, w = draw(TOKENS, D, seed=rank).requires_grad_(), draw(2, F, D, seed=9)
    return dispatch_matmul(_dispatcher(rank, 2), x, _other_ranks_experts(rank), w, CHUNKED)[0]


def _prepare_matmul_combine(rank: int) -> Callable[[], Tensor]:
    h, dispatch = dispatch_matmul(
        _dispatcher(rank, 2), draw(TOKENS, D, seed=rank), _other_ranks_experts(rank), draw(2, F, D, seed=9), CHUNKED
    )
    return lambda: matmul_combine(h.requires_grad_(), draw(2, D, F, seed=8), torch.ones(TOKENS, 1), dispatch)


def _layer(rank: int) -> Tensor:
    x, ids = draw(TOKENS, D, seed=rank).requires_grad_(), _other_ranks_experts(rank)
    call = dispatch_rows(_dispatcher(rank, 2), x, ids, torch.ones(TOKENS, 1), CHUNKED, width=F)
    mlp = ExpertMLP((draw(2, 2 * F, D, seed=9), draw(2, D, F, seed=8), None, None), GATED)
    return call.combine(call.compute(call.rows, call.handle.rows_per_expert, mlp))


RUNS: dict[str, Run] = {
    "gather_matmul": _linear(gather_matmul, ROWS, D, (F, D)),
    "matmul_scatter": _linear(matmul_scatter, 2 * ROWS, D, (F, D)),
    "swap_matmul": _linear(swap_matmul, 2 * ROWS, D, (F, 2 * D)),
    "matmul_swap": _linear(matmul_swap, ROWS, D, (F, D)),
    "dispatch_matmul": _run_dispatch_matmul,
    "matmul_combine": lambda rank: _prepare_matmul_combine(rank)(),
    "layer": _layer,
}


def _prepare_pass(rank: int, name: str, direction: str) -> Callable[[], object]:
    """Return the pass of an operator to observe, after running the passes before it."""
    if direction == "forward":
        return _prepare_matmul_combine(rank) if name == "matmul_combine" else lambda: RUNS[name](rank)
    y = RUNS[name](rank)
    return lambda: y.backward(torch.ones_like(y))


def _check_arrivals(rank: int, world: int, arg: tuple[str, str, int, Path]) -> None:
    name, direction, gemms, path = arg
    configure_collectives(CollectiveOptions(shared_memory=False))
    try:
        gate = Gate(dist.FileStore(str(path), world), f"{name} {direction}")
        run = _prepare_pass(rank, name, direction)

        def before(number: int) -> None:
            if rank == 1 and number == 1:
                gate.wait()

        def after(number: int) -> None:
            if rank == 0 and number + 1 == gemms:
                gate.open()

        with _transfers(before, _do_nothing), _gemms(_do_nothing, after):
            run()
        assert gate.used
    finally:
        configure_collectives(CollectiveOptions())


@pytest.mark.parametrize(
    ("name", "direction", "gemms"),
    [
        ("gather_matmul", "forward", 2),  # the GEMMs of own rows and of the first chunk
        ("matmul_scatter", "backward", 2),
        ("swap_matmul", "forward", 1),
        ("matmul_swap", "backward", 1),
        ("dispatch_matmul", "forward", 1),
        ("matmul_combine", "backward", 1),
        ("layer", "forward", 2),
        ("layer", "backward", 2),
    ],
)
def test_received_rows_are_computed_before_the_rest_is_received(
    name: str, direction: str, gemms: int, pool2: RankPool, tmp_path: Path
) -> None:
    pool2.run(_check_arrivals, (name, direction, gemms, tmp_path / "store"), timeout=120)


def _check_departures(rank: int, world: int, arg: tuple[str, str, int, int, Path]) -> None:
    name, direction, gemm, transfer, path = arg
    configure_collectives(CollectiveOptions(shared_memory=False))
    try:
        gate = Gate(dist.FileStore(str(path), world), f"{name} {direction}")
        run = _prepare_pass(rank, name, direction)

        def before(number: int) -> None:
            if rank == 0 and number == gemm:
                gate.wait()

        def received(number: int) -> None:
            if rank == 1 and number == transfer:
                gate.open()

        with _transfers(_do_nothing, received), _gemms(before, _do_nothing):
            run()
        assert gate.used
    finally:
        configure_collectives(CollectiveOptions())


@pytest.mark.parametrize(
    ("name", "direction", "gemm", "transfer"),
    [
        ("matmul_scatter", "forward", 2, 0),  # a chunk has two GEMMs, one for each rank
        ("gather_matmul", "backward", 2, 0),
        ("matmul_swap", "forward", 1, 0),
        ("swap_matmul", "backward", 1, 0),
        ("dispatch_matmul", "backward", 1, 0),
        ("matmul_combine", "forward", 1, 0),
        ("layer", "forward", 2, 2),  # after the two chunks of dispatch
        ("layer", "backward", 2, 2),
    ],
)
def test_results_are_sent_before_the_rest_is_computed(
    name: str, direction: str, gemm: int, transfer: int, pool2: RankPool, tmp_path: Path
) -> None:
    pool2.run(_check_departures, (name, direction, gemm, transfer, tmp_path / "store"), timeout=120)


def _receive_all_first(rank: int, world: int, path: Path) -> None:
    """Replace the executor by one that receives all rows before it computes.

    Rank 0 then waits for rank 1, which waits for the first GEMM of rank 0, so rank 1 must time out.
    """

    def receive_all_first(
        segments: RowSegments, send: RowSend, back: RowReturn, compute: Callable[[RowRange], None], *_: Any
    ) -> None:
        remaining = sum(map(len, segments.groups))
        while remaining:
            remaining -= len(send.poll(wait=True))
        run_ranges(segments, None, back, compute)

    gate = Gate(dist.FileStore(str(path), world), "never", 2.0)
    timed_out: list[bool] = []

    def before(number: int) -> None:
        if rank == 1 and number == 1:
            try:
                gate.wait()
            except RuntimeError:  # the store's deadline has passed
                timed_out.append(True)

    with (
        mock.patch.object(pipelined, "run_ranges", receive_all_first),
        _transfers(before, _do_nothing),
        _gemms(_do_nothing, lambda number: gate.open() if rank == 0 else None),
    ):
        _layer(rank)
    assert timed_out == [True] * rank


def test_receiving_all_rows_before_computing_is_detected(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(_receive_all_first, tmp_path / "store", timeout=120)


# --- through shared memory ---

SHARED = Overlap(8, 1, executor="pipelined")


def _shared_layer(rank: int, world: int, dispatcher: Dispatcher | None = None) -> Tensor:
    """Run a layer in which every token has an expert on every rank; each rank has one expert."""
    group = dist.group.WORLD
    assert group is not None
    placement = ExpertPlacement.of(world, world)
    dispatcher = dispatcher or SharedMemoryDispatcher(placement, group, rank, DispatchOptions(timeout_s=90))
    x, ids = draw(TOKENS, D, seed=rank).requires_grad_(), torch.arange(world).repeat(TOKENS, 1)
    call = dispatch_rows(dispatcher, x, ids, torch.ones(TOKENS, world), SHARED, width=F)
    mlp = ExpertMLP((draw(1, 2 * F, D, seed=9), draw(1, D, F, seed=8), None, None), GATED)
    return call.combine(call.compute(call.rows, call.handle.rows_per_expert, mlp))


@on_ranks(4)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_rows_of_other_peers_are_computed_while_one_peer_is_late(rank: int, world: int, direction: str) -> None:
    """The last peer's rows are reported complete only after the rows of all other ranks are computed."""
    y = _shared_layer(rank, world) if direction == "backward" else None
    late_peer, computed = (rank - 1) % world, 0
    others = 2 * (world - 1) * TOKENS  # rows of all sources but one, in two GEMMs each
    ready, next_peer, exit_receive = NativeIncomingRows.ready, NativeIncomingRows.next, NativeIncomingRows.__exit__

    def is_ready(arriving: NativeIncomingRows, peer: int) -> bool:
        return (peer != late_peer or computed >= others) and ready(arriving, peer)

    def next_of(arriving: NativeIncomingRows, peers: Sequence[int]) -> int:
        rest = [peer for peer in peers if peer != late_peer]
        assert rest or computed >= others, "must not wait for the last peer while there are rows to compute"
        return next_peer(arriving, rest or peers)

    def checked_exit(arriving: NativeIncomingRows, *error: Any) -> None:
        assert computed >= others or any(error), "must not wait for all peers while there are rows to compute"
        exit_receive(arriving, *error)

    def counted(weights: ExpertWeights, rows: Tensor, *rest: Any) -> None:
        nonlocal computed
        multiply(weights, rows, *rest)
        computed += rows.shape[0]

    multiply = ExpertWeights.multiply
    with (
        mock.patch.object(ExpertWeights, "multiply", counted),
        mock.patch.object(NativeIncomingRows, "ready", is_ready),
        mock.patch.object(NativeIncomingRows, "next", next_of),
        mock.patch.object(NativeIncomingRows, "__exit__", checked_exit),
    ):
        if y is None:
            _shared_layer(rank, world)
        else:
            y.sum().backward()
    assert computed == 2 * world * TOKENS


def _delay_push(rank: int, world: int, path: Path) -> None:
    """The kernel ``push`` of the last rank starts after the other ranks have computed each other's rows."""
    store = dist.FileStore(str(path), world)
    store.set_timeout(timedelta(seconds=90))

    def before(kernel: str) -> None:
        if kernel == "push" and rank == world - 1:
            store.wait([f"computed {other}" for other in range(world - 1)])

    computed = 0

    def counted(weights: ExpertWeights, rows: Tensor, *rest: Any) -> None:
        nonlocal computed
        multiply(weights, rows, *rest)
        computed += rows.shape[0]
        if computed == 2 * (world - 1) * TOKENS:  # rows of all sources but one, in two GEMMs each
            store.set(f"computed {rank}", "")

    multiply = ExpertWeights.multiply
    options = DispatchOptions(timeout_s=90, peer_to_peer=PeerToPeerOptions(emulate=True))
    placement = ExpertPlacement.of(world, world)
    dispatcher = PeerToPeerDispatcher(placement, dist.group.WORLD, rank, options, "cpu", HookedLauncher(before))
    with mock.patch.object(ExpertWeights, "multiply", counted):
        _shared_layer(rank, world, dispatcher)
    assert computed == 2 * world * TOKENS


def test_rows_of_other_peers_are_computed_before_a_late_push_over_peer_to_peer(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(_delay_push, tmp_path / "store", timeout=120)


def _no_room(rank: int, world: int, path: Path) -> None:
    """Rank 1 sends rows that have no room on rank 0 after rank 0 has begun to wait for them."""
    store = dist.FileStore(str(path), world)
    store.set_timeout(timedelta(seconds=90))
    pushed = 0

    def before(kernel: str) -> None:
        nonlocal pushed
        pushed += kernel == "push"
        if kernel == "arrive" and rank == 0:
            store.set("arrive", "")
        if kernel == "push" and rank == 1 and pushed == 1:
            store.wait(["arrive"])

    options = DispatchOptions(timeout_s=90, peer_to_peer=PeerToPeerOptions(emulate=True, heap_bytes=4096))
    placement = ExpertPlacement.of(world, world)
    dispatcher = PeerToPeerDispatcher(placement, dist.group.WORLD, rank, options, "cpu", HookedLauncher(before))
    x, ids = torch.ones(16, 64), torch.zeros(16, 1, dtype=torch.int64)
    with pytest.raises(HeapError, match="rank 0 has no room"):
        dispatch_rows(dispatcher, x, ids, torch.ones(16, 1), SHARED, width=F)
    assert dispatcher.memory.operations.heap.used == 0
    assert dispatcher.dispatch(x[:1], ids[:1]).handle.num_rows == (world if rank == 0 else 0)


def test_memory_is_not_freed_before_rows_without_room_are_sent(pool2: RankPool, tmp_path: Path) -> None:
    pool2.run(_no_room, tmp_path / "store", timeout=120)


def _delay_last_gemm(rank: int, world: int, arg: tuple[str, Path]) -> None:
    """Rank 0 has computed rank 1's rows. It delays its last GEMM until rank 1 has its weighted sum."""
    direction, path = arg
    gate = Gate(dist.FileStore(str(path), world), direction)
    y = _shared_layer(rank, world) if direction == "backward" else None
    sum_rows = NativeOutgoingRows.sum

    def sum_and_open(leaving: NativeOutgoingRows, weights: Tensor | None) -> Tensor:
        result = sum_rows(leaving, weights)
        if rank == 1:
            gate.open()
        return result

    def before(number: int) -> None:
        # Rank 0 computes own rows with or before those of rank 1, then those of rank 2, then those of rank 3.
        if rank == 0 and number == last_gemm:
            gate.wait()

    last_gemm = 4 if world == 4 else 2
    with (
        mock.patch.object(NativeOutgoingRows, "sum", sum_and_open),
        _rows_complete_when_polled(rank, world),
        _gemms(before, _do_nothing),
    ):
        if y is None:
            _shared_layer(rank, world)
        else:
            y.sum().backward()
    assert gate.used or rank > 1


@contextlib.contextmanager
def _rows_complete_when_polled(rank: int, world: int) -> Iterator[None]:
    """Make all rows complete when they are polled, so that the order of GEMMs is fixed."""
    ready = NativeIncomingRows.ready

    def once_complete(arriving: NativeIncomingRows, peer: int) -> bool:
        while not ready(arriving, peer):
            arriving.next([peer])
        return True

    with mock.patch.object(NativeIncomingRows, "ready", once_complete):
        yield


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_peer_gets_its_sum_before_rows_of_other_peers_are_computed(
    direction: str, pool4: RankPool, tmp_path: Path
) -> None:
    pool4.run(_delay_last_gemm, (direction, tmp_path / "store"), timeout=120)


# --- the executor alone ---


class _ScriptedSend(RowSend):
    """Segment 1 completes after the own rows and segments 0 and 2 have been computed."""

    def __init__(self, events: list[str]) -> None:
        self._events, self._left = events, [0, 2, 1]

    def poll(self, wait: bool) -> Sequence[int]:
        assert not wait or len(self._left) == 1, "must not wait while there are rows to compute"
        if len(self._left) == 1 and not {"0:4", "4:8", "12:16"} <= set(self._events):
            return ()
        return (self._left.pop(0),) if self._left else ()


class _RecordingReturn(RowReturn):
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def mark_computed(self, segment: int) -> None:
        self._events.append(f"segment {segment}")

    def result(self, weights_TK: Tensor | None) -> Tensor:
        raise NotImplementedError


def test_segments_are_computed_and_returned_in_order_of_completion() -> None:
    ranges = [(RowRange(0, 4, 8),), (RowRange(1, 8, 12),), (RowRange(2, 12, 16),)]
    segments = RowSegments(ranges, (RowRange(3, 0, 4),), ((0,), (1,), (2,)))
    events: list[str] = []

    def compute(row_range: RowRange) -> None:
        events.append(f"{row_range.first}:{row_range.end}")

    run_ranges(segments, _ScriptedSend(events), _RecordingReturn(events), compute)
    assert events == ["4:8", "segment 0", "12:16", "segment 2", "0:4", "8:12", "segment 1"]
    events.clear()
    run_ranges(segments, None, _RecordingReturn(events), compute)
    assert events == ["4:8", "segment 0", "8:12", "segment 1", "12:16", "segment 2", "0:4"]
