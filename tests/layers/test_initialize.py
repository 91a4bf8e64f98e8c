"""Initial weights depend on the seed and parameter names only: each mapping gives the same full model."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.module import shardings_of
from moe_comm.layers.transformer.initialize import fill, init_kind, initialize
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.topology import ParallelConfig, Sharding, Split
from tests.layers.tiny import LATENT, TINY

module = importlib.import_module(
    "moe_comm.layers.transformer.initialize"
)  # the package exports a function with this name

EVEN = replace(TINY, vocab=64)
MAPPINGS = [
    ParallelConfig(),
    ParallelConfig(tp=2, ep=2),
    ParallelConfig(dp=2, etp=2),
    ParallelConfig(tp=4, dp=2, etp=2, ep=4),
    ParallelConfig(tp=2, cp=2, dp=2, ep=8),
]


def assemble(mapping: ParallelConfig, config: object = EVEN, seed: int = 3) -> dict[str, Tensor]:
    """Assemble the parameters from the parts of all ranks, without a process group."""
    model = Transformer(config, ModelPlan(device="meta"))  # type: ignore[arg-type]
    parameters = {}
    for name, sharding in shardings_of(model).items():
        full = torch.full(sharding.shape, torch.nan)
        for rank in range(mapping.world):
            place = mapping.place(rank)
            local = torch.full(sharding.local_shape(place, mapping.sizes), torch.nan)
            fill(local, name, sharding, place, mapping.sizes, seed, 0.2)
            for box in sharding.boxes(place, mapping.sizes):
                filled = full[box.full]
                assert filled.isnan().all() or torch.equal(filled, local[box.local]), f"copies of {name} differ"
                full[box.full] = local[box.local]
        assert not full.isnan().any(), name
        parameters[name] = full
    return parameters


@pytest.mark.parametrize(("mapping", "block"), [*zip(MAPPINGS[1:], [100, 1 << 22] * 2, strict=True)], ids=str)
def test_all_mappings_have_the_same_initial_model(
    mapping: ParallelConfig, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", block)
    alone, sharded = assemble(MAPPINGS[0]), assemble(mapping)
    assert all(torch.equal(alone[name], sharded[name]) for name in alone)


def test_initialize_fills_each_parameter() -> None:
    model = Transformer(EVEN)
    initialize(model, seed=3)
    assert all(
        torch.equal(p, whole) for p, whole in zip(model.parameters(), assemble(MAPPINGS[0]).values(), strict=True)
    )


def test_weights_are_normal_norms_one_biases_zero_and_buffers_zero() -> None:
    config = replace(
        LATENT,
        vocab=512,
        attention=replace(LATENT.attention, bias=True),
        moe=replace(LATENT.moe, expert_bias=True, router=replace(LATENT.moe.router, linear_bias=True)),
    )
    model = Transformer(config)
    initialize(model, seed=3)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert bool((parameter == 1).all()), name
        elif name.endswith(("bias", "b13", "b2")):
            assert not parameter.any(), name
        else:
            assert abs(float(parameter.detach().mean())) < 0.1 * config.init_std * (4096 / parameter.numel()) ** 0.5, (
                name
            )
            assert float(parameter.detach().std()) == pytest.approx(config.init_std, rel=0.15), name
    assert all(not buffer.any() for buffer in model.buffers())


def test_values_differ_between_seeds_names_experts_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 8 * 32)
    weights = assemble(MAPPINGS[0])
    assert not torch.equal(weights["layers.0.attention.q.weight"], weights["layers.2.attention.q.weight"])
    assert not torch.equal(weights["embed.weight"], assemble(MAPPINGS[0], seed=4)["embed.weight"])
    experts = weights["layers.0.moe.experts.w13"]
    assert len({tuple(expert.flatten()[:4].tolist()) for expert in experts}) == len(experts)
    rows = weights["layers.0.attention.q.weight"]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


def test_a_tied_head_on_another_stage_has_the_values_of_the_embedding() -> None:
    tied = replace(TINY, tie=True)
    last = Transformer(tied, ModelPlan(layers=(), has_embedding=False))
    first = Transformer(tied, ModelPlan(layers=(), has_head=False))
    untied = Transformer(TINY)
    for model in (first, last, untied):
        initialize(model, seed=3)
    assert torch.equal(first.embed.weight, last.head.weight)
    assert not torch.equal(untied.embed.weight, untied.head.weight)


def test_bf16_weights_are_the_rounded_fp32_weights() -> None:
    wide, narrow = Transformer(TINY), Transformer(TINY, ModelPlan(dtype=torch.bfloat16))
    for model in (wide, narrow):
        initialize(model, seed=3)
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(wide.parameters(), narrow.parameters(), strict=True))


def test_torchs_generator_is_unchanged() -> None:
    model = Transformer(TINY)
    before = torch.get_rng_state()
    initialize(model, seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_only_required_blocks_are_generated_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 64)
    block_sizes: list[int] = []
    original = Tensor.normal_

    def counted(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        block_sizes.append(self.numel())
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Tensor, "normal_", counted)
    sharding = Sharding((64, 16), (Split(0, "tp"),))
    mapping = ParallelConfig(tp=4)
    fill(torch.empty(16, 16), "x.weight", sharding, mapping.place(1), mapping.sizes, 0)
    assert block_sizes == [64] * 4


def test_a_wrong_shape_or_unknown_kind_raises() -> None:
    mapping = ParallelConfig(tp=2)
    sharding = Sharding((8, 4), (Split(0, "tp"),))
    with pytest.raises(ConfigError, match=r"this rank holds \(4, 4\)"):
        fill(torch.empty(8, 4), "q.weight", sharding, mapping.place(0), mapping.sizes, 0)
    with pytest.raises(ConfigError, match="no initialization is defined"):
        init_kind("layers.0.scale", Sharding((4,)))
    assert init_kind("layers.0.attention.q_norm.weight", Sharding((4,))) == "ones"


def test_a_model_of_plain_modules_can_be_filled_by_name() -> None:
    linear = nn.Linear(4, 8)
    mapping = ParallelConfig()
    for name, parameter in linear.named_parameters():
        fill(parameter, name, Sharding(tuple(parameter.shape)), mapping.place(0), mapping.sizes, 1)
    assert not linear.bias.any() and linear.weight.abs().max() < 0.2
