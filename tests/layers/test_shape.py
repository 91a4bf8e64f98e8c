"""Parameters and FLOPs of model shapes agree with ``moe_comm.layers``, block by block, and with published numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from moe_comm.errors import ConfigError
from moe_comm.layers.attention.config import AttentionConfig, MLAConfig
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.router import RouterConfig, ZeroExperts
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.model import ModelPlan, Transformer
from moe_comm.layers.transformer.shape import ModelShape
from moe_plan.model.named_models import DENSE, MODELS

GQA = TransformerConfig(
    vocab=100,
    hidden=24,
    layers=5,
    attention=AttentionConfig(24, heads=6, kv_heads=2, head_dim=8),
    moe=MoEConfig(24, 20, RouterConfig(8, 3)),
    max_length=64,
)
LATENT = AttentionConfig(24, 6, 6, 8, mla=MLAConfig(10, 12, nope_dim=4, rope_dim=2, v_dim=6), bias=True)
ZERO = replace(GQA.moe, router=RouterConfig(8, 3, zero_experts=ZeroExperts(identity=3, zero=1)))
SHARED = MoEConfig(24, 20, RouterConfig(8, 3, linear_bias=True), expert_bias=True, shared_ffn=14, shared_gate=True)
CONFIGS = {
    "gqa": GQA,
    "tied": replace(GQA, tie=True),
    "parallel": replace(GQA, parallel_block=True, dense_layers=(0,), dense_ffn=30),
    "dense layers": replace(GQA, dense_layers=(0, 1), dense_ffn=33),
    "no experts": replace(GQA, dense_layers=(0, 1, 2, 3, 4), dense_ffn=33),
    "window": replace(GQA, attention=replace(GQA.attention, window=4)),
    "norms and biases": replace(GQA, attention=replace(GQA.attention, qk_norm="full", bias=True, out_bias=True)),
    "norm per head": replace(GQA, attention=replace(GQA.attention, qk_norm="head")),
    "latent": replace(GQA, attention=LATENT),
    "direct queries": replace(GQA, attention=replace(LATENT, mla=MLAConfig(None, 12, 4, 2, 6))),
    "shared": replace(GQA, moe=SHARED),
    "not gated": replace(GQA, moe=replace(SHARED, activation="gelu")),
    "shortcut": replace(GQA, shortcut=True, dense_layers=(0,), dense_ffn=40),
    "zero experts": replace(GQA, moe=ZERO),
}


PLACES = {
    "embed.": "embedding",
    "head.": "head",
    ".router.": "router",
    ".experts.": "experts",
    ".shared": "shared experts",
    "attention.": "attention",
    "norm.": "norms",
    "dense.": "dense",
}
"""Substring of a parameter's name -> family of the parameter. The first match counts."""


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_parameter_counts_equal_those_of_the_layers(config: TransformerConfig) -> None:
    shape, built = ModelShape.of(config), Counter[str]()
    for name, parameter in Transformer(config, ModelPlan(device="meta")).named_parameters():
        built[next(family for part, family in PLACES.items() if part in name)] += parameter.numel()
    assert shape.parameters() == built
    assert shape.params == built.total()
    active = shape.active_parameters()
    assert round(sum(active.values())) == shape.active
    chosen = config.moe.router.top_k / config.moe.router.num_choices
    assert active == pytest.approx({name: n * chosen if name == "experts" else n for name, n in built.items()})


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS.keys())
def test_parameters_and_flops_are_sums_over_the_blocks(shape: ModelShape) -> None:
    sums = {"dense": shape.dense_layers, "moe": shape.moe_layers}
    layers = [shape.kind(layer) for layer in range(shape.layers)]
    assert {kind: layers.count(kind) for kind in sums} == sums  # type: ignore[arg-type]
    ends = shape.embedding_block.params + shape.head_block.params
    assert shape.params == ends + sum(sum(shape.parameters(kind).values()) for kind in layers)
    forward = sum(sum(shape.flops_per_token(100, kind=kind).values()) for kind in layers)
    assert shape.model_flops(100) == pytest.approx(3 * (forward + sum(shape.head_block.flops(0).values())))


def test_a_block_lists_the_shape_of_each_gemm() -> None:
    shape = MODELS["mixtral-8x7b"]
    assert [(one.name, one.k, one.n, one.copies, one.used) for one in shape.moe_block.products("experts")] == [
        ("up", 4096, 28672, 8, 2),
        ("down", 14336, 4096, 8, 2),
    ]
    assert [(one.k, one.n) for one in shape.attention_block.products("qkv")] == [(4096, 6144)]
    assert shape.qkv_width == 6144
    latent = MODELS["deepseek-v3"].attention_block
    assert [(one.k, one.n) for one in latent.products("qkv")] == [
        (7168, 1536),
        (1536, 128 * 192),
        (7168, 576),
        (512, 128 * 256),
    ]
    assert latent.per_context == 2 * 128 * (192 + 128)


# Published numbers from model cards and reports (sources in named_models.py): total parameters and active parameters in
# billions, and whether the active parameters include the embedding.
PUBLISHED: dict[str, tuple[float, float, bool]] = {
    "mixtral-8x7b": (46.7, 12.9, True),
    "mixtral-8x22b": (140.6, 39.2, True),
    "qwen1.5-moe-a2.7b": (14.3, 2.7, True),
    "qwen2-57b-a14b": (57.4, 14.2, True),
    "qwen3-30b-a3b": (30.5, 3.3, True),
    "qwen3-235b-a22b": (235.0, 22.0, True),
    "deepseek-v3": (671.0, 37.0, False),
    "deepseek-moe-16b": (16.4, 2.8, True),
    "megascale-moe-352b": (352.0, 45.07, False),  # active: derived from the reported MFU, see below
    "hunyuan-large": (389.0, 52.0, True),
    "phi3.5-moe": (41.9, 6.6, True),
    "olmoe-1b-7b": (6.9, 1.3, True),
    "gpt-oss-120b": (116.8, 5.1, False),
    "longcat-flash": (560.0, 27.0, False),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    shape, (total, active, with_embedding) = MODELS[name], PUBLISHED[name]
    assert shape.params / 1e9 == pytest.approx(total, rel=0.01)
    counted = shape.active - (0 if with_embedding else shape.embedding_block.params)
    assert counted / 1e9 == pytest.approx(active, rel=0.02)  # two digits are published
    # Training takes six FLOPs per active parameter in a GEMM, in addition to those of attention.
    multiplied = shape.active - shape.parameters()["embedding"] * (not shape.tie) - shape.parameters()["norms"]
    assert shape.model_flops(1) == pytest.approx(6 * multiplied, rel=2e-3)


# Published parameters in billions (sources in named_models.py). The README of llm-foundry (mpt-*) lists all digits.
PUBLISHED_DENSE = {
    "llama2-13b": 13.0,
    "llama2-70b": 69.0,
    "llama3-8b": 8.03,
    "llama3-70b": 70.6,
    "llama3-405b": 405.9,
    "nemotron4-15b": 3.2 + 12.5,
    "nemotron4-340b": 9.4 + 331.6,
    "gpt3-175b": 175.0,
    "megatron-1.7b": 1.7,
    "megatron-7.1b": 7.1,
    "megatron-16b": 16.0,
    "megatron-32b": 32.0,
    "megatron-70b": 70.0,
    "megatron-119b": 119.0,
    "megatron-177b": 177.0,
    "megatron-314b": 314.0,
    "megatron-462b": 462.0,
    "mpt-1b": 1.315950592,
    "mpt-3b": 2.651837440,
    "mpt-7b": 6.658859008,
    "mpt-13b": 12.853954560,
    "mpt-30b": 29.975214080,
    "mpt-70b": 64.862437376,
}


@pytest.mark.parametrize("name", DENSE)
def test_published_sizes_of_dense_models(name: str) -> None:
    shape = DENSE[name]
    assert shape.params / 1e9 == pytest.approx(PUBLISHED_DENSE[name], rel=0.03 if name == "megatron-1.7b" else 0.02)
    assert shape.moe_layers == 0 and shape.params - shape.active < 1


def test_grok_has_the_flops_that_its_recipe_counts() -> None:
    """NVIDIA/dgxc-benchmarking, grok1: attention, experts and head. Attention counts only the causal half."""
    recipe = 53_150_220_288 + 463_856_467_968 + 4_728_029_184
    assert MODELS["grok-1"].model_flops(8192) == pytest.approx(recipe, rel=1e-3)


def test_split_experts_have_the_same_parameters_and_half_the_flops() -> None:
    whole, split = MODELS["mixtral-8x22b"], MODELS["mixtral-8x22b-g8t8"]
    assert whole.parameters()["experts"] == split.parameters()["experts"]
    assert whole.flops_per_token(4096)["experts"] == 2 * split.flops_per_token(4096)["experts"]


def test_the_352b_model_has_the_flops_behind_its_reported_utilisation() -> None:
    """MegaScale-MoE, table 3: 32.48 % of 240 x 989 TFLOP/s at 272.9 ktokens/s."""
    shape = MODELS["megascale-moe-352b"]
    assert 272.9e3 * shape.model_flops(8192) / (240 * 989e12) == pytest.approx(0.3248, rel=2e-3)


def test_layers_without_a_window_attend_to_the_whole_sequence() -> None:
    narrow = replace(ModelShape.of(GQA), window=4)
    mixed = [replace(narrow, full_layers=full).context(16) for full in (0, 1, 5)]
    assert mixed[2] == narrow.context(3) + 6.5 == 8.5
    assert mixed[1] == pytest.approx(mixed[0] + (mixed[2] - mixed[0]) / 5)
    assert mixed[0] == (1 + 2 + 3 + 4 * 13) / 16


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"kv_heads": 4},
        {"top_k": 9},
        {"experts": 0},
        {"shared_ffn": -1},
        {"dense_layers": 6},
        {"dense_layers": 1},
        {"window": 0},
        {"full_layers": 6},
        {"qk_norm": "some"},
        {"shortcut": True, "parallel_block": True, "dense_ffn": 1},
    ],
    ids=str,
)
def test_invalid_shapes_are_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(ModelShape.of(GQA), **change)


def test_sequences_without_tokens_are_rejected() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ModelShape.of(GQA).model_flops(0)
