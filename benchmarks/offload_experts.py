"""Generation with experts in a file of limited bandwidth, four times the budget, against experts in memory.

    taskset -c 0 python -m benchmarks.offload_experts FOLDER [--rate 5e8] [--tokens 16]

Both models are in one process. The file is throttled by a token bucket. Printed are the seconds, the bytes that were
read and those of the experts that calls had to wait for, as a share of what the file can deliver in that time.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import moe_comm
from benchmarks.offload import Bucket
from moe_comm.integrations.offload.cache import CacheReport
from moe_comm.runtime.offload import files

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rate", type=float, default=5e8)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    saved = args.folder / "model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **MODEL)).save_pretrained(saved)
    resident = moe_comm.from_pretrained(saved)
    experts = sum(p.nbytes for name, p in resident.named_parameters() if ".experts." in name)
    offload = moe_comm.ExpertOffload(experts // 4, str(args.folder))
    files.read_block = Bucket(args.rate).limited(files.read_block)  # type: ignore[assignment]  # names of arguments
    runs: dict[str, tuple[Any, bool]] = {"predicted": (offload, True), "not predicted": (offload, False)}
    print(f"experts {experts / 1e6:.0f} MB of {sum(p.nbytes for p in resident.parameters()) / 1e6:.0f} MB")
    prompts = {
        "1 prompt": torch.randint(MODEL["vocab_size"], (1, 32), device="cpu"),
        "4 prompts": torch.randint(MODEL["vocab_size"], (4, 32), device="cpu"),
    }
    for name, (settings, predict) in runs.items():
        model = moe_comm.from_pretrained(saved, offload=replace(settings, predict=predict))
        for many, ids in prompts.items():
            resident_s, expected = _generate(resident, ids, args.tokens)
            before = replace(moe_comm.offload_report(model))
            seconds, tokens = _generate(model, ids, args.tokens)
            after = moe_comm.offload_report(model)
            if not torch.equal(tokens, expected):
                raise SystemExit("the tokens differ")
            _show(f"{name}, {many}", before, after, seconds, args.rate)
            print(f"    in memory {resident_s:.2f} s")
        if after.peak > after.budget:
            raise SystemExit("the budget was exceeded")


def _show(name: str, before: CacheReport, after: CacheReport, seconds: float, rate: float) -> None:
    used, hits = after.used - before.used, after.hits - before.hits
    expert = after.stored / MODEL["num_hidden_layers"] / MODEL["num_experts"]
    read, needed = after.read - before.read, (used - hits) * expert
    print(
        f"{name}: {seconds:.2f} s, read {read / 1e6:.0f} MB ({read / seconds / rate:.2f} of the bandwidth), not in "
        f"memory {needed / 1e6:.0f} MB ({needed / seconds / rate:.2f}), hits {hits / used:.2f}, "
        f"waited {after.waited_s - before.waited_s:.2f} s, peak {after.peak / 1e6:.0f} of {after.budget / 1e6:.0f} MB"
    )


def _generate(model: Any, ids: torch.Tensor, count: int) -> tuple[float, torch.Tensor]:
    began = time.perf_counter()
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count, max_new_tokens=count
    )
    return time.perf_counter() - began, tokens


if __name__ == "__main__":
    main()
