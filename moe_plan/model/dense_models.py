"""Named models without experts, used by published measurements. Each number has its source next to it."""

from __future__ import annotations

from moe_comm.layers.transformer.shape import ModelShape


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
