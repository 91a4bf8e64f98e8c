"""Names of the implementations that benchmarks compare with. The help of the command line loads no more than this."""

from __future__ import annotations

DISPATCH_PEERS = ("torch_gloo", "torch_gloo_tuned", "torch_mpich", "torch_mpich_tuned")
LAYER_PEERS = ("hf_grouped_mm", "hf_all_to_all", "torchtitan", "sonic_moe")
TRAIN_PEERS = (
    "hf_ep_fsdp2",
    "hf_fsdp2",
    "hf_ddp",
    "deepspeed_autoep",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "one_process",
    "hf_one_process",
)
