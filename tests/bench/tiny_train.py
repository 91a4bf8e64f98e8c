"""A tiny size of ``bench train``."""

from __future__ import annotations

from moe_comm.bench.train.settings import TrainBench

TINY = TrainBench(
    ranks=2,
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    experts=8,
    top_k=2,
    ffn=32,
    vocab=300,
    seq_len=32,
    batch=2,
    warmup=1,
    steps=2,
    peers=("hf_ep_fsdp2", "hf_fsdp2", "hf_ddp", "one_process", "hf_one_process"),
)
