"""FLOP and parameter counts agree with torch's counter on a real model, and with published sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_comm.errors import ConfigError
from moe_comm.layers.attention.config import AttentionConfig, MLAConfig
from moe_comm.layers.moe.config import MoEConfig
from moe_comm.layers.moe.router import RouterConfig, ZeroExperts
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.initialize import initialize
from moe_comm.layers.transformer.model import Transformer
from moe_comm.layers.transformer.shape import ModelShape

# Widths are multiples of 64, so that no GEMM is padded. All heads have the same width.
MODEL = TransformerConfig(
    vocab=128,
    hidden=64,
    layers=3,
    attention=AttentionConfig(64, heads=4, kv_heads=2, head_dim=16),
    moe=MoEConfig(64, 32, RouterConfig(64, 4), shared_ffn=64),
    max_length=64,
    dense_layers=(0,),
    dense_ffn=128,
)
LATENT = replace(
    MODEL, attention=AttentionConfig(64, 4, 4, 16, mla=MLAConfig(32, 16, nope_dim=8, rope_dim=8, v_dim=16))
)


def scores(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """Count the full S x S attention scores, as torch does on other devices."""
    batch, heads, length, width = q
    return int(2 * batch * heads * length * k[2] * (width + v[3]))


def addmm_flops(total: Any, a: Any, b: Any, *args: Any, **kwargs: Any) -> int:
    """Count the in-place ``addmm_``, which torch's counter does not know."""
    return int(2 * a[0] * a[1] * b[1])


@pytest.mark.parametrize("config", [MODEL, LATENT], ids=["gqa", "mla"])
def test_flops_equal_those_that_torch_counts_for_a_real_model(
    config: TransformerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "moe_comm.kernels.row_invariant.MIN_ROWS", 1
    )  # padding rows of experts are not work of the model
    model = Transformer(config)
    initialize(model, seed=0)
    ids = torch.randint(config.vocab, (2, 64), generator=torch.Generator().manual_seed(0))
    custom_mapping = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: scores}
    forward_flops = sum(ModelShape.of(config).flops_per_token(64, causal=False).values())
    with FlopCounterMode(display=False, custom_mapping=custom_mapping) as forward, torch.no_grad():
        model.logits(model(ids))
    assert forward.get_total_flops() == forward_flops * ids.numel()
    # In training, attention scores are excluded: the kernel recomputes them in backward, which is not model work.
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: addmm_flops}) as training:
        model.loss(model(ids), ids).backward()
    layer = config.attention
    width = layer.head_dim if layer.mla is None else layer.mla.v_dim
    score_flops = 2 * config.layers * 2 * layer.heads * width * 64
    assert training.get_total_flops() == 3 * (forward_flops - score_flops) * ids.numel()


def mixtral(hidden: int, ffn: int, layers: int, heads: int, vocab: int) -> TransformerConfig:
    return TransformerConfig(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        attention=AttentionConfig(hidden, heads, 8, 128),
        moe=MoEConfig(hidden, ffn, RouterConfig(8, 2)),
        max_length=32768,
    )


QWEN = TransformerConfig(
    vocab=151936,
    hidden=2048,
    layers=48,
    attention=AttentionConfig(2048, 32, 4, 128, qk_norm="head"),
    moe=MoEConfig(2048, 768, RouterConfig(128, 8)),
    max_length=40960,
)
DEEPSEEK = TransformerConfig(
    vocab=129280,
    hidden=7168,
    layers=61,
    attention=AttentionConfig(7168, 128, 128, 128, mla=MLAConfig(1536, 512, 128, 64, 128)),
    moe=MoEConfig(7168, 2048, RouterConfig(256, 8, score="sigmoid"), shared_ffn=2048),
    max_length=4096,
    dense_layers=(0, 1, 2),
    dense_ffn=18432,
)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (mixtral(4096, 14336, 32, 32, 32000), 46.7, 12.9),
        (mixtral(6144, 16384, 56, 48, 32768), 140.6, 39.2),
        (QWEN, 30.5, 3.35),
        (DEEPSEEK, 671.0, 37.6),
    ],
    ids=["mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "deepseek-v3"],
)
def test_published_sizes(config: TransformerConfig, total: float, active: float) -> None:
    """Billions of parameters, in all and for one token, as on the models' cards (active ones with the embedding)."""
    shape = ModelShape.of(config)
    assert shape.params / 1e9 == pytest.approx(total, abs=0.06)
    assert shape.active / 1e9 == pytest.approx(active, abs=0.06)
    # Training takes six FLOPs per active parameter in a GEMM, in addition to those of attention.
    multiplied = shape.active - shape.parameters()["embedding"] - shape.parameters()["norms"]
    without_scores = shape.model_flops(1)
    assert without_scores == pytest.approx(6 * multiplied, rel=2e-3)


def test_a_token_attends_to_half_the_sequence_or_to_its_window() -> None:
    for window in (None, 1, 3, 8, 100):
        config = replace(MODEL, attention=replace(MODEL.attention, window=window))
        context = [min(place + 1, window or 8) for place in range(8)]
        assert ModelShape.of(config).context(8) == pytest.approx(sum(context) / 8)
    assert ModelShape.of(MODEL).context(8, causal=False) == 8


def test_a_tied_head_has_products_and_no_parameters() -> None:
    tied, untied = ModelShape.of(replace(MODEL, tie=True)), ModelShape.of(MODEL)
    assert untied.params - tied.params == MODEL.vocab * MODEL.hidden
    assert tied.flops_per_token(64) == untied.flops_per_token(64)


def test_zero_computation_experts_cost_nothing_when_chosen() -> None:
    half = replace(MODEL.moe, router=RouterConfig(64, 4, zero_experts=ZeroExperts(identity=32, zero=32)))
    shape, plain = ModelShape.of(replace(MODEL, moe=half)), ModelShape.of(MODEL)
    assert shape.flops_per_token(64)["experts"] == plain.flops_per_token(64)["experts"] / 2
    assert shape.parameters()["experts"] == plain.parameters()["experts"]


def test_a_router_may_group_zero_computation_experts_with_real_ones() -> None:
    """Some groups of eight experts hold real and zero-computation experts."""
    router = RouterConfig(20, 4, num_groups=3, top_groups=2, zero_experts=ZeroExperts(identity=4))
    config = replace(MODEL, moe=replace(MODEL.moe, router=router))
    assert ModelShape.of(config).params == sum(p.numel() for p in Transformer(config).parameters())


def test_sequences_without_tokens_are_rejected() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ModelShape.of(MODEL).model_flops(0)
