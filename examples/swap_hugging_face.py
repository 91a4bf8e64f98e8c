"""Make a Hugging Face model expert-parallel, and check that its logits do not change.

    python examples/swap_hugging_face.py
    torchrun --nproc-per-node 2 examples/swap_hugging_face.py

The script uses a small random Mixtral and downloads nothing. Pass a folder on the command line to use your own model.
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
    """Save a small random model as a checkpoint: config.json and safetensors."""
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

    # The swap. The rest of a script does not change.
    group = dist.group.WORLD if dist.is_initialized() else None
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model = swap_moe(model, group)

    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(model.config.vocab_size, (2, 16), generator=generator)  # a different batch on each rank
    with torch.no_grad():
        expected, actual = plain(tokens).logits, model(tokens).logits
    error = float((actual - expected).abs().max() / expected.abs().max())
    local = sum(parameter.numel() for parameter in expert_parameters(model).values())
    full = sum(p.numel() for name, p in plain.named_parameters() if name in expert_parameters(model))
    print(f"rank {rank} of {world}: holds {local / full:.0%} of the experts' weights, logits differ by {error:.1e}")
    if error > 1e-5:
        raise SystemExit("the logits of the swapped model differ")
    print(f"rank {rank} of {world}: logits match")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        # Each rank writes its own copy before init_process_group: later, save_pretrained would write on rank 0 only.
        folder = sys.argv[1] if len(sys.argv) > 1 else small_mixtral(Path(scratch))
        if "RANK" in os.environ:  # under torchrun
            dist.init_process_group("gloo")
        main(folder)
    if dist.is_initialized():
        dist.destroy_process_group()
