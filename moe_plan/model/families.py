"""Defaults of model families that ``config.json`` does not contain, and settings that are not supported.

Tests compare the parameter counts with those of the transformers model of each family. A family that is not listed here
gets the default ``FamilyDefaults``: gated blocks, and only the vectors that its file names.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm.layers.attention.config import QKNorm


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
