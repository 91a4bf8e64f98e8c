"""RoPE and attention layers have the results of transformers' modules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.layers.attention.config import RopeConfig, Yarn
from moe_comm.layers.attention.layer import Attention
from moe_comm.layers.attention.rope import Rope, softmax_scale

pytest.importorskip("transformers", minversion="5.23", reason="needs the hf extra")

from transformers import AutoConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

from moe_comm.integrations.hugging_face.attention import NAMES, read_config

YARN = Yarn(factor=40.0, original_length=64, mscale=1.0, mscale_all_dim=0.8)
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}


def yarn_parameters(theta: float, yarn: Yarn) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale": yarn.mscale,
        "mscale_all_dim": yarn.mscale_all_dim,
    }


def default_parameters(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


FAMILIES: dict[str, tuple[Any, str, dict[str, Any], RopeConfig]] = {
    "mixtral": (mixtral, "Mixtral", {"rope_parameters": default_parameters(1e6)}, RopeConfig(1e6)),
    "qwen3_moe": (qwen3, "Qwen3Moe", {"head_dim": 16, "rope_parameters": default_parameters(1e6)}, RopeConfig(1e6)),
    "olmoe": (olmoe, "Olmoe", {"clip_qkv": 0.5, "rope_parameters": default_parameters(1e4)}, RopeConfig(1e4)),
    "deepseek_v3": (
        deepseek,
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "rope_interleave": True,
            "rope_parameters": yarn_parameters(1e4, YARN),
        },
        RopeConfig(1e4, YARN, interleaved=True),
    ),
}


def transformers_modules(family: str) -> tuple[Any, Any, Any]:
    """Return the module with the functions, a configuration, and a random attention layer."""
    module, prefix, changes, _ = FAMILIES[family]
    config = AutoConfig.for_model(family, **{**SIZES, **changes}, attn_implementation="sdpa")
    layer = getattr(module, f"{prefix}Attention")(config, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + ("norm" in name))
    return module, config, layer


def table_of(family: str, config: Any, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    module, prefix, _, _ = FAMILIES[family]
    table: tuple[Tensor, Tensor] = getattr(module, f"{prefix}RotaryEmbedding")(config)(
        torch.empty(0, dtype=dtype), positions
    )
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_rotation_has_the_bits_of_transformers(family: str, dtype: torch.dtype) -> None:
    module, config, _ = transformers_modules(family)
    generator = torch.Generator().manual_seed(2)
    positions = torch.randint(0, 4000, (2, 9), generator=generator)
    cos, sin = table_of(family, config, positions, dtype)
    dim = cos.shape[-1]
    q, k = (torch.randn(2, heads, 9, dim, generator=generator).to(dtype) for heads in (4, 2))
    apply = module.apply_rotary_pos_emb_interleave if family == "deepseek_v3" else module.apply_rotary_pos_emb
    rope = Rope(FAMILIES[family][3], dim)
    table = rope.table(positions, dtype)
    for x, expected in zip((q, k), apply(q, k, cos, sin), strict=True):
        assert torch.equal(rope.rotate(x.transpose(1, 2), table).transpose(1, 2), expected)


@pytest.mark.parametrize("yarn", [YARN, replace(YARN, mscale_all_dim=0.0), replace(YARN, factor=1.0), Yarn(8.0, 4096)])
def test_yarn_frequencies_and_amplitude_have_the_bits_of_transformers(yarn: Yarn) -> None:
    config: Any = AutoConfig.for_model(
        "deepseek_v3", **{**SIZES, "qk_rope_head_dim": 64, "rope_parameters": yarn_parameters(5e4, yarn)}
    )
    expected = deepseek.DeepseekV3RotaryEmbedding(config)
    rope = Rope(RopeConfig(5e4, yarn, interleaved=True), 64)
    assert torch.equal(rope.frequencies(torch.device("cpu")), expected.inv_freq)
    assert rope.amplitude == expected.attention_scaling
    assert softmax_scale(192, yarn) == deepseek.yarn_apply_mscale(config.rope_parameters, 192**-0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_equals_that_of_transformers(family: str) -> None:
    _, config, layer = transformers_modules(family)
    attention = Attention(replace(read_config(layer), rope=FAMILIES[family][3]))
    names = dict(attention.named_parameters())
    assert len(names) == len(dict(layer.named_parameters()))
    with torch.no_grad():
        for name, p in names.items():
            module, _, key = name.partition(".")
            p.copy_(layer.get_parameter(f"{NAMES.get(module, module)}.{key}"))
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(24)[None] + 70
    expected, _ = layer(x, table_of(family, config, positions, x.dtype), None)
    torch.testing.assert_close(attention(x, positions), expected, rtol=1e-5, atol=1e-5)


def test_invalid_settings_raise() -> None:
    with pytest.raises(ConfigError, match="even number; got 7"):
        Rope(RopeConfig(), 7)
    with pytest.raises(ConfigError, match="theta"):
        Rope(RopeConfig(theta=1.0), 8)
    with pytest.raises(ConfigError, match="factor"):
        Rope(RopeConfig(yarn=Yarn(0.5, 64)), 8)
