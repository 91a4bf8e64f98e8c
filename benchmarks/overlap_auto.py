"""How much longer a MoE layer takes with overlap="auto" than serially: the cost model must not lose.

    python -m benchmarks.overlap_auto --json benchmarks/results/overlap_auto.json

Two layers with the same weights, one with ``overlap="auto"``, take turns in the same processes, forward and backward,
pair by pair; of each turn the slowest rank counts. ``ratio`` is the median over pairs of auto over serial, with the
interval that holds the true median with 95% probability. Over ``shared_memory`` and over ``all_to_all`` (gloo on one
host), 2 and 4 ranks, 1 to 8192 tokens a rank.
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
from moe_comm.bench.common.machine import facts
from moe_comm.bench.common.race import pairs
from moe_comm.runtime.launch import init_ranks, launch

HIDDEN, FFN, EXPERTS, TOP_K = 512, 256, 16, 2
TOKENS = (1, 8, 64, 512, 2048, 8192)
PAIRS = 31


def step(layer: MoELayer, x_TD: torch.Tensor) -> None:
    """Forward and backward."""
    layer(x_TD.detach().requires_grad_()).sum().backward()


def measure(backends: list[str], tokens: list[int], seconds: float) -> list[dict[str, Any]]:
    """On each rank; the same everywhere."""
    found: list[dict[str, Any]] = []
    with init_ranks() as ranks:
        config = MoEConfig(HIDDEN, FFN, RouterConfig(EXPERTS, TOP_K))
        for backend in backends:
            serial = MoELayer.build(config, dist.group.WORLD, backend, seed=1)
            auto = MoELayer.build(config, dist.group.WORLD, backend, seed=1, overlap="auto")
            for count in tokens:
                x_TD = torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(ranks.rank))
                pair = pairs(partial(step, serial, x_TD), partial(step, auto, x_TD), 3, PAIRS, seconds=seconds)
                found.append({"backend": backend, "ranks": ranks.world, "tokens": count, **asdict(pair)})
    return found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap_auto", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--backend", nargs="+", default=["shared_memory", "all_to_all"])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each case; more pairs as they fit")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = []
    for ranks in given.ranks:
        for case in launch(measure, (given.backend, given.tokens, given.seconds), ranks=ranks)[0]:
            found.append(case)
            print(
                f"{case['backend']:>13}, {case['ranks']} ranks, {case['tokens']:>5} tokens: {case['ratio']:.3f} "
                f"({case['low']:.3f} to {case['high']:.3f}, {case['count']} pairs)",
                flush=True,
            )
    if given.json is not None:
        given.json.write_text(json.dumps({"cases": found, "machine": facts("cpu")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
