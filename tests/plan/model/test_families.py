"""Parameter counts from a config.json equal those of the transformers model of the family."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_comm.errors import ConfigError
from moe_plan.model.files import FAMILIES, REFUSED, shape_of_hugging_face

transformers = pytest.importorskip("transformers")

WIDTHS = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 99,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_key_value_heads": 4,
}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
DEEP = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
}
WINDOWS = ["sliding_attention", "full_attention"] * 3
DENSE = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "olmo2", "olmo3"]
DENSE += ["exaone4", "glm", "glm4", "phi3", "granite", "smollm3", "seed_oss", "internlm3"]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", LOCAL),
    ("mixtral", LOCAL | {"tie_word_embeddings": True, "sliding_window": 8}),
    ("qwen2_moe", EIGHT | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 56}),
    (
        "qwen2_moe",
        EIGHT | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "decoder_sparse_step": 2},
    ),
    ("qwen3_moe", EIGHT | {"moe_intermediate_size": 40, "mlp_only_layers": [0, 3], "attention_bias": True}),
    ("olmoe", EIGHT | {"head_dim": 24}),
    ("flex_olmo", EIGHT),
    ("deepseek_v2", DEEP | LATENT),
    ("deepseek_v2", DEEP | LATENT | {"q_lora_rank": None}),
    ("deepseek_v3", DEEP | LATENT),
    ("deepseek_v3", DEEP | LATENT | {"attention_bias": True, "q_lora_rank": None}),
    ("glm4_moe", DEEP | {"use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe", DEEP),
    ("glm4_moe_lite", DEEP | LATENT),
    ("dots1", DEEP),
    ("solar_open", DEEP | {"first_k_dense_replace": 0}),
    ("phimoe", LOCAL),
    ("phimoe", LOCAL | {"attention_bias": True, "lm_head_bias": True}),
    ("gpt_oss", LOCAL | {"sliding_window": 8, "layer_types": WINDOWS}),
    ("granitemoe", LOCAL | {"attention_bias": True}),
    ("granitemoeshared", LOCAL | {"shared_intermediate_size": 48}),
    ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": [2] * 6}),
    ("minimax_m2", LOCAL),
    ("cohere2_moe", EIGHT),
    (
        "ernie4_5_moe",
        {
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 4,
            "moe_layer_interval": 2,
        },
    ),
    ("exaone_moe", EIGHT | {"moe_intermediate_size": 40, "num_shared_experts": 1, "first_k_dense_replace": 1}),
    ("aria_text", {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2}),
    *[(kind, {}) for kind in DENSE],
    ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    ("cohere", {"use_qk_norm": True}),
]


def count_parameters(config: Any) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in {id(one): one for one in model.parameters()}.values())


@pytest.mark.parametrize(("kind", "changes"), CASES, ids=lambda part: part if isinstance(part, str) else "+".join(part))
def test_parameter_counts_equal_those_of_the_transformers_model(kind: str, changes: dict[str, Any]) -> None:
    try:
        config = transformers.AutoConfig.for_model(kind, **WIDTHS | changes)
    except ValueError:
        pytest.skip(f"no {kind} in transformers {transformers.__version__}")
    expected = count_parameters(config)
    full_config = json.loads(json.dumps(config.to_dict(), default=str))
    assert shape_of_hugging_face(full_config).params == expected
    # As save_pretrained writes it, without the defaults of the family: the same count, or a ConfigError.
    diff_config = json.loads(json.dumps(config.to_diff_dict(), default=str))
    result = None
    with suppress(ConfigError):
        result = shape_of_hugging_face(diff_config).params
    assert result in (None, expected)
    assert result == expected or not set(WIDTHS) <= set(diff_config)


def test_dbrx_sizes_are_read_from_nested_configs() -> None:
    result = shape_of_hugging_face(
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "vocab_size": 100352,
            "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "model_type": ""},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4, "model_type": ""},
            "tie_word_embeddings": False,
        }
    )
    assert (round(result.params / 1e9, 1), round(result.active / 1e9, 1)) == (131.6, 36.5)  # 132 B and 36 B in its card


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_an_unsupported_family_is_rejected(kind: str) -> None:
    assert kind not in FAMILIES
    with pytest.raises(ConfigError, match=rf"{kind}: .* not modelled"):
        shape_of_hugging_face(WIDTHS | EIGHT | {"model_type": kind})


@pytest.mark.parametrize(("key", "value"), [("use_cla", True), ("mlp_bias", True), ("conv_L_cache", 3)])
def test_an_unsupported_setting_is_rejected_only_if_it_is_enabled(key: str, value: object) -> None:
    assert shape_of_hugging_face(WIDTHS | LOCAL | {"model_type": "mixtral", key: False})
    with pytest.raises(ConfigError, match=f"{key} = .* not modelled"):
        shape_of_hugging_face(WIDTHS | LOCAL | {"model_type": "mixtral", key: value})


def test_an_unknown_dense_family_must_have_a_gated_activation() -> None:
    new = WIDTHS | {"model_type": "brand_new", "hidden_act": "silu"}
    known = shape_of_hugging_face(new | {"model_type": "llama"})
    assert shape_of_hugging_face(new) == replace(known, name="brand_new")
    with pytest.raises(ConfigError, match="two matrices or three"):
        shape_of_hugging_face(new | {"hidden_act": "gelu"})


def test_shared_experts_are_read_from_every_known_key() -> None:
    base = WIDTHS | EIGHT | {"moe_intermediate_size": 40}
    for kind, keys, width in (
        ("hunyuan_v1_moe", {"num_shared_expert": [2] * 6}, 80),
        ("bailing_moe", {"num_shared_experts": 2, "moe_shared_expert_intermediate_size": 30}, 60),
        ("brand_new", {"num_shared_experts": 1}, 40),
        ("brand_new", {"shared_expert_intermediate_size": 48}, 48),
        ("brand_new", {}, 0),
    ):
        assert shape_of_hugging_face(base | keys | {"model_type": kind}).shared_ffn == width
    with pytest.raises(ConfigError, match="num_experts must be an integer"):
        shape_of_hugging_face(base | {"model_type": "brand_new", "num_experts": [8, 8, 4]})


def test_full_attention_layers_are_read_from_every_known_key() -> None:
    base = WIDTHS | {"sliding_window": 8}
    for kind, keys, expected in (
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 4}, (8, 4)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 28}, (None, 0)),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 4}, (None, 0)),
        ("gemma2", {}, (8, 3)),
        ("gemma3_text", {}, (8, 1)),
        ("gemma3_text", {"sliding_window_pattern": 2}, (8, 3)),
        ("mistral", {}, (8, 0)),
    ):
        result = shape_of_hugging_face(base | keys | {"model_type": kind})
        assert (result.window, result.full_layers) == expected
