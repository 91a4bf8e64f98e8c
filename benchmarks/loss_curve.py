"""Plot the loss of the configuration ``small`` with ep 4 and with ep 1.

    python -m benchmarks.loss_curve --out docs/loss-small

Trains twice: with the configuration (attention tp 2 x dp 2, experts ep 4), and with ep 1. Writes OUT.json and OUT.svg.
The losses must agree, because the placement of experts changes only the order of some sums.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.chart import Chart, Line
from moe_comm.bench.common.machine import machine_info
from moe_comm.runtime.launch import init_ranks, launch
from moe_comm.train import config as configuration, run

SMOOTH = 10


def train(overrides: list[str]) -> dict[str, Any]:
    """Train on this rank. Return the losses of all steps and the final results. Collective."""
    with init_ranks("cpu"):
        result = run("small", overrides)
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "tokens_per_s": sorted(line["tokens_per_s"] for line in lines if "loss" in line)[len(lines) // 2],
        "validation_loss": result.validation_loss,
        "unigram_entropy": result.unigram_entropy,
        "seconds": result.seconds,
    }


def smooth(losses: list[float]) -> list[float]:
    """Return means over adjacent steps, which remove the noise of single batches."""
    return [sum(losses[at : at + SMOOTH]) / len(losses[at : at + SMOOTH]) for at in range(0, len(losses), SMOOTH)]


def main() -> None:
    """Train twice and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("docs/loss-small"))
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine_info("cpu"), "steps": args.steps, "runs": {}}
    ranks = configuration.load("small").parallel.ranks
    with tempfile.TemporaryDirectory() as folder:
        common = [f"run.steps={args.steps}", f"run.folder={folder}", "run.sample_tokens=0", "checkpoint.every=0"]
        for name, extra in (("tp 2 x dp 2 | ep 4", []), ("tp 2 x dp 2 | ep 1", ["parallel.ep=1"])):
            result["runs"][name] = launch(train, ([*common, *extra],), ranks)[0]
    lines: list[Line] = []
    for name, one in result["runs"].items():
        ys = smooth(one["losses"])
        xs = [SMOOTH * (n + 0.5) for n in range(len(ys))]
        lines.append(Line(f"{name}, validation {one['validation_loss']:.3f}", xs, ys, dashed=bool(lines), marks=False))
    first, second = (one["losses"] for one in result["runs"].values())
    result["largest_rel_diff"] = max(abs(a - b) / b for a, b in zip(first, second, strict=True))
    entropy = next(iter(result["runs"].values()))["unigram_entropy"]
    lines.append(Line("", (0, args.steps), (entropy, entropy), guide=True))
    chart = Chart("small: loss on the standard library's source text", "step", "nats/byte", lines)
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    args.out.with_suffix(".svg").write_text(chart.svg())
    print(f"largest relative difference of the losses: {result['largest_rel_diff']:.1e}")
    for name, one in result["runs"].items():
        print(f"{name}: loss {one['losses'][0]:.3f} -> {smooth(one['losses'])[-1]:.3f}, {one['seconds']:.0f} s")


if __name__ == "__main__":
    main()
