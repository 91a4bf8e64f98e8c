"""Train a swapped Hugging Face model in a custom loop: DDP, clipping, accumulation, bf16, saving and resuming.

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py runs/own_loop
    python examples/own_loop.py runs/own_loop        # resumes on a different number of ranks

A small random Qwen3-MoE learns the bytes of Python's language reference. Lines marked (*) are the changes to an
ordinary DDP loop for expert parallelism.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_comm

STEPS, BATCH, LENGTH, ACCUMULATE = 20, 8, 64, 2
TEXT = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8).long()


def small_model() -> Any:
    torch.manual_seed(0)  # the same weights on every rank
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=2,
            use_cache=False,
        )
    )


def batch(step: int, rank: int, world: int) -> torch.Tensor:
    """Return this rank's sequences of the global batch, which does not depend on the number of ranks."""
    starts = torch.randint(len(TEXT) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([TEXT[start : start + LENGTH] for start in starts[rank::world].tolist()])


def main(folder: Path) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    file = folder / "checkpoint.pt"
    raw = moe_comm.swap_moe(small_model(), dist.group.WORLD if world > 1 else None)  # (*)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=3e-3)
    first = 0
    if file.exists():
        saved = torch.load(file, map_location="cpu")
        moe_comm.load_state_dict(raw, saved["model"])  # (*) instead of raw.load_state_dict
        moe_comm.load_optimizer_state_dict(raw, optimizer, saved["optimizer"])  # (*)
        first = saved["step"]
    model = DistributedDataParallel(raw) if world > 1 else raw
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        losses = []
        for number, ids in enumerate(batch(step, rank, world).chunk(ACCUMULATE), 1):
            accumulating = world > 1 and number < ACCUMULATE
            with model.no_sync() if accumulating else nullcontext(), torch.autocast("cpu", torch.bfloat16):
                loss = model(ids, labels=ids).loss / ACCUMULATE
                loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = torch.stack(losses).sum() / world
        if world > 1:
            dist.all_reduce(total)
        if rank == 0 and (step - first) % 5 in (0, 4):
            print(f"step {step}: loss {total:.3f}, norm {norm:.2f}, {world} rank(s)")
    state = {  # (*) collective; rank 0 gets all experts
        "model": moe_comm.state_dict(raw, rank0_only=True),
        "optimizer": moe_comm.optimizer_state_dict(raw, optimizer, rank0_only=True),
        "step": first + STEPS,
    }
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, file)
        print(f"saved step {first + STEPS}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else scratch))
    if dist.is_initialized():
        dist.destroy_process_group()
