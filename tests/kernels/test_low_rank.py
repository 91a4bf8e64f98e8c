"""Low-rank adapters of experts: values, gradients, bits of row ranges, and no work for frozen weights."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.dispatch.expert_call import grouped_mlp
from moe_comm.errors import InputError
from moe_comm.kernels.activations import activation_of
from moe_comm.kernels.expert_mlp import BackwardInputs, ExpertMLP
from moe_comm.kernels.low_rank import Dropout, LowRank, with_adapters
from moe_comm.runtime.memory import warm_like, warm_rows

SIZES = (9, 0, 2, 26)
SCALINGS = (0.5, 3.0)
DROPOUTS = (None, Dropout(0.4, 5, (7, 3, 0, 2)))


def tensors(hidden: int, ffn: int, dtype: torch.dtype, bias: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(hidden + ffn)
    experts, shapes = len(SIZES), {"rows": (sum(SIZES), hidden), "w13": (0, 2 * ffn, hidden), "w2": (0, hidden, ffn)}
    if bias:
        shapes |= {"b13": (0, 2 * ffn), "b2": (0, hidden)}
    for adapter, rank in (("x", 3), ("y", 8)):
        shapes |= {
            f"first {adapter} a": (0, rank, hidden),
            f"first {adapter} b": (0, rank, 2 * ffn),
            f"last {adapter} a": (0, rank, ffn),
            f"last {adapter} b": (0, rank, hidden),
        }
    return {
        name: torch.randn(experts if not n and name != "rows" else n, *rest, generator=generator).mul(0.3).to(dtype)
        for name, (n, *rest) in shapes.items()
    }


def adapters(values: dict[str, Tensor], place: str, dropout: bool = False) -> list[LowRank]:
    names = [name[:-2] for name in values if name.startswith(place) and name.endswith(" a")]
    return [
        LowRank(values[f"{name} a"], values[f"{name} b"], scaling, dropped if dropout else None)
        for name, scaling, dropped in zip(names, SCALINGS, DROPOUTS, strict=False)
    ]


def adapted(values: dict[str, Tensor], dropout: bool = False, **settings: Any) -> ExpertMLP:
    weights = (values["w13"], values["w2"], values.get("b13"), values.get("b2"))
    mlp = ExpertMLP(weights, activation_of("swiglu"), **settings)
    return with_adapters(mlp, adapters(values, "first", dropout), adapters(values, "last", dropout))


def merged(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with the adapters added."""
    sums = dict(values)
    for place, name in (("first", "w13"), ("last", "w2")):
        for one in adapters(values, place):
            sums[name] = sums[name] + one.scaling * torch.einsum("elo,eli->eoi", one.b_ELO, one.a_ELI)
    return sums


def run(values: dict[str, Tensor], mlp_of: Any, frozen: tuple[str, ...] = ()) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {k: v.detach().clone().requires_grad_(k not in frozen) for k, v in values.items()}
    out = grouped_mlp(leaves["rows"], SIZES, mlp_of(leaves))
    out.backward(torch.sin(torch.arange(out.numel(), dtype=torch.float64)).view_as(out).to(out.dtype))
    return out.detach(), {k: v.grad for k, v in leaves.items() if v.grad is not None}


def plain(values: dict[str, Tensor]) -> ExpertMLP:
    sums = merged(values)
    return ExpertMLP((sums["w13"], sums["w2"], sums.get("b13"), sums.get("b2")), activation_of("swiglu"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("hidden", "ffn"), [(32, 16), (20, 12)])
def test_adapters_equal_merged_weights(hidden: int, ffn: int, recompute: bool, bias: bool) -> None:
    values = tensors(hidden, ffn, torch.float64, bias)
    out, grads = run(values, lambda leaves: adapted(leaves, recompute=recompute))
    want_out, want = run(values, plain)
    torch.testing.assert_close(out, want_out)
    assert grads.keys() == want.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, want[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("only", ["first x a", "first x b", "last x a", "last x b"])
def test_one_trained_tensor_has_the_gradient_of_all(only: str) -> None:
    values = tensors(32, 16, torch.float32)
    _, want = run(values, adapted)
    _, grads = run(values, adapted, frozen=tuple(name for name in values if name != only))
    assert list(grads) == [only] and torch.equal(grads[only], want[only])


def with_masks(leaves: dict[str, Tensor]) -> Tensor:
    """Return the outputs of experts whose second adapter has dropout, by the formula of PEFT."""

    def linear(x: Tensor, weight: Tensor, place: str, expert: int) -> Tensor:
        y = x @ weight[expert].T
        for one in adapters(leaves, place, dropout=True):
            factors = 1 if one.dropout is None else one.dropout.factors(expert, 0, x.detach())
            y = y + ((x * factors) @ one.a_ELI[expert].T) @ one.b_ELO[expert] * one.scaling
        return y

    outputs = []
    for expert, x in enumerate(leaves["rows"].split(SIZES)):
        gate, up = linear(x, leaves["w13"], "first", expert).chunk(2, 1)
        outputs.append(linear(torch.nn.functional.silu(gate) * up, leaves["w2"], "last", expert))
    return torch.cat(outputs)


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_multiplies_the_inputs_of_an_adapter_by_its_mask(recompute: bool) -> None:
    values = tensors(32, 16, torch.float64)
    out, grads = run(values, lambda leaves: adapted(leaves, True, recompute=recompute))
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    want = with_masks(leaves)
    want.backward(torch.sin(torch.arange(want.numel(), dtype=torch.float64)).view_as(want))
    torch.testing.assert_close(out, want.detach())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, leaves[name].grad, msg=lambda text, name=name: f"{name}: {text}")


def test_masks_have_the_probability_and_differ_between_experts_rows_and_seeds() -> None:
    like = torch.empty(400, 250)
    masks = [Dropout(0.3, seed, (5, 6)).factors(expert, 0, like) for seed in (1, 2) for expert in (0, 1)]
    for mask in masks:
        assert set(mask.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1 - 0.3))}
        assert abs(float(mask.mean()) - 1) < 0.01
        assert not torch.equal(mask[:16], mask[16:32])
    assert all(0.55 < float((a == b).float().mean()) < 0.61 for a, b in pairwise(masks))


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "ffn"), [(64, 32), (32, 16), (20, 12)])
def test_row_ranges_have_the_bits_of_all_rows(hidden: int, ffn: int, dtype: torch.dtype, dropout: bool) -> None:
    values = tensors(hidden, ffn, dtype)
    mlp = adapted(values, dropout)
    torch.manual_seed(91)
    grad_RD = torch.randn_like(values["rows"])
    needs = tuple(index >= 4 for index in range(len(mlp.tensors)))
    starts, results = [0, *accumulate(SIZES)], []
    for pieces in (None, 1, 2, 3, 7):
        out_RD, grad_rows_RD = torch.empty_like(grad_RD), torch.empty_like(grad_RD)
        forward = mlp.forward(values["rows"], out_RD, SIZES, True, warm_rows)
        grads = [warm_like(t) if t is not None and need else None for t, need in zip(mlp.tensors, needs, strict=True)]

        h_RG = forward.saved[2]
        inputs = partial(BackwardInputs, values["rows"], h_RG, grad_RD, SIZES, grad_rows_RD, needs, warm_rows)
        if pieces is None:
            forward.all_rows()
            mlp.backward(inputs(at_once=True)).all_rows(grads)
        else:
            ranges = [
                (expert, slice(first, min(first + pieces, end)))
                for expert, (start, end) in enumerate(pairwise(starts))
                for first in reversed(range(start, end, pieces))
            ]
            for one in ranges:
                forward.row_range(*one)
            backward = mlp.backward(inputs(at_once=False))
            for one in ranges:
                backward.row_range(*one)
            for expert in range(len(SIZES)):
                backward.weights_of(expert, grads)
        assert all(grad is None for grad in grads[:4])
        results.append([out_RD, grad_rows_RD, *grads[4:]])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_adapters_of_other_shapes_are_refused() -> None:
    values = tensors(32, 16, torch.float32)
    with pytest.raises(InputError, match="adapters of w13"):
        run(values | {"first x a": torch.zeros(3, 3, 32), "first x b": torch.zeros(3, 3, 32)}, one_adapter)
    with pytest.raises(InputError, match="fp8"):
        grouped_mlp(values["rows"], SIZES, adapted(values, gemm_dtype="fp8"))


def one_adapter(values: dict[str, Tensor]) -> ExpertMLP:
    mlp = ExpertMLP((values["w13"], values["w2"], None, None), activation_of("swiglu"))
    return with_adapters(mlp, [LowRank(values["first x a"], values["first x b"])])
