"""Conversion of Hugging Face configurations in both directions, and unsupported settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig

from moe_comm.dispatch.slots.capacity import Capacity
from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.integrations.hugging_face.architecture import (
    ARCHITECTURES,
    from_hugging_face,
    read_config,
    to_hugging_face,
)
from moe_comm.layers.attention.config import MLAConfig, Yarn
from moe_comm.layers.moe.router import ZeroExperts
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.train.architecture import transformer_config
from moe_comm.train.config import load
from tests.integrations.models import _SHARED, SMALL

YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.707,
    "mscale_all_dim": 1.0,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in ARCHITECTURES},
    "mixtral with a window": ("mixtral", {"sliding_window": 16, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen3 with dense layers": ("qwen3_moe", {"mlp_only_layers": [0], "attention_bias": True, "norm_topk_prob": False}),
    "qwen3 with a window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 9}),
    "qwen3, every third layer": ("qwen3_moe", {"decoder_sparse_step": 3, "num_hidden_layers": 7}),
    "olmoe clipped": ("olmoe", {"clip_qkv": 8.0, "norm_topk_prob": True}),
    "deepseek stretched": ("deepseek_v3", {"rope_parameters": YARN, "q_lora_rank": None, "n_shared_experts": 3}),
    "deepseek without groups": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
}


def hf_config_of(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **{**_SHARED, **SMALL[family], **changes})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_survives_the_round_trip(name: str, tmp_path: Path) -> None:
    family, changes = CONFIGS[name]
    config = from_hugging_face(hf_config_of(family, **changes))
    hf_config = to_hugging_face(config, family)
    assert from_hugging_face(hf_config) == config
    hf_config.save_pretrained(tmp_path)
    assert from_hugging_face(read_config(tmp_path)) == config


PUBLISHED = {
    # Settings of the published config.json that differ from the defaults of transformers.
    "mixtral-8x7b": MixtralConfig(),
    "mixtral-8x22b": MixtralConfig(
        vocab_size=32768,
        hidden_size=6144,
        intermediate_size=16384,
        num_hidden_layers=56,
        num_attention_heads=48,
        num_key_value_heads=8,
    ),
    "qwen3-30b-a3b": Qwen3MoeConfig(
        num_hidden_layers=48,
        head_dim=128,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "deepseek-v3": DeepseekV3Config(initializer_range=0.006),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bundled_training_configurations_describe_the_published_models(name: str) -> None:
    config = load(name)
    assert config.model.vocab is not None
    preset = transformer_config(config.model, config.model.vocab, config.data.seq_len)
    published = from_hugging_face(PUBLISHED[name])
    converted = from_hugging_face(to_hugging_face(preset, config.model.family))
    # The published length is longer than that of the training configuration.
    assert replace(converted, max_length=published.max_length) == published


def test_the_norms_inside_deepseeks_attention_have_their_own_epsilon() -> None:
    config = from_hugging_face(hf_config_of("deepseek_v3", rms_norm_eps=1e-3))
    assert (config.norm_eps, config.attention.norm_eps) == (1e-3, 1e-6)
    with pytest.raises(UnsupportedModel, match=r"attention\.norm_eps is 0\.001 but would become 1e-06"):
        to_hugging_face(replace(config, attention=replace(config.attention, norm_eps=1e-3)), "deepseek_v3")


def test_missing_yarn_settings_have_the_defaults_of_transformers() -> None:
    def yarn(**changes: Any) -> Yarn:
        result = from_hugging_face(hf_config_of("qwen3_moe", rope_parameters={**YARN, **changes})).attention.rope.yarn
        assert result is not None
        return result

    assert yarn() == Yarn(40.0, 32, 32.0, 1.0, 0.707, 1.0)
    assert yarn(mscale=None, mscale_all_dim=None) == Yarn(40.0, 32)
    assert yarn(mscale=None).mscale == 0.0  # 1 would be divided by mscale_all_dim
    assert yarn(factor=None).factor == 128 / 32


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GptOssConfig(), ["gpt_oss"]),
        (hf_config_of("mixtral", hidden_act="gelu"), ["hidden_act", "gelu"]),
        (hf_config_of("mixtral", router_jitter_noise=0.1), ["router_jitter_noise", "0.1"]),
        (hf_config_of("qwen3_moe", attention_dropout=0.2), ["attention_dropout", "0.2"]),
        (hf_config_of("olmoe", quantization_config={"quant_method": "fp8"}), ["quantization_config", "dequantize"]),
        (hf_config_of("olmoe", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), ["linear"]),
        (
            hf_config_of("qwen3_moe", rope_parameters={**YARN, "attention_factor": 1.5}),
            ["attention_factor", "1.5"],
        ),
        (hf_config_of("qwen3_moe", rope_parameters={**YARN, "truncate": False}), ["truncate", "False"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_settings_that_are_not_supported_are_named(config: Any, words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        from_hugging_face(config)
    assert all(word in str(caught.value) for word in words), caught.value


def cases() -> list[Any]:
    qwen3 = from_hugging_face(hf_config_of("qwen3_moe"))
    deepseek = from_hugging_face(hf_config_of("deepseek_v3"))

    def attention(config: TransformerConfig, **changes: Any) -> TransformerConfig:
        return replace(config, attention=replace(config.attention, **changes))

    def router(config: TransformerConfig, **changes: Any) -> TransformerConfig:
        return replace(config, moe=replace(config.moe, router=replace(config.moe.router, **changes)))

    def moe(config: TransformerConfig, **changes: Any) -> TransformerConfig:
        return replace(config, moe=replace(config.moe, **changes))

    latent = MLAConfig(8, 8, 4, 4, 4)
    return [
        ("llama", qwen3, "llama"),
        ("qwen3_moe", replace(qwen3, parallel_block=True), "parallel_block"),
        ("mixtral", qwen3, r"attention\.qk_norm is 'head' but would become 'none'"),
        ("mixtral", replace(attention(qwen3, qk_norm="none"), dense_layers=(1,), dense_ffn=48), "dense_layers is "),
        ("mixtral", router(attention(qwen3, qk_norm="none"), normalize=False), r"router\.normalize is False"),
        ("olmoe", attention(qwen3, qk_norm="full", head_dim=16), r"attention\.head_dim is 16"),
        ("qwen3_moe", attention(qwen3, clip_qkv=2.0), r"clip_qkv is 2\.0"),
        ("qwen3_moe", attention(qwen3, bias=True), r"out_bias is False but would become True"),
        ("qwen3_moe", attention(qwen3, mla=latent, qk_norm="none"), r"attention\.mla is MLAConfig"),
        ("qwen3_moe", moe(qwen3, shared_ffn=24), "shared_ffn is 24"),
        ("qwen3_moe", router(qwen3, score="sigmoid"), "score is 'sigmoid'"),
        ("qwen3_moe", router(qwen3, scale=2.0), r"scale is 2\.0"),
        ("qwen3_moe", router(qwen3, zero_experts=ZeroExperts(1)), "zero_experts.identity is 1"),
        ("qwen3_moe", moe(qwen3, activation="geglu"), "activation is 'geglu'"),
        ("deepseek_v3", qwen3, "latent attention"),
        ("deepseek_v3", moe(deepseek, shared_ffn=25), "shared_ffn 25 and ffn 24"),
        ("deepseek_v3", replace(deepseek, dense_layers=(1,)), r"dense_layers is \(1,\) but would become \(0,\)"),
        ("deepseek_v3", router(deepseek, num_groups=8, top_groups=4), "8 experts in 8 groups"),
        ("deepseek_v3", attention(deepseek, window=4), "window is 4"),
    ]


@pytest.mark.parametrize(
    ("family", "config", "message"), cases(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_unsupported_fields_of_a_family_are_named(family: str, config: TransformerConfig, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        to_hugging_face(config, family)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_training_only_settings_are_ignored(family: str) -> None:
    config = from_hugging_face(hf_config_of(family))
    training = replace(config.moe.router, balance_loss=0.02, z_loss=0.1, balance_form="batch")
    trained = replace(config, moe=replace(config.moe, router=training, capacity=Capacity(1.25), recompute=True))
    hf_config = to_hugging_face(trained, family, bos_token_id=5)
    assert from_hugging_face(hf_config) == config
    assert hf_config.bos_token_id == 5 and hf_config.router_aux_loss_coef == 0.02


def test_a_folder_without_a_valid_configuration_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="no config"):
        read_config("mistralai/Mixtral-8x7B-v0.1")  # nothing is downloaded
    for text in ("{", json.dumps({"model_type": "unheard_of"}), json.dumps({"model_type": "olmoe", "vocab_size": "x"})):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
            read_config(tmp_path)
    GptOssConfig().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="gpt_oss"):
        read_config(tmp_path)
