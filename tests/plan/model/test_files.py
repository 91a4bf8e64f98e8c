"""Models by name, from a Hugging Face config.json, and from a configuration of ``moe-comm train``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.train import plan_config
from moe_plan.model.files import model_named, shape_of_hugging_face
from moe_plan.model.named_models import MODELS

# As in the published config.json files, without keys that do not affect the cost.
PLAIN = {"tie_word_embeddings": False, "hidden_act": "silu", "sliding_window": None, "attention_bias": False}
FILES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "vocab_size": 32000,
    },
    "qwen2-57b-a14b": {
        "model_type": "qwen2_moe",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "moe_intermediate_size": 2560,
        "shared_expert_intermediate_size": 20480,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
        "sliding_window": 65536,
        "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "mlp_only_layers": [],
        "vocab_size": 151936,
    },
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "vocab_size": 50304,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "num_attention_heads": 64,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "sliding_window": 128,
        "vocab_size": 201088,
    },
    "longcat-flash": {
        "model_type": "longcat_flash",
        "hidden_size": 6144,
        "ffn_hidden_size": 12288,
        "expert_ffn_hidden_size": 2048,
        "num_layers": 28,
        "num_attention_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "moe_topk": 12,
        "vocab_size": 131072,
    },
}


def written(folder: Path, content: dict[str, Any] | str, name: str = "config.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def bare(shape: ModelShape) -> ModelShape:
    """Remove the name, and widths that latent attention ignores."""
    shape = replace(shape, name="")
    return replace(shape, kv_heads=1, head_dim=1) if shape.latent else shape


@pytest.mark.parametrize("name", FILES)
def test_a_published_config_equals_the_named_model(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, PLAIN | FILES[name])
    result = model_named(str(path))
    assert bare(result) == bare(MODELS[name])
    assert model_named(str(tmp_path)) == result and result.name == tmp_path.name


def test_model_names_are_case_insensitive() -> None:
    assert model_named(" Mixtral-8x7B ") is MODELS["mixtral-8x7b"]


def test_an_unknown_name_gets_the_nearest_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mixtral-8x7b'"):
        model_named("mixtral-8x7")


@pytest.mark.parametrize("name", ["mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "deepseek-v3"])
def test_a_shipped_training_configuration_equals_the_named_model(name: str) -> None:
    pytest.importorskip("pydantic")
    from moe_comm.train.config import ready_configs

    assert bare(plan_config.model_named(str(ready_configs()[name]))) == bare(MODELS[name])


def test_a_byte_level_training_configuration_needs_no_vocab_size(tmp_path: Path) -> None:
    pytest.importorskip("pydantic")
    assert plan_config.model_named("tiny").vocab == 257
    as_json = written(tmp_path, {"model": {"layers": 3, "vocab": 1000}}, "mine.json")
    result = plan_config.model_named(str(as_json))
    assert (result.name, result.layers, result.vocab) == ("mine", 3, 1000)
    other = written(tmp_path, '[data]\ntokenizer = "tokenizer.json"\n', "other.toml")
    with pytest.raises(ConfigError, match=r"set model\.vocab"):
        plan_config.model_named(str(other))
    folder = written(tmp_path, FILES["olmoe-1b-7b"]).parent
    pretrained = written(tmp_path, f"[model]\npretrained = {json.dumps(str(folder))}\n", "tuned.toml")
    assert bare(plan_config.model_named(str(pretrained))) == bare(MODELS["olmoe-1b-7b"])


GENERIC = {
    "model_type": "brand_new",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "vocab_size": 99,
}


def test_an_unknown_family_is_read_from_the_common_keys() -> None:
    result = shape_of_hugging_face(GENERIC)
    assert result == ModelShape("brand_new", 6, 32, 4, 2, 8, 99, 16, 2, 24)
    assert shape_of_hugging_face({"text_config": GENERIC, "vision_config": {"hidden_size": 1}}) == result


@pytest.mark.parametrize("key", [key for key in GENERIC if key != "model_type"])
def test_a_missing_key_is_named(key: str) -> None:
    missing = "intermediate_size" if key == "moe_intermediate_size" else key
    missing = "n_routed_experts.*num_experts" if key == "num_experts" else missing
    with pytest.raises(ConfigError, match=missing):
        shape_of_hugging_face({name: value for name, value in GENERIC.items() if name != key})


def test_dense_layers_are_read_from_every_known_key() -> None:
    more = GENERIC | {"intermediate_size": 77}
    for label, expected in (
        ({"first_k_dense_replace": 2}, 2),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, 4),  # experts in layers 2 and 4
        ({"decoder_sparse_step": 2}, 3),
        ({"mlp_only_layers": [0, 5], "decoder_sparse_step": 1}, 2),
        ({"mlp_layer_types": ["dense"] + 5 * ["sparse"]}, 1),
        ({}, 0),
    ):
        result = shape_of_hugging_face(more | label)
        assert (result.dense_layers, result.dense_ffn) == (expected, 77 if expected else 0)
    width = {name: value for name, value in more.items() if name != "moe_intermediate_size"}
    with pytest.raises(ConfigError, match="moe_intermediate_size is missing"):
        shape_of_hugging_face(width | {"first_k_dense_replace": 1})


def test_a_dense_model_has_no_experts() -> None:
    result = shape_of_hugging_face(GENERIC | {"model_type": "llama", "intermediate_size": 100})
    assert (result.experts, result.dense_layers, result.moe_layers) == (0, 6, 0)
    assert set(result.flops_per_token(8)) == {"qkv", "scores", "out", "dense", "head"}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_experts": -4}, "num_experts"),
        ({"vocab_size": 1 << 50}, "vocab_size"),
        ({"vocab_size": 1.5}, "vocab_size"),
        ({"num_hidden_layers": 1 << 20}, "num_hidden_layers must be an integer from 1 to 4,096"),
        ({"num_experts": 1 << 30}, "num_experts must be an integer from 1 to 16,384"),
        ({"num_experts": 1 << 14, "hidden_size": 1 << 20, "moe_intermediate_size": 1 << 30}, "parameters"),
        ({"hidden_size": 33}, "head_dim"),
        ({"num_experts_per_tok": 17}, "top_k"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"layer_types": ["linear_attention"] * 6}, "linear_attention"),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, "layer_types"),
        ({"kv_lora_rank": 8}, "qk_nope_head_dim"),
        ({"interleave_moe_layer_step": 2}, "not modelled"),
        ({"model_type": 3}, "model_type"),
        ({"model_type": "qwen2_moe"}, "shared_expert_intermediate_size"),
    ],
    ids=str,
)
def test_the_error_names_the_invalid_setting(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        shape_of_hugging_face(GENERIC | change)


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": 1, "a": 2}', "[" * 100_000, '{"hidden_size": NaN}'])
def test_a_file_without_a_json_object_is_rejected(content: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a valid JSON file"):
        model_named(str(written(tmp_path, content)))


def test_missing_and_too_long_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        model_named(str(tmp_path / "config.json"))
    with pytest.raises(ConfigError, match="longer"):
        model_named(str(written(tmp_path, " " * (2 << 20))))


def test_expert_groups_are_read_only_for_group_limited_routing(tmp_path: Path) -> None:
    content = PLAIN | FILES["deepseek-v3"]
    plain = model_named(str(written(tmp_path, content | {"topk_method": "greedy"})))
    assert (plain.groups, plain.top_groups) == (1, 1), "greedy routing ignores the groups, as in DeepSeek-V2-Lite"
    with pytest.raises(ConfigError, match="groups must divide the experts"):
        model_named(str(written(tmp_path, content | {"n_group": 7})))
    with pytest.raises(ConfigError, match="fewer experts than top_k"):
        model_named(str(written(tmp_path, content | {"n_group": 256, "topk_group": 7})))
