"""The bundled model in a pipeline: gradients equal those of one process, and are computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_comm.kernels import expert_mlp
from moe_comm.kernels.cpu_gemm import ExpertWeights
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.layers import grouped_mlp
from moe_comm.layers.moe.experts import Experts
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.parallel import DataParallel
from moe_comm.train.pipeline import ActivationShape, MicroBatch, make_runner, plan_stages
from tests.layers import tiny
from tests.pool import RankPool
from tests.train.pipes import FFN, HIDDEN, SCALE

FOUR_LAYERS = replace(tiny.TINY, layers=4, tie=True)


def transformer(rank: int, world: int, arg: tuple[str, ParallelConfig, str, bool]) -> Any:
    """Run the bundled model on packed documents. Return losses, gradients and shardings by name, expert loads
    by layer, and the number of router calls."""
    schedule, mapping, recompute, split_backward = arg
    mesh = ParallelMesh(mapping)
    plan = plan_stages(FOUR_LAYERS.layers, mapping.pp, schedule)
    stages = []
    for stage in plan.stages_of(mesh.place["pp"]):
        part = ModelPlan.of(
            mesh,
            layers=plan.layers_of(stage),
            has_embedding=plan.is_first(stage),
            has_head=plan.is_last(stage),
            recompute=recompute,
            backend="all_to_all" if mapping.ep > 1 else "auto",
            dtype=torch.float64,
        )
        stages.append(Transformer(FOUR_LAYERS, part))
        initialize(stages[-1], 3, mesh.place, mesh.sizes)
    batches = []
    for rows in zip(*(t.split(1) for t in tiny.batch(packed=True)), strict=True):
        ids, targets, documents = (tiny.own(t, stages[0].plan) for t in rows)
        batches.append(MicroBatch(ids, targets, None, documents))
    calls: list[int] = []
    for moe in (moe for stage in stages for moe in stage.moe_layers()):
        moe.router.register_forward_hook(lambda *_: calls.append(0))
    activations = ActivationShape(FOUR_LAYERS.hidden, torch.float64, mapping.tp)
    shardings = {name: sharding for stage in stages for name, sharding in shardings_of(stage).items()}
    tied = next((stage.tied_names for stage in stages if stage.tied_names), ())
    data_parallel = DataParallel(stages, shardings, mesh, tied=tied)
    runner = make_runner(stages, mesh, plan, schedule, activations, split_backward=split_backward, timeout_s=60)
    losses = runner.step(batches, SCALE)
    data_parallel.reduce()
    gradients = {stages[0].origin_of(o.name): (o.value.grad, o.sharding) for o in data_parallel.owned()}
    loads = {}
    for stage in stages:
        loads |= {label: block.moe.router.load_E for label, block in stage.layers.items() if block.is_moe}
        stage.close()
    runner.close()
    return losses, gradients, loads, len(calls)


@pytest.mark.parametrize(
    ("schedule", "recompute", "split_backward"),
    [
        ("1f1b", "selective", True),
        ("interleaved_1f1b", "full", True),
        ("zero_bubble", "full", True),
        ("zero_bubble", "full", False),
        ("zbv", "selective", True),
        ("dualpipev", "full", False),
    ],
)
def test_the_bundled_model_with_tensor_and_expert_parallel_stages(
    schedule: str, recompute: str, split_backward: bool, pool4: RankPool
) -> None:
    mapping = ParallelConfig(tp=2, pp=2, ep=2)
    results = pool4.run(transformer, (schedule, mapping, recompute, split_backward))
    losses, expected_gradients, loads, calls = transformer(0, 1, ("gpipe", ParallelConfig(), "none", True))
    torch.testing.assert_close(sum(r[0] for r in results), losses, rtol=1e-10, atol=0)
    for rank, (_, gradients, _, _) in enumerate(results):
        for name, (grad, sharding) in gradients.items():
            expected = sharding.take(expected_gradients[name][0], mapping.place(rank), mapping.sizes)
            error = float((grad - expected).abs().max() / expected_gradients[name][0].abs().max())
            assert error < 1e-10, f"{name}: {error}"
    assert set().union(*(r[1] for r in results)) == set(expected_gradients)
    for layer, load_E in loads.items():
        assert torch.equal(sum(r[2][layer] for r in results if layer in r[2]), load_E)
    if recompute != "full" or schedule == "interleaved_1f1b" or not split_backward:
        # Every layer is on the two ranks of a stage. It runs once, and once more with full recomputation.
        assert sum(r[3] for r in results) == 2 * calls * (2 if recompute == "full" else 1)


def test_a_split_backward_computes_each_weight_gradient_of_the_experts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    products = []
    for owner, name in ((ExpertWeights, "multiply"), (expert_mlp, "weight_gradients")):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, plain=plain: (products.append(0), plain(*args)))
    rows = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)
    w13 = torch.randn(1, 2 * FFN, HIDDEN, dtype=torch.float64, requires_grad=True)
    w2 = torch.randn(1, HIDDEN, FFN, dtype=torch.float64, requires_grad=True)
    y = grouped_mlp(rows, [5], ExpertMLP((w13, w2, None, None), Experts(1, HIDDEN, FFN).activation, False))
    counts = []
    gradients = []
    for inputs in ((rows,), (w13, w2), (rows, w13, w2)):
        products.clear()
        gradients += torch.autograd.grad(y.sum(), inputs, retain_graph=True)
        counts.append(len(products))
    assert counts == [2, 3, 4]
    assert all(torch.equal(half, whole) for half, whole in zip(gradients[:3], gradients[3:], strict=True))
