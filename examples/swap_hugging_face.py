"""Make a Hugging Face model expert-parallel, and check that it still computes the same.

    python examples/swap_hugging_face.py
    torchrun --nproc-per-node 2 examples/swap_hugging_face.py

A small random Mixtral stands in for a real checkpoint, so that nothing is downloaded; put a folder name on the
command line to use your own model.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from moe_comm.integrations.hugging_face import expert_parameters, swap_moe


def small_mixtral(folder: Path) -> Path:
    """A checkpoint like the real ones: config.json and safetensors."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
    )
    MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def main(folder: str | Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(folder)

    # The swap. Everything else in your script stays as it is.
    group = dist.group.WORLD if dist.is_initialized() else None
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model = swap_moe(model, group)

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(model.config.vocab_size, (2, 16), generator=generator)  # each rank its own batch
    with torch.no_grad():
        expected, got = plain(tokens).logits, model(tokens).logits
    error = float((got - expected).abs().max() / expected.abs().max())
    held = sum(parameter.numel() for parameter in expert_parameters(model).values())
    whole = sum(p.numel() for name, p in plain.named_parameters() if name in expert_parameters(model))
    print(f"rank {rank} of {world}: holds {held / whole:.0%} of the experts' weights, logits differ by {error:.1e}")
    if error > 1e-5:
        raise SystemExit("the swapped model computes something else")
    print(f"rank {rank} of {world}: logits match")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        # Before the ranks know of each other, as then only rank 0 would write.
        folder = sys.argv[1] if len(sys.argv) > 1 else small_mixtral(Path(scratch))
        if "RANK" in os.environ:  # under torchrun
            dist.init_process_group("gloo")
        main(folder)
    if dist.is_initialized():
        dist.destroy_process_group()
