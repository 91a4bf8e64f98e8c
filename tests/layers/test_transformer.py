"""The transformer on each kind of mapping equals the same model on one process: loss and all gradients."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from moe_comm.errors import ConfigError, InputError
from moe_comm.layers.attention.sequence import shard_sequence
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig, ParallelMesh
from tests.layers.tiny import (
    BATCH,
    BY_WEIGHT,
    DROPPING,
    LATENT,
    LENGTH,
    TINY,
    Case,
    Outcome,
    assert_same,
    batch,
    own,
    run,
    work,
)
from tests.pool import RankPool

RING = {"context": "ring"}
PARALLEL = replace(TINY, parallel_block=True)
TIED = replace(TINY, tie=True)
DENSE = replace(TINY, dense_layers=(0, 1, 2))

ON_2 = [
    Case(ParallelConfig(tp=2, ep=2)),
    Case(ParallelConfig(tp=2, ep=1), PARALLEL),
    Case(ParallelConfig(cp=2, ep=2)),
    Case(ParallelConfig(cp=2, ep=2), DROPPING, RING, packed=True),
    Case(ParallelConfig(dp=2, ep=2)),
    Case(ParallelConfig(dp=2, etp=2), TIED),
    Case(ParallelConfig(tp=2, ep=2), DENSE),
]
ON_4 = [
    Case(ParallelConfig(tp=2, cp=2, ep=4), BY_WEIGHT, RING),
    Case(ParallelConfig(tp=2, dp=2, etp=2, ep=2), TIED),
    Case(ParallelConfig(cp=2, dp=2, ep=2), LATENT, packed=True),
    Case(ParallelConfig(tp=4, ep=2), DROPPING),
]


@lru_cache(maxsize=32)
def alone(config: TransformerConfig, packed: bool, dtype: torch.dtype = torch.float64) -> Outcome:
    return run(Case(config=config, packed=packed, dtype=dtype))


def check(pool: RankPool, case: Case, tolerance: float = 1e-9) -> None:
    outcomes = pool.run(work, case)
    expected = alone(case.config, case.packed, case.dtype)
    assert_same(outcomes, case.mapping, expected, tolerance)
    assert sum(outcome.dropped for outcome in outcomes) == expected.dropped
    assert sum(outcome.counted for outcome in outcomes) == expected.counted


@pytest.mark.parametrize("case", ON_2, ids=str)
def test_two_ranks_equal_one(pool2: RankPool, case: Case) -> None:
    check(pool2, case)


@pytest.mark.parametrize("case", ON_4, ids=str)
def test_four_ranks_equal_one(pool4: RankPool, case: Case) -> None:
    check(pool4, case)


def test_eight_ranks_equal_one(pool8: RankPool) -> None:
    check(pool8, Case(ParallelConfig(tp=2, cp=2, dp=2, etp=2, ep=4), LATENT))


def test_a_folded_mapping_in_fp32_over_shared_memory_agrees_to_1e_5(pool4: RankPool) -> None:
    mapping = ParallelConfig(tp=2, cp=2, etp=2, ep=2)
    check(pool4, Case(mapping, TINY, {"backend": "auto"}, dtype=torch.float32), tolerance=1e-5)


def test_the_capacity_configurations_of_these_tests_drop_slots() -> None:
    assert alone(DROPPING, True).dropped > 0 and alone(BY_WEIGHT, False).dropped > 0


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = Transformer(TINY)
    initialize(model, seed=3)
    ids, targets, _ = batch(False)
    hidden = model(ids)
    expected = nn.functional.cross_entropy(model.logits(hidden).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model.loss(hidden, targets), expected)


def test_a_token_does_not_attend_to_later_tokens() -> None:
    model = Transformer(TINY).eval()
    initialize(model, seed=3)
    ids, _, _ = batch(False)
    changed = ids.clone()
    changed[:, LENGTH // 2 :] = (ids[:, LENGTH // 2 :] + 1) % TINY.vocab
    half = slice(0, LENGTH // 2)
    torch.testing.assert_close(model(changed)[:, half], model(ids)[:, half])
    assert not torch.allclose(model(changed)[:, -1], model(ids)[:, -1])


@pytest.mark.parametrize("cuts", [(0, 1, 3), (0, 0, 3), (0, 3, 3)])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_sequential_stages_equal_the_full_model(cuts: tuple[int, ...], tie: bool) -> None:
    """The stages hold layers 0..cuts[1] and the rest. A stage may have no layers, and so no experts."""
    config = replace(TINY, tie=tie)
    expected = alone(config, True)
    ids, targets, documents = batch(True)
    stages = []
    for number in range(2):
        layers = tuple(range(cuts[number], cuts[number + 1]))
        plan = ModelPlan(layers=layers, has_embedding=number == 0, has_head=number == 1, dtype=torch.float64)
        stages.append(Transformer(config, plan))
        initialize(stages[-1], seed=3)
    x = ids
    for stage in stages:
        x = stage(x, documents=documents)
    loss = stages[1].loss(x, targets) / (targets >= 0).sum()
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected.loss, rtol=1e-12, atol=0)
    grads = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    if tie:
        assert torch.equal(stages[0].embed.weight, stages[1].head.weight)
        assert all(stage.tied_names == ("embed.weight", "head.weight") for stage in stages)
        head = grads.pop("head.weight")
        assert head is not None and grads["embed.weight"] is not None
        grads["embed.weight"] = grads["embed.weight"] + head
    assert grads.keys() == expected.grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected.grads[name], rtol=1e-9, atol=1e-12, msg=name)


def test_a_tied_head_on_one_stage_is_the_embedding() -> None:
    model = Transformer(replace(TINY, tie=True))
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in shardings_of(model) and model.tied_names == ()


@pytest.mark.parametrize("context", ["ulysses", "ring"])
def test_the_token_index_is_the_position_in_the_global_micro_batch(context: str) -> None:
    mapping = ParallelConfig(tp=2, cp=2, dp=2)
    whole = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    for rank in range(mapping.world):
        plan = ModelPlan(mapping.place(rank), mapping.sizes, context=context)  # type: ignore[arg-type]
        local = own(whole, plan)
        assert local is not None
        expected = local.chunk(2, dim=1)[plan.place["tp"]]
        assert torch.equal(plan.token_index(BATCH // 2, LENGTH // 4), expected)


def test_positions_affect_rope_but_not_causality() -> None:
    model = Transformer(TINY).eval()
    initialize(model, seed=3)
    ids, _, _ = batch(False)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    assert torch.equal(model(ids), model(ids, positions=positions))
    # RoPE depends on differences of positions, so an offset changes rounding only.
    torch.testing.assert_close(model(ids), model(ids, positions=positions + 7), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(model(ids), model(ids, positions=positions * 2), rtol=1e-3, atol=1e-4)


def test_packed_documents_equal_separate_sequences() -> None:
    model = Transformer(replace(TINY, attention=replace(TINY.attention, window=5))).eval()
    initialize(model, seed=3)
    ids, _, _ = batch(False)
    half = LENGTH // 2
    documents = (torch.arange(LENGTH) >= half).long().expand(BATCH, LENGTH)
    packed = model(ids, torch.arange(half).repeat(1, 2), documents)
    separate = torch.cat([model(ids[:, :half]), model(ids[:, half:])], 1)
    torch.testing.assert_close(packed, separate, rtol=1e-4, atol=1e-5)


def test_the_meta_device_has_the_same_parameters_without_memory() -> None:
    model = Transformer(LATENT, ModelPlan(device="meta"))
    assert all(p.is_meta for p in model.parameters()) and all(b.is_meta for b in model.buffers())
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in Transformer(LATENT).named_parameters()
    }
    initialize(model, seed=3)
    layer = next(model.moe_layers())
    assert layer.dispatcher.name == "deferred"
    with pytest.raises(ConfigError, match="meta device"):
        layer.dispatcher.dispatch(torch.zeros(1, 32), torch.zeros(1, 2, dtype=torch.int64))


def shapes_match_shardings(rank: int, world: int, mapping: ParallelConfig) -> bool:
    """Return whether the parameters of this rank have the shapes of their shardings, without memory."""
    mesh = ParallelMesh(mapping)
    model = Transformer(TINY, ModelPlan.of(mesh, device="meta"))
    shardings = shardings_of(model)
    return all(
        p.is_meta and tuple(p.shape) == shardings[name].local_shape(mesh.place, mesh.sizes)
        for name, p in model.named_parameters()
    )


def test_a_mapping_is_built_on_the_meta_device_rank_by_rank(pool4: RankPool) -> None:
    assert all(pool4.run(shapes_match_shardings, ParallelConfig(tp=2, dp=2, etp=2, ep=2)))


def check_deep_copy(rank: int, world: int, mapping: ParallelConfig) -> None:
    mesh = ParallelMesh(mapping)
    model = Transformer(TIED, ModelPlan.of(mesh, backend="all_to_all"))
    initialize(model, seed=3)
    copied = deepcopy(model)
    ids = own(batch(False)[0], model.plan)
    assert ids is not None
    assert torch.equal(copied(ids), model(ids))
    assert copied.plan is model.plan and copied.head.weight is copied.embed.weight
    with torch.no_grad():
        copied.embed.weight.zero_()
    assert bool(model.embed.weight.any())


def test_a_copy_has_its_own_weights_and_the_same_groups(pool4: RankPool) -> None:
    pool4.run(check_deep_copy, ParallelConfig(tp=2, cp=2, ep=2))
    pool4.run(check_deep_copy, ParallelConfig(cp=2, dp=2, ep=4))


@pytest.mark.parametrize("config", [TINY, LATENT, DENSE, TIED, PARALLEL], ids=["gqa", "mla", "dense", "tied", "par"])
def test_the_parameter_count_is_that_of_the_model(config: TransformerConfig) -> None:
    model = Transformer(config, ModelPlan(device="meta"))
    assert ModelShape.of(config).params == sum(p.numel() for p in model.parameters())


def test_names_and_shardings_omit_wrappers() -> None:
    model = Transformer(TINY, ModelPlan(device="meta"))
    plain = shardings_of(model)
    for key, block in list(model.layers.items()):
        model.layers[key] = checkpoint_wrapper(block)
    assert shardings_of(model) == plain
    assert {
        "embed.weight",
        "layers.0.attention_norm.weight",
        "layers.0.attention.q.weight",
        "layers.0.ffn_norm.weight",
        "layers.0.moe.router.weight",
        "layers.0.moe.experts.w13",
        "layers.0.moe.shared.w2",
        "layers.1.dense.w13",
        "norm.weight",
        "head.weight",
    } <= plain.keys()
    assert plain["layers.0.moe.experts.w13"].expert and not plain["layers.0.moe.router.weight"].splits


def test_unset_weights_give_a_nan_loss() -> None:
    model = Transformer(DENSE)
    ids, targets, _ = batch(False)
    assert model.loss(model(ids), targets).isnan()


def test_invalid_input_raises_with_the_expected_value() -> None:
    model = Transformer(TINY)
    initialize(model, seed=3)
    with pytest.raises(InputError, match="token ids"):
        model(torch.zeros(1, 4, 32))
    with pytest.raises(InputError, match=f"max_length = {LENGTH} tokens"):
        model(torch.zeros(1, LENGTH + 1, dtype=torch.int64))
    middle = Transformer(TINY, ModelPlan(layers=(1,), has_embedding=False, has_head=False))
    with pytest.raises(InputError, match=r"activations \[B, S, 32\]"):
        middle(torch.zeros(1, 4, 31))
    with pytest.raises(ConfigError, match="last pipeline stage"):
        middle.loss(torch.zeros(1, 4, 32), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"must be in 0\.\.2"):
        Transformer(TINY, ModelPlan(layers=(2, 3)))
    with pytest.raises(ConfigError, match="ascending"):
        ModelPlan(layers=(1, 0))


def test_ring_and_ulysses_split_by_the_plan() -> None:
    plan = ModelPlan(ParallelConfig(cp=2).place(1), ParallelConfig(cp=2).sizes, context="ring")
    whole = torch.arange(8).unsqueeze(0)
    assert torch.equal(shard_sequence(whole, 2, 1, "ring"), plan.token_index(1, 4))
