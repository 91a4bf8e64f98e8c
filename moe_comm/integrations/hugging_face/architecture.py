"""Convert between Hugging Face configurations and ``TransformerConfig`` for the model families that both support.

model_type    attention              router
mixtral       GQA, window            softmax
qwen3_moe     GQA, QK-norm per head  softmax; dense layers
olmoe         MHA, QK-norm full      softmax
deepseek_v3   MLA, YaRN              sigmoid in groups with correction bias; shared expert; dense layers first
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, DeepseekV3Config, MixtralConfig, OlmoeConfig, PreTrainedConfig, Qwen3MoeConfig

from moe_comm.errors import ConfigError, UnsupportedModel
from moe_comm.layers.attention.config import AttentionConfig, MLAConfig, QKNorm, RopeConfig, Yarn
from moe_comm.layers.moe.layer import MoEConfig
from moe_comm.layers.moe.router import RouterConfig
from moe_comm.layers.transformer.config import MOST_LAYERS, TransformerConfig
from moe_comm.runtime.untrusted import read_bounded, shown

ARCHITECTURES: dict[str, type[PreTrainedConfig]] = {
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "olmoe": OlmoeConfig,
    "deepseek_v3": DeepseekV3Config,
}
_QK_NORM: dict[str, QKNorm] = {"qwen3_moe": "head", "olmoe": "full"}
_LATENT_EPS = 1e-6
"""Epsilon of the norms inside DeepSeek's attention, which does not follow ``rms_norm_eps``."""
_UNSUPPORTED = {
    "attention_dropout": "attention has no dropout",
    "router_jitter_noise": "routers add no noise",
    "quantization_config": "quantized weights cannot be read; dequantize them first",
}
"""Settings that must be missing or 0, with the reason."""
_ROPE_KEYS = {
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "type",  # the older name of rope_type
}


def _check_layers(values: Any) -> None:
    """Raise ``ConfigError`` if config.json has too many layers. Transformers would create a list of them."""
    for part in (values, *(values.get(name) for name in ("text_config", "llm_config"))):
        for name, value in part.items() if isinstance(part, dict) else ():
            if name.endswith("layers") and isinstance(value, int | float) and value > MOST_LAYERS:
                raise ConfigError(f"{name} can be at most {MOST_LAYERS}; got {shown(value)}")


CONFIG_BYTES = 16 << 20
"""Maximum size of config.json."""


def read_config(folder: str | Path) -> PreTrainedConfig:
    """Read the configuration of the model in a local ``folder``. Nothing is downloaded.

    Raises:
        ConfigError: the folder has no config.json, or it cannot be read.
        UnsupportedModel: the model family is not in ``ARCHITECTURES``.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    auto: Any = AutoConfig
    try:
        _check_layers(json.loads(read_bounded(path, CONFIG_BYTES)))
        config: PreTrainedConfig = auto.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # invalid JSON, a family unknown to transformers, a setting of the wrong type
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if config.model_type not in ARCHITECTURES:
        raise UnsupportedModel(f"{path}: model_type {config.model_type!r} is not one of {', '.join(ARCHITECTURES)}")
    return config


def from_hugging_face(config: PreTrainedConfig) -> TransformerConfig:
    """Convert a Hugging Face configuration to a ``TransformerConfig``.

    The coefficients of auxiliary losses are 0. The multi-token prediction layers of DeepSeek-V3 are not included.

    Raises:
        UnsupportedModel: the family is not in ``ARCHITECTURES``, or ``Transformer`` does not support a setting.
        ConfigError: settings contradict each other.
    """
    c: Any = config
    family = config.model_type
    if family not in ARCHITECTURES:
        raise UnsupportedModel(f"model_type {family!r} is not one of {', '.join(ARCHITECTURES)}")
    if c.hidden_act != "silu":
        raise UnsupportedModel(f"hidden_act must be silu; got {c.hidden_act!r}")
    for name, reason in _UNSUPPORTED.items():
        if getattr(c, name, None):
            raise UnsupportedModel(f"{name} = {getattr(c, name)!r} is not supported: {reason}")
    dense_layers = _dense_layers(family, c)
    return TransformerConfig(
        vocab=c.vocab_size,
        hidden=c.hidden_size,
        layers=c.num_hidden_layers,
        attention=_attention(family, c),
        moe=_moe(family, c),
        max_length=c.max_position_embeddings,
        dense_layers=dense_layers,
        dense_ffn=c.intermediate_size if dense_layers else 0,
        norm_eps=c.rms_norm_eps,
        tie=c.tie_word_embeddings,
        init_std=c.initializer_range,
    )


def _attention(family: str, c: Any) -> AttentionConfig:
    mla = None
    if family == "deepseek_v3":
        mla = MLAConfig(c.q_lora_rank, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim)
    window = getattr(c, "sliding_window", None)
    if family == "qwen3_moe" and not c.use_sliding_window:
        window = None
    return AttentionConfig(
        hidden=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_attention_heads if mla else c.num_key_value_heads,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        rope=_rope(c),
        qk_norm=_QK_NORM.get(family, "none"),
        window=window,
        bias=getattr(c, "attention_bias", False),
        out_bias=getattr(c, "attention_bias", False),
        clip_qkv=getattr(c, "clip_qkv", None),
        mla=mla,
        norm_eps=_LATENT_EPS if mla else c.rms_norm_eps,
    )


def _rope(c: Any) -> RopeConfig:
    rope = {key: value for key, value in c.rope_parameters.items() if value is not None}
    kind = rope.get("rope_type", "default")
    no_effect = {"partial_rotary_factor": 1.0, "truncate": True}
    unsupported = [key for key in rope if key not in _ROPE_KEYS and no_effect.get(key) != rope[key]]
    if unsupported:
        raise UnsupportedModel(
            f"rope_parameters has {unsupported[0]} = {rope[unsupported[0]]!r}, which is not supported"
        )
    yarn = None
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings", c.max_position_embeddings)
        all_dim = rope.get("mscale_all_dim") or 0.0
        yarn = Yarn(
            factor=rope.get("factor") or c.max_position_embeddings / original,
            original_length=original,
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            # As in transformers, mscale and mscale_all_dim take effect only together; mscale defaults to 1.
            mscale=rope.get("mscale") or (0.0 if all_dim else 1.0),
            mscale_all_dim=all_dim,
        )
    elif kind != "default":
        raise UnsupportedModel(f"rope_type {kind!r} is not supported; use default or yarn")
    return RopeConfig(rope["rope_theta"], yarn, interleaved=getattr(c, "rope_interleave", False))


def _moe(family: str, c: Any) -> MoEConfig:
    if family == "deepseek_v3":
        router = RouterConfig(
            c.n_routed_experts,
            c.num_experts_per_tok,
            score="sigmoid",
            normalize=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
            num_groups=c.n_group,
            top_groups=c.topk_group,
            correction_bias=True,
            balance_form="sequence",
        )
        ffn: int = c.moe_intermediate_size
        return MoEConfig(c.hidden_size, ffn, router, shared_ffn=ffn * (c.n_shared_experts or 0))
    experts = c.num_local_experts if family == "mixtral" else c.num_experts
    normalize = family == "mixtral" or c.norm_topk_prob
    router = RouterConfig(experts, c.num_experts_per_tok, normalize=normalize)
    return MoEConfig(c.hidden_size, c.moe_intermediate_size if family == "qwen3_moe" else c.intermediate_size, router)


def _dense_layers(family: str, c: Any) -> tuple[int, ...]:
    if family == "deepseek_v3":
        return tuple(range(min(c.first_k_dense_replace, c.num_hidden_layers)))
    if family == "qwen3_moe":
        dense = set(c.mlp_only_layers or ())
        step = c.decoder_sparse_step
        return tuple(layer for layer in range(c.num_hidden_layers) if layer in dense or (layer + 1) % step)
    return ()


def to_hugging_face(config: TransformerConfig, family: str, **extra: Any) -> PreTrainedConfig:
    """Convert a ``TransformerConfig`` to the Hugging Face configuration of a model family.

    Args:
        config: the model.
        family: ``model_type`` in transformers, one of ``ARCHITECTURES``.
        extra: further settings of the result, such as the ids of special tokens.

    Raises:
        UnsupportedModel: the family cannot express the model. The message lists the fields that do not fit.
    """
    if family not in ARCHITECTURES:
        raise UnsupportedModel(f"family {family!r} is not one of {', '.join(ARCHITECTURES)}")
    if config.parallel_block:
        raise UnsupportedModel("no Hugging Face family has parallel blocks (parallel_block)")
    if config.shortcut:
        raise UnsupportedModel(f"family {family!r} does not support shortcut-connected experts (shortcut)")
    attention, moe = config.attention, config.moe
    settings: dict[str, Any] = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "num_experts_per_tok": moe.router.top_k,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie,
        "initializer_range": config.init_std,
        "router_aux_loss_coef": moe.router.balance_loss,
        "rope_parameters": _rope_parameters(attention.rope),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    settings |= _SETTINGS[family](config) | extra
    try:
        hf_config = ARCHITECTURES[family](**settings)
        round_trip = from_hugging_face(hf_config)
    except UnsupportedModel:
        raise
    except Exception as error:  # transformers validates settings with exception classes of several libraries
        raise UnsupportedModel(f"{family} cannot express this model: {error}") from error
    differences = _differences(_comparable(config), _comparable(round_trip))
    if differences:
        raise UnsupportedModel(f"{family} cannot express this model: {'; '.join(differences)}")
    return hf_config


def _comparable(config: TransformerConfig) -> TransformerConfig:
    """Reset the fields that no Hugging Face configuration has, and those without effect in this model."""
    router = replace(config.moe.router, balance_loss=0.0, z_loss=0.0, balance_form="batch")
    if router.top_groups == router.num_groups:
        router = replace(router, num_groups=1, top_groups=1, group_score="top2_sum")
    attention = config.attention
    if attention.mla is not None:
        attention = replace(attention, head_dim=attention.mla.rope_dim, kv_heads=attention.heads)
    moe = replace(
        config.moe,
        router=router,
        capacity=None,
        recompute=False,
        experts_per_rank=None,
        expert_gemm_dtype="same",
    )
    return replace(config, moe=moe, attention=attention, dense_ffn=config.dense_ffn if config.dense_layers else 0)


def _differences(expected: Any, actual: Any, path: str = "") -> list[str]:
    """List the fields in which two nested dataclasses differ, with both values."""
    if is_dataclass(expected) and type(expected) is type(actual):
        return [
            line
            for f in fields(expected)
            for line in _differences(getattr(expected, f.name), getattr(actual, f.name), f"{path}.{f.name}".lstrip("."))
        ]
    return [] if expected == actual else [f"{path} is {expected!r} but would become {actual!r}"]


def _rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    if rope.yarn is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": "yarn",
        "rope_theta": rope.theta,
        "factor": rope.yarn.factor,
        "original_max_position_embeddings": rope.yarn.original_length,
        "beta_fast": rope.yarn.beta_fast,
        "beta_slow": rope.yarn.beta_slow,
        "mscale": rope.yarn.mscale,
        "mscale_all_dim": rope.yarn.mscale_all_dim,
    }


def _mixtral(config: TransformerConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.moe.ffn,
        "num_local_experts": config.moe.num_experts,
        "head_dim": config.attention.head_dim,
        "sliding_window": config.attention.window,
    }


def _qwen3_moe(config: TransformerConfig) -> dict[str, Any]:
    window = config.attention.window
    return {
        "intermediate_size": config.dense_ffn or config.moe.ffn,
        "moe_intermediate_size": config.moe.ffn,
        "num_experts": config.moe.num_experts,
        "head_dim": config.attention.head_dim,
        "norm_topk_prob": config.moe.router.normalize,
        "mlp_only_layers": list(config.dense_layers),
        "decoder_sparse_step": 1,
        "attention_bias": config.attention.bias,
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }


def _olmoe(config: TransformerConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.moe.ffn,
        "num_experts": config.moe.num_experts,
        "norm_topk_prob": config.moe.router.normalize,
        "attention_bias": config.attention.bias,
        "clip_qkv": config.attention.clip_qkv,
    }


def _deepseek_v3(config: TransformerConfig) -> dict[str, Any]:
    mla, moe = config.attention.mla, config.moe
    if mla is None or moe.shared_ffn % moe.ffn:
        raise UnsupportedModel(
            f"deepseek_v3 requires latent attention (mla) and a shared_ffn that is a multiple of ffn; got mla {mla}, "
            f"shared_ffn {moe.shared_ffn} and ffn {moe.ffn}"
        )
    if moe.router.num_experts < 2 * moe.router.num_groups:
        raise UnsupportedModel(
            f"deepseek_v3 requires at least two experts in each router group; got {moe.router.num_experts} experts in "
            f"{moe.router.num_groups} groups"
        )
    return {
        "intermediate_size": config.dense_ffn or moe.ffn,
        "moe_intermediate_size": moe.ffn,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_ffn // moe.ffn,
        "norm_topk_prob": moe.router.normalize,
        "routed_scaling_factor": moe.router.scale,
        "n_group": moe.router.num_groups,
        "topk_group": moe.router.top_groups,
        "first_k_dense_replace": len(config.dense_layers),
        "num_mtp_layers": 0,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.v_dim,
        "rope_interleave": config.attention.rope.interleaved,
        "attention_bias": config.attention.bias,
    }


_SETTINGS = {"mixtral": _mixtral, "qwen3_moe": _qwen3_moe, "olmoe": _olmoe, "deepseek_v3": _deepseek_v3}
