"""Tensor-parallel linears, the dense block and RMSNorm compared with plain torch on full weights in one process."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_comm.errors import ConfigError, InputError
from moe_comm.kernels.activations import Activation
from moe_comm.layers.parallel.collectives import sum_values
from moe_comm.layers.parallel.dense import DenseMLP, RMSNorm
from moe_comm.layers.parallel.linear import ColumnParallelLinear, RowParallelLinear, gather_input
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Sharding
from tests.layers.reference import draw, silu_glu
from tests.pool import RankPool, on_ranks

BATCH, SEQUENCE, HIDDEN, WIDTH = 2, 8, 12, 16


@dataclass(frozen=True)
class Case:
    kind: str
    sequence_dim: int | None
    overlap: Overlap | None = None
    recompute: bool = False


KINDS = ("linears", "segments", "dense", "geglu", "interleaved", "from_linears")
PAIRS = Activation("interleaved", lambda h: F.silu(h[..., ::2]) * h[..., 1::2], interleaved=True)


class Block(nn.Module):
    """norm, column linear, activation, row linear: both linears with bias, between replicated weights."""

    def __init__(self, norm: nn.Module, columns: nn.Module, rows: nn.Module, gated: bool) -> None:
        super().__init__()
        self.norm, self.columns, self.rows, self.gated = norm, columns, rows, gated

    def forward(self, x: Tensor) -> Tensor:
        h = self.columns(self.norm(x))
        y: Tensor = x + self.rows(silu_glu(h) if self.gated else torch.tanh(h))
        return y


class Dense(nn.Module):
    """A plain dense block."""

    def __init__(self, act: Any, interleaved: bool = False) -> None:
        super().__init__()
        self.act, self.interleaved = act, interleaved
        self.w13 = nn.Parameter(draw(2 * WIDTH, HIDDEN, seed=5, dtype=torch.float64))
        self.w2 = nn.Parameter(draw(HIDDEN, WIDTH, seed=6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.w13.t()
        gate, up = (h[..., ::2], h[..., 1::2]) if self.interleaved else h.chunk(2, -1)
        return (self.act(gate) * up) @ self.w2.t()


def full_model(kind: str) -> nn.Module:
    """Return the unsharded model."""
    if kind in ("linears", "segments"):
        gated = kind == "segments"
        columns, rows = nn.Linear(HIDDEN, WIDTH * (1 + gated)), nn.Linear(WIDTH, HIDDEN)
        model: nn.Module = Block(RMSNorm(HIDDEN), columns, rows, gated).double()
    else:
        model = Dense(F.gelu if kind == "geglu" else F.silu, kind == "interleaved")
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=10 + i, dtype=torch.float64))
    return model


def sharded_model(case: Case, rank: int, world: int, group: Any) -> tuple[nn.Module, dict[str, Sharding]]:
    """Return this rank's part, and its shardings."""
    full: Any = full_model(case.kind)
    dim = case.sequence_dim
    if case.kind in ("linears", "segments"):
        columns = ColumnParallelLinear.from_linear(
            full.columns, group, sequence_dim=dim, segments=2 if case.kind == "segments" else 1, overlap=case.overlap
        )
        rows = RowParallelLinear.from_linear(full.rows, group, sequence_dim=dim, overlap=case.overlap)
        model: nn.Module = Block(full.norm, columns, rows, full.gated)
    elif case.kind == "from_linears":
        gate, up, down = (nn.Linear(*shape, bias=False).double() for shape in [(HIDDEN, WIDTH)] * 2 + [(WIDTH, HIDDEN)])
        with torch.no_grad():
            gate.weight.copy_(full.w13[:WIDTH])
            up.weight.copy_(full.w13[WIDTH:])
            down.weight.copy_(full.w2)
        model = DenseMLP.from_linears(gate, up, down, group, sequence_dim=dim, overlap=case.overlap)
    else:
        activation = {"geglu": "geglu", "interleaved": PAIRS}.get(case.kind, "swiglu")
        model = DenseMLP(HIDDEN, WIDTH, group, activation, sequence_dim=dim, overlap=case.overlap, dtype=torch.float64)
        for name, sharding in model.shardings().items():
            model.get_parameter(name).data = sharding.take(full.get_parameter(name).data, {"tp": rank}, {"tp": world})
    shardings = {name: Sharding(tuple(p.shape)) for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if hasattr(module, "shardings"):
            shardings |= {f"{name}.{key}".lstrip("."): value for key, value in module.shardings().items()}
    return model, shardings


def tokens() -> Tensor:
    return draw(BATCH, SEQUENCE, HIDDEN, seed=1, dtype=torch.float64)


def loss_of(y_BSD: Tensor, part: slice) -> Tensor:
    return (y_BSD * draw(BATCH, SEQUENCE, HIDDEN, seed=2, dtype=torch.float64)[:, part]).square().sum()


def work(rank: int, world: int, case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return output and gradients of this rank's tokens, and parameter gradients summed by their shardings."""
    group = dist.group.WORLD
    model, shardings = sharded_model(case, rank, world, group)
    step = SEQUENCE // world
    part = slice(None) if case.sequence_dim is None else slice(rank * step, (rank + 1) * step)
    x_BSD = tokens()[:, part].clone().requires_grad_()
    y_BSD = checkpoint(model, x_BSD, use_reentrant=False) if case.recompute else model(x_BSD)
    loss_of(y_BSD, part).backward()
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert tuple(parameter.shape) == shardings[name].local_shape({"tp": rank}, {"tp": world})
        partial = case.sequence_dim is not None and "tp" in shardings[name].sum_axes
        grads[name] = sum_values(parameter.grad, group) if partial else parameter.grad
    assert x_BSD.grad is not None
    return y_BSD.detach(), x_BSD.grad, grads


FORMS = {"replicated": (None, None), "sequence parallel": (1, None), "overlapped": (1, Overlap(2, 1))}


@pytest.mark.parametrize(
    ("kind", "form", "world"),
    [(KINDS[i], [*FORMS][(i + j) % 3], (2, 4)[(i + j) % 2]) for i in range(len(KINDS)) for j in range(2)],
)
def test_outputs_and_all_gradients_equal_the_full_block(
    kind: str, form: str, world: int, pools: dict[int, RankPool]
) -> None:
    sequence_dim, overlap = FORMS[form]
    model, x_BSD = full_model(kind), tokens().requires_grad_()
    y_BSD = model(x_BSD)
    loss_of(y_BSD, slice(None)).backward()
    case = Case(kind, sequence_dim, overlap, recompute=kind == "dense")
    results = pools[world].run(work, case)
    for actual_y, actual_x, _ in results if sequence_dim is None else []:
        torch.testing.assert_close(actual_y, y_BSD.detach())
        torch.testing.assert_close(actual_x, x_BSD.grad)
    if sequence_dim is not None:
        torch.testing.assert_close(torch.cat([y for y, _, _ in results], 1), y_BSD.detach())
        torch.testing.assert_close(torch.cat([grad for _, grad, _ in results], 1), x_BSD.grad)
    _, shardings = sharded_model(case, 0, 1, None)
    for rank, (_, _, grads) in enumerate(results):
        for name, parameter in model.named_parameters():
            part = shardings[name].take(parameter.grad, {"tp": rank}, {"tp": world})
            torch.testing.assert_close(grads[name], part, msg=lambda m, name=name: f"{name}: {m}")


@on_ranks(2)
def test_overlapped_layers_support_empty_batches_and_reject_odd_sequences() -> None:
    group, overlap = dist.group.WORLD, Overlap(2, 1)
    columns = ColumnParallelLinear(4, 6, group, sequence_dim=1, overlap=overlap)
    rows = RowParallelLinear(4, 6, group, sequence_dim=1, overlap=overlap)
    assert columns(torch.ones(0, 3, 4)).shape == (0, 6, 3)
    assert rows(torch.ones(0, 6, 2)).shape == (0, 3, 6)
    with pytest.raises(InputError, match="multiple of 2"):
        rows(torch.ones(2, 3, 2))


@on_ranks(2)
def test_layers_can_share_one_gather(rank: int, world: int) -> None:
    """Two layers share one gathered input."""
    group = dist.group.WORLD
    linears = [nn.Linear(HIDDEN, WIDTH, bias=False).double() for _ in range(2)]
    for i, linear in enumerate(linears):
        linear.weight.data.copy_(draw(WIDTH, HIDDEN, seed=3 + i))
    own_tokens = slice(rank * SEQUENCE // world, (rank + 1) * SEQUENCE // world)
    local_BSD = tokens()[:, own_tokens].clone().requires_grad_()
    parts = [ColumnParallelLinear.from_linear(linear, group, sequence_dim=1, gathers_input=False) for linear in linears]
    gathered_BSD = gather_input(local_BSD, group, 1)
    (parts[0](gathered_BSD) * parts[1](gathered_BSD)).sum().backward()
    x_BSD = tokens().requires_grad_()
    (linears[0](x_BSD) * linears[1](x_BSD)).sum().backward()
    torch.testing.assert_close(local_BSD.grad, x_BSD.grad[:, own_tokens])


def test_without_a_group_the_layers_are_plain_linears() -> None:
    linear, x = nn.Linear(6, 8), draw(3, 6)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind.from_linear(linear)
        torch.testing.assert_close(layer(x), linear(x))
        assert set(layer.state_dict()) == set(linear.state_dict())
        assert layer.weight.data_ptr() != linear.weight.data_ptr()
        assert set(kind(6, 8, bias=False).shardings()) == {"weight"}


@on_ranks(2)
def test_invalid_sizes_raise_with_both_numbers() -> None:
    group = dist.group.WORLD
    for build in (
        lambda: ColumnParallelLinear(4, 7, group),
        lambda: RowParallelLinear.from_linear(nn.Linear(5, 4), group),
        lambda: ColumnParallelLinear(4, 6, group, segments=2),
        lambda: DenseMLP(4, 9, group),
    ):
        with pytest.raises(ConfigError, match="multiple of"):
            build()
    with pytest.raises(InputError, match=r"got \(2, 3\)"):
        ColumnParallelLinear(4, 8, group)(torch.ones(2, 3))
    with pytest.raises(InputError, match="multiple of 2"):
        RowParallelLinear(8, 4, group, sequence_dim=0)(torch.ones(3, 4))
    layer = deepcopy(ColumnParallelLinear(4, 8, group))
    assert layer.group is group
    assert layer(torch.ones(2, 4)).shape == (2, 4)


def test_a_dense_block_rejects_unsupported_linears() -> None:
    gate, down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
    with pytest.raises(InputError, match="biases"):
        DenseMLP.from_linears(gate, nn.Linear(4, 8), down)
    with pytest.raises(InputError, match=r"\(4, 6\)"):
        DenseMLP.from_linears(gate, gate, nn.Linear(6, 4, bias=False))
    with pytest.raises(InputError, match="gelu"):
        DenseMLP.from_linears(gate, gate, down, activation="gelu")
    with pytest.raises(ConfigError, match="swish"):
        DenseMLP(4, 8, activation="swish")


def test_a_dense_block_of_linears_has_the_layout_of_its_activation() -> None:
    gate, up, down = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)
    x = draw(3, 4)
    expected = down(F.silu(gate(x)) * up(x))
    for activation in ("swiglu", PAIRS):
        torch.testing.assert_close(DenseMLP.from_linears(gate, up, down, None, activation)(x), expected)


def test_autocast_runs_the_dense_block_in_bf16() -> None:
    block = DenseMLP(HIDDEN, WIDTH)
    x_BSD = tokens().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y_BSD = block(x_BSD)
    y_BSD.float().sum().backward()
    assert y_BSD.dtype == torch.bfloat16 and block.w13.grad.dtype == torch.float32
    torch.testing.assert_close(y_BSD.float(), block(x_BSD), rtol=0.05, atol=0.05 * float(y_BSD.detach().abs().max()))


def reference_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Hugging Face's RMSNorm."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rmsnorm_and_its_gradients_equal_hugging_faces(dtype: torch.dtype) -> None:
    norm = RMSNorm(HIDDEN, 1e-5, dtype=dtype)
    norm.weight.data.copy_(draw(HIDDEN, seed=3))
    x, grad = draw(5, HIDDEN, dtype=dtype).requires_grad_(), draw(5, HIDDEN, seed=4, dtype=dtype)
    norm(x).backward(grad)
    reference_x, weight = x.detach().clone().requires_grad_(), norm.weight.detach().clone().requires_grad_()
    expected = reference_norm(reference_x, weight, 1e-5)
    expected.backward(grad)
    torch.testing.assert_close(norm(x), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad, reference_x.grad, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(norm.weight.grad, weight.grad, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_rmsnorm_of_bf16_is_rounded_once(weight_dtype: torch.dtype) -> None:
    norm = RMSNorm(HIDDEN, dtype=weight_dtype)
    norm.weight.data.copy_(draw(HIDDEN, seed=3))
    x = draw(50, HIDDEN, dtype=torch.bfloat16)
    exact = reference_norm(x.double(), norm.weight.double(), norm.eps)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2.0**-8, atol=0)
    with pytest.raises(InputError, match=r"expects \[\.\., 12\]; got \(3, 4\)"):
        norm(torch.ones(3, 4))
