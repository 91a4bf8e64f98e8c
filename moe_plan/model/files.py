"""Read a model's shape by name or from a Hugging Face ``config.json``.

``config.json`` is read as plain JSON, so transformers need not be installed and the family need not be known. One table
maps the families' different key names. ``FAMILIES`` holds the properties that files do not state, such as the bias of
Qwen2's projections. Tests compare the parameter counts with those of the transformers model of each family. A family
that is not listed gets the default ``FamilyDefaults``: gated blocks, and only the vectors that its file names. Required
keys have no defaults: a missing key raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_comm.errors import ConfigError, suggestion
from moe_comm.layers.attention.config import QKNorm
from moe_comm.layers.transformer.shape import Latent, ModelShape
from moe_comm.runtime.untrusted import parse_object, read_bounded, shown
from moe_plan.model.named_models import DENSE, MODELS as WITH_EXPERTS


@dataclass(frozen=True)
class FamilyDefaults:
    """Properties of a family that its ``config.json`` does not state.

    qkv_bias: attention has biases, whatever the file says. out_bias: the output projection has a bias if
        ``attention_bias`` is set. shared_gate, shortcut, parallel: as in ``ModelShape``.
    vectors: the router and the experts have biases. router_vector: the router alone has a bias vector, such as the
        offsets of loss-free balancing as parameters.
    moe: the family has experts. shared: default number of shared experts.
    norms: norms of a layer in addition to one before each block. norm_bias: norms have biases.
    sinks: attention has one sink value for each head. tie: default of ``tie_word_embeddings``.
    full_every: with windowed attention, every n-th layer is not windowed unless the file lists the layers.
    """

    qk_norm: QKNorm = "none"
    qkv_bias: bool = False
    out_bias: bool = True
    shared_gate: bool = False
    vectors: bool = False
    router_vector: bool = False
    moe: bool = True
    shortcut: bool = False
    parallel: bool = False
    shared: int = 0
    norms: int = 0
    norm_bias: bool = False
    sinks: bool = False
    tie: bool = False
    full_every: int = 0


FAMILIES: dict[str, FamilyDefaults] = {
    "mixtral": FamilyDefaults(),
    "qwen2_moe": FamilyDefaults(qkv_bias=True, out_bias=False, shared_gate=True),
    "qwen3_moe": FamilyDefaults("head"),
    "olmoe": FamilyDefaults("full"),
    "flex_olmo": FamilyDefaults("full"),
    "deepseek": FamilyDefaults(),
    "deepseek_v2": FamilyDefaults(),
    "deepseek_v3": FamilyDefaults(),
    "kimi_k2": FamilyDefaults(),
    "glm4_moe": FamilyDefaults(out_bias=False),
    "glm4_moe_lite": FamilyDefaults(),
    "phimoe": FamilyDefaults(norm_bias=True),
    "gpt_oss": FamilyDefaults(vectors=True, sinks=True, full_every=2),
    "longcat_flash": FamilyDefaults(shortcut=True),
    "aria_text": FamilyDefaults(),
    "bailing_moe": FamilyDefaults(out_bias=False),
    "cohere2_moe": FamilyDefaults(parallel=True, tie=True, full_every=4),
    "dbrx": FamilyDefaults(),
    "dots1": FamilyDefaults("head"),
    "ernie4_5_moe": FamilyDefaults(router_vector=True, tie=True),
    "exaone_moe": FamilyDefaults("head"),
    "flint": FamilyDefaults("head", sinks=True),
    "granitemoe": FamilyDefaults(),
    "granitemoe_swa": FamilyDefaults(sinks=True),
    "granitemoeshared": FamilyDefaults(),
    "hunyuan_v1_moe": FamilyDefaults("head", shared=1),
    "hy_v3": FamilyDefaults("head"),
    "kolibri1": FamilyDefaults("head", norms=2),
    "mellum": FamilyDefaults("head"),
    "minimax_m2": FamilyDefaults("full"),
    "minimax_m3_vl_text": FamilyDefaults("head"),
    "solar_open": FamilyDefaults(),
    "llama": FamilyDefaults(moe=False),
    "mistral": FamilyDefaults(moe=False),
    "qwen2": FamilyDefaults(qkv_bias=True, out_bias=False, moe=False),
    "qwen3": FamilyDefaults("head", moe=False),
    "gemma": FamilyDefaults(moe=False, tie=True),
    "gemma2": FamilyDefaults(moe=False, tie=True, norms=2, full_every=2),
    "gemma3_text": FamilyDefaults("head", moe=False, tie=True, norms=2, full_every=6),
    "cohere": FamilyDefaults(moe=False, tie=True, parallel=True),
    "cohere2": FamilyDefaults(moe=False, tie=True, parallel=True, full_every=4),
    "olmo2": FamilyDefaults("full", moe=False),
    "olmo3": FamilyDefaults("full", moe=False, full_every=4),
    "exaone4": FamilyDefaults("head", moe=False, full_every=4),
    "hyperclovax": FamilyDefaults(moe=False, norms=2),
    "granite_swa": FamilyDefaults(moe=False, sinks=True),
    "glm": FamilyDefaults(moe=False, out_bias=False),
    "glm4": FamilyDefaults(moe=False, out_bias=False, norms=2),
}

REFUSED: dict[str, str] = {
    "afmoe": "attention's output gate",
    "arcee": "blocks of two matrices",
    "beam": "attention's output gate",
    "diffllama": "differential attention",
    "doge": "its own kind of experts",
    "jetmoe": "attention's experts",
    "laguna": "attention's output gate",
    "mimo_v2_flash": "two kinds of attention",
    "olmo": "norms without weights",
    "phi4_multimodal": "adapters inside layers",
    "stablelm": "norms with biases of some blocks",
}
"""Families whose files look like supported ones but mean something that ``ModelShape`` does not model."""

NOT_MODELLED = (
    "interleave_moe_layer_step",
    "intermediate_size_mlp",
    "attention_chunk_size",
    "attn_type_list",
    "linear_num_value_heads",
    "full_attention_interval",
    "layer_group_size",
    "attn_layer_period",
    "hybrid_override_pattern",
    "mamba_d_state",
    "conv_L_cache",
    "use_cla",
    "index_topk",
    "swa_num_key_value_heads",
    "num_attention_heads_per_layer",
    "cross_attention_layers",
    "num_kv_shared_layers",
    "hidden_size_per_layer_input",
    "is_encoder_decoder",
    "mlp_bias",
    "use_bias",
)
"""Settings that change the cost of a layer in ways that ``ModelShape`` does not model. Files with them are rejected."""


MODELS = WITH_EXPERTS | DENSE
"""All named models."""
FILE_BYTES = 1 << 20
"""Largest accepted model file."""
MOST, MOST_LAYERS, MOST_EXPERTS, MOST_PARAMS = 1 << 30, 1 << 12, 1 << 14, 1 << 60
"""Largest accepted width or count, number of layers, experts and parameters. Sums over them are exact."""

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers")
_VOCAB = ("vocab_size",)
_HIDDEN = ("hidden_size", "d_model")
_HEADS = ("num_attention_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "kv_n_heads")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_EXPERT_FFN = ("moe_intermediate_size", "expert_ffn_hidden_size")
_FFN = ("intermediate_size", "ffn_hidden_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_FFN = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
_FIRST_DENSE = ("first_k_dense_replace", "moe_layer_start_index", "moe_layer_num_skipped")


def model_named(text: str, others: Iterable[str] = ()) -> ModelShape:
    """Return the model with a given name or described by a given file.

    Args:
        text: a name in ``MODELS``, the path of a Hugging Face ``config.json``, or the path of its folder.
        others: further names for the error message.

    Raises:
        ConfigError: the model is unknown, or the file is unreadable, incomplete or inconsistent. Names the key.
    """
    name = text.strip()
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json":
        return shape_of_hugging_face(read_json(path), str(path))
    known = sorted({*others, *MODELS})
    hint = suggestion(name.lower(), known)
    raise ConfigError(
        f"no model named {shown(name)}{hint}; known: {', '.join(known)}; or give the path of a config.json or of a "
        f"configuration of moe-comm train"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a model file.

    Raises:
        ConfigError: the file cannot be read, is too long or is not a JSON object.
    """
    try:
        return parse_object(read_bounded(path, FILE_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read the model {path}: {error.strerror or error}") from error
    except ValueError as error:  # malformed, or not UTF-8
        raise ConfigError(f"{path} is not a valid JSON file: {error}") from error


def shape_of_hugging_face(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """Return the shape of the model that the content of a ``config.json`` describes.

    Only the text model of a multimodal model (``text_config``) is read. Layers for multi-token prediction are ignored.
    ``intermediate_size`` is the width of an expert if no other key gives it, as in Mixtral.

    Args:
        where: name of the file for error messages.

    Raises:
        ConfigError: a key is missing, has the wrong type, or asks for something that is not modelled. Names the key.
    """
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping) and not any(key in config for key in _HIDDEN):
        config = text_config
    for part in ("attn_config", "ffn_config"):  # DBRX
        nested = config.get(part)
        config = {**nested, **config} if isinstance(nested, Mapping) else config
    read = _Reader(config, where)
    kind = read.text("model_type")
    family = _family(read, kind)
    # LongCat-Flash counts its layers' two attentions as layers in num_hidden_layers.
    layers, hidden, heads = (
        read.count(("num_layers", "num_hidden_layers") if family.shortcut else _LAYERS, MOST_LAYERS),
        read.count(_HIDDEN),
        read.count(_HEADS),
    )
    latent = _latent(read)
    head_dim = read.optional("head_dim") or (hidden // heads if heads and not latent and hidden % heads == 0 else None)
    if head_dim is None and latent is None:
        raise ConfigError(
            f"{where}: head_dim is missing, and hidden_size ({hidden}) is not a multiple of {heads} heads"
        )
    experts = read.count(_EXPERTS, MOST_EXPERTS) if family.moe else 0
    dense_layers = _dense_layers(read, layers) if family.moe else layers
    expert_ffn = read.optional(*_EXPERT_FFN)
    if experts and expert_ffn is None:
        if dense_layers:
            raise ConfigError(
                f"{where}: {_EXPERT_FFN[0]} is missing: the width of an expert in a model with dense layers"
            )
        expert_ffn = read.count(_FFN)
    window, full_layers = _window(read, layers, family)
    attention_bias = read.flag("attention_bias")
    shared = _shared_ffn(read, kind, expert_ffn or 0, family) if experts else 0
    groups, top_groups = _groups(read) if experts else (1, 1)
    blocks_norms = 1 if family.parallel else 2
    shape = ModelShape(
        name=_title(Path(where)) or kind,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else read.count(_KV_HEADS),
        head_dim=head_dim or 1,
        vocab=read.count(_VOCAB),
        experts=experts,
        top_k=read.count(_TOP_K) if experts else 0,
        ffn=expert_ffn or 0,
        shared_ffn=shared,
        dense_layers=dense_layers,
        dense_ffn=read.count(_FFN) if dense_layers or family.shortcut else 0,
        latent=latent,
        tie=read.flag("tie_word_embeddings", family.tie),
        qk_norm=family.qk_norm,
        qkv_bias=read.flag("qkv_bias", read.flag("use_qkv_bias", family.qkv_bias)) or attention_bias,
        out_bias=read.flag("attention_out_bias", attention_bias and family.out_bias),
        router_bias=family.vectors or family.router_vector,
        expert_bias=family.vectors,
        shared_gate=family.shared_gate and shared > 0,
        window=window,
        full_layers=full_layers,
        zero_experts=read.optional("zero_expert_num") or 0,
        parallel_block=family.parallel,
        shortcut=family.shortcut,
        layer_vectors=hidden * (family.norms + blocks_norms * family.norm_bias) + heads * family.sinks,
        head_vectors=hidden * family.norm_bias + read.count(_VOCAB) * read.flag("lm_head_bias"),
        groups=groups,
        top_groups=top_groups,
    )
    if shape.params > MOST_PARAMS:
        raise ConfigError(f"{where}: {shape.params:,} parameters; no model has more than {MOST_PARAMS:,}")
    return shape


def _family(read: _Reader, kind: str) -> FamilyDefaults:
    """Return the defaults of a family. Raises ConfigError for a model that ``ModelShape`` cannot describe."""
    config, where = read.config, read.where
    unsupported = next((key for key in NOT_MODELLED if _is_set(config.get(key))), None)
    if unsupported is not None:
        raise ConfigError(f"{where}: {unsupported} = {shown(config[unsupported])} is not modelled")
    if kind in REFUSED:
        raise ConfigError(f"{where}: model_type {kind}: {REFUSED[kind]} is not modelled")
    family = FAMILIES.get(kind)
    if family is None:
        family = FamilyDefaults(moe=any(config.get(key) for key in (*_EXPERTS, *_TOP_K, *_EXPERT_FFN)))
        activation = next((config[key] for key in ("hidden_act", "hidden_activation") if config.get(key)), "silu")
        if activation not in ("silu", "swish"):
            raise ConfigError(
                f"{where}: model_type {kind} is not known, and its activation {shown(activation)} does not determine "
                f"whether its blocks have two matrices or three"
            )
    if family.qk_norm == "none" and read.flag("use_qk_norm"):
        family = replace(family, qk_norm="full" if kind in ("cohere", "cohere2_moe") else "head")
    return family


def _is_set(value: Any) -> bool:
    """Return whether a setting is present and neither off nor 1 ("every layer")."""
    return value is True or value not in (None, False, 0, 1)


def _title(path: Path) -> str:
    """Return a name for the model in a file. A config.json is named after its folder."""
    return path.parent.name if path.stem == "config" else path.stem


class _Reader:
    """Read settings. A setting has several possible names; the first one in the file is used."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def optional(self, *names: str, least: int = 0, most: int = MOST) -> int | None:
        """Return an integer, or None if no such key exists or its value is null."""
        name = next((name for name in names if self.config.get(name) is not None), None)
        if name is None:
            return None
        value = self.config[name]
        if isinstance(value, list) and value and value.count(value[0]) == len(value):  # the same for each layer
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            kind = f"an integer from {least} to {most:,}"
            raise ConfigError(f"{self.where}: {name} must be {kind}; got {shown(value)}")
        return value

    def count(self, names: tuple[str, ...], most: int = MOST) -> int:
        """Return a required integer of at least 1."""
        value = self.optional(*names, least=1, most=most)
        if value is None:
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise ConfigError(f"{self.where}: key {names[0]!r} is missing{others}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a flag, or ``default`` if there is no such key or its value is null."""
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} must be true or false; got {shown(value)}")
        return value

    def text(self, name: str) -> str:
        value = self.config.get(name, "")
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}: {name} must be text; got {shown(value)}")
        return value or "model"

    def items(self, name: str) -> list[Any] | None:
        value = self.config.get(name)
        if value is not None and not isinstance(value, list):
            raise ConfigError(f"{self.where}: {name} must be a list; got {shown(value)}")
        return value


def _latent(read: _Reader) -> Latent | None:
    if read.config.get("kv_lora_rank") is None:
        return None
    kv_rank, nope, rope, value = (
        read.count((name,)) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return Latent(read.optional("q_lora_rank", least=1), kv_rank, nope, rope, value)


def _groups(read: _Reader) -> tuple[int, int]:
    """Return groups and top groups of group-limited routing. DeepSeek-V2 uses it with only one of its methods."""
    groups, top = read.optional("n_group", least=1), read.optional("topk_group", least=1)
    if groups is None or top is None or read.text("topk_method") == "greedy":
        return 1, 1
    return groups, top


def _dense_layers(read: _Reader, layers: int) -> int:
    """Return the number of layers without experts. Files state it in one of three ways; the first one found is used."""
    kinds = read.items("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != layers or not all(kind in ("dense", "sparse") for kind in kinds):
            raise ConfigError(f"{read.where}: mlp_layer_types must be dense or sparse for each of {layers} layers")
        return kinds.count("dense")
    first = read.optional(*_FIRST_DENSE)
    if first is not None:
        if isinstance(read.config.get("moe_layer_freq"), int) and read.config["moe_layer_freq"] != 1:
            step = read.count(("moe_layer_freq",))
            return sum(layer < first or layer % step != 0 for layer in range(layers))
        last, step = read.config.get("moe_layer_end_index"), read.optional("moe_layer_interval", least=1) or 1
        last = layers if last in (None, -1) else read.optional("moe_layer_end_index") or 0
        return sum(layer < first or layer > last or (layer + 1) % step != 0 for layer in range(layers))
    dense_ids, step = read.items("mlp_only_layers") or [], read.optional("decoder_sparse_step", least=1) or 1
    return sum(layer in dense_ids or (layer + 1) % step != 0 for layer in range(layers))


def _shared_ffn(read: _Reader, kind: str, ffn: int, family: FamilyDefaults) -> int:
    if kind == "qwen2_moe":
        return read.count(("shared_expert_intermediate_size",))
    width, number = read.optional(*_SHARED_FFN), read.optional(*_SHARED)
    if width is None:
        return ffn * (family.shared if number is None else number)
    # Bailing gives the width of one shared expert and their number.
    return width * (number if kind.startswith("bailing") and number else 1)


def _window(read: _Reader, layers: int, family: FamilyDefaults) -> tuple[int | None, int]:
    """Return the attention window in tokens, and the number of layers without a window."""
    kinds = read.items("layer_types")
    unknown = sorted({str(kind) for kind in kinds or ()} - {"sliding_attention", "full_attention"})
    if kinds is not None and (unknown or len(kinds) != layers):
        raise ConfigError(
            f"{read.where}: layer_types must be sliding_attention or full_attention for each of {layers} layers; "
            f"got {len(kinds)}{', with ' + shown(unknown[0]) if unknown else ''}"
        )
    window = read.optional("sliding_window")
    if not window or not read.flag("use_sliding_window", True):
        return None, 0
    if kinds is not None:
        windowed = kinds.count("sliding_attention")
    elif "use_sliding_window" in read.config and "max_window_layers" in read.config:
        # Qwen: the first layers have no window.
        windowed = layers - min(read.optional("max_window_layers") or 0, layers)
    else:
        period = read.optional("sliding_window_pattern", "_sliding_window_pattern") or family.full_every
        windowed = layers - (layers // period if period else 0)
    return (window, layers - windowed) if windowed else (None, 0)
