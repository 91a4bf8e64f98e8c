"""Named models. A comment above each model cites the source of its sizes. Assumed sizes are marked."""

from __future__ import annotations

from dataclasses import replace

from moe_comm.layers.transformer.shape import Latent, ModelShape

# Positional arguments: name, layers, hidden, heads, kv_heads, head_dim, vocab, experts, top_k, ffn, shared_ffn.

# https://huggingface.co/mistralai/Mixtral-8x22B-Instruct-v0.1 config.json. 140.6 B, 39.2 B active. The vocabulary is
# the instruct model's; the base model has 32000.
_MIXTRAL_8X22B = ModelShape("mixtral-8x22b", 56, 6144, 48, 8, 128, 32768, 8, 2, 16384)

# https://huggingface.co/Qwen/Qwen2-57B-A14B config.json; arXiv 2407.10671, table 1. 57.4 B, 14.2 B active.
_QWEN2_57B = ModelShape(
    "qwen2-57b-a14b", 28, 3584, 28, 4, 128, 151936, 64, 8, 2560, 20480, qkv_bias=True, shared_gate=True
)

# https://huggingface.co/Qwen/Qwen3-30B-A3B config.json; arXiv 2505.09388, table 2. 30.5 B, 3.3 B active.
_QWEN3_30B = ModelShape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 151936, 128, 8, 768, qk_norm="head")

# https://huggingface.co/deepseek-ai/DeepSeek-V3 config.json; arXiv 2412.19437, section 4.2.
_DEEPSEEK_LATENT = Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)

MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        # https://huggingface.co/mistralai/Mixtral-8x7B-v0.1 config.json; arXiv 2401.04088, table 1. 46.7 B, 12.9 B
        # active.
        ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 32000, 8, 2, 14336),
        _MIXTRAL_8X22B,
        # arXiv 2504.14960, section 4: each expert of Mixtral 8x22B is split into eight experts with 1/8 of the width;
        # top-8. 22 B active.
        replace(_MIXTRAL_8X22B, name="mixtral-8x22b-g8t8", experts=64, top_k=8, ffn=2048),
        # https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B config.json. 14.3 B, 2.7 B active.
        ModelShape(
            "qwen1.5-moe-a2.7b", 24, 2048, 16, 16, 128, 151936, 60, 4, 1408, 5632, qkv_bias=True, shared_gate=True
        ),
        _QWEN2_57B,
        # arXiv 2504.14960, section 4: Llama-3-70B (arXiv 2407.21783, table 3), upcycled. Each layer has eight experts,
        # which are copies of its feed-forward block.
        ModelShape("llama3-8x70b", 80, 8192, 64, 8, 128, 128256, 8, 2, 28672),
        _QWEN3_30B,
        # https://huggingface.co/Qwen/Qwen3-235B-A22B config.json; arXiv 2505.09388, table 2. 235 B, 22 B active.
        replace(_QWEN3_30B, name="qwen3-235b-a22b", layers=94, hidden=4096, heads=64, ffn=1536),
        # https://huggingface.co/deepseek-ai/deepseek-moe-16b-base config.json; arXiv 2401.06066. 16.4 B, 2.8 B active.
        ModelShape(
            "deepseek-moe-16b", 28, 2048, 16, 16, 128, 102400, 64, 6, 1408, 2 * 1408, dense_layers=1, dense_ffn=10944
        ),
        # 671 B, 37 B active, without the layer for multi-token prediction.
        ModelShape(
            "deepseek-v3",
            61,
            7168,
            128,
            128,
            192,
            129280,
            256,
            8,
            2048,
            2048,
            dense_layers=3,
            dense_ffn=18432,
            latent=_DEEPSEEK_LATENT,
            groups=8,
            top_groups=4,
        ),
        # MegaScale-MoE, arXiv 2505.11432, table 2. The paper gives neither the vocabulary nor shared experts. Assumed:
        # one shared expert with the width of a routed expert, because the 352 B parameters and the published MFU match
        # only with it. Also assumed: the vocabulary of 64,000 of MegaScale (arXiv 2402.15627, section 6, by the same
        # authors). It is 0.15 % of all parameters.
        ModelShape("megascale-moe-352b", 60, 4096, 32, 8, 128, 64000, 32, 3, 14336, 14336),
        # arXiv 2411.02265, table 1 (Hunyuan-Large). 389 B, 52 B active. Pairs of layers share keys and values. This is
        # not modelled; it saves 0.03 % of the parameters.
        ModelShape("hunyuan-large", 64, 6400, 80, 8, 80, 128512, 16, 1, 18304, 18304, tie=True, qk_norm="head"),
        # https://huggingface.co/microsoft/Phi-3.5-MoE-instruct config.json. 41.9 B, 6.6 B active.
        ModelShape("phi3.5-moe", 32, 4096, 32, 8, 128, 32064, 16, 2, 6400, qkv_bias=True, out_bias=True),
        # https://huggingface.co/allenai/OLMoE-1B-7B-0924 config.json; arXiv 2409.02060. 6.9 B, 1.3 B active.
        ModelShape("olmoe-1b-7b", 16, 2048, 16, 16, 128, 50304, 64, 8, 1024, qk_norm="full"),
        # https://huggingface.co/openai/gpt-oss-120b config.json; arXiv 2508.10925, table 1. 116.8 B, 5.1 B active.
        ModelShape(
            "gpt-oss-120b",
            36,
            2880,
            64,
            8,
            64,
            201088,
            128,
            4,
            2880,
            qkv_bias=True,
            out_bias=True,
            router_bias=True,
            expert_bias=True,
            window=128,
            full_layers=18,
            layer_vectors=64,  # sinks
        ),
        # https://huggingface.co/meituan-longcat/LongCat-Flash-Chat config.json; arXiv 2509.01322. 560 B; a token uses
        # 27 B on average.
        ModelShape(
            "longcat-flash",
            28,
            6144,
            64,
            64,
            192,
            131072,
            512,
            12,
            2048,
            dense_ffn=12288,
            latent=_DEEPSEEK_LATENT,
            zero_experts=256,
            shortcut=True,
        ),
        # https://huggingface.co/databricks/dbrx-base config.json. 132 B, 36 B active.
        ModelShape("dbrx", 40, 6144, 48, 8, 128, 100352, 16, 4, 10752),
        # MegaScale-Infer, arXiv 2504.02263: 317 B. The paper gives neither heads nor vocabulary (assumed).
        ModelShape("scaled-moe", 48, 8192, 64, 8, 128, 32000, 32, 4, 8192),
        # https://huggingface.co/xai-org/grok-1 config.json, except the vocabulary: 128,256, as in published benchmarks
        # (NVIDIA/dgxc-benchmarking, grok1). 314 B.
        ModelShape("grok-1", 64, 6144, 48, 8, 128, 128256, 8, 2, 32768),
    )
}
"""MoE models by name."""


def _dense(
    name: str,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int,
    *,
    kv_heads: int = 0,
    gated: bool = True,
    tie: bool = False,
) -> ModelShape:
    """Return the shape of a dense model. ``kv_heads`` 0 means one for each head."""
    return ModelShape(
        name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=hidden // heads,
        vocab=vocab,
        experts=0,
        top_k=0,
        ffn=0,
        dense_layers=layers,
        dense_ffn=ffn,
        dense_gated=gated,
        tie=tie,
    )


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int, tie: bool = False) -> ModelShape:
    return _dense(name, layers, hidden, heads, 4 * hidden, vocab, gated=False, tie=tie)


DENSE: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        # arXiv 2307.09288, table 1 and appendix A.2.1.
        _dense("llama2-13b", 40, 5120, 40, 13824, 32000),
        _dense("llama2-70b", 80, 8192, 64, 28672, 32000, kv_heads=8),
        # arXiv 2407.21783, table 3.
        _dense("llama3-8b", 32, 4096, 32, 14336, 128256, kv_heads=8),
        _dense("llama3-70b", 80, 8192, 64, 28672, 128256, kv_heads=8),
        _dense("llama3-405b", 126, 16384, 128, 53248, 128256, kv_heads=8),
        # arXiv 2402.16819, table 1; arXiv 2406.11704, table 1: squared ReLU.
        _dense("nemotron4-15b", 32, 6144, 48, 24576, 256000, kv_heads=8, gated=False),
        _dense("nemotron4-340b", 96, 18432, 96, 73728, 256000, kv_heads=8, gated=False),
        # arXiv 2005.14165, table 2.1, with the vocabulary of 51,200 that NVIDIA uses for measurements.
        _gpt("gpt3-175b", 96, 12288, 96, 51200, tie=True),
        # Megatron-LM's README, weak scaling. Embedding and head are not tied, which the stated sizes imply.
        _gpt("megatron-1.7b", 24, 2048, 16, 131072),
        _gpt("megatron-7.1b", 30, 4096, 32, 131072),
        _gpt("megatron-16b", 32, 6144, 48, 131072),
        _gpt("megatron-32b", 48, 7168, 56, 131072),
        _gpt("megatron-70b", 84, 8192, 64, 131072),
        _gpt("megatron-119b", 92, 10240, 80, 131072),
        _gpt("megatron-177b", 96, 12288, 96, 131072),
        _gpt("megatron-314b", 96, 16384, 128, 131072),
        _gpt("megatron-462b", 112, 18432, 144, 131072),
        # llm-foundry, scripts/train/yamls/pretrain.
        _gpt("mpt-1b", 24, 2048, 16, 50368, tie=True),
        _gpt("mpt-3b", 32, 2560, 20, 50368, tie=True),
        _gpt("mpt-7b", 32, 4096, 32, 50368, tie=True),
        _gpt("mpt-13b", 40, 5120, 40, 50368, tie=True),
        _gpt("mpt-30b", 48, 7168, 56, 50368, tie=True),
        _gpt("mpt-70b", 80, 8192, 64, 50368, tie=True),
    )
}
"""All named dense models."""
