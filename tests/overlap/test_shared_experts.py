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
from moe_comm.comm.shared_heap import SharedOptions
from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.backends.native import OutgoingRows
from moe_comm.dispatch.backends.shared_memory import SharedMemoryDispatcher
from moe_comm.dispatch.base import Dispatcher
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
from moe_comm.kernels import expert_mlp
from moe_comm.overlap.dispatch_matmul import dispatch_matmul, reference as dispatch_reference
from moe_comm.overlap.executors.shared_rows import SharedDispatch
from moe_comm.overlap.matmul_combine import matmul_combine, reference as combine_reference
from moe_comm.overlap.options import Overlap
from moe_comm.runtime.memory import block
from moe_comm.topology import ExpertPlacement
from tests.layers.reference import draw
from tests.pool import RankPool

D, F = 16, 32
CUT = Overlap(8, 1)
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


def _both(dispatcher: Any, ids: Tensor, overlap: Overlap, x: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h, dispatch = dispatch_matmul(dispatcher, x, ids, w1, overlap)
    return matmul_combine(torch.relu(h), w2, weights, dispatch)


def _gradients(leaves: dict[str, Tensor], forward: Callable[..., Tensor], wanted: Any = None) -> dict[str, Tensor]:
    inputs = {n: value.clone().requires_grad_(wanted is None or n in wanted) for n, value in leaves.items()}
    y = forward(**inputs)
    y.backward(draw(*y.shape, seed=99, dtype=y.dtype))
    return {"y": y.detach()} | {name: value.grad for name, value in inputs.items() if value.grad is not None}


def _bits(rank: int, world: int, arg: tuple[int, torch.dtype, WireDtypes, tuple[str, ...]]) -> None:
    experts, dtype, wire_dtypes, kinds = arg
    dispatcher = _dispatcher(rank, world, experts, wire_dtypes=wire_dtypes)
    group = dist.group.WORLD
    assert group is not None
    over_gloo = AllToAllDispatcher(dispatcher.placement, group, rank, dispatcher.options)
    for kind in kinds:
        ids = _routing(kind, rank, experts)
        leaves = _leaves(rank, len(dispatcher.local_experts), ids, dtype)
        wanted = _gradients(leaves, partial(_both, dispatcher, ids, Overlap(1)))
        assert set(wanted) == {"y", *leaves}
        cases: list[tuple[Dispatcher, Overlap]] = [(dispatcher, CUT), (dispatcher, Overlap(2, 1)), (over_gloo, CUT)]
        for each, overlap in cases:
            found = _gradients(leaves, partial(_both, each, ids, overlap))
            for name, value in wanted.items():
                assert torch.equal(found[name], value), f"{name} with {each.name}, {overlap.chunks}, {kind}"
        with torch.no_grad():
            h, dispatch = dispatch_matmul(dispatcher, leaves["x"], ids, leaves["w1"], CUT)
            assert isinstance(dispatch, SharedDispatch)
            assert torch.equal(h, dispatch_reference(dispatcher, leaves["x"], ids, leaves["w1"]))
            y = matmul_combine(h, leaves["w2"], leaves["weights"], dispatch)
            assert torch.equal(y, combine_reference(h, leaves["w2"], leaves["weights"], dispatch))
            del h, y, dispatch
        del wanted, found
    assert dispatcher.shared.heap.blocks == 0


SAME = WireDtypes()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_bits_are_those_of_serial_execution_and_of_another_transport(
    world: int, request: pytest.FixtureRequest
) -> None:
    if world == 1:
        with RankPool(1) as pool:
            pool.run(_bits, (5, torch.float32, SAME, ROUTINGS))
        return
    request.getfixturevalue(f"pool{world}").run(_bits, (7, torch.float32, SAME, ROUTINGS))


@pytest.mark.parametrize(
    "arg",
    [
        (5, torch.bfloat16, SAME, ("random", "dropped")),
        (1, torch.float32, SAME, ("random",)),
        (4, torch.float32, WireDtypes("fp8_block", "bf16", "bf16", "fp8_token"), ("random",)),
    ],
    ids=["bf16", "a rank without experts", "rounded as a payload would"],
)
def test_the_bits_are_equal_in_other_dtypes_placements_and_wire_dtypes(arg: Any, pool2: RankPool) -> None:
    pool2.run(_bits, arg)


def test_the_bits_are_equal_on_8_ranks() -> None:
    with RankPool(8) as pool:
        pool.run(_bits, (11, torch.float32, SAME, ("random",)), timeout=120)


def _near(rank: int, world: int, _: Any) -> None:
    """Compare one rank's tokens with float64. All ranks know the weights of all experts."""
    dispatcher = _dispatcher(rank, world, 4)
    ids = _routing("random", rank, 4)
    leaves = _leaves(rank, 2, ids)
    w1 = torch.cat([draw(2, F, D, seed=40 + r) for r in range(world)])
    w2 = torch.cat([draw(2, D, F, seed=60 + r) for r in range(world)])

    def plain(x: Tensor, weights: Tensor) -> Tensor:
        h = torch.relu(torch.einsum("td,tkfd->tkf", x, w1.to(x.dtype)[ids]))
        return torch.einsum("tkf,tkdf,tk->td", h, w2.to(x.dtype)[ids], weights)

    wanted = _gradients({name: leaves[name].double() for name in ("x", "weights")}, plain)
    found = _gradients(leaves, partial(_both, dispatcher, ids, CUT))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-4)


def test_the_results_agree_with_float64(pool2: RankPool) -> None:
    pool2.run(_near)


def _each_alone(rank: int, world: int, _: Any) -> None:
    dispatcher = _dispatcher(rank, world, 4)
    ids = _routing("random", rank, 4)
    leaves = _leaves(rank, 2, ids)
    every = _gradients(leaves, partial(_both, dispatcher, ids, CUT))
    for name in leaves:
        found = _gradients(leaves, partial(_both, dispatcher, ids, CUT), {name})
        assert set(found) == {"y", name}
        assert torch.equal(found[name], every[name]), name
    inputs = {name: value.clone().requires_grad_() for name, value in leaves.items()}
    y = _both(dispatcher, ids, CUT, **inputs)
    for _ in range(2):
        again = torch.autograd.grad(y, list(inputs.values()), draw(*y.shape, seed=99), retain_graph=True)
        assert all(torch.equal(a, every[name]) for a, name in zip(again, inputs, strict=True))


def test_each_gradient_can_be_computed_alone_and_twice(pool2: RankPool) -> None:
    pool2.run(_each_alone)


def _unlike(rank: int, world: int, _: Any) -> None:
    """One rank computes serially, the others do not."""
    dispatcher = _dispatcher(rank, world, 5)
    ids = _routing("random", rank, 5)
    leaves = _leaves(rank, len(dispatcher.local_experts), ids)
    own = Overlap(1) if rank == 1 else CUT
    for wanted in (None, ("x",), ("w1", "w2"), ("weights",)):
        mixed = _gradients(leaves, partial(_both, dispatcher, ids, own), wanted)
        expected = _gradients(leaves, partial(_both, dispatcher, ids, CUT), wanted)
        assert all(torch.equal(mixed[name], value) for name, value in expected.items())
    with torch.no_grad():
        assert torch.equal(
            _both(dispatcher, ids, own, **{n: v.requires_grad_() for n, v in leaves.items()}), expected["y"]
        )


def test_serial_and_pipelined_ranks_work_together(pool4: RankPool) -> None:
    pool4.run(_unlike)


def _flags(rank: int, world: int, path: Path) -> None:
    """Rank 1 computes its own rows only after rank 0 has its sum: peers do not wait for them."""
    store = dist.FileStore(str(path), world)
    dispatcher = _dispatcher(rank, world, 8)
    ids = _routing("random", rank, 8)
    leaves = _leaves(rank, 2, ids)
    h, dispatch = dispatch_matmul(dispatcher, leaves["x"], ids, leaves["w1"], CUT)
    assert isinstance(dispatch, SharedDispatch)
    own = {row_range.rows.start for row_range in dispatch.segments.own}
    real = expert_mlp.expert_mm

    def product(a: Tensor, b: Tensor, out: Tensor) -> None:
        if rank == 1 and out.storage_offset() // D in own:
            store.wait(["summed"])
        real(a, b, out)

    summed = OutgoingRows.sum

    def watched(leaving: OutgoingRows, weights: Tensor | None) -> Tensor:
        y = summed(leaving, weights)
        if rank == 0:
            store.set("summed", "")
        return y

    with (
        mock.patch.object(expert_mlp, "expert_mm", product),
        mock.patch.object(OutgoingRows, "sum", watched),
    ):
        y = matmul_combine(h, leaves["w2"], leaves["weights"], dispatch)
    assert torch.equal(y, combine_reference(h, leaves["w2"], leaves["weights"], dispatch))


def test_a_rank_has_its_sum_before_its_peers_have_computed_their_own_rows(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(_flags, tmp_path / "store")


def _bad(rank: int, world: int, what: str) -> str:
    dispatcher = _dispatcher(rank, world, 8)
    ids = _routing("random", 0, 8)
    leaves = _leaves(rank, 2, ids)
    x, w1, w2, weights = leaves["x"], leaves["w1"], leaves["w2"], leaves["weights"]
    odd = rank == 1
    found = "nothing"
    try:
        if odd and what == "width":
            w1 = w1[:, :, :-1]
        if odd and what == "id":
            ids[0, 0] = 8
        if odd and what == "dtype":
            x, w1 = x.bfloat16(), w1.bfloat16()
        if odd and what == "float64":
            x, w1 = x.double(), w1.double()
        if odd and what == "other hidden":
            x, w1 = x[:, :-1], w1[:, :, :-1]
        h, dispatch = dispatch_matmul(dispatcher, x, ids, w1, CUT)
        if odd and what == "last width":
            w2 = w2[:, :-1]
        if odd and what == "weights":
            weights = weights[:-1]
        if odd and what == "gradient":
            weights = weights.clone().requires_grad_()
        if odd and what == "operation":
            dispatch_matmul(dispatcher, x, ids, w1, CUT)
        matmul_combine(h, w2, weights, dispatch)
    except (InputError, RoutingError, RankMismatch) as error:
        found = type(error).__name__
    good = _leaves(rank, 2, _routing("random", 0, 8))  # after which all goes on
    _both(dispatcher, _routing("random", 0, 8), CUT, **good)
    return found


@pytest.mark.parametrize(
    ("what", "kind"),
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
def test_an_error_on_one_rank_is_raised_on_all_and_the_next_call_works(what: str, kind: str, pool4: RankPool) -> None:
    assert set(pool4.run(_bad, what)) == {kind}


def _groups_of_rows(rank: int, world: int, _: Any) -> None:
    wire_dtypes = WireDtypes(combine_backward="fp8_group")
    dispatcher = _dispatcher(rank, world, 4, wire_dtypes=wire_dtypes, deterministic=False)
    ids = _routing("random", rank, 4)
    leaves = _leaves(rank, 2, ids)
    with pytest.raises(ConfigError, match="scales for each row"):
        dispatch_matmul(dispatcher, leaves["x"], ids, leaves["w1"], CUT)


def test_scales_of_groups_of_rows_are_refused(pool2: RankPool) -> None:
    pool2.run(_groups_of_rows)


def _full(rank: int, world: int, _: Any) -> None:
    """A rank whose heap has no memory for its results."""
    group = dist.new_group(backend="gloo")
    assert group is not None
    made = heap_of(communicator_of(group), 60.0, SharedOptions(initial_bytes=0, reserve_bytes=4 << 20))
    dispatcher = SharedMemoryDispatcher(ExpertPlacement.of(4, world), group, rank, DispatchOptions(timeout_s=60))
    ids = _routing("random", rank, 4)
    leaves = _leaves(rank, 2, ids)
    h, dispatch = dispatch_matmul(dispatcher, leaves["x"], ids, leaves["w1"], CUT)
    filling = []
    while rank == 1:
        try:
            filling.append(block(made.heap, 1, 256, torch.float32))
        except HeapError:
            break
    with pytest.raises(HeapError):
        matmul_combine(h, leaves["w2"], leaves["weights"], dispatch)
    filling.clear()
    y = matmul_combine(h, leaves["w2"], leaves["weights"], dispatch)
    assert torch.equal(y, combine_reference(h, leaves["w2"], leaves["weights"], dispatch))
    del h
    gc.collect()  # the error's frames
    assert made.heap.blocks == 0


def test_a_full_heap_on_one_rank_is_an_error_on_all_and_the_next_call_works(pool2: RankPool) -> None:
    pool2.run(_full)


PHASES = ("dispatch", "combine", "combine backward", "dispatch backward")


def _in_phase(rank: int, world: int, arg: tuple[str, str]) -> None:
    """Rank 1 raises or exits in a GEMM of the pass ``phase``. The others raise, in this pass or in the next."""
    phase, what = arg
    dispatcher = _dispatcher(rank, world, 2 * world, group=dist.new_group(backend="gloo"))
    ids = _routing("random", rank, 2 * world)
    leaves = {name: value.requires_grad_() for name, value in _leaves(rank, 2, ids).items()}
    calls: list[str] = []
    header = dispatcher.header
    real = expert_mlp.expert_mm
    now = "dispatch"

    def noted(op: str, *args: Any) -> Any:
        nonlocal now
        now = op
        return header(op, *args)

    def product(*args: Any) -> None:
        calls.append(now)
        if rank == 1 and now == phase and calls.count(now) == 2:
            if what == "dies":
                os._exit(3)
            raise ZeroDivisionError("in a product")
        real(*args)

    expected = ZeroDivisionError if rank == 1 else PeerDied if what == "dies" else PeerError
    with (  # noqa: PT012
        mock.patch.object(dispatcher, "header", noted),
        mock.patch.object(expert_mlp, "expert_mm", product),
        pytest.raises(expected, match="in a product" if rank == 1 else "rank 1"),
    ):
        _both(dispatcher, ids, CUT, **leaves).sum().backward()
        dispatcher.dispatch(leaves["x"].detach(), ids)  # where rows were pushed before the error, it is the next
    with pytest.raises(PeerError):
        dispatcher.dispatch(leaves["x"].detach(), ids)


@pytest.mark.parametrize("phase", PHASES)
def test_an_error_in_one_ranks_gemm_reaches_the_others(phase: str, pool4: RankPool) -> None:
    pool4.run(_in_phase, (phase, "raises"))


@pytest.mark.parametrize("phase", ["combine", "combine backward"])
def test_a_rank_that_exits_in_a_gemm_is_named_on_the_others(phase: str) -> None:
    before = set(os.listdir("/dev/shm"))
    with RankPool(3) as pool:
        pool.run(_in_phase, (phase, "dies"), expect_dead={1})
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("moe_comm.")}
    assert not any(_ended(name) for name in left)


def _ended(segment: str) -> bool:
    """Return whether the process that created ``segment`` has exited. Processes of other tests may create segments."""
    return not Path(f"/proc/{segment.split('.')[1]}").exists()


def _stuck(rank: int, world: int, path: Path) -> None:
    store = dist.FileStore(str(path), world)
    dispatcher = _dispatcher(rank, world, 2 * world, timeout_s=3, group=dist.new_group(backend="gloo"))
    ids = _routing("random", rank, 2 * world)
    leaves = _leaves(rank, 2, ids)
    h, dispatch = dispatch_matmul(dispatcher, leaves["x"], ids, leaves["w1"], CUT)
    dist.barrier()
    if rank == 1:
        store.wait(["0", "2", "3"])
        return
    with pytest.raises(PeerTimeout, match="waited for rank 1"):
        matmul_combine(h, leaves["w2"], leaves["weights"], dispatch)
    store.set(str(rank), "")


def test_a_rank_that_hangs_is_named_at_the_deadline(pool4: RankPool, tmp_path: Path) -> None:
    pool4.run(_stuck, tmp_path / "store")
