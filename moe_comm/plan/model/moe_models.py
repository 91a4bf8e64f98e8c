"""Models by name. Every number is from the source beside it; what a source leaves open is said to be assumed."""

from __future__ import annotations

from dataclasses import replace

from moe_comm.plan.model.shape import Latent, ModelShape

# https://huggingface.co/mistralai/Mixtral-8x7B-v0.1 config.json; arXiv 2401.04088, table 1. 46.7 B, 12.9 B active.
_MIXTRAL_8X7B = ModelShape(
    "mixtral-8x7b",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=32000,
    experts=8,
    top_k=2,
    ffn=14336,
)

# https://huggingface.co/mistralai/Mixtral-8x22B-Instruct-v0.1 config.json. 140.6 B, 39.2 B active.
_MIXTRAL_8X22B = ModelShape(
    "mixtral-8x22b",
    layers=56,
    hidden=6144,
    heads=48,
    kv_heads=8,
    head_dim=128,
    vocab=32768,  # of the instruct model's tokenizer; the base model's has 32000
    experts=8,
    top_k=2,
    ffn=16384,
)

# arXiv 2504.14960, section 4: each expert of the above split in eight, top-8: a token goes through as much as one of
# them has, and uses 22 B parameters.
_MIXTRAL_8X22B_G8T8 = replace(_MIXTRAL_8X22B, name="mixtral-8x22b-g8t8", experts=64, top_k=8, ffn=2048)

# https://huggingface.co/Qwen/Qwen2-57B-A14B config.json; arXiv 2407.10671, table 1. 57.4 B, 14.2 B active.
_QWEN2_57B = ModelShape(
    "qwen2-57b-a14b",
    layers=28,
    hidden=3584,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocab=151936,
    experts=64,
    top_k=8,
    ffn=2560,
    shared_ffn=20480,
    qkv_bias=True,
    shared_gate=True,
)

# https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B config.json. 14.3 B, 2.7 B active.
_QWEN15_MOE = ModelShape(
    "qwen1.5-moe-a2.7b",
    layers=24,
    hidden=2048,
    heads=16,
    kv_heads=16,
    head_dim=128,
    vocab=151936,
    experts=60,
    top_k=4,
    ffn=1408,
    shared_ffn=5632,
    qkv_bias=True,
    shared_gate=True,
)

# arXiv 2504.14960, section 4: Llama-3-70B (arXiv 2407.21783, table 3) upcycled to eight of its feed-forward blocks.
_LLAMA3_8X70B = ModelShape(
    "llama3-8x70b",
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    experts=8,
    top_k=2,
    ffn=28672,
)

# https://huggingface.co/Qwen/Qwen3-30B-A3B config.json; arXiv 2505.09388, table 2. 30.5 B, 3.3 B active.
_QWEN3_30B = ModelShape(
    "qwen3-30b-a3b",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab=151936,
    experts=128,
    top_k=8,
    ffn=768,
    qk_norm="head",
)

# https://huggingface.co/Qwen/Qwen3-235B-A22B config.json; arXiv 2505.09388, table 2. 235 B, 22 B active.
_QWEN3_235B = replace(_QWEN3_30B, name="qwen3-235b-a22b", layers=94, hidden=4096, heads=64, ffn=1536)

# https://huggingface.co/deepseek-ai/DeepSeek-V3 config.json; arXiv 2412.19437, section 4.2. 671 B, 37 B active; its
# layer for multi-token prediction is no part of either.
_DEEPSEEK_V3 = ModelShape(
    "deepseek-v3",
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_dim=192,
    vocab=129280,
    experts=256,
    top_k=8,
    ffn=2048,
    shared_ffn=2048,
    dense_layers=3,
    dense_ffn=18432,
    latent=Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
    groups=8,
    top_groups=4,
)

# https://huggingface.co/deepseek-ai/deepseek-moe-16b-base config.json; arXiv 2401.06066. 16.4 B, 2.8 B active.
_DEEPSEEK_MOE_16B = ModelShape(
    "deepseek-moe-16b",
    layers=28,
    hidden=2048,
    heads=16,
    kv_heads=16,
    head_dim=128,
    vocab=102400,
    experts=64,
    top_k=6,
    ffn=1408,
    shared_ffn=2 * 1408,
    dense_layers=1,
    dense_ffn=10944,
)

# MegaScale-MoE, arXiv 2505.11432, table 2, which has neither vocabulary nor shared experts. Assumed: one shared expert
# of a routed one's width, for it takes that to reach the 352 B and the model FLOPs behind its reported utilisation; and
# the 64,000 words of the same authors' MegaScale (arXiv 2402.15627, section 6), 0.15 % of all parameters.
_MEGASCALE_352B = ModelShape(
    "megascale-moe-352b",
    layers=60,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=64000,
    experts=32,
    top_k=3,
    ffn=14336,
    shared_ffn=14336,
)

# arXiv 2411.02265, table 1 (Hunyuan-Large). 389 B, 52 B active. Its layers share keys and values two by two, which
# saves 0.03 % of the parameters and is not counted.
_HUNYUAN_LARGE = ModelShape(
    "hunyuan-large",
    layers=64,
    hidden=6400,
    heads=80,
    kv_heads=8,
    head_dim=80,
    vocab=128512,
    experts=16,
    top_k=1,
    ffn=18304,
    shared_ffn=18304,
    tie=True,
    qk_norm="head",
)

# https://huggingface.co/microsoft/Phi-3.5-MoE-instruct config.json. 41.9 B, 6.6 B active.
_PHI35_MOE = ModelShape(
    "phi3.5-moe",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab=32064,
    experts=16,
    top_k=2,
    ffn=6400,
    qkv_bias=True,
    out_bias=True,
)

# https://huggingface.co/allenai/OLMoE-1B-7B-0924 config.json; arXiv 2409.02060. 6.9 B, 1.3 B active.
_OLMOE = ModelShape(
    "olmoe-1b-7b",
    layers=16,
    hidden=2048,
    heads=16,
    kv_heads=16,
    head_dim=128,
    vocab=50304,
    experts=64,
    top_k=8,
    ffn=1024,
    qk_norm="full",
)

# https://huggingface.co/openai/gpt-oss-120b config.json; arXiv 2508.10925, table 1. 116.8 B, 5.1 B active.
_GPT_OSS_120B = ModelShape(
    "gpt-oss-120b",
    layers=36,
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    vocab=201088,
    experts=128,
    top_k=4,
    ffn=2880,
    qkv_bias=True,
    out_bias=True,
    router_bias=True,
    expert_bias=True,
    window=128,
    full_layers=18,
    layer_vectors=64,  # sinks
)

# https://huggingface.co/meituan-longcat/LongCat-Flash-Chat config.json; arXiv 2509.01322. 560 B, of which a token uses
# 27 B on average.
_LONGCAT_FLASH = ModelShape(
    "longcat-flash",
    layers=28,
    hidden=6144,
    heads=64,
    kv_heads=64,
    head_dim=192,
    vocab=131072,
    experts=512,
    top_k=12,
    ffn=2048,
    dense_ffn=12288,
    latent=Latent(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128),
    zero_experts=256,
    shortcut=True,
)

# https://huggingface.co/xai-org/grok-1 config.json, with the 128,256 words of the tokenizer that it is measured with
# (NVIDIA/dgxc-benchmarking, grok1). 314 B.
_GROK_1 = ModelShape(
    "grok-1",
    layers=64,
    hidden=6144,
    heads=48,
    kv_heads=8,
    head_dim=128,
    vocab=128256,
    experts=8,
    top_k=2,
    ffn=32768,
)

MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _MIXTRAL_8X7B,
        _MIXTRAL_8X22B,
        _MIXTRAL_8X22B_G8T8,
        _QWEN15_MOE,
        _QWEN2_57B,
        _LLAMA3_8X70B,
        _QWEN3_30B,
        _QWEN3_235B,
        _DEEPSEEK_MOE_16B,
        _DEEPSEEK_V3,
        _MEGASCALE_352B,
        _HUNYUAN_LARGE,
        _PHI35_MOE,
        _OLMOE,
        _GPT_OSS_120B,
        _LONGCAT_FLASH,
        _GROK_1,
    )
}
"""Those with experts."""
