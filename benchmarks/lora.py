"""Time and bytes of a training step with LoRA on experts, against full fine-tuning of the same block.

    PYTHONPATH=build/hosts python -m benchmarks.lora --json benchmarks/results/lora.json

A Mixtral MoE block with random weights is swapped twice: once all its parameters are trained, once PEFT adapts both
parameters of its experts. A step is forward, backward to the input, sync_gradients and AdamW. The steps alternate in
one run on pinned ranks with one thread, and the slowest rank counts. "time" is the median ratio of adjacent steps.
"state" is the optimizer state of a rank. With LoRA, gradients have the bytes of A and B, and AdamW's state twice those.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import asdict
from functools import partial
from typing import Any

import peft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

import moe_comm
from moe_comm.bench.common import report
from moe_comm.bench.common.interleave import PairedRatio, interleaved_times, slowest
from moe_comm.bench.common.machine import machine_info
from moe_comm.bench.common.ranks import on_ranks, pinned_to
from moe_comm.bench.common.settings import LAYER_PRESETS
from moe_comm.layers.data_parallel.expert_shard import plain

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
KINDS = ("full", "lora")


def make(kind: str, settings: dict[str, int]) -> Any:
    """Return the swapped block of one kind."""
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=settings["hidden"],
        intermediate_size=settings["ffn"],
        num_local_experts=settings["experts"],
        num_experts_per_tok=settings["top_k"],
    )
    model: Any = nn.Sequential(MixtralSparseMoeBlock(config))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    model = moe_comm.swap_moe(model, dist.group.WORLD if settings["ranks"] > 1 else None)
    if kind == "lora":
        lora = peft.LoraConfig(r=settings["r"], target_modules=[], target_parameters=TARGETS)
        model = peft.get_peft_model(model, lora)
    return model


def step(model: Any, optimizer: torch.optim.Optimizer, x_BSD: Tensor) -> None:
    """Train one step."""
    optimizer.zero_grad()
    y_BSD = model(x_BSD.detach().requires_grad_())
    (y_BSD.square().sum() / y_BSD.numel()).backward()
    moe_comm.sync_gradients(model)
    optimizer.step()


def measure(settings: dict[str, int], _: int) -> dict[str, Any]:
    """Measure on this rank. Return the times of the slowest rank, and the bytes of this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    x_BSD = torch.randn(1, settings["tokens"], settings["hidden"], generator=generator)
    steps, nbytes = {}, {}
    with pinned_to({min(os.sched_getaffinity(0))}):
        for kind in KINDS:
            model = make(kind, settings)
            params = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(params, lr=1e-4)
            steps[kind] = partial(step, model, optimizer, x_BSD)
            steps[kind]()
            grads = [plain(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
            state = [value for values in optimizer.state.values() for value in values.values() if value.dim()]
            tensors = {"trained": params, "gradients": grads, "state": state}
            nbytes[kind] = {name: sum(one.nbytes for one in found) for name, found in tensors.items()}
        contestants = {kind: (("total", steps[kind]),) for kind in KINDS}
        times = interleaved_times(contestants, 2, settings["rounds"])
    seconds = {kind: slowest(times, kind) for kind in KINDS}
    return {
        "settings": settings,
        "ms": {kind: 1e3 * statistics.median(found) for kind, found in seconds.items()},
        "time": asdict(PairedRatio.of(seconds["full"], seconds["lora"])),
        "bytes": nbytes,
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in ({"ranks": 2, "r": 16, "rounds": 15} | LAYER_PRESETS["comm"]).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--json")
    settings = vars(parser.parse_args())
    out = settings.pop("json")
    result: dict[str, Any] = on_ranks(measure, settings, settings["ranks"], "cpu") or {}
    result["machine"] = machine_info("cpu")
    for kind in KINDS:
        sizes = ", ".join(f"{name} {n / (1 << 20):.1f} MiB" for name, n in result["bytes"][kind].items())
        print(f"{kind}: {result['ms'][kind]:.1f} ms; {sizes}")
    time = result["time"]
    print(f"time {time['ratio']:.2f} of full fine-tuning ({time['low']:.2f} to {time['high']:.2f})")
    report.write_json(result, out)


if __name__ == "__main__":
    main()
