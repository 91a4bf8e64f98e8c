"""Padding is not routed, counted, sent or computed: a call with a mask is the call on the real tokens alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm import (
    Capacity,
    MoEConfig,
    MoEGroups,
    MoELayer,
    Overlap,
    ParallelConfig,
    ParallelMesh,
    Router,
    RouterConfig,
    Transformer,
    ZeroExperts,
)
from moe_comm.errors import InputError
from moe_comm.layers.data_parallel import leave_gradients
from moe_comm.layers.moe.load import take_loads
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan
from moe_comm.train.pipeline import ActivationShape, MicroBatch, make_runner, plan_stages
from moe_comm.train.pipeline.runner import Accumulation
from tests.layers.reference import draw
from tests.layers.tiny import BY_WEIGHT, DROPPING, LATENT, TINY, own
from tests.pool import RankPool

HIDDEN, B, S = 16, 8, 16
LENGTHS = (9, 16, 0, 3, 12, 1, 16, 7)
ROUTER = RouterConfig(6, 2, balance_loss=0.5, z_loss=0.1)
CONFIGS = {
    "capacity": MoEConfig(HIDDEN, 12, ROUTER, capacity=Capacity(1.0)),
    "by weight": MoEConfig(HIDDEN, 12, ROUTER, capacity=Capacity(1.0, "probability", "batch")),
    "shared": MoEConfig(HIDDEN, 12, ROUTER, shared_ffn=8, shared_gate=True, recompute=True),
    "zero experts": MoEConfig(HIDDEN, 12, replace(ROUTER, zero_experts=ZeroExperts(identity=1, zero=1))),
}


def mask_of(lengths: tuple[int, ...] = LENGTHS, left: bool = False) -> Tensor:
    mask_BS = torch.arange(S) < torch.tensor(lengths)[:, None]
    return mask_BS.flip(1) if left else mask_BS


def results(layer: MoELayer, x: Tensor, weight: Tensor, **arguments: Any) -> dict[str, Any]:
    """Return what a call and its backward pass compute."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf, **arguments)
    (y * weight).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    numbers = {"dropped": layer.num_dropped, "load": layer.router.take_load(), **layer.router.losses}
    return {"y": y.detach(), "dx": leaf.grad, **grads, **numbers}


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert value is None or torch.equal(got[name], value), name


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("left", [False, True])
def test_a_call_with_a_mask_has_the_bits_of_a_call_on_the_real_tokens(name: str, left: bool) -> None:
    layer, mask = MoELayer.build(CONFIGS[name], seed=0), mask_of(left=left)
    x, weight = draw(B, S, HIDDEN), draw(B, S, HIDDEN, seed=1)
    x[~mask] = torch.nan  # never read
    index = torch.randperm(B * S, generator=torch.Generator().manual_seed(2))
    batch = name == "by weight"
    got = results(layer, x, weight, mask=mask, token_index=index.view(B, S) if batch else None)
    want = results(layer, x[mask], weight[mask], token_index=index[mask.view(-1)] if batch else None)
    for key in ("y", "dx"):
        assert not got[key][~mask].any()
        got[key] = got[key][mask]
    assert_same(got, want)
    assert layer.dispatch_stats is not None and layer.dispatch_stats.slots == 2 * sum(LENGTHS)


@pytest.mark.parametrize("overlap", [None, Overlap(chunks=2, chunk_bytes=1)])
def test_pending_calls_given_routing_and_flat_masks(overlap: Overlap | None) -> None:
    layer, mask = MoELayer.build(replace(CONFIGS["shared"], capacity=Capacity(1.0)), seed=0, overlap=overlap), mask_of()
    x = draw(B, S, HIDDEN)
    want = layer(x[mask])
    call = layer.begin(x, mask=mask.view(-1))
    call.compute()
    assert torch.equal(call.result()[mask], want)
    routing = layer.router(x.view(-1, HIDDEN))
    assert torch.equal(layer(x.view(-1, HIDDEN), routing, mask=mask.view(-1))[mask.view(-1)], want)
    assert torch.equal(layer(x, mask=torch.ones(B, S, dtype=torch.bool)), layer(x))


def test_padding_causes_no_drops_and_leaves_the_losses_alone() -> None:
    """All padding chooses the same two experts, and the real tokens are balanced."""
    config = MoEConfig(HIDDEN, 12, RouterConfig(8, 2, balance_loss=1.0), capacity=Capacity(1.25))
    layer, mask = MoELayer.build(config, seed=0), torch.arange(128).expand(B, 128) < 40
    weight = layer.router.weight.detach()
    x = (2000 * (weight[0] + weight[1])).expand(B, 128, HIDDEN).clone()
    ids = torch.arange(int(mask.sum())) % 8
    x[mask] = 2000 * (weight[ids] + weight[(ids + 1) % 8])
    layer(x)
    assert layer.num_dropped > 0 and float(layer.router.losses["balance"]) > 2.5
    layer(x, mask=mask)
    assert layer.num_dropped == 0 and float(layer.router.losses["balance"]) < 2.1


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_sequence_wise_loss_is_the_mean_over_sequences_with_tokens(score: Any) -> None:
    router = Router(HIDDEN, RouterConfig(6, 2, score=score, balance_loss=1.0, balance_form="sequence"))
    x, mask = draw(B, S, HIDDEN), mask_of()
    router(x[mask], B, mask_N=mask.view(-1))
    got = router.losses["balance"]
    each = []
    for row, length in zip(x, LENGTHS, strict=True):
        if length:
            router(row[:length], 1)
            each.append(router.losses["balance"])
    torch.testing.assert_close(got, torch.stack(each).mean())
    layer = MoELayer.build(MoEConfig(HIDDEN, 12, router.config), seed=0)
    layer.router.weight.data.copy_(router.weight)
    layer(x, mask=mask)
    torch.testing.assert_close(layer.router.losses["balance"], got)


@pytest.mark.parametrize("form", ["batch", "sequence"])
def test_a_call_with_only_padding(form: Any) -> None:
    layer = MoELayer.build(replace(CONFIGS["shared"], router=replace(ROUTER, balance_form=form)), seed=0)
    x = draw(2, 3, HIDDEN).requires_grad_()
    y = layer(x, mask=torch.zeros(2, 3, dtype=torch.bool))
    y.sum().backward()
    assert not y.any() and x.grad is not None and not x.grad.any() and not layer.router.load_E.any()


# --- ranks ---


def masked_ranks(rank: int, world: int, setting: str) -> dict[str, Any]:
    """Return the results of this rank. On one process, all ranks' tokens are in one call."""
    groups = MoEGroups(dist.group.WORLD if world > 1 else None, etp=2 if setting == "etp" and world > 1 else 1)
    form = "sequence" if setting == "sequence" else "batch"
    config = replace(CONFIGS["by weight"], shared_ffn=8, router=replace(ROUTER, balance_form=form))
    layer = MoELayer.build(config, groups, seed=0, overlap=Overlap() if setting == "overlap" else None)
    lengths = (0,) * 4 + LENGTHS[4:] if setting == "one rank has only padding" else LENGTHS
    own_rows = slice(rank * B // world, (rank + 1) * B // world)
    x, weight, mask = (t[own_rows] for t in (draw(B, S, HIDDEN), draw(B, S, HIDDEN, seed=1), mask_of(lengths)))
    index = torch.arange(B * S).view(B, S)[own_rows]
    no_mask = setting == "one rank has no mask" and rank == 1
    return results(layer, x, weight, token_index=index, mask=None if no_mask else mask)


SETTINGS = ("serial", "overlap", "etp", "sequence", "one rank has only padding", "one rank has no mask")


@pytest.mark.parametrize("setting", SETTINGS)
def test_two_ranks_have_the_results_of_one_process(setting: str, pool2: RankPool) -> None:
    want = masked_ranks(0, 1, setting)
    if setting == "one rank has no mask":
        full = (*LENGTHS[:4], *(S,) * 4)
        layer = MoELayer.build(replace(CONFIGS["by weight"], shared_ffn=8), seed=0)
        want = results(layer, draw(B, S, HIDDEN), draw(B, S, HIDDEN, seed=1), mask=mask_of(full))
    outcomes = pool2.run(masked_ranks, setting)
    for name in ("y", "dx"):
        got = torch.cat([outcome[name] for outcome in outcomes])
        if name == "y" and setting != "etp":
            assert torch.equal(got, want[name])
        torch.testing.assert_close(got, want[name], rtol=1e-4, atol=1e-5)
    for name in ("load", "dropped", "balance", "z", "router.weight"):
        total = sum(outcome[name] for outcome in outcomes)
        torch.testing.assert_close(total, want[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def refused(rank: int, world: int, mask: Any) -> str:
    layer = MoELayer.build(CONFIGS["capacity"], dist.group.WORLD, seed=0, label="padded")
    x = draw(2, 3, HIDDEN)
    try:
        layer(x, mask=mask if rank == 1 else None)
    except InputError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("mask", [torch.ones(2, 3), torch.ones(2, dtype=torch.bool), [[True] * 3] * 2])
def test_a_mask_that_does_not_fit_is_refused_on_every_rank(mask: Any, pool2: RankPool) -> None:
    for error in pool2.run(refused, mask):
        assert "mask must be bool (2, 3) or (6,)" in error


# --- the transformer ---


def packed_batch(seed: int = 5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids, targets, documents and mask [B, S] with padding in a document of its own."""
    ids, targets = torch.randint(TINY.vocab, (2, 4, 16), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(16) < torch.tensor([9, 16, 2, 0])[:, None]
    return ids, targets.masked_fill(~mask, -100), (~mask).long() + (torch.arange(16) > 4), mask


@dataclass(frozen=True)
class Case:
    """A model on a mapping, and how its two micro-batches run."""

    name: str
    config: TransformerConfig
    mapping: ParallelConfig
    recompute: Any = "none"
    schedule: str = "1f1b"
    interleave: bool = False


def transformer(rank: int, world: int, case: Case) -> dict[str, Any]:
    """Return losses, gradients of routers, and loads of this rank after two micro-batches with padding."""
    if world == 1:
        modules, plan = [Transformer(case.config, ModelPlan(dtype=torch.float64))], ModelPlan()
        runner: Any = Accumulation(modules[0])
    else:
        mesh = ParallelMesh(case.mapping)
        stages = plan_stages(case.config.layers, case.mapping.pp, case.schedule)
        modules = [
            Transformer(
                case.config,
                ModelPlan.of(
                    mesh,
                    layers=tuple(stages.layers_of(stage)),
                    has_embedding=stages.is_first(stage),
                    has_head=stages.is_last(stage),
                    recompute=case.recompute,
                    backend="all_to_all",
                    dtype=torch.float64,
                ),
            )
            for stage in stages.stages_of(mesh.place["pp"])
        ]
        plan = modules[0].plan
        shape = ActivationShape(case.config.hidden, torch.float64, case.mapping.tp)
        runner = make_runner(modules, mesh, stages, case.schedule, shape, interleave=case.interleave, timeout_s=60)
    for module in modules:
        leave_gradients(module)
        initialize(module, 3, plan.place, plan.sizes)
    batches = []
    for seed in (5, 6):
        ids, targets, documents, mask = (own(t, plan) for t in packed_batch(seed))
        assert ids is not None and targets is not None
        batches.append(MicroBatch(ids, targets, documents=documents, mask_BS=mask))
    found: dict[str, Any] = {"loss": runner.step(batches)}
    for module in modules:
        found |= {name: p.grad for name, p in module.named_parameters() if ".moe.router" in name}
        found |= {name: load.load_E for name, load in take_loads(module).items()}
        module.close()
    runner.close()
    return found


CASES = [
    Case("tensor parallel", TINY, ParallelConfig(tp=2, ep=2), interleave=True),
    Case("context parallel, sequence-wise loss", LATENT, ParallelConfig(cp=2, ep=2)),
    Case("dropping, recomputed", DROPPING, ParallelConfig(dp=2, ep=2), "full"),
    Case("dropping by weight, expert slices", BY_WEIGHT, ParallelConfig(tp=2, etp=2), "selective"),
    Case("pipeline", TINY, ParallelConfig(pp=2)),
    Case("pipeline of pairs", TINY, ParallelConfig(pp=2), schedule="gpipe", interleave=True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_transformer_on_any_mapping_equals_one_process(case: Case, pool2: RankPool) -> None:
    want = transformer(0, 1, case)
    outcomes = pool2.run(transformer, case)
    for name, value in want.items():
        total = sum(outcome[name] for outcome in outcomes if name in outcome)
        torch.testing.assert_close(total, value, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
        assert not name.endswith(".moe") or int(value.sum()) == 2 * 27 * 2


def test_real_tokens_of_a_transformer_have_the_bits_of_a_batch_without_padding() -> None:
    model = Transformer(replace(TINY, dense_layers=(1,)))
    initialize(model, seed=3)
    model.eval()
    ids, _, documents, mask = packed_batch()
    with torch.no_grad():
        padded = model.logits(model(ids, documents=documents, mask=mask))
        for row, length in enumerate(mask.sum(1).tolist()):
            if length:
                alone = model.logits(model(ids[row : row + 1, :length], documents=documents[row : row + 1, :length]))
                torch.testing.assert_close(padded[row, :length], alone[0], rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="mask must be bool"):
        model(ids, mask=mask[:, 1:])
