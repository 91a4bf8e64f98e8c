"""``Overlap(backend="triton")`` in the public operators: kernels run under the interpreter and are refused without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import configure_collectives
from moe_comm.dispatch import make_dispatcher
from moe_comm.dispatch.types import DispatchOptions, PeerToPeerOptions
from moe_comm.errors import ConfigError, MissingDependency
from moe_comm.overlap import chunked
from moe_comm.overlap.executors.choice import dispatch_rows
from moe_comm.overlap.expert_operators import dispatch_matmul
from moe_comm.overlap.linear import gather_matmul, matmul_scatter
from moe_comm.overlap.options import TRITON, Overlap
from moe_comm.overlap.tuning.store import OverlapChoice
from moe_comm.overlap.ulysses import matmul_swap
from tests.overlap.common import gather_reference, scatter_reference
from tests.overlap.triton.common import interpreted, needs_triton
from tests.pool import RankPool, on_ranks

WORLD, S, D, N = 2, 5, 24, 17
FUSED = Overlap(backend="triton")
LINEAR: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "gather_matmul": (gather_matmul, gather_reference),
    "matmul_scatter": (matmul_scatter, scatter_reference),
}


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


class Launches:
    """Records how many programs communicate in each launch of a kernel."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.communicating: list[int] = []
        linear = interpreted("linear")
        of = linear.LinearKernels.of

        def kernels_of(*args: Any) -> Any:
            kernels = of(*args)
            self.communicating.append(kernels.programs.moving)
            return kernels

        patch.setattr(linear.LinearKernels, "of", kernels_of)


@on_ranks(2)
@needs_triton
@pytest.mark.parametrize("name", LINEAR)
def test_kernels_equal_the_reference_forward_and_backward(rank: int, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch)
        expected = _linear(name, rank, Overlap(1))
        assert not launches.communicating
        for programs, communicating in ((None, 1), (2, 2)):
            results = _linear(name, rank, Overlap(backend="triton", programs=programs))
            assert all(map(torch.equal, results, expected))
            assert launches.communicating == [communicating] * 2
            launches.communicating.clear()
    with pytest.raises(ConfigError, match="leave none of 4 to compute"):
        _linear(name, rank, Overlap(backend="triton", programs=4))


@on_ranks(2)
@needs_triton
@pytest.mark.parametrize("name", LINEAR)
def test_linear_operators_use_the_stored_choice_of_each_direction(rank: int, name: str) -> None:
    """Run with a stored choice that differs between forward and backward."""
    interpreted("linear")
    expected = _linear(name, rank, Overlap(1))
    with pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch)

        def choose(work: Any, *args: Any) -> OverlapChoice:
            return OverlapChoice(TRITON, programs=3) if work.direction == "forward" else OverlapChoice(chunks=2)

        patch.setattr(chunked, "choose", choose)
        assert all(map(torch.equal, _linear(name, rank, Overlap("auto")), expected))
        assert launches.communicating == [3]


# --- experts: other dispatchers ---


@on_ranks(2)
@needs_triton
def test_the_kernels_of_experts_need_peer_to_peer(world: int) -> None:
    interpreted("arrived_mm")
    x, ids, w = torch.ones(3, D), torch.zeros(3, 1, dtype=torch.int64), torch.ones(1, N, D)
    for backend in ("all_to_all", "shared_memory"):
        dispatcher = make_dispatcher(world, dist.group.WORLD, backend=backend)
        for call in (
            lambda dispatcher: dispatch_matmul(dispatcher, x, ids, w, FUSED),
            lambda dispatcher: dispatch_rows(dispatcher, x, ids, torch.ones(3, 1), FUSED),
            lambda dispatcher: dispatch_rows(dispatcher, x, ids, torch.ones(3, 1), Overlap(executor="device")),
        ):
            with pytest.raises(ConfigError, match=f"need the dispatcher peer_to_peer; got {backend}"):
                call(dispatcher)
        y = dispatch_matmul(dispatcher, x, ids, w, Overlap(2, 1))[0]
        assert bool((y == D).all())  # the next call works


# --- without the interpreter ---


def _call_without_interpreter(rank: int, world: int, arg: None) -> None:
    configure_collectives(CollectiveOptions(shared_memory=False))
    try:
        group = dist.group.WORLD
        for operator, _ in LINEAR.values():
            with pytest.raises((ConfigError, MissingDependency), match=r"TRITON_INTERPRET=1|pip install"):
                operator(torch.ones(4, D), torch.ones(N, D), group, FUSED)
        options = DispatchOptions(peer_to_peer=PeerToPeerOptions(emulate=True))
        dispatcher = make_dispatcher(world, group, backend="peer_to_peer", options=options)
        x, ids = torch.ones(3, D), torch.zeros(3, 1, dtype=torch.int64)
        with pytest.raises((ConfigError, MissingDependency), match=r"TRITON_INTERPRET=1|pip install"):
            dispatch_matmul(dispatcher, x, ids, torch.ones(1, N, D), FUSED)
        with pytest.raises(ConfigError, match=r"no Triton kernel for matmul_swap.*backend='auto'"):
            matmul_swap(x, torch.ones(2 * world, D), group, FUSED)
        with pytest.raises((ConfigError, MissingDependency), match=r"TRITON_INTERPRET=1|pip install"):
            dispatch_rows(dispatcher, x, ids, torch.ones(3, 1), FUSED)
        y = dispatch_matmul(dispatcher, x, ids, torch.ones(1, N, D), Overlap(2, 1))[0]
        assert bool((y == D).all())  # the next call works
    finally:
        configure_collectives(CollectiveOptions())


def test_without_the_interpreter_every_rank_raises_an_error_with_advice() -> None:
    with RankPool(2) as pool:
        pool.run(_call_without_interpreter)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"backend": "cuda"}, "unknown backend 'cuda'; known: auto, chunked, triton"), ({"programs": 0}, "programs")],
)
def test_invalid_backends_and_programs_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Overlap(**options)
