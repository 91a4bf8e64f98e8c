"""Compare an MoE layer with overlap="auto" with the serial layer: the choice of the cost model must not be slower.

    python -m benchmarks.overlap_auto --json benchmarks/results/overlap_auto.json

Two layers with the same weights run forward and backward in pairs in the same processes, with the slowest rank of each
call. ``ratio`` is the median over the pairs of auto over serial; ``low`` and ``high`` are its 95% confidence interval.
Backends ``shared_memory`` and ``all_to_all`` (gloo on one host), 2 and 4 ranks, 1 to 8192 tokens per rank.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_comm import MoEConfig, MoELayer, RouterConfig
from moe_comm.bench.common.interleave import measure_pairs
from moe_comm.bench.common.machine import machine_info
from moe_comm.runtime.launch import init_ranks, launch

HIDDEN, FFN, EXPERTS, TOP_K = 512, 256, 16, 2
TOKENS = (1, 8, 64, 512, 2048, 8192)
PAIRS = 31


def step(layer: MoELayer, x_TD: torch.Tensor) -> None:
    """Run forward and backward."""
    layer(x_TD.detach().requires_grad_()).sum().backward()


def measure(backends: list[str], tokens: list[int], seconds: float) -> list[dict[str, Any]]:
    """Measure on this rank. Return the cases, the same on every rank."""
    cases: list[dict[str, Any]] = []
    with init_ranks() as ranks:
        config = MoEConfig(HIDDEN, FFN, RouterConfig(EXPERTS, TOP_K))
        for backend in backends:
            serial = MoELayer.build(config, dist.group.WORLD, backend=backend, seed=1)
            auto = MoELayer.build(config, dist.group.WORLD, backend=backend, seed=1, overlap="auto")
            for count in tokens:
                x_TD = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(ranks.rank))
                pair = measure_pairs(partial(step, serial, x_TD), partial(step, auto, x_TD), 3, PAIRS, seconds=seconds)
                cases.append({"backend": backend, "ranks": ranks.world, "tokens": count, **asdict(pair)})
    return cases


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap_auto", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--backend", nargs="+", default=["shared_memory", "all_to_all"])
    parser.add_argument("--seconds", type=float, default=8.0, help="time of each case, for additional pairs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = []
    for ranks in args.ranks:
        for case in launch(measure, (args.backend, args.tokens, args.seconds), ranks=ranks)[0]:
            cases.append(case)
            print(
                f"{case['backend']:>13}, {case['ranks']} ranks, {case['tokens']:>5} tokens: {case['ratio']:.3f} "
                f"({case['low']:.3f} to {case['high']:.3f}, {case['count']} pairs)",
                flush=True,
            )
    if args.json is not None:
        args.json.write_text(json.dumps({"cases": cases, "machine": machine_info("cpu")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
