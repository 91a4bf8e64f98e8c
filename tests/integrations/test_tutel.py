"""The adapter of Tutel without Tutel: dispatch and combine with its routes against one process, and its errors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch.selection.factory import shared_dispatcher
from moe_comm.errors import MoeCommError
from moe_comm.integrations.tutel.routed import run_experts
from tests.pool import RankPool

HIDDEN, WIDTH, EXPERTS = 6, 5, 8


@dataclass(frozen=True)
class Case:
    """tokens: of each rank. capacity: of each expert and source rank. one: all tokens choose the same experts."""

    name: str
    tokens: tuple[int, int, int, int] = (9, 9, 9, 9)
    top_k: int = 2
    capacity: int = 100
    one: bool = False
    is_postscore: bool = True


CASES = (
    Case("top-1", top_k=1),
    Case("top-2 with dropped tokens", capacity=2),
    Case("top-4, uneven tokens, dropped", tokens=(7, 1, 12, 3), top_k=4, capacity=3),
    Case("no capacity, all dropped", capacity=0),
    Case("zero tokens on some ranks", tokens=(0, 6, 0, 2)),
    Case("zero tokens on every rank", tokens=(0, 0, 0, 0)),
    Case("all tokens to the same experts", one=True, capacity=5),
    Case("weights before the experts", is_postscore=False, capacity=2),
)


def batch(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return tokens, their expert ids, positions in Tutel's order (slot, token), weights, and the output's gradient."""
    g = torch.Generator().manual_seed(rank)
    tokens = case.tokens[rank]
    x, grad = (torch.randn(tokens, HIDDEN, generator=g, dtype=torch.float64) for _ in range(2))
    scores = torch.rand(tokens, EXPERTS, generator=g, dtype=torch.float64)
    if case.one:
        scores += torch.arange(EXPERTS)
    weights, ids = scores.topk(case.top_k)
    positions, rows = torch.empty_like(ids), [0] * EXPERTS
    for slot in range(case.top_k):
        for token, expert in enumerate(ids[:, slot].tolist()):
            positions[token, slot] = rows[expert]
            rows[expert] += 1
    return x, ids, positions, weights, grad


def params() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(9)
    return (
        torch.randn(EXPERTS, HIDDEN, WIDTH, generator=g, dtype=torch.float64),
        torch.randn(EXPERTS, WIDTH, HIDDEN, generator=g, dtype=torch.float64),
    )


def step(rank: int, world: int, arg: tuple[Case, torch.dtype]) -> dict[str, Tensor]:
    """Return the output and the gradients of this rank."""
    case, dtype = arg
    backend = "all_to_all" if dtype is torch.float64 else "auto"  # shared memory moves no rows in float64
    dispatcher = shared_dispatcher(EXPERTS, dist.group.WORLD, torch.device("cpu"), backend)
    own, shapes = dispatcher.local_experts, []
    w1, w2 = (w[own.start : own.stop].to(dtype).requires_grad_() for w in params())
    x, ids, positions, weights, grad = batch(case, rank)
    x, weights, grad = x.to(dtype), weights.to(dtype), grad.to(dtype)
    if not len(x):  # Tutel's functions need a token; it is not dispatched
        ids, positions, weights = (torch.zeros(1, case.top_k, dtype=t.dtype) for t in (ids, positions, weights))
    x.requires_grad_()
    weights.requires_grad_()

    def experts(rows_LMD: Tensor) -> Tensor:
        shapes.append(rows_LMD.shape)
        return (rows_LMD @ w1).tanh() @ w2

    slots = [[t.int() for t in ids.unbind(1)], [t.int() for t in positions.unbind(1)], weights.unbind(1)]
    y = run_experts(dispatcher, x, (EXPERTS, *slots, case.capacity), experts, is_postscore=case.is_postscore)
    y.backward(grad)
    assert x.grad is not None and weights.grad is not None and w1.grad is not None and w2.grad is not None
    found = {"y": y.detach(), "x": x.grad, "weights": weights.grad[: len(x)], "w1": w1.grad, "w2": w2.grad}
    return found | {"shape": torch.tensor(shapes)}


def expected(case: Case, world: int) -> dict[str, Any]:
    """Return the results of one process, token by token for all ranks, and the rows of each expert."""
    w1, w2 = (w.requires_grad_() for w in params())
    found: dict[str, Any] = {"y": [], "x": [], "weights": []}
    rows = [0] * EXPERTS
    for rank in range(world):
        x, ids, positions, weights, grad = batch(case, rank)
        x.requires_grad_()
        weights.requires_grad_()
        y = torch.zeros_like(x)
        for token in range(len(x)):
            for slot in range(case.top_k):
                expert, weight = int(ids[token, slot]), weights[token, slot]
                if positions[token, slot] >= case.capacity:
                    continue
                rows[expert] += 1
                before, after = (1, weight) if case.is_postscore else (weight, 1)
                out = ((before * x[token]) @ w1[expert]).tanh() @ w2[expert] * after
                y = y + out * torch.eye(len(x), dtype=x.dtype)[token].unsqueeze(1)
        (y * grad + 0 * (x * weights.sum() * w1.sum() * w2.sum())).sum().backward()
        for name, value in (("y", y.detach()), ("x", x.grad), ("weights", weights.grad)):
            found[name].append(value)
    return found | {"w1": w1.grad, "w2": w2.grad, "rows": rows}


@pytest.mark.parametrize(("world", "dtype"), [(1, torch.float64), (2, torch.float32), (4, torch.float64)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_and_gradients_are_those_of_one_process(
    case: Case, world: int, dtype: torch.dtype, pools: dict[int, RankPool]
) -> None:
    want = expected(case, world)
    fp64 = dtype is torch.float64 and case.is_postscore  # weights before the experts are sent in fp32
    tolerance = 1e-12 if fp64 else 1e-5
    local = EXPERTS // world
    arg = case, dtype
    for rank, found in enumerate(pools[world].run(step, arg) if world > 1 else [step(0, 1, arg)]):
        own = slice(rank * local, (rank + 1) * local)
        most = max(want["rows"][own])
        assert found.pop("shape").tolist() == [[local, max(most, 1), HIDDEN]]
        for name, value in found.items():
            of_rank = want[name][own] if name in ("w1", "w2") else want[name][rank]
            torch.testing.assert_close(
                value.double(), of_rank, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n} {m}"
            )


def failing(rank: int, world: int, fault: str) -> str:
    """Return the error of experts that fail on the last rank."""
    dispatcher = shared_dispatcher(EXPERTS, dist.group.WORLD, torch.device("cpu"))
    x, ids, positions, weights, _ = batch(CASES[1], rank)
    x, weights = x.float(), weights.float()

    def experts(rows_LMD: Tensor) -> Tensor:
        if rank == world - 1 and fault == "raises":
            raise ArithmeticError("of this rank")
        return rows_LMD[..., :-1] if rank == world - 1 else rows_LMD

    try:
        run_experts(dispatcher, x, (EXPERTS, ids.unbind(1), positions.unbind(1), weights.unbind(1), 2), experts)
    except (ArithmeticError, MoeCommError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("fault", "here", "there"),
    [("raises", "ArithmeticError: of this rank", "PeerRaised"), ("width", "InputError: combine needs rows", "Input")],
)
def test_experts_that_fail_on_one_rank_raise_on_every_rank(
    fault: str, here: str, there: str, pools: dict[int, RankPool]
) -> None:
    errors = pools[2].run(failing, fault)
    assert errors[1].startswith(here) and errors[0].startswith(there)


def test_an_absent_tutel_and_another_interface_raise_what_to_install(tmp_path: Path) -> None:
    impls = tmp_path / "tutel" / "impls"
    impls.mkdir(parents=True)
    (impls.parent / "__init__.py").touch()
    (impls / "fast_dispatch.py").write_text("def extract_critical(scores): pass")
    (impls / "losses.py").write_text("gshard_loss = load_importance_loss = None")
    (impls / "moe_layer.py").write_text("class MOELayer:\n    def forward(self, input, gate_index=0): pass")
    code = f"""
import sys
import moe_comm.integrations.tutel as adapter
for absent in (True, False):
    if absent:
        sys.modules["tutel"] = None
    else:
        del sys.modules["tutel"]
        sys.path.insert(0, {str(tmp_path)!r})
    try:
        adapter.moe_layer
    except Exception as error:
        print(type(error).__name__, error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    absent, other = run.stdout.strip().split("\n")
    assert absent.startswith("MissingDependency") and "pip install git+https://github.com/microsoft/tutel" in absent
    assert other.startswith("ConfigError") and "MOELayer.forward has the arguments self input gate_index," in other
