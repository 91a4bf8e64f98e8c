"""The device executor over ``peer_to_peer``: emulated CUDA kernels and interpreted Triton kernels of several processes.

Its rows, flags and faults are those of ``peer_to_peer``; its bits are those of serial execution with Triton kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.dispatch.peer_options import PeerToPeerOptions
from moe_comm.dispatch.types import DispatchOptions
from moe_comm.dispatch.wire_dtype import WireDtypes
from moe_comm.errors import ConfigError, PeerRaised, PeerTimeout, RankMismatch
from moe_comm.kernels import native
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.overlap.options import Overlap
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.schedule import dispatch_order
from moe_comm.overlap.tiles import Cut
from moe_comm.topology import ExpertPlacement
from tests.layers.reference import draw
from tests.overlap.triton.common import interpreted, needs_triton
from tests.pool import RankPool, with_longer_deadline
from tests.support.launches import HookedLauncher

pytestmark = needs_triton
WORLD, D, F, EXPERTS = 3, 20, 8, 7
DEVICE = Overlap(executor="device")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A separate pool, because its ranks import Triton as an interpreter (see ``interpreted``)."""
    with RankPool(WORLD, bare=True) as pool:
        yield pool


def _dispatcher(
    rank: int,
    world: int,
    experts: int,
    launcher: Any = None,
    timeout_s: float = 60,
    relay: bool = False,
    **options: Any,
) -> Any:
    from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher

    peer_options = PeerToPeerOptions(emulate=True, relay=relay)
    settings = DispatchOptions(timeout_s=timeout_s, peer_to_peer=peer_options, **options)
    # Dispatchers of a group share their memory and its launcher.
    group = dist.group.WORLD if launcher is None else dist.new_group()
    return PeerToPeerDispatcher(ExpertPlacement.of(experts, world), group, rank, settings, "cpu", launcher)


@contextmanager
def _triton_on_cpus() -> Iterator[None]:
    interpreted("arrived_mm")
    native.TRITON_DEVICES.add("cpu")
    try:
        yield
    finally:
        native.TRITON_DEVICES.discard("cpu")


# --- the list of tiles ---


def _compare_lists(rank: int, world: int, arg: tuple[int, float, int]) -> None:
    most, density, rows = arg
    tile_list = interpreted("tile_list")
    generator = np.random.default_rng(most)
    for ranks, experts, before in ((1, 3, 0), (5, 9, 2), (4, 17, 1), (4, 0, 3)):
        for own in {ranks // 2, ranks - 1} if ranks < 5 else {2}:
            rows_EW = generator.integers(0, most + 1, (experts, ranks)) * (generator.random((experts, ranks)) < density)
            counts_WE = torch.zeros(ranks, before + experts + 2, dtype=torch.int64)
            counts_WE[:, before : before + experts] = torch.from_numpy(rows_EW.T)
            tiles = tile_list.list_tiles(counts_WE, range(before, before + experts), own, int(rows_EW.sum()), rows)
            schedule = dispatch_order(rows_EW, Ring(own, ranks), Cut(rows, tile_list.EXTRA_PERCENT / 100))
            number = int(tiles.ends_W[-1])
            assert number == len(schedule.expert_N)
            with_rows = [sum(rank in ranks for ranks in schedule.ranks) for rank in range(ranks)]
            assert tiles.tiles_W.tolist() == with_rows
            stages = [int((schedule.stage_N <= step).sum()) for step in range(ranks)]
            assert tiles.ends_W.tolist() == stages
            sources = [(schedule.ranks[i][0], schedule.ranks[i][-1]) for i in range(number)]
            expected = zip(schedule.expert_N, schedule.first_row_N, schedule.end_row_N, sources, strict=True)
            actual = tiles.items_N5[:number].tolist()
            assert actual == [[expert, first, end, *pair] for expert, first, end, pair in expected]
            assert torch.equal(tiles.rows_EW, torch.from_numpy(rows_EW)) or not experts
            assert tiles.counts_E.tolist() == rows_EW.sum(1).tolist()


@pytest.mark.parametrize("arg", [(3, 0.3, 4), (20, 0.7, 4), (90, 1.0, 16)], ids=str)
def test_tiles_listed_on_the_device_are_those_of_the_schedule(arg: tuple[int, float, int], pool: RankPool) -> None:
    pool.run(_compare_lists, arg)


# --- a layer ---


def _ids(kind: str, rank: int, experts: int, top_k: int) -> Tensor:
    """Return [T, K] ids; T differs between ranks."""
    tokens = 0 if kind == "no tokens on rank 0" and rank == 0 else 2 if kind == "few" else 24 + 9 * rank
    generator = torch.Generator().manual_seed(rank)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    if kind == "one expert":
        return torch.full_like(ids, experts - 1)
    if kind == "dropped":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.4, -1)
    return torch.full_like(ids, -1) if kind == "no rows" else ids


def _leaves(rank: int, experts: int, ids: Tensor, dtype: torch.dtype, hidden: int = D) -> list[Tensor]:
    """Return x, routing weights, w13 and w2."""
    shapes = (ids.shape[0], hidden), tuple(ids.shape), (experts, 2 * F, hidden), (experts, hidden, F)
    dtypes = dtype, torch.float32, dtype, dtype
    seeds = range(10 * rank, 10 * rank + 4)
    return [draw(*s, seed=seed, dtype=t).requires_grad_() for s, t, seed in zip(shapes, dtypes, seeds, strict=True)]


def _layer(
    dispatcher: Any,
    ids: Tensor,
    overlap: Overlap | None,
    dtype: torch.dtype = torch.bfloat16,
    recompute: bool = False,
    complete: bool = False,
    hidden: int = D,
) -> list[Tensor]:
    """Run a layer forward and backward. Return the output and all gradients."""
    from moe_comm.overlap.executors.choice import dispatch_rows

    rank, experts = dispatcher.rank, len(dispatcher.local_experts)
    x, weights, w13, w2 = leaves = _leaves(rank, experts, ids, dtype, hidden)
    call = dispatch_rows(dispatcher, x, ids, weights, overlap, width=F)
    if complete:
        call.complete()
        dispatcher.dispatch(x.detach(), ids)  # another dispatch of the group
    mlp = ExpertMLP((w13, w2, None, None), activation_of("swiglu"), recompute)
    with call.abort_on_error():
        rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
    y = call.combine(rows)
    return [y.detach(), *torch.autograd.grad(y, leaves, draw(*y.shape, seed=99 + rank, dtype=dtype))]


Comparison = tuple[str, int, torch.dtype, dict[str, Any]]
"""Routing, experts, dtype and options of the dispatcher."""


def _compare_with_serial(rank: int, world: int, arg: Comparison) -> None:
    kind, experts, dtype, options = arg
    with _triton_on_cpus():
        dispatcher = _dispatcher(rank, world, experts, **options)
        ids = _ids(kind, rank, experts, min(3, experts))
        expected = _layer(dispatcher, ids, None, dtype)
        for settings in ({}, {"recompute": True}, {"complete": True}) if kind == "random" and not options else ({},):
            actual = _layer(dispatcher, ids, DEVICE, dtype, **settings)
            assert all(map(torch.equal, actual, expected)), settings


@pytest.mark.parametrize("kind", ["random", "dropped", "one expert", "no tokens on rank 0", "few", "no rows"])
def test_output_and_gradients_have_the_bits_of_serial_execution(kind: str, pool: RankPool) -> None:
    pool.run(_compare_with_serial, (kind, EXPERTS, torch.bfloat16, {}))


@pytest.mark.parametrize(
    "arg",
    [
        ("random", EXPERTS, torch.float16, {}),
        ("random", 2, torch.bfloat16, {}),
        ("random", EXPERTS, torch.bfloat16, {"wire_dtypes": WireDtypes("fp8_block", "bf16", "bf16", "fp8_token")}),
        ("random", EXPERTS, torch.bfloat16, {"relay": True}),
        ("random", EXPERTS, torch.bfloat16, {"checksums": True}),
    ],
    ids=["fp16", "a rank without experts", "wire dtypes", "relayed", "checksums"],
)
def test_the_bits_are_equal_with_other_options(arg: Comparison, pool: RankPool) -> None:
    pool.run(_compare_with_serial, arg)


def _compare_in_fp32(rank: int, world: int, arg: None) -> None:
    """Serial execution multiplies fp32 by cuBLAS or torch, so only the values agree."""
    interpreted("arrived_mm")
    dispatcher, ids = _dispatcher(rank, world, EXPERTS), _ids("random", rank, EXPERTS, 3)
    with _triton_on_cpus():
        actual = _layer(dispatcher, ids, DEVICE, torch.float32)
    torch.testing.assert_close(actual, _layer(dispatcher, ids, None, torch.float32), rtol=1e-5, atol=1e-4)


def test_fp32_agrees_with_serial_execution(pool: RankPool) -> None:
    pool.run(_compare_in_fp32)


def _compare_halves(rank: int, world: int, arg: None) -> None:
    """Compute the gradients of the rows and those of the weights in two backward passes, and again."""
    from moe_comm.overlap.executors.choice import dispatch_rows

    with _triton_on_cpus():
        from torch.distributed.pipelining._backward import (  # imports Triton
            stage_backward_input,
            stage_backward_weight,
        )

        dispatcher, ids = _dispatcher(rank, world, EXPERTS), _ids("random", rank, EXPERTS, 3)
        _, *expected = _layer(dispatcher, ids, None)

        def run(leaves: list[Tensor]) -> Tensor:
            call = dispatch_rows(dispatcher, leaves[0], ids, leaves[1], DEVICE, width=F)
            mlp = ExpertMLP((leaves[2], leaves[3], None, None), activation_of("swiglu"))
            return call.combine(call.compute(call.rows, call.handle.rows_per_expert, mlp))

        leaves = _leaves(rank, len(dispatcher.local_experts), ids, torch.bfloat16)
        y = run(leaves)
        grad = draw(*y.shape, seed=99 + rank, dtype=torch.bfloat16)
        for _ in range(2):
            assert all(map(torch.equal, torch.autograd.grad(y, leaves, grad, retain_graph=True), expected))
        parameters = leaves[2:]
        (x_grad,), groups = stage_backward_input([run(leaves)], [grad], [leaves[0]], iter(parameters))
        assert torch.equal(x_grad, expected[0]) and all(p.grad is None for p in parameters)
        stage_backward_weight(iter(parameters), groups)
        assert all(torch.equal(p.grad, e) for p, e in zip(parameters, expected[2:], strict=True) if p.grad is not None)
        assert all(p.grad is not None for p in parameters)


def test_gradients_can_be_computed_again_and_in_two_steps(pool: RankPool) -> None:
    pool.run(_compare_halves)


def _whole_numbers(*shape: int, seed: int) -> Tensor:
    """Return small whole numbers, so that every sum of products is exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float().requires_grad_()


def _run_operators(rank: int, world: int, arg: None) -> None:
    from moe_comm.overlap.dispatch_matmul import dispatch_matmul
    from moe_comm.overlap.matmul_combine import matmul_combine

    interpreted("arrived_mm")
    dispatcher, ids = _dispatcher(rank, world, EXPERTS), _ids("dropped", rank, EXPERTS, 3)
    experts, tokens = len(dispatcher.local_experts), ids.shape[0]
    results = []
    for overlap in (Overlap(1), Overlap(1, backend="triton"), Overlap(2, 1, backend="triton", programs=1)):
        x, weights = _whole_numbers(tokens, D, seed=rank), _whole_numbers(*ids.shape, seed=30 + rank)
        w1, w2 = _whole_numbers(experts, F, D, seed=40 + rank), _whole_numbers(experts, D, F, seed=50 + rank)
        h, dispatch = dispatch_matmul(dispatcher, x, ids, w1, overlap)
        y = matmul_combine(h, w2, weights, dispatch)
        grads = torch.autograd.grad(y, (x, w1, w2, weights), _whole_numbers(tokens, D, seed=60 + rank))
        results.append([h.detach(), y.detach(), *grads])
    for actual in results[1:]:
        assert all(map(torch.equal, actual, results[0]))


def test_operators_equal_serial_execution_on_whole_numbers(pool: RankPool) -> None:
    pool.run(_run_operators)


# --- order and faults ---

TOKENS = 64
"""Tokens of each rank, with an expert on every rank: whole tiles, so that no tile waits for two ranks."""


def _store(path: Path, world: int) -> dist.FileStore:
    store = dist.FileStore(str(path), world)
    store.set_timeout(timedelta(seconds=90))
    return store


def _delay_rows(rank: int, world: int, arg: tuple[str, Path]) -> None:
    """The kernel of the last rank that sends rows starts after the other ranks have computed all rows but its own."""
    sending, path = arg
    kernels, store = interpreted("arrived_mm"), _store(path, world)

    def before(kernel: str) -> None:
        if kernel == "meet":
            sources.clear()  # of the last operation
        if kernel == sending and rank == world - 1:
            store.wait([f"computed {other}" for other in range(world - 1)])

    sources: list[int] = []
    orders: list[list[int]] = []
    compute_tile, rest = kernels.compute_tile, kernels.rest

    def recorded(*args: Any) -> None:
        start, first_n = int(args[7]), int(args[10])
        if not first_n:
            sources.append(start // TOKENS)
        if len(sources) == world * tiles_of_rank and not first_n:
            orders.append([*sources])
        compute_tile(*args)

    def rest_and_check() -> None:
        waits_in = "push" if not orders else "spread"
        if rank != world - 1 and waits_in == sending and len(sources) == (world - 1) * tiles_of_rank:
            assert sorted({*sources}) == [*range(world - 1)]
            store.set(f"computed {rank}", "")
        rest()

    with _triton_on_cpus(), pytest.MonkeyPatch.context() as patch:
        dispatcher = _dispatcher(rank, world, world, HookedLauncher(before), timeout_s=90)
        tiles_of_rank = TOKENS // kernels.tiling_of(torch.empty(TOKENS * world, D, dtype=torch.bfloat16), 1).rows
        ids = torch.arange(world).repeat(TOKENS, 1)
        patch.setattr(kernels, "compute_tile", recorded)
        patch.setattr(kernels, "rest", rest_and_check)
        _layer(dispatcher, ids, DEVICE)
    assert len(orders) == 2, "forward and backward"
    for order in orders:
        assert order[:tiles_of_rank] == [rank] * tiles_of_rank
        assert sorted(order) == sorted([*range(world)] * tiles_of_rank)


@pytest.mark.parametrize("kernel", ["push", "spread"])
def test_rows_of_other_ranks_are_computed_before_late_rows_own_rows_first(
    kernel: str, pool: RankPool, tmp_path: Path
) -> None:
    pool.run(_delay_rows, (kernel, tmp_path / "store"), timeout=120)


def _delay_slice(rank: int, world: int, path: Path) -> None:
    """The last GEMM of the last rank computes its second slice after the other ranks have summed the first one."""
    kernels, store = interpreted("publish_mm"), _store(path, world)
    columns, tokens, sums, order = kernels.SLICE_COLUMNS + 8, 32, 0, []

    def before(kernel: str) -> None:
        nonlocal sums
        sums += kernel == "sum"
        if kernel == "ready" and sums == 1 and rank != world - 1:
            store.set(f"summed {rank}", "")

    compute_tile = kernels.compute_tile

    def recorded(*args: Any) -> None:
        start, first_n = int(args[7]), int(args[10])
        order.append((first_n // kernels.SLICE_COLUMNS, (rank - start // tokens) % world))
        if rank == world - 1 and first_n >= kernels.SLICE_COLUMNS:
            store.wait([f"summed {other}" for other in range(world - 1)])
        compute_tile(*args)

    with _triton_on_cpus(), pytest.MonkeyPatch.context() as patch:
        dispatcher = _dispatcher(rank, world, world, HookedLauncher(before), timeout_s=90)
        ids = torch.arange(world).repeat(tokens, 1)
        expected = _layer(dispatcher, ids, None, hidden=columns)
        sums = 0
        patch.setattr(kernels, "compute_tile", recorded)
        actual = _layer(dispatcher, ids, DEVICE, hidden=columns)
        assert all(map(torch.equal, actual, expected))
    assert sums == 4, "two slices in each direction"
    distances = [world - 1 if own == 0 else own - 1 for _, own in order]
    forward = [*zip([part for part, _ in order], distances, strict=True)][: len(order) // 2]
    assert forward == sorted(forward), "slice by slice, own rows last"


def test_slices_are_summed_while_others_are_computed(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_delay_slice, tmp_path / "store", timeout=120)


def _hang(rank: int, world: int, arg: tuple[str, Path, float]) -> str:
    """Rank 1 begins an operation, and sends its rows or results only after the others have raised."""
    kernel, path, timeout_s = arg
    store, publish = _store(path, world), interpreted("publish_mm")
    others = [f"raised {other}" for other in range(world) if other != 1]

    def before(launched: str) -> None:
        if launched == kernel and rank == 1:
            store.wait(others)

    def late(*args: Any) -> None:
        before("publish_mm")
        multiply(*args)

    multiply = publish.publish_mm_into
    with _triton_on_cpus(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish, "publish_mm_into", late)
        dispatcher = _dispatcher(rank, world, EXPERTS, HookedLauncher(before), timeout_s)
        ids = _ids("random", rank, EXPERTS, 3)
        with pytest.raises(PeerTimeout) as error:
            _layer(dispatcher, ids, DEVICE)
        store.set(f"raised {rank}", "")
        with pytest.raises(PeerTimeout):
            dispatcher.dispatch(torch.ones(1, D), torch.zeros(1, 1, dtype=torch.int64))
    return str(error.value)


@pytest.mark.parametrize(
    ("kernel", "awaited"),
    [
        ("push", "to send its rows"),
        ("spread", "to send its rows"),
        ("publish_mm", "to compute the results of its experts"),
    ],
)
def test_a_rank_that_hangs_is_named_at_the_deadline(kernel: str, awaited: str, tmp_path: Path) -> None:
    def check(timeout_s: float) -> None:
        with RankPool(WORLD, bare=True) as pool:
            errors = pool.run(_hang, (kernel, tmp_path / f"store {timeout_s}", timeout_s), timeout=120)
        for rank in (0, 2):
            assert "rank 1" in errors[rank] and awaited in errors[rank]

    with_longer_deadline(check, 3.0, 30.0)


def _mix_with_serial(rank: int, world: int, arg: None) -> None:
    with _triton_on_cpus():
        dispatcher, ids = _dispatcher(rank, world, EXPERTS), _ids("random", rank, EXPERTS, 3)
        with pytest.raises(RankMismatch, match="whether GEMMs overlap on the device"):
            _layer(dispatcher, ids, None if rank == 1 else DEVICE)
        _layer(dispatcher, ids, DEVICE)  # the group can be used again


def test_ranks_with_other_executors_raise(pool: RankPool) -> None:
    pool.run(_mix_with_serial)


def _raise_before_experts(rank: int, world: int, arg: None) -> None:
    from moe_comm.overlap.executors.choice import dispatch_rows

    with _triton_on_cpus():
        dispatcher, ids = _dispatcher(rank, world, EXPERTS), _ids("random", rank, EXPERTS, 3)
        x, weights, w13, w2 = _leaves(rank, len(dispatcher.local_experts), ids, torch.bfloat16)
        call = dispatch_rows(dispatcher, x, ids, weights, DEVICE, width=F)
        with pytest.raises(ZeroDivisionError if rank == 1 else PeerRaised):  # noqa: PT012
            with call.abort_on_error():
                if rank == 1:
                    raise ZeroDivisionError("between")
                mlp = ExpertMLP((w13, w2, None, None), activation_of("swiglu"))
                rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
            call.combine(rows)
        call = dispatch_rows(dispatcher, x, ids, weights, DEVICE, width=F)
        b2 = torch.zeros(len(dispatcher.local_experts), D, dtype=torch.bfloat16)
        with pytest.raises(ConfigError, match="experts without biases"), call.abort_on_error():
            call.compute(
                call.rows, call.handle.rows_per_expert, ExpertMLP((w13, w2, None, b2), activation_of("swiglu"))
            )
        _layer(dispatcher, ids, DEVICE)  # the group can be used again


def test_an_exception_before_the_experts_reaches_all_ranks(pool: RankPool) -> None:
    pool.run(_raise_before_experts)


def _run_moe_layer(rank: int, world: int, arg: None) -> None:
    from moe_comm.layers.moe.config import MoEConfig
    from moe_comm.layers.moe.layer import MoELayer
    from moe_comm.layers.moe.router import RouterConfig

    with _triton_on_cpus():
        options = DispatchOptions(timeout_s=60, peer_to_peer=PeerToPeerOptions(emulate=True))
        x = draw(20 + rank, D, seed=rank, dtype=torch.bfloat16)
        results = []
        for overlap in (None, DEVICE, Overlap("auto", backend="triton")):
            layer = MoELayer.build(
                MoEConfig(D, F, RouterConfig(EXPERTS, 2)),
                dist.group.WORLD,
                backend="peer_to_peer",
                options=options,
                overlap=overlap,
                seed=1,
                dtype=torch.bfloat16,
            )
            launched = _launches(layer, x)
            assert ("arrived_mm_kernel" in launched) == (overlap is not None)
            results.append([p.grad for p in layer.parameters() if p.grad is not None])
        for actual in results[1:]:
            assert len(actual) > 2 and all(map(torch.equal, actual, results[0]))


def _launches(layer: torch.nn.Module, x: Tensor) -> set[str]:
    """Run ``layer`` forward and backward. Return the names of the Triton kernels that ran."""
    from triton.runtime import interpreter

    names = set()
    launch = interpreter.GridExecutor.__call__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(self.fn.__name__)
        return launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", recorded)
        layer(x).float().square().sum().backward()
    return names


def test_a_layer_uses_the_kernels_by_its_overlap_option(pool: RankPool) -> None:
    pool.run(_run_moe_layer)
