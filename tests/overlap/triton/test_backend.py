"""``Overlap(backend="triton")`` in the public operators: kernels run under the interpreter and are refused without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_comm
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.errors import ConfigError, MissingDependency
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig
from moe_comm.layers.data_parallel.expert_shard import plain
from moe_comm.overlap import (
    chunked,
    dispatch_matmul as dispatching,
    gather_matmul as gathering,
    matmul_combine as combining,
    matmul_scatter as scattering,
)
from moe_comm.overlap.executors import device
from moe_comm.overlap.executors.choice import dispatch_rows
from moe_comm.overlap.options import TRITON, Overlap
from moe_comm.overlap.tuning.store import OverlapChoice
from moe_comm.overlap.ulysses import matmul_swap
from moe_comm.topology import ExpertPlacement, Placement
from tests.overlap.triton.common import interpreted, needs_triton
from tests.pool import RankPool

WORLD, S, D, N, T, K, EXPERTS = 2, 5, 24, 17, 6, 2, 4
FUSED = Overlap(backend="triton")
LINEAR: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gather_matmul": (gathering.gather_matmul, gathering.reference),
    "matmul_scatter": (scattering.matmul_scatter, scattering.reference),
}


@pytest.fixture(scope="module")
def interpreter_pool() -> Iterator[RankPool]:
    """A separate pool, because its ranks import Triton as an interpreter (see ``interpreted``)."""
    with RankPool(WORLD, bare=True) as pool:
        yield pool


def whole_numbers(*shape: int, seed: int) -> Tensor:
    """Return small whole numbers, so that every sum of products is exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


def _linear(name: str, rank: int, overlap: Overlap) -> list[Tensor]:
    rows = S if name == "gather_matmul" else S * WORLD
    x, w = whole_numbers(rows, D, seed=rank).requires_grad_(), whole_numbers(N, D, seed=10 + rank).requires_grad_()
    operator, reference = LINEAR[name]
    y = operator(x, w, dist.group.WORLD, overlap)
    assert torch.equal(y, reference(x.detach(), w.detach(), dist.group.WORLD))
    return [y.detach(), *torch.autograd.grad(y, (x, w), whole_numbers(*y.shape, seed=20 + rank))]


def _experts(rank: int, overlap: Overlap) -> list[Tensor]:
    placement = ExpertPlacement.of(EXPERTS, WORLD)
    dispatcher = AllToAllDispatcher(placement, dist.group.WORLD, rank)
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(T * rank + t)) for t in range(T)]
    )
    x, weights = whole_numbers(T, D, seed=rank).requires_grad_(), whole_numbers(T, K, seed=30 + rank).requires_grad_()
    w1, w2 = (
        whole_numbers(2, N, D, seed=40 + rank).requires_grad_(),
        whole_numbers(2, D, N, seed=50 + rank).requires_grad_(),
    )
    h, dispatch = dispatching.dispatch_matmul(dispatcher, x, ids[:, :K], w1, overlap)
    assert torch.equal(h, dispatching.reference(dispatcher, x.detach(), ids[:, :K], w1.detach()))
    y = combining.matmul_combine(h, w2, weights, dispatch)
    assert torch.equal(y, combining.reference(h.detach(), w2.detach(), weights.detach(), dispatch))
    grads = torch.autograd.grad(y, (x, w1, w2, weights), whole_numbers(*y.shape, seed=60 + rank))
    return [h.detach(), y.detach(), *grads]


def _run(name: str, rank: int, overlap: Overlap) -> list[Tensor]:
    return _experts(rank, overlap) if name == "experts" else _linear(name, rank, overlap)


class Launches:
    """Records how many programs communicate in each launch of a kernel."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.communicating: list[int] = []
        linear, tiling = interpreted("linear"), interpreted("tiling")
        of, split = linear.LinearKernels.of, tiling.ExpertTiling.split

        def kernels_of(*args: Any) -> Any:
            kernels = of(*args)
            self.communicating.append(kernels.programs.moving)
            return kernels

        def recorded_split(*args: Any) -> Any:
            programs = split(*args)
            self.communicating.append(programs[0])
            return programs

        patch.setattr(linear.LinearKernels, "of", kernels_of)
        patch.setattr(tiling.ExpertTiling, "split", recorded_split)


def _run_with_programs(rank: int, world: int, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch)
        expected = _run(name, rank, Overlap(1))
        assert not launches.communicating
        for programs, communicating in ((None, 1), (2, 2)):
            results = _run(name, rank, Overlap(backend="triton", programs=programs))
            assert all(map(torch.equal, results, expected))
            passes = 4 if name == "experts" else 2
            assert launches.communicating == [communicating] * passes
            launches.communicating.clear()
    if name != "experts":
        with pytest.raises(ConfigError, match="leave none of 4 to compute"):
            _run(name, rank, Overlap(backend="triton", programs=4))


@needs_triton
@pytest.mark.parametrize("name", [*LINEAR, "experts"])
def test_kernels_equal_the_reference_forward_and_backward(name: str, interpreter_pool: RankPool) -> None:
    interpreter_pool.run(_run_with_programs, name)


def _run_with_stored_choice(rank: int, world: int, name: str) -> None:
    """Run with a stored choice that differs between forward and backward."""
    interpreted("linear")
    expected = _run(name, rank, Overlap(1))
    with pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch)

        def choose(work: Any, *args: Any) -> OverlapChoice:
            return OverlapChoice(TRITON, programs=3) if work.direction == "forward" else OverlapChoice(chunks=2)

        patch.setattr(chunked, "choose", choose)
        assert all(map(torch.equal, _run(name, rank, Overlap("auto")), expected))
        assert launches.communicating == [3]


@needs_triton
@pytest.mark.parametrize("name", LINEAR)
def test_linear_operators_use_the_stored_choice_of_each_direction(name: str, interpreter_pool: RankPool) -> None:
    interpreter_pool.run(_run_with_stored_choice, name)


def _run_experts_with_stored_choice(rank: int, world: int, arg: None) -> None:
    interpreted("experts")
    expected = _experts(rank, Overlap(1))
    with pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch)
        requests = []

        def choose(works: Any, channel: Any, device: Any, backends: tuple[str, ...]) -> OverlapChoice:
            requests.append(([work.operator for work in works], backends))
            return OverlapChoice(TRITON, programs=3 if works[0].operator == "dispatch_matmul" else 2)

        patch.setattr(device, "choose", choose)
        patch.setattr(device, "on_gpus", lambda device: True)
        patch.setattr("moe_comm.overlap.executors.chunked_rows.choose", lambda *args: OverlapChoice())
        assert all(map(torch.equal, _experts(rank, Overlap("auto")), expected))
    assert requests == [
        (["dispatch_matmul"] * 2, ("chunked", TRITON)),
        (["matmul_combine"] * 2, (TRITON,)),
    ]
    assert launches.communicating == [3, 2, 2, 3]  # dispatch, combine, combine backward, dispatch backward


@needs_triton
def test_expert_operators_use_the_stored_choice(interpreter_pool: RankPool) -> None:
    interpreter_pool.run(_run_experts_with_stored_choice)


def _layer(rank: int, dispatcher: AllToAllDispatcher, overlap: Overlap | None, bias: bool = False) -> list[Tensor]:
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(T * rank + t)) for t in range(T)]
    )
    x, weights = whole_numbers(T, D, seed=rank).requires_grad_(), whole_numbers(T, K, seed=30 + rank).requires_grad_()
    w13, w2 = (
        whole_numbers(2, N, D, seed=40 + rank).requires_grad_(),
        whole_numbers(2, D, N, seed=50 + rank).requires_grad_(),
    )
    call = dispatch_rows(dispatcher, x, ids[:, :K], weights, overlap, width=N)
    b2 = torch.zeros(2, D) if bias else None
    with call.abort_on_error():
        mlp = ExpertMLP((w13, w2, None, b2), activation_of("relu"))
        rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
    y = call.combine(rows)
    return [y.detach(), *torch.autograd.grad(y, (x, w13, w2, weights), whole_numbers(*y.shape, seed=60 + rank))]


def _compare_executors(rank: int, world: int, arg: None) -> None:
    interpreted("experts")
    dispatcher = AllToAllDispatcher(ExpertPlacement.of(EXPERTS, WORLD), dist.group.WORLD, rank)
    expected = _layer(rank, dispatcher, None)
    for overlap in (Overlap(executor="device"), FUSED, Overlap("auto", backend="triton")):
        results = _layer(rank, dispatcher, overlap)
        assert all(map(torch.equal, results, expected))
    with pytest.raises(ConfigError, match="experts without biases"):
        _layer(rank, dispatcher, FUSED, bias=True)


@needs_triton
def test_the_device_executor_equals_the_serial_executor(interpreter_pool: RankPool) -> None:
    interpreter_pool.run(_compare_executors)


def _compare_rematerialized(rank: int, world: int, arg: None) -> None:
    """Layers of the device executor, whose combine multiplies by w2, find the weights of their copies in backward."""
    interpreted("experts")
    placements = [
        Placement(owners, world, slots=2)
        for owners in (((0, 1), (0,), (1, 0), (1,)), ((0,), (0, 1), (1,), (1, 0)), ((0,), (0,), (1,), (1,)))
    ]
    results = []
    for rematerialize in (False, True):
        layers = torch.nn.ModuleList(
            MoELayer.build(
                MoEConfig(D, 16, RouterConfig(EXPERTS, K), placement=one),
                dist.group.WORLD,
                backend="all_to_all",
                overlap=Overlap(executor="device"),
                seed=seed,
            )
            for seed, one in enumerate(placements)
        )
        if rematerialize:
            moe_comm.rematerialize_copies(layers)
        x = whole_numbers(T, D, seed=rank).requires_grad_()
        y = x
        for layer in layers:
            y = y + layer(y)
        y.sum().backward()
        moe_comm.sync_gradients(layers, dist.group.WORLD)
        results.append([y.detach(), x.grad, *(plain(param.grad) for param in layers.parameters())])
        for layer in layers:
            layer.dispatcher.close()
    assert all(map(torch.equal, *results))


@needs_triton
def test_rematerialized_copies_keep_the_bits_of_the_device_executor(interpreter_pool: RankPool) -> None:
    interpreter_pool.run(_compare_rematerialized)


# --- without the interpreter ---


def _call_without_interpreter(rank: int, world: int, arg: None) -> None:
    configure_collectives(CollectiveOptions(shared_memory=False))
    try:
        group = dist.group.WORLD
        for operator, _ in LINEAR.values():
            with pytest.raises((ConfigError, MissingDependency), match=r"TRITON_INTERPRET=1|pip install"):
                operator(torch.ones(4, D), torch.ones(N, D), group, FUSED)
        dispatcher = AllToAllDispatcher(ExpertPlacement.of(world, world), group, rank)
        x, ids = torch.ones(3, D), torch.zeros(3, 1, dtype=torch.int64)
        with pytest.raises((ConfigError, MissingDependency), match=r"TRITON_INTERPRET=1|pip install"):
            dispatching.dispatch_matmul(dispatcher, x, ids, torch.ones(1, N, D), FUSED)
        with pytest.raises(ConfigError, match=r"no Triton kernel for matmul_swap.*backend='auto'"):
            matmul_swap(x, torch.ones(2 * world, D), group, FUSED)
        with pytest.raises((ConfigError, MissingDependency), match=r"TRITON_INTERPRET=1|pip install"):
            dispatch_rows(dispatcher, x, ids, torch.ones(3, 1), FUSED)
        y = dispatching.dispatch_matmul(dispatcher, x, ids, torch.ones(1, N, D), Overlap(2, 1))[0]
        assert bool((y == D).all())  # the next call works
    finally:
        configure_collectives(CollectiveOptions())


def test_without_the_interpreter_every_rank_raises_an_error_with_advice(pool2: RankPool) -> None:
    pool2.run(_call_without_interpreter)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"backend": "cuda"}, "unknown backend 'cuda'; known: auto, chunked, triton"), ({"programs": 0}, "programs")],
)
def test_invalid_backends_and_programs_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Overlap(**options)
