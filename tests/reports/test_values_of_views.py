"""Tensors whose values are not those at their address are read right, and those without values raise InputError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from moe_comm import MoEConfig, MoELayer, RouterConfig, make_dispatcher
from moe_comm.dispatch import Dispatcher
from moe_comm.dispatch.expert_call import grouped_mlp
from moe_comm.errors import InputError
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.rms_norm import rms_norm
from moe_comm.kernels.swiglu import swiglu
from moe_comm.layers.parallel.collectives import gather_dim, gather_values, scatter_sum, sum_over
from moe_comm.overlap.linear import gather_matmul, matmul_scatter
from moe_comm.train.checkpoint.files import bytes_of
from tests.dispatch import cases
from tests.dispatch.test_contract import BACKENDS, usable
from tests.dispatch.workers import Job, build
from tests.pool import RankPool, on_ranks

T, D, K, E = 6, 8, 2, 8


def negative(x: Tensor) -> Tensor:
    """Return the values of ``x`` as a dense view with the negative bit, whose memory has the other sign."""
    view = torch._neg_view(-x)
    assert view.is_neg() and view.is_contiguous() and torch.equal(view, x)
    return view


def imaginary(x: Tensor) -> Tensor:
    """Return the values of ``x`` as the imaginary part of a conjugate."""
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg() and torch.equal(view, x)
    return view


def zero(x: Tensor) -> Tensor:
    """Return zeros without memory, as autograd makes them for gradients of unused outputs."""
    view = torch._efficientzerotensor(x.shape, dtype=x.dtype)
    assert view.data_ptr() == 0
    return view


def results(
    dispatcher: Dispatcher, read: Callable[[str, Tensor], Tensor], weights_grad: bool = True
) -> dict[str, Tensor | None]:
    """Run every operation on the values that ``read`` returns for inputs by name."""
    g = torch.Generator().manual_seed(dispatcher.rank)
    x_TD, grad_TD = torch.randn(2, T, D, generator=g)
    ids_TK = torch.arange(T * K).view(T, K) % E
    weights_TK, extra_TKX = torch.rand(T, K, generator=g), torch.rand(T, K, 3, generator=g)
    x = read("x", x_TD).requires_grad_()
    extra = read("extra", extra_TKX).requires_grad_()
    weights = read("weights", weights_TK).requires_grad_(weights_grad)
    sent = dispatcher.dispatch(x, ids_TK, extra_TKX=extra)
    assert sent.extra_RX is not None
    rows = read("rows", (sent.rows_RD * 2).detach()).requires_grad_()
    y_TD = dispatcher.combine(rows, weights, sent.handle)
    y_TD.backward(read("gradient", grad_TD))
    torch.autograd.backward(
        [sent.rows_RD, sent.extra_RX],
        [read("gradient of rows", sent.rows_RD.detach()), read("gradient of extra", sent.extra_RX.detach())],
    )
    again = dispatcher.spread(read("spread", x_TD), sent.handle)
    return {
        "rows": sent.rows_RD.detach(),
        "extra": sent.extra_RX.detach(),
        "y": y_TD.detach(),
        "x.grad": x.grad,
        "extra.grad": extra.grad,
        "weights.grad": weights.grad,
        "rows.grad": rows.grad,
        "again": again,
    }


VIEWS = {"negative": negative, "imaginary": imaginary, "zero": zero}


def differing(rank: int, world: int, job: Job) -> list[str]:
    """Return the inputs whose views give other results than their copies."""
    if world == 1:
        dispatcher = make_dispatcher(E, backend="local")
    else:
        dispatcher = build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    wrong = []
    for kind, view in VIEWS.items():
        got = results(dispatcher, lambda _, x, view=view: view(x))  # type: ignore[misc]
        expected = results(dispatcher, lambda _, x, view=view: view(x).clone())  # type: ignore[misc]
        wrong += [f"{kind}: {name}" for name, value in expected.items() if not _same(got[name], value)]
    return wrong


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_operations_of_two_ranks_read_the_values(backend: str, pool2: RankPool) -> None:
    usable(backend, "cpu")
    assert pool2.run(differing, Job(backend, timeout_s=20)) == [[], []]


def test_operations_of_one_rank_read_the_values() -> None:
    assert differing(0, 1, Job("local")) == []


def test_experts_and_kernels_read_the_values() -> None:
    g = torch.Generator().manual_seed(0)
    rows, w13, w2 = (
        torch.randn(5, 16, generator=g),
        torch.randn(2, 32, 16, generator=g),
        torch.randn(2, 16, 16, generator=g),
    )
    b13, b2, grad = torch.randn(2, 32, generator=g), torch.randn(2, 16, generator=g), torch.randn(5, 16, generator=g)

    def run(view: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        leaves = [view(t).requires_grad_() for t in (rows, w13, w2, b13, b2)]
        y = grouped_mlp(leaves[0], (2, 3), ExpertMLP(tuple(leaves[1:]), activation_of("swiglu")))
        y.backward(view(grad))
        h = view(torch.randn(4, 32, generator=torch.Generator().manual_seed(1))).requires_grad_()
        act = swiglu(h)
        act.backward(view(torch.ones(4, 16)))
        x, weight = view(rows).requires_grad_(), view(torch.ones(16)).requires_grad_()
        normed = rms_norm(x, weight, 1e-5)
        normed.backward(view(grad))
        return [y, act, normed, h.grad, x.grad, weight.grad, *(leaf.grad for leaf in leaves)]

    for view in VIEWS.values():
        expected = run(lambda t, view=view: view(t).clone())  # type: ignore[misc]
        same = [_same(*pair) for pair in zip(run(view), expected, strict=True)]
        assert all(same), f"{view.__name__}: {same}"


@on_ranks(2)
def test_collectives_read_the_values(rank: int) -> None:
    group = dist.group.WORLD
    x, w = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(rank))
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "gather_dim": lambda x: gather_dim(x, group, 0),
        "scatter_sum": lambda x: scatter_sum(x, group, 0),
        "sum_over": lambda x: sum_over(x, group),
        "gather_values": lambda x: gather_values(x, group),
        "integers": lambda x: gather_values((x * 100).long() if not x.is_neg() else negative((x * 100).long()), group),
        "gather_matmul": lambda x: gather_matmul(x, w, group),
        "matmul_scatter": lambda x: matmul_scatter(x, w, group),
    }
    for name, call in calls.items():
        for kind, view in VIEWS.items():
            assert torch.equal(call(view(x)), call(view(x).clone())), f"{name} {kind}"


def test_files_have_the_values() -> None:
    x = torch.randn(3, 4)
    for view in VIEWS.values():
        assert bytes(bytes_of(view(x))) == bytes(bytes_of(view(x).clone()))


def test_complex_weights_are_refused() -> None:
    dispatcher = make_dispatcher(E, backend="local")
    sent = dispatcher.dispatch(torch.ones(T, D), torch.zeros(T, K, dtype=torch.int64))
    with pytest.raises(InputError, match="complex64"):
        dispatcher.combine(sent.rows_RD, torch.ones(T, K, dtype=torch.complex64), sent.handle)


def without_values() -> dict[str, Tensor]:
    x = torch.ones(T, D)
    with FakeTensorMode():
        fake = torch.ones(T, D)
    return {
        "FakeTensor": fake,
        "transform": torch._to_functional_tensor(x),
        "sparse_coo": x.to_sparse(),
        "sparse_csr": x.to_sparse_csr(),
        "mkldnn": x.to_mkldnn(),
        "nested": torch.nested.nested_tensor([x, x]),
        "NestedTensor": torch.nested.nested_tensor([x, x], layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "meta": x.to("meta"),
    }


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_values_are_refused() -> None:
    dispatcher, layer = make_dispatcher(E, backend="local"), MoELayer.build(MoEConfig(D, 16, RouterConfig(4, K)))
    ids_TK = torch.zeros(T, K, dtype=torch.int64)
    sent = dispatcher.dispatch(torch.ones(T, D), ids_TK)
    for kind, x in without_values().items():
        for call in (
            lambda x=x: dispatcher.dispatch(x, ids_TK),
            lambda x=x: dispatcher.dispatch(torch.ones(T, D), x),
            lambda x=x: dispatcher.combine(x, torch.ones(T, K), sent.handle),
            lambda x=x: dispatcher.combine(sent.rows_RD, x, sent.handle),
            lambda x=x: layer(x),
        ):
            with pytest.raises(InputError, match=kind):
                call()


@on_ranks(2)
def test_wrapper_subclasses(rank: int, world: int) -> None:
    """A collective in flight is waited for. A DTensor has no memory of its own."""
    import torch.distributed._functional_collectives as funcol

    dispatcher = make_dispatcher(E, dist.group.WORLD)
    x_TD, ids_TK = torch.full((T, D), 1.0 + rank), torch.arange(T * K).view(T, K) % E
    pending = funcol.all_reduce(x_TD, "sum", dist.group.WORLD)
    assert isinstance(pending, funcol.AsyncCollectiveTensor)
    assert (dispatcher.dispatch(pending, ids_TK).rows_RD == 3).all()
    mesh = init_device_mesh("cpu", (world,))
    with pytest.raises(InputError, match=r"DTensor.*to_local\(\)"):
        dispatcher.dispatch(DTensor.from_local(x_TD, mesh, [Replicate()], run_check=False), ids_TK)


def differentiated() -> dict[str, Callable[[Tensor], Tensor]]:
    dispatcher = make_dispatcher(E, backend="local")
    layer = MoELayer.build(MoEConfig(D, 16, RouterConfig(4, K)))
    ids_TK, weights_TK = torch.arange(T * K).view(T, K) % E, torch.rand(T, K)
    sent = dispatcher.dispatch(torch.ones(T, D), ids_TK)
    slots = torch.arange(T * K) // K
    mlp = ExpertMLP((torch.randn(1, 32, D), torch.randn(1, D, 16), None, None), activation_of("swiglu"))
    return {
        "dispatch": lambda x: dispatcher.dispatch(x, ids_TK).rows_RD,
        "combine": lambda x: dispatcher.combine(x[slots], weights_TK, sent.handle),
        "spread": lambda x: dispatcher.spread(x, sent.handle),
        "experts": lambda x: grouped_mlp(x, (T,), mlp),
        "layer": layer,
    }


@pytest.mark.parametrize("name", ["dispatch", "combine", "spread", "experts", "layer"])
def test_derivatives_that_do_not_exist_raise(name: str) -> None:
    """Forward mode, transforms of torch.func, and second derivatives, each of which would lose a term."""
    call, x = differentiated()[name], torch.rand(T, D)
    with fwd.dual_level(), pytest.raises((InputError, RuntimeError)):
        call(fwd.make_dual(x, torch.ones_like(x)))
    transforms: list[Callable[[], Any]] = [
        lambda: torch.func.jvp(call, (x,), (x,)),
        lambda: torch.func.vmap(call)(x.expand(2, T, D)),
        lambda: torch.func.grad(lambda x: call(x).sum())(x),
    ]
    for transform in transforms:
        with pytest.raises(RuntimeError):
            transform()
    x = x.requires_grad_()
    (grad,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    with pytest.raises(InputError, match="differentiated twice"):
        (x.square().sum() + grad.square().sum()).backward()
    call(x).sum().backward()  # the first derivative works on
