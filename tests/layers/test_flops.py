"""FLOP and parameter counts agree with torch's counter on a real model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

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
    monkeypatch.setattr("moe_comm.kernels.cpu_gemm.is_native", lambda *_: False)  # torch counts its own products only
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
