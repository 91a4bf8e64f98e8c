"""``Overlap(backend="triton")`` through the public operators: the kernels run, under the interpreter, and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.errors import ConfigError, MissingDependency
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
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
from moe_comm.topology import ExpertPlacement
from tests.overlap.triton.common import interpreted, needs_triton
from tests.pool import RankPool

WORLD, S, D, N, T, K, EXPERTS = 2, 5, 24, 17, 6, 2, 4
FUSED = Overlap(backend="triton")
LINEAR: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gather_matmul": (gathering.gather_matmul, gathering.reference),
    "matmul_scatter": (scattering.matmul_scatter, scattering.reference),
}


@pytest.fixture(scope="module")
def interpreting() -> Iterator[RankPool]:
    """Ranks of their own, because Triton interprets if it does so when it is first imported (``interpreted``)."""
    with RankPool(WORLD, bare=True) as pool:
        yield pool


def whole(*shape: int, seed: int) -> Tensor:
    """Small whole numbers: every sum of products is exact, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).float()


def _linear(name: str, rank: int, overlap: Overlap) -> list[Tensor]:
    rows = S if name == "gather_matmul" else S * WORLD
    x, w = whole(rows, D, seed=rank).requires_grad_(), whole(N, D, seed=10 + rank).requires_grad_()
    operator, reference = LINEAR[name]
    y = operator(x, w, dist.group.WORLD, overlap)
    assert torch.equal(y, reference(x.detach(), w.detach(), dist.group.WORLD))
    return [y.detach(), *torch.autograd.grad(y, (x, w), whole(*y.shape, seed=20 + rank))]


def _experts(rank: int, overlap: Overlap) -> list[Tensor]:
    placement = ExpertPlacement.of(EXPERTS, WORLD)
    dispatcher = AllToAllDispatcher(placement, dist.group.WORLD, rank)
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(T * rank + t)) for t in range(T)]
    )
    x, weights = whole(T, D, seed=rank).requires_grad_(), whole(T, K, seed=30 + rank).requires_grad_()
    w1, w2 = whole(2, N, D, seed=40 + rank).requires_grad_(), whole(2, D, N, seed=50 + rank).requires_grad_()
    h, dispatch = dispatching.dispatch_matmul(dispatcher, x, ids[:, :K], w1, overlap)
    assert torch.equal(h, dispatching.reference(dispatcher, x.detach(), ids[:, :K], w1.detach()))
    y = combining.matmul_combine(h, w2, weights, dispatch)
    assert torch.equal(y, combining.reference(h.detach(), w2.detach(), weights.detach(), dispatch))
    grads = torch.autograd.grad(y, (x, w1, w2, weights), whole(*y.shape, seed=60 + rank))
    return [h.detach(), y.detach(), *grads]


def _run(name: str, rank: int, overlap: Overlap) -> list[Tensor]:
    return _experts(rank, overlap) if name == "experts" else _linear(name, rank, overlap)


class Launches:
    """How many programs communicated in each launch of a kernel's pass."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.found: list[int] = []
        linear, tiling = interpreted("linear"), interpreted("tiling")
        of, split = linear.LinearKernels.of, tiling.ExpertTiling.split

        def kernels_of(*args: Any) -> Any:
            kernels = of(*args)
            self.found.append(kernels.programs.moving)
            return kernels

        def kinds(*args: Any) -> Any:
            programs = split(*args)
            self.found.append(programs[0])
            return programs

        patch.setattr(linear.LinearKernels, "of", kernels_of)
        patch.setattr(tiling.ExpertTiling, "split", kinds)


def _asked(rank: int, world: int, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch)
        plain = _run(name, rank, Overlap(1))
        assert not launches.found
        for programs, communicating in ((None, 1), (2, 2)):
            found = _run(name, rank, Overlap(backend="triton", programs=programs))
            assert all(map(torch.equal, found, plain))
            passes = 4 if name == "experts" else 2
            assert launches.found == [communicating] * passes
            launches.found.clear()
    if name != "experts":
        with pytest.raises(ConfigError, match="leave none of 4 to compute"):
            _run(name, rank, Overlap(backend="triton", programs=4))


@needs_triton
@pytest.mark.parametrize("name", [*LINEAR, "experts"])
def test_the_kernels_give_the_references_numbers_forward_and_backward(name: str, interpreting: RankPool) -> None:
    interpreting.run(_asked, name)


def _stored(rank: int, world: int, name: str) -> None:
    """A choice as tune's store gives it, which differs by direction."""
    interpreted("linear")
    plain = _run(name, rank, Overlap(1))
    with pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch)

        def chosen(work: Any, *args: Any) -> OverlapChoice:
            return OverlapChoice(TRITON, programs=3) if work.direction == "forward" else OverlapChoice(chunks=2)

        patch.setattr(chunked, "choose", chosen)
        assert all(map(torch.equal, _run(name, rank, Overlap("auto")), plain))
        assert launches.found == [3]


@needs_triton
@pytest.mark.parametrize("name", LINEAR)
def test_a_stored_choice_is_obeyed_in_each_direction_by_itself(name: str, interpreting: RankPool) -> None:
    interpreting.run(_stored, name)


def _stored_experts(rank: int, world: int, arg: None) -> None:
    interpreted("experts")
    plain = _experts(rank, Overlap(1))
    with pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch)
        asked = []

        def chosen(works: Any, channel: Any, device: Any, backends: tuple[str, ...]) -> OverlapChoice:
            asked.append(([work.operator for work in works], backends))
            return OverlapChoice(TRITON, programs=3 if works[0].operator == "dispatch_matmul" else 2)

        patch.setattr(device, "choose", chosen)
        patch.setattr(device, "on_gpus", lambda device: True)
        patch.setattr("moe_comm.overlap.executors.chunked_rows.choose", lambda *args: OverlapChoice())
        assert all(map(torch.equal, _experts(rank, Overlap("auto")), plain))
    assert asked == [
        (["dispatch_matmul"] * 2, ("chunked", TRITON)),
        (["matmul_combine"] * 2, (TRITON,)),
    ]
    assert launches.found == [3, 2, 2, 3]  # dispatch, combine, and back


@needs_triton
def test_a_stored_choice_is_obeyed_by_the_operators_for_experts(interpreting: RankPool) -> None:
    interpreting.run(_stored_experts)


def _layer(rank: int, dispatcher: AllToAllDispatcher, overlap: Overlap | None, bias: bool = False) -> list[Tensor]:
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(T * rank + t)) for t in range(T)]
    )
    x, weights = whole(T, D, seed=rank).requires_grad_(), whole(T, K, seed=30 + rank).requires_grad_()
    w13, w2 = whole(2, N, D, seed=40 + rank).requires_grad_(), whole(2, D, N, seed=50 + rank).requires_grad_()
    call = dispatch_rows(dispatcher, x, ids[:, :K], weights, overlap, width=N)
    b2 = torch.zeros(2, D) if bias else None
    with call.abort_on_error():
        mlp = ExpertMLP((w13, w2, None, b2), activation_of("relu"))
        rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
    y = call.combine(rows)
    return [y.detach(), *torch.autograd.grad(y, (x, w13, w2, weights), whole(*y.shape, seed=60 + rank))]


def _whole_layer(rank: int, world: int, arg: None) -> None:
    interpreted("experts")
    dispatcher = AllToAllDispatcher(ExpertPlacement.of(EXPERTS, WORLD), dist.group.WORLD, rank)
    wanted = _layer(rank, dispatcher, None)
    for overlap in (Overlap(executor="device"), FUSED, Overlap("auto", backend="triton")):
        found = _layer(rank, dispatcher, overlap)
        assert all(map(torch.equal, found, wanted))
    with pytest.raises(ConfigError, match="experts without biases"):
        _layer(rank, dispatcher, FUSED, bias=True)


@needs_triton
def test_the_device_executor_gives_the_numbers_of_the_serial_one(interpreting: RankPool) -> None:
    interpreting.run(_whole_layer)


# --- without the interpreter ---


def _refused(rank: int, world: int, arg: None) -> None:
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


def test_where_the_kernels_cannot_run_every_rank_is_told_what_to_do(pool2: RankPool) -> None:
    pool2.run(_refused)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"backend": "cuda"}, "unknown backend 'cuda'; known: auto, chunked, triton"), ({"programs": 0}, "programs")],
)
def test_a_wrong_backend_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Overlap(**options)
