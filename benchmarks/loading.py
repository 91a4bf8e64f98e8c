"""Peak memory and time of loading a Mixtral, against transformers on one process.

    python -m benchmarks.loading --json benchmarks/results/loading.json

A random model in bf16 is saved in the layout of the hub and stays in the page cache. Each round loads it in new
processes, which have imported all modules:

    transformers        AutoModelForCausalLM.from_pretrained on one process
    swapped             swap_moe of that model, on each rank
    moe_comm            moe_comm.from_pretrained, on each rank

"peak / kept" is the increase of the peak resident memory over the resident memory before loading, divided by the bytes
of the parameters that a rank keeps; the largest of the ranks. "time" is the slowest rank's, with the swap, relative to
transformers' in the same round; medians over rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.utils.logging import disable_progress_bar

import moe_comm
from moe_comm.bench.common import report
from moe_comm.bench.common.machine import machine_info, peak_rss_mib, reset_peak_rss, rss_mib
from moe_comm.runtime.launch import init_ranks, launch

disable_progress_bar()


def save(folder: str, layers: int, hidden: int, ffn: int, experts: int) -> float:
    """Save a random model, and return its size in MiB."""
    config = MixtralConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        num_local_experts=experts,
    )
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = MixtralForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder, max_shard_size="256MB")
    size: float = sum(parameter.nbytes for parameter in model.parameters()) / (1 << 20)
    return size


def load(folder: str, kind: str) -> dict[str, float]:
    """Load the model on this rank. Return MiB and seconds, the largest of all ranks."""
    with init_ranks() as ranks:
        group = dist.group.WORLD if ranks.world > 1 else None
        ours, swap = moe_comm.from_pretrained, moe_comm.swap_moe  # imported on first use
        MixtralForCausalLM(MixtralConfig(vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1))
        if group is not None:
            dist.barrier()
        if not reset_peak_rss():
            raise OSError("this system does not permit to reset the peak of resident memory")
        before, start = rss_mib(), time.perf_counter()
        if kind == "moe_comm":
            model = ours(folder, group)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder)
            if kind == "swapped":
                model = swap(model, group)
        seconds, peak = time.perf_counter() - start, peak_rss_mib() - before
        kept = sum(parameter.nbytes for parameter in model.parameters()) / (1 << 20)
        values = torch.tensor([seconds, peak, kept, peak / kept], dtype=torch.float64)
        if group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return dict(zip(("seconds", "peak", "kept", "peak / kept"), values.tolist(), strict=True))


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"ranks": 2, "rounds": 5, "layers": 4, "hidden": 1024, "ffn": 3584, "experts": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")

    def alone(entry: Any, *values: Any) -> Any:
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            return pool.submit(entry, *values).result()

    rounds: dict[str, list[dict[str, float]]] = {"transformers": [], "swapped": [], "moe_comm": []}
    with tempfile.TemporaryDirectory() as folder:
        whole = alone(save, folder, args.layers, args.hidden, args.ffn, args.experts)
        for file in Path(folder).glob("*.safetensors"):
            file.read_bytes()
        for number in range(args.rounds):
            for kind, found in rounds.items() if number % 2 else reversed(rounds.items()):
                one = kind == "transformers"
                found.append(alone(load, folder, kind) if one else launch(load, (folder, kind), args.ranks)[0])
    reference = [values["seconds"] for values in rounds["transformers"]]
    result: dict[str, Any] = {"ranks": args.ranks, "whole": whole, "machine": machine_info("cpu")}
    print(f"{whole:.0f} MiB on {args.ranks} ranks, {args.rounds} rounds")
    for kind, found in rounds.items():
        of_kind = {key: statistics.median(values[key] for values in found) for key in found[0]}
        of_kind["peak / kept"] = max(values["peak / kept"] for values in found)
        pairs = zip(found, reference, strict=True)
        of_kind["time"] = statistics.median(values["seconds"] / other for values, other in pairs)
        result[kind] = of_kind
        print(
            f"{kind:>12}: {of_kind['seconds']:.2f} s, {of_kind['time']:.2f} of transformers' time; peak "
            f"{of_kind['peak']:.0f} MiB for {of_kind['kept']:.0f} MiB kept: {of_kind['peak / kept']:.3f}"
        )
    report.write_json(result, args.json)


if __name__ == "__main__":
    main()
