"""Tiny transformers, and helpers that assemble the full gradients from the ranks of any mapping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch.slots.capacity import Capacity
from moe_comm.layers.attention.config import AttentionConfig, MLAConfig, RopeConfig
from moe_comm.layers.attention.sequence import shard_sequence
from moe_comm.layers.moe.layer import MoEConfig
from moe_comm.layers.moe.router import RouterConfig
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.topology import ParallelConfig, ParallelMesh, Sharding

BATCH, LENGTH = 4, 16

TINY = TransformerConfig(
    vocab=50,  # over tp 4: 13, 13, 13 and 11 rows
    hidden=32,
    layers=3,
    attention=AttentionConfig(32, heads=8, kv_heads=4, head_dim=4, qk_norm="head"),
    moe=MoEConfig(32, 16, RouterConfig(8, 2, balance_loss=0.1, z_loss=0.01), shared_ffn=24),
    max_length=LENGTH,
    dense_layers=(1,),
    dense_ffn=48,
    init_std=0.2,  # large enough for distinct routing scores and non-uniform attention
)
LATENT = replace(
    TINY,
    attention=AttentionConfig(
        32, 8, 8, 4, rope=RopeConfig(interleaved=True), mla=MLAConfig(12, 8, nope_dim=4, rope_dim=2, v_dim=3)
    ),
    moe=replace(
        TINY.moe,
        router=RouterConfig(
            8,
            2,
            score="sigmoid",
            num_groups=4,
            top_groups=2,
            correction_bias=True,
            balance_loss=0.1,
            balance_form="sequence",
        ),
    ),
)
DROPPING = replace(TINY, moe=replace(TINY.moe, capacity=Capacity(1.0, scope="batch")))
BY_WEIGHT = replace(TINY, moe=replace(TINY.moe, capacity=Capacity(1.0, "probability", scope="batch")))


@dataclass(frozen=True)
class Case:
    """A model on a mapping. plan: further arguments of ``ModelPlan``. packed: sequences contain several documents."""

    mapping: ParallelConfig = field(default_factory=ParallelConfig)
    config: TransformerConfig = TINY
    plan: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        more = [f"{name} {value}" for name, value in self.plan.items() if name != "backend"]
        return ", ".join([str(self.mapping), *more])


@dataclass(frozen=True)
class Outcome:
    """Results of one rank: its part of the loss, gradients summed over their replicas, dropped and counted slots."""

    loss: Tensor
    grads: dict[str, Tensor]
    shardings: dict[str, Sharding]
    dropped: int
    counted: int


def batch(packed: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ids and targets [B, S], some targets without loss, and document ids."""
    generator = torch.Generator().manual_seed(5)
    ids, targets = torch.randint(TINY.vocab, (2, BATCH, LENGTH), generator=generator, device="cpu")
    targets[torch.rand(targets.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.2] = -100
    if not packed:
        return ids, targets, None
    starts = torch.rand(ids.shape, generator=generator, dtype=torch.float32, device="cpu") < 0.2
    return ids, targets, starts.long().cumsum(1)


def run(case: Case) -> Outcome:
    """Run forward and backward of the global micro-batch on this rank of ``case.mapping``."""
    mesh = ParallelMesh(case.mapping)
    plan = ModelPlan.of(mesh, dtype=case.dtype, **{"backend": "all_to_all", **case.plan})
    model = Transformer(case.config, plan)
    initialize(model, seed=3)
    ids, targets, documents = (own(t, plan) for t in batch(case.packed))
    assert ids is not None and targets is not None
    valid = int((batch(case.packed)[1] >= 0).sum())
    for layer in model.moe_layers():
        layer.aux_scale = 1.0
    loss = model.loss(model(ids, documents=documents), targets) / valid
    loss.backward()
    shardings = shardings_of(model)
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grads[name] = parameter.grad
        group = mesh.sum_group(shardings[name])
        if group is not None:
            dist.all_reduce(parameter.grad, group=group)
    dropped = sum(int(layer.num_dropped) for layer in model.moe_layers() if layer.num_dropped is not None)
    counted = sum(int(layer.router.load_E.sum()) for layer in model.moe_layers())
    model.close()
    return Outcome(loss.detach(), grads, shardings, dropped, counted)


def own(whole: Tensor | None, plan: ModelPlan) -> Tensor | None:
    """Return this rank's part of a global micro-batch [B, S]: rows over dp, sequence over cp."""
    if whole is None:
        return None
    rows = whole.chunk(plan.sizes["dp"])[plan.place["dp"]]
    return shard_sequence(rows, plan.sizes["cp"], plan.place["cp"], plan.context)


def work(rank: int, world: int, case: Case) -> Outcome:
    return run(case)


def assemble(outcomes: list[Outcome], mapping: ParallelConfig) -> dict[str, Tensor]:
    """Assemble full gradients from the ranks' parts; fail if a part is missing or covered twice."""
    whole = {}
    for name, sharding in outcomes[0].shardings.items():
        full = torch.full(sharding.shape, torch.nan, dtype=outcomes[0].grads[name].dtype)
        for rank, outcome in enumerate(outcomes):
            place = mapping.place(rank)
            assert outcome.shardings[name] == sharding, name
            for box in sharding.boxes(place, mapping.sizes):
                part = outcome.grads[name][box.local]
                if not sharding.counts_once(place):
                    continue
                assert full[box.full].isnan().all(), f"{name} is covered twice"
                full[box.full] = part
        assert not full.isnan().any(), f"{name} is not covered"
        whole[name] = full
    return whole


def assert_same(outcomes: list[Outcome], mapping: ParallelConfig, alone: Outcome, tolerance: float) -> None:
    """Compare the loss and all gradients with those of one process, relative to the largest value of each."""
    loss = torch.stack([outcome.loss for outcome in outcomes]).sum()
    torch.testing.assert_close(loss, alone.loss, rtol=tolerance, atol=0)
    grads = assemble(outcomes, mapping)
    assert grads.keys() == alone.grads.keys()
    for name, expected in alone.grads.items():
        scale = float(expected.abs().max())
        assert scale > 0, f"{name} has no gradient to compare"
        difference = float((grads[name] - expected).abs().max()) / scale
        assert difference <= tolerance, f"{name}: {difference:.1e}"
