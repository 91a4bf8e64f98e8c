"""Optimizers compared with torch and plain-torch references; state by name; learning rates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from moe_comm.errors import ConfigError, InputError
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.optim import OptimizerOptions, learning_rate, make_optimizer, newton_schulz
from moe_comm.train.parallel import DataParallelOptions
from tests.train.toy import SHARDINGS, Toy, assemble, backward, make, pieces, train

ALONE = ParallelConfig()
DECAYED = [n for n, s in SHARDINGS.items() if len(s.shape) - s.expert >= 2 and "norm" not in n]


def trained(options: OptimizerOptions, lr: float = 0.05, steps: int = 3) -> dict[str, torch.Tensor]:
    mesh = ParallelMesh(ALONE)
    return assemble([pieces(train(mesh, DataParallelOptions(), options, lr=lr, steps=steps)[0].owned(), mesh)])


def with_torch(make_optimizers: Any, steps: int = 3) -> dict[str, torch.Tensor]:
    """Train the toy with plain torch; ``make_optimizers`` receives its parameters by name."""
    model = Toy(SHARDINGS, ParallelMesh(ALONE))
    params = dict(model.named_parameters())
    optimizers = make_optimizers(params)
    for _ in range(steps):
        model.zero_grad()
        model(torch.zeros(())).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: param.detach() for name, param in params.items()}


def groups(params: dict[str, nn.Parameter], decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for n, p in params.items() if n in DECAYED], "weight_decay": decay},
        {"params": [p for n, p in params.items() if n not in DECAYED], "weight_decay": 0.0},
    ]


def test_only_matrices_decay():
    assert "layers.0.experts.w13" in DECAYED and "layers.0.experts.b2" not in DECAYED  # [E, D]: a vector per expert
    still = OptimizerOptions(kind="adamw", weight_decay=0.5)
    decayed, plain = trained(still), trained(still.model_copy(update={"weight_decay": 0.0}))
    assert {n for n in decayed if not torch.equal(decayed[n], plain[n])} == set(DECAYED)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "sgd-momentum"])
def test_adamw_and_sgd_equal_torch(kind):
    momentum = 0.0 if kind == "sgd" else 0.8
    options = OptimizerOptions(kind=kind.split("-")[0], weight_decay=0.3, momentum=momentum)

    def torch_optimizers(params: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
        if kind == "adamw":
            return [torch.optim.AdamW(groups(params, 0.3), lr=0.05, betas=options.betas, eps=options.eps)]
        return [torch.optim.SGD(groups(params, 0.3), lr=0.05, momentum=momentum)]

    expected = with_torch(torch_optimizers)
    for name, value in trained(options).items():
        torch.testing.assert_close(value, expected[name], rtol=2e-6, atol=2e-6)


class ReferenceLAMB:
    """Algorithm 2 of arXiv 1904.00962 in float64, with each expert as a separate parameter."""

    def __init__(self, params: dict[str, nn.Parameter], options: OptimizerOptions, lr: float) -> None:
        self.params, self.options, self.lr, self.t = params, options, lr, 0
        self.w = {n: p.detach().double().clone() for n, p in params.items()}
        self.m = {n: torch.zeros_like(w) for n, w in self.w.items()}
        self.v = {n: torch.zeros_like(w) for n, w in self.w.items()}

    @torch.no_grad()
    def step(self) -> None:
        (b1, b2), self.t = self.options.betas, self.t + 1
        for name, param in self.params.items():
            grad = param.grad.double()
            self.m[name] = b1 * self.m[name] + (1 - b1) * grad
            self.v[name] = b2 * self.v[name] + (1 - b2) * grad**2
            update = self.m[name] / (1 - b1**self.t) / ((self.v[name] / (1 - b2**self.t)).sqrt() + self.options.eps)
            update = update + (self.options.weight_decay if name in DECAYED else 0) * self.w[name]
            for e in range(len(update)) if "experts" in name else [...]:
                ratio = self.w[name][e].norm() / update[e].norm()
                self.w[name][e] -= self.lr * ratio * update[e]
            param.copy_(self.w[name])


def test_lamb_equals_the_algorithm_of_the_paper():
    options = OptimizerOptions(kind="lamb", weight_decay=0.3)
    expected = with_torch(lambda params: [ReferenceLAMB(params, options, 0.05)])
    for name, value in trained(options).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


def test_lamb_updates_a_zero_parameter():
    mesh = ParallelMesh(ALONE)
    model, data_parallel = make(mesh, DataParallelOptions())
    with torch.no_grad():
        model.layers["0"].dense.w2.zero_()
    optimizer = make_optimizer(data_parallel.owned(), mesh, OptimizerOptions(kind="lamb"))
    backward(model, data_parallel)
    optimizer.step(0.1)
    w2 = model.layers["0"].dense.w2
    assert w2.isfinite().all() and w2.abs().min() > 0.05  # trust ratio 1: each element changes by about lr


MUON_TAKES = [n for n in DECAYED if "embed" not in n and "head" not in n and "router" not in n]


def test_muon_equals_torch_for_each_matrix_and_adamw_for_other_parameters():
    options = OptimizerOptions(kind="muon", weight_decay=0.3, momentum=0.9)

    def matrices(name: str, param: nn.Parameter) -> list[torch.Tensor]:
        experts = list(param.unbind(0)) if "experts" in name else [param]
        return [part for matrix in experts for part in (matrix.chunk(2) if "w13" in name else [matrix])]

    class TorchMuon:
        """torch.optim.Muon on each matrix separately, also on gate and up."""

        def __init__(self, params: dict[str, nn.Parameter]) -> None:
            self.params = {n: params[n] for n in MUON_TAKES}
            self.own = {
                n: [nn.Parameter(m.detach().clone().contiguous()) for m in matrices(n, p)]
                for n, p in self.params.items()
            }
            every = [m for own in self.own.values() for m in own]
            self.muon = torch.optim.Muon(every, lr=0.05, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw")

        @torch.no_grad()
        def step(self) -> None:
            for name, param in self.params.items():
                for own, grad in zip(self.own[name], matrices(name, param.grad), strict=True):
                    own.grad = grad.contiguous()
            self.muon.step()
            for name, param in self.params.items():
                for own, part in zip(self.own[name], matrices(name, param), strict=True):
                    part.copy_(own)

    def torch_optimizers(params: dict[str, nn.Parameter]) -> list[Any]:
        rest = {n: p for n, p in params.items() if n not in MUON_TAKES}
        return [TorchMuon(params), torch.optim.AdamW(groups(rest, 0.3), lr=0.05, betas=options.betas, eps=options.eps)]

    expected = with_torch(torch_optimizers)
    start = with_torch(lambda _: [])
    for name, value in trained(options).items():
        total_change = (expected[name] - start[name]).abs().max()
        # The iteration of torch is in bf16, and batched products round differently.
        tolerance = 0.03 * total_change if name in MUON_TAKES else 1e-5
        assert (value - expected[name]).abs().max() < tolerance, name


def test_newton_schulz_brings_singular_values_near_one():
    matrices = torch.randn(3, 12, 5, generator=torch.Generator().manual_seed(0))
    orthogonal = newton_schulz(matrices, 5)
    values = torch.linalg.svdvals(orthogonal)
    assert values.min() > 0.5 and values.max() < 1.3
    assert torch.equal(newton_schulz(matrices.mT, 5), orthogonal.mT)
    assert torch.equal(newton_schulz(torch.zeros(1, 3, 3)), torch.zeros(1, 3, 3))


KINDS = {
    "adamw": OptimizerOptions(kind="adamw"),
    "sgd": OptimizerOptions(kind="sgd", momentum=0.5),
    "lamb": OptimizerOptions(kind="lamb"),
    "muon": OptimizerOptions(kind="muon", momentum=0.9),
}


def resumed(rank: int, world: int, arg: tuple[str, str]) -> bool:
    """Return whether three steps equal two steps and one with a second optimizer that loads values and state."""
    kind, strategy = arg
    mesh = ParallelMesh(ParallelConfig(tp=2, dp=2, ep=2))
    options = DataParallelOptions(sharding=strategy)
    uninterrupted, _, _ = train(mesh, options, KINDS[kind], steps=3)
    first, optimizer, _ = train(mesh, options, KINDS[kind], steps=2)
    model, second = make(mesh, options)
    with torch.no_grad():
        for target, source in zip(second.owned(), first.owned(), strict=True):
            target.value.copy_(source.value)
    second.publish()
    resumed_optimizer = make_optimizer(second.owned(), mesh, KINDS[kind])
    state, loaded_state = optimizer.state_tensors(), resumed_optimizer.state_tensors()
    shapes = {o.name: o.value.shape for o in first.owned()}
    assert all(t.shape == shapes[n] for n, s in state.items() for t in s.values())
    assert {n: s.keys() for n, s in state.items()} == {n: s.keys() for n, s in loaded_state.items()}
    for name, of_param in state.items():
        for key, tensor in of_param.items():
            loaded_state[name][key].copy_(tensor)
    resumed_optimizer.load_steps(optimizer.steps)
    backward(model, second, 2)
    resumed_optimizer.step(0.05)
    return all(torch.equal(a.value, b.value) for a, b in zip(second.owned(), uninterrupted.owned(), strict=True))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sgd"])
def test_state_by_name_is_sufficient_for_a_resumed_run(pool4, kind):
    for strategy in ("replicate", "zero1", "fsdp"):
        assert all(pool4.run(resumed, (kind, strategy))), strategy


def test_a_step_without_gradients_raises():
    _, data_parallel = make(ParallelMesh(ALONE), DataParallelOptions())
    adamw = make_optimizer(data_parallel.owned(), ParallelMesh(ALONE), KINDS["adamw"])
    with pytest.raises(InputError, match="has no gradient"):
        adamw.step(0.1)


# --- learning rates ---


def rates(steps: int, **settings: Any) -> list[float]:
    options = OptimizerOptions(**{"lr": 1.0, "warmup": 0, **settings})
    return [learning_rate(options, step, steps) for step in range(steps)]


def test_warmup_rises_in_equal_steps_to_the_full_rate():
    values = rates(steps=10, warmup=4, schedule="constant")
    assert values == [0.25, 0.5, 0.75, 1.0, *[1.0] * 6]


def test_cosine_falls_from_the_full_rate_to_the_final_one_through_their_mean():
    values = rates(steps=13, warmup=2, final_lr=0.2)
    assert values[2] == 1.0 and values[-1] == pytest.approx(0.2)
    assert values[7] == pytest.approx(0.6)
    assert sorted(values[2:], reverse=True) == values[2:]
    expected = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * i / 10)) for i in range(11)]
    assert values[2:] == pytest.approx(expected)


def test_linear_falls_in_equal_steps():
    assert rates(steps=6, warmup=1, schedule="linear", final_lr=0.0) == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_wsd_is_stable_until_its_last_steps():
    values = rates(steps=10, warmup=2, schedule="wsd", decay=4, final_lr=0.2)
    assert values == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(steps=5, schedule="wsd", decay=0) == [1.0] * 5
    assert rates(steps=4, schedule="wsd", decay=4, final_lr=0.0) == pytest.approx([0.75, 0.5, 0.25, 0.0])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_edges_of_every_schedule(schedule):
    assert rates(steps=1, schedule=schedule, decay=0) == [1.0]
    assert rates(steps=3, warmup=6, schedule=schedule) == pytest.approx([1 / 6, 2 / 6, 3 / 6])  # ends in its warm-up
    late = OptimizerOptions(lr=2.0, schedule=schedule, warmup=2, decay=2, final_lr=0.1)
    assert learning_rate(late, 1000, 8) == learning_rate(late, 7, 8)
    assert learning_rate(late, 7, 8) == pytest.approx(2.0 if schedule == "constant" else 0.2)
    assert all(0 < learning_rate(late, step, 8) <= 2.0 for step in range(20))
    with pytest.raises(ConfigError):
        learning_rate(late, -1, 8)
