"""What the ``config.json`` of a family leaves unsaid, and what no ``config.json`` may ask for.

Parameters of each family are counted as transformers' model of it has them: tests build those, and hold them against
these. A family that is not here is taken at its word: gated blocks, no vector that it does not name.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm.layers.attention.config import QKNorm


@dataclass(frozen=True)
class Family:
    """What a family does without saying so.

    qkv_bias: its attention has biases whatever the file says. out_bias: the output projection has one, too, when
        ``attention_bias`` is set. vectors: of router and experts. router_vector: of the router alone, such as the
        offsets of a routing without a loss, where these are parameters.
    moe: False: it has no experts. shared_gate, shortcut, parallel: as in ``ModelShape``.
    shared: experts that are always chosen, where the file does not say how many.
    norms: of a layer, beside one before each block. norm_bias: norms have biases. sinks: a number for each head.
    tie: the head is the embedding unless the file says no.
    full_every: of windowed attention, every n-th layer sees all where the file does not list them.
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


FAMILIES: dict[str, Family] = {
    "mixtral": Family(),
    "qwen2_moe": Family(qkv_bias=True, out_bias=False, shared_gate=True),
    "qwen3_moe": Family("head"),
    "olmoe": Family("full"),
    "flex_olmo": Family("full"),
    "deepseek": Family(),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "kimi_k2": Family(),
    "glm4_moe": Family(out_bias=False),
    "glm4_moe_lite": Family(),
    "phimoe": Family(norm_bias=True),
    "gpt_oss": Family(vectors=True, sinks=True, full_every=2),
    "longcat_flash": Family(shortcut=True),
    "aria_text": Family(),
    "bailing_moe": Family(out_bias=False),
    "cohere2_moe": Family(parallel=True, tie=True, full_every=4),
    "dbrx": Family(),
    "dots1": Family("head"),
    "ernie4_5_moe": Family(router_vector=True, tie=True),
    "exaone_moe": Family("head"),
    "flint": Family("head", sinks=True),
    "granitemoe": Family(),
    "granitemoe_swa": Family(sinks=True),
    "granitemoeshared": Family(),
    "hunyuan_v1_moe": Family("head", shared=1),
    "hy_v3": Family("head"),
    "kolibri1": Family("head", norms=2),
    "mellum": Family("head"),
    "minimax_m2": Family("full"),
    "minimax_m3_vl_text": Family("head"),
    "solar_open": Family(),
    "llama": Family(moe=False),
    "mistral": Family(moe=False),
    "qwen2": Family(qkv_bias=True, out_bias=False, moe=False),
    "qwen3": Family("head", moe=False),
    "gemma": Family(moe=False, tie=True),
    "gemma2": Family(moe=False, tie=True, norms=2, full_every=2),
    "gemma3_text": Family("head", moe=False, tie=True, norms=2, full_every=6),
    "cohere": Family(moe=False, tie=True, parallel=True),
    "cohere2": Family(moe=False, tie=True, parallel=True, full_every=4),
    "olmo2": Family("full", moe=False),
    "olmo3": Family("full", moe=False, full_every=4),
    "exaone4": Family("head", moe=False, full_every=4),
    "hyperclovax": Family(moe=False, norms=2),
    "granite_swa": Family(moe=False, sinks=True),
    "glm": Family(moe=False, out_bias=False),
    "glm4": Family(moe=False, out_bias=False, norms=2),
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
"""Families whose files look like others', and mean something that is not modelled."""

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
"""Settings that change what a layer costs in ways that ``ModelShape`` does not have: refused, not overlooked."""
