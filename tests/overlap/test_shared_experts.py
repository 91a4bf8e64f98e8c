"""dispatch_matmul and matmul_combine between ranks that share memory: the bits of serial execution, and errors."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.comm.group_setup import communicator_of, heap_of
from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.backends.native import NativeOutgoingRows, SharedMemoryDispatcher
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.wire_dtype import WireDtypes
from moe_comm.errors import (
    ConfigError,
    HeapError,
    InputError,
    PeerDied,
    PeerError,
    PeerTimeout,
    RankMismatch,
    RoutingError,
)
from moe_comm.kernels.cpu_gemm import ExpertWeights
from moe_comm.overlap.executors.shared_rows import SharedDispatch
from moe_comm.overlap.expert_operators import dispatch_matmul, matmul_combine
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.memory import block
from moe_comm.topology import ExpertPlacement
from tests.dispatch.workers import heap_constants
from tests.layers.reference import draw
from tests.overlap.common import combine_reference, dispatch_reference
from tests.pool import RankPool, on_ranks, with_longer_deadline

D, F = 16, 32
EIGHT_CHUNKS = Overlap(8, 1)
ROUTINGS = ("random", "one expert", "no tokens on rank 0", "dropped", "every expert", "nothing")


def _routing(kind: str, rank: int, experts: int, top_k: int = 2) -> Tensor:
    """Return [T, K] ids; T differs between ranks."""
    tokens = 0 if kind == "no tokens on rank 0" and rank == 0 else 23 + 5 * rank
    top_k = experts if kind == "every expert" else top_k
    generator = torch.Generator().manual_seed(7 * rank + len(kind))
    if kind == "one expert":
        return torch.full((tokens, top_k), experts - 1)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    if kind == "dropped":
        ids[torch.rand(ids.shape, generator=generator) < 0.4] = -1
    return torch.full_like(ids, -1) if kind == "nothing" else ids


def _dispatcher(
    rank: int, world: int, experts: int, timeout_s: float = 60, group: ProcessGroup | None = None, **options: Any
) -> SharedMemoryDispatcher:
    group = group or dist.group.WORLD
    assert group is not None
    return SharedMemoryDispatcher(
        ExpertPlacement.of(experts, world), group, rank, DispatchOptions(timeout_s=timeout_s, **options)
    )


def _leaves(rank: int, local: int, ids: Tensor, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tokens, top_k = ids.shape
    return {
        "x": draw(tokens, D, seed=rank, dtype=dtype),
        "weights": torch.softmax(draw(tokens, top_k, seed=20 + rank), -1),
        "w1": draw(local, F, D, seed=40 + rank, dtype=dtype),
        "w2": draw(local, D, F, seed=60 + rank, dtype=dtype),
    }


def _dispatch_and_combine(
    dispatcher: Any, ids: Tensor, overlap: Overlap, x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor
) -> Tensor:
    h, dispatch = dispatch_matmul(dispatcher, x, ids, w1, overlap)
    return matmul_combine(torch.relu(h), w2, weights, dispatch)


def _gradients(leaves: dict[str, Tensor], forward: Callable[..., Tensor], required: Any = None) -> dict[str, Tensor]:
    inputs = {n: value.clone().requires_grad_(required is None or n in required) for n, value in leaves.items()}
    y = forward(**inputs)
    y.backward(draw(*y.shape, seed=99, dtype=y.dtype))
    return {"y": y.detach()} | {name: value.grad for name, value in inputs.items() if value.grad is not None}


def _compare_transports(rank: int, world: int, arg: tuple[int, torch.dtype, WireDtypes, tuple[str, ...]]) -> None:
    experts, dtype, wire_dtypes, kinds = arg
    dispatcher = _dispatcher(rank, world, experts, wire_dtypes=wire_dtypes)
    group = dist.group.WORLD
    assert group is not None
    over_gloo = AllToAllDispatcher(dispatcher.placement, group, rank, dispatcher.options)
    for kind in kinds:
        ids = _routing(kind, rank, experts)
        leaves = _leaves(rank, len(dispatcher.local_experts), ids, dtype)
        expected = _gradients(leaves, partial(_dispatch_and_combine, dispatcher, ids, Overlap(1)))
        assert set(expected) == {"y", *leaves}
        cases: list[tuple[Dispatcher, Overlap]] = [
            (dispatcher, EIGHT_CHUNKS),
            (dispatcher, Overlap(2, 1)),
            *((over_gloo, Overlap(chunks, 1)) for chunks in (1, 2, 3, 8)),
        ]
        for used_dispatcher, overlap in cases:
            actual = _gradients(leaves, partial(_dispatch_and_combine, used_dispatcher, ids, overlap))
            for name, value in expected.items():
                assert torch.equal(actual[name], value), f"{name} with {used_dispatcher.name}, {overlap.chunks}, {kind}"
        with torch.no_grad():
            h, dispatch = dispatch_matmul(dispatcher, leaves["x"], ids, leaves["w1"], EIGHT_CHUNKS)
            assert isinstance(dispatch, SharedDispatch)
            assert torch.equal(h, dispatch_reference(dispatcher, leaves["x"], ids, leaves["w1"]))
            y = matmul_combine(h, leaves["w2"], leaves["weights"], dispatch)
            assert torch.equal(y, combine_reference(h, leaves["w2"], leaves["weights"], dispatch))
            del h, y, dispatch
        del expected, actual
    assert dispatcher.shared.heap.blocks == 0


SAME = WireDtypes()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shared_memory_has_the_bits_of_serial_execution_and_of_all_to_all(
    world: int, request: pytest.FixtureRequest
) -> None:
    if world == 1:
        with RankPool(1) as pool:
            pool.run(_compare_transports, (5, torch.float32, SAME, ROUTINGS))
        return
    request.getfixturevalue(f"pool{world}").run(_compare_transports, (7, torch.float32, SAME, ROUTINGS))


@pytest.mark.parametrize(
    "arg",
    [
        (5, torch.bfloat16, SAME, ("random", "dropped")),
        (1, torch.float32, SAME, ("random",)),
        (4, torch.float32, WireDtypes("fp8_block", "bf16", "bf16", "fp8_token"), ("random",)),
    ],
    ids=["bf16", "a rank without experts", "wire dtypes"],
)
def test_the_bits_are_equal_in_other_dtypes_placements_and_wire_dtypes(arg: Any, pool2: RankPool) -> None:
    pool2.run(_compare_transports, arg)


def test_the_bits_are_equal_on_8_ranks() -> None:
    with RankPool(8) as pool:
        pool.run(_compare_transports, (11, torch.float32, SAME, ("random",)), timeout=120)


@on_ranks(2)
def test_results_agree_with_float64(rank: int, world: int) -> None:
    """Compare one rank's tokens with float64. All ranks know the weights of all experts."""
    dispatcher = _dispatcher(rank, world, 4)
    ids = _routing("random", rank, 4)
    leaves = _leaves(rank, 2, ids)
    w1 = torch.cat([draw(2, F, D, seed=40 + r) for r in range(world)])
    w2 = torch.cat([draw(2, D, F, seed=60 + r) for r in range(world)])

    def plain(x: Tensor, weights: Tensor) -> Tensor:
        h = torch.relu(torch.einsum("td,tkfd->tkf", x, w1.to(x.dtype)[ids]))
        return torch.einsum("tkf,tkdf,tk->td", h, w2.to(x.dtype)[ids], weights)

    expected = _gradients({name: leaves[name].double() for name in ("x", "weights")}, plain)
    actual = _gradients(leaves, partial(_dispatch_and_combine, dispatcher, ids, EIGHT_CHUNKS))
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].double(), value, rtol=1e-5, atol=1e-4)


def _compare_partial_gradients(rank: int, world: int, _: Any) -> None:
    dispatcher = _dispatcher(rank, world, 4)
    ids = _routing("random", rank, 4)
    leaves = _leaves(rank, 2, ids)
    all_grads = _gradients(leaves, partial(_dispatch_and_combine, dispatcher, ids, EIGHT_CHUNKS))
    for name in leaves:
        partial_grads = _gradients(leaves, partial(_dispatch_and_combine, dispatcher, ids, EIGHT_CHUNKS), {name})
        assert set(partial_grads) == {"y", name}
        assert torch.equal(partial_grads[name], all_grads[name]), name
    inputs = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    y = _dispatch_and_combine(dispatcher, ids, EIGHT_CHUNKS, **inputs)
    for _ in range(2):
        again = torch.autograd.grad(y, list(inputs.values()), draw(*y.shape, seed=99), retain_graph=True)
        assert all(torch.equal(a, all_grads[name]) for a, name in zip(again, inputs, strict=True))


def test_each_gradient_can_be_computed_alone_and_twice(pool2: RankPool) -> None:
    pool2.run(_compare_partial_gradients)


@on_ranks(4)
def test_serial_and_pipelined_ranks_work_together(rank: int, world: int) -> None:
    """Rank 1 runs serially; the others run pipelined."""
    dispatcher = _dispatcher(rank, world, 5)
    ids = _routing("random", rank, 5)
    leaves = _leaves(rank, len(dispatcher.local_experts), ids)
    overlap_of_rank = Overlap(1) if rank == 1 else EIGHT_CHUNKS
    for required in (None, ("x",), ("w1", "w2"), ("weights",)):
        mixed = _gradients(leaves, partial(_dispatch_and_combine, dispatcher, ids, overlap_of_rank), required)
        expected = _gradients(leaves, partial(_dispatch_and_combine, dispatcher, ids, EIGHT_CHUNKS), required)
        assert all(torch.equal(mixed[name], value) for name, value in expected.items())
    with torch.no_grad():
        assert torch.equal(
            _dispatch_and_combine(
                dispatcher, ids, overlap_of_rank, **{n: v.requires_grad_() for n, v in leaves.items()}
            ),
            expected["y"],
        )


def _delay_own_rows(rank: int, world: int, path: Path) -> None:
    """Rank 1 computes its own rows only after rank 0 has its sum, so peers must not wait for them."""
    store = dist.FileStore(str(path), world)
    dispatcher = _dispatcher(rank, world, 8)
    ids = _routing("random", rank, 8)
    leaves = _leaves(rank, 2, ids)
    h, dispatch = dispatch_matmul(dispatcher, leaves["x"], ids, leaves["w1"], EIGHT_CHUNKS)
    assert isinstance(dispatch, SharedDispatch)
    own_rows = {row_range.rows.start for row_range in dispatch.segments.own}
    multiply = ExpertWeights.multiply

    def gemm(weights: ExpertWeights, rows: Tensor, out: Tensor, *rest: Any) -> None:
        if rank == 1 and out.storage_offset() // D in own_rows:
            store.wait(["summed"])
        multiply(weights, rows, out, *rest)

    summed = NativeOutgoingRows.sum

    def sum_and_notify(leaving: NativeOutgoingRows, weights: Tensor | None) -> Tensor:
        y = summed(leaving, weights)
        if rank == 0:
            store.set("summed", "")
        return y

    with (
        mock.patch.object(ExpertWeights, "multiply", gemm),
        mock.patch.object(NativeOutgoingRows, "sum", sum_and_notify),
    ):
        y = matmul_combine(h, leaves["w2"], leaves["weights"], dispatch)
    assert torch.equal(y, combine_reference(h, leaves["w2"], leaves["weights"], dispatch))


def test_a_rank_does_not_wait_for_the_own_rows_of_its_peers(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(_delay_own_rows, tmp_path / "store")


def _call_with_bad_input(rank: int, world: int, arg: tuple[str, str]) -> str:
    fault, backend = arg
    shared = _dispatcher(rank, world, 8)
    over_gloo = AllToAllDispatcher(shared.placement, dist.group.WORLD, rank, shared.options)
    dispatcher = shared if backend == "shared_memory" else over_gloo
    ids = _routing("random", 0, 8)
    leaves = _leaves(rank, 2, ids)
    x, w1, w2, weights = leaves["x"], leaves["w1"], leaves["w2"], leaves["weights"]
    faulty = rank == 1
    error_name = "nothing"
    try:
        if faulty and fault == "width":
            w1 = w1[:, :, :-1]
        if faulty and fault == "id":
            ids[0, 0] = 8
        if faulty and fault == "dtype":
            x, w1 = x.bfloat16(), w1.bfloat16()
        if faulty and fault == "float64":
            x, w1 = x.double(), w1.double()
        if faulty and fault == "other hidden":
            x, w1 = x[:, :-1], w1[:, :, :-1]
        h, dispatch = dispatch_matmul(dispatcher, x, ids, w1, EIGHT_CHUNKS)
        if faulty and fault == "last width":
            w2 = w2[:, :-1]
        if faulty and fault == "weights":
            weights = weights[:-1]
        if faulty and fault == "gradient":
            weights = weights.clone().requires_grad_()
        if faulty and fault == "operation":
            dispatch_matmul(dispatcher, x, ids, w1, EIGHT_CHUNKS)
        matmul_combine(h, w2, weights, dispatch)
    except (InputError, RoutingError, RankMismatch) as error:
        error_name = type(error).__name__
    valid = _leaves(rank, 2, _routing("random", 0, 8))  # the next call works
    _dispatch_and_combine(dispatcher, _routing("random", 0, 8), EIGHT_CHUNKS, **valid)
    return error_name


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("width", "InputError"),
        ("id", "RoutingError"),
        ("dtype", "RankMismatch"),
        ("float64", "InputError"),
        ("other hidden", "RankMismatch"),
        ("last width", "InputError"),
        ("weights", "InputError"),
        ("gradient", "RankMismatch"),
        ("operation", "RankMismatch"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all_and_the_next_call_works(fault: str, error: str, pool4: RankPool) -> None:
    assert set(pool4.run(_call_with_bad_input, (fault, "shared_memory"))) == {error}
    if fault not in ("float64", "gradient", "operation"):
        assert set(pool4.run(_call_with_bad_input, (fault, "all_to_all"))) == {error}


@on_ranks(2)
def test_group_scales_are_refused(rank: int, world: int) -> None:
    wire_dtypes = WireDtypes(combine_backward="fp8_group")
    dispatcher = _dispatcher(rank, world, 4, wire_dtypes=wire_dtypes, deterministic=False)
    ids = _routing("random", rank, 4)
    leaves = _leaves(rank, 2, ids)
    with pytest.raises(ConfigError, match="scales for each row"):
        dispatch_matmul(dispatcher, leaves["x"], ids, leaves["w1"], EIGHT_CHUNKS)


@on_ranks(2)
def test_a_full_heap_on_one_rank_raises_on_all_and_the_next_call_works(rank: int, world: int) -> None:
    """Fill the heap of rank 1, so that there is no memory for its results."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    with heap_constants(INITIAL_BYTES=0, RESERVE_BYTES=4 << 20):
        shared_heap = heap_of(communicator_of(group), 60.0)
    dispatcher = SharedMemoryDispatcher(ExpertPlacement.of(4, world), group, rank, DispatchOptions(timeout_s=60))
    ids = _routing("random", rank, 4)
    leaves = _leaves(rank, 2, ids)
    h, dispatch = dispatch_matmul(dispatcher, leaves["x"], ids, leaves["w1"], EIGHT_CHUNKS)
    blocks = []
    while rank == 1:
        try:
            blocks.append(block(shared_heap.heap, 1, 256, torch.float32))
        except HeapError:
            break
    with pytest.raises(HeapError):
        matmul_combine(h, leaves["w2"], leaves["weights"], dispatch)
    blocks.clear()
    y = matmul_combine(h, leaves["w2"], leaves["weights"], dispatch)
    assert torch.equal(y, combine_reference(h, leaves["w2"], leaves["weights"], dispatch))
    del h
    gc.collect()  # the frames of the error hold tensors
    assert shared_heap.heap.blocks == 0


PHASES = ("dispatch", "combine", "combine backward", "dispatch backward")


def _fail_in_phase(rank: int, world: int, arg: tuple[str, str]) -> None:
    """Rank 1 raises or exits in a GEMM of the pass ``phase``. The others raise, in this pass or in the next."""
    phase, failure = arg
    dispatcher = _dispatcher(rank, world, 2 * world, group=dist.new_group(backend="gloo"))
    ids = _routing("random", rank, 2 * world)
    leaves = {name: value.requires_grad_() for name, value in _leaves(rank, 2, ids).items()}
    calls: list[str] = []
    start = dispatcher.operation
    multiply = ExpertWeights.multiply
    current = "dispatch"

    def record_phase(op: str, *args: Any, **fields: Any) -> Any:
        nonlocal current
        current = op
        return start(op, *args, **fields)

    def gemm(*args: Any) -> None:
        calls.append(current)
        if rank == 1 and current == phase and calls.count(current) == 2:
            if failure == "dies":
                os._exit(3)
            raise ZeroDivisionError("in a product")
        multiply(*args)

    expected = ZeroDivisionError if rank == 1 else PeerDied if failure == "dies" else PeerError
    with (  # noqa: PT012
        mock.patch.object(dispatcher, "operation", record_phase),
        mock.patch.object(ExpertWeights, "multiply", gemm),
        pytest.raises(expected, match="in a product" if rank == 1 else "rank 1"),
    ):
        _dispatch_and_combine(dispatcher, ids, EIGHT_CHUNKS, **leaves).sum().backward()
        # If the pass had pushed its rows before the error, the next call raises.
        dispatcher.dispatch(leaves["x"].detach(), ids)
    with pytest.raises(PeerError):
        dispatcher.dispatch(leaves["x"].detach(), ids)


@pytest.mark.parametrize("phase", PHASES)
def test_an_error_in_one_ranks_gemm_reaches_the_others(phase: str, pool4: RankPool) -> None:
    pool4.run(_fail_in_phase, (phase, "raises"))


@pytest.mark.parametrize("phase", ["combine", "combine backward"])
def test_a_rank_that_exits_in_a_gemm_is_named_on_the_others(phase: str) -> None:
    with RankPool(3) as pool:
        pids = pool.pids
        pool.run(_fail_in_phase, (phase, "dies"), expect_dead={1})
    # Processes of other tests have segments, too.
    assert not [path for pid in pids for path in Path("/dev/shm").glob(f"moe_comm.{pid}.*")]


def _hang_before_combine(rank: int, world: int, arg: tuple[Path, float]) -> None:
    path, timeout_s = arg
    store = dist.FileStore(str(path), world)
    dispatcher = _dispatcher(rank, world, 2 * world, timeout_s=timeout_s, group=dist.new_group(backend="gloo"))
    ids = _routing("random", rank, 2 * world)
    leaves = _leaves(rank, 2, ids)
    h, dispatch = dispatch_matmul(dispatcher, leaves["x"], ids, leaves["w1"], EIGHT_CHUNKS)
    dist.barrier()
    if rank == 1:
        store.wait(["0", "2", "3"])
        return
    with pytest.raises(PeerTimeout, match="waited for rank 1"):
        matmul_combine(h, leaves["w2"], leaves["weights"], dispatch)
    store.set(str(rank), "")


def test_a_rank_that_hangs_is_named_at_the_deadline(pool4: RankPool, tmp_path: Path) -> None:
    def check(timeout_s: float) -> None:
        pool4.run(_hang_before_combine, (tmp_path / f"store {timeout_s}", timeout_s))

    with_longer_deadline(check, 3.0, 30.0)
