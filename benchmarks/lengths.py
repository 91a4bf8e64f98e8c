"""Step time of balanced and static lengths: documents of log-normal lengths, with one that fills a sequence.

    python -m benchmarks.lengths [--seq-len 4096] [--machine MACHINE] [--link-gbit RATE] [--steps 6] [KEY=VALUE ...]

Four ranks with half a core each (root, and a cgroup controller of CPU time) train the same model on the same documents.
The settings take turns, a step each. A table shows the median step, the idle share of the ranks, and the work of the
slowest rank over the mean. With ``--machine``, such as the description that ``moe-comm plan --calibrate`` writes, a
further run distributes documents by time instead of FLOPs. The last rows are documents of equal lengths. With
``--link-gbit``, each rank is on a separate simulated host, and the table has the bytes that a host sends in a step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist

from benchmarks import lengths  # of a module, not of __main__
from moe_comm.bench.common.ranks import on_hosts, on_ranks
from moe_comm.bench.hosts.namespaces import interface_bytes
from moe_comm.bench.parity.training import Session, session
from moe_comm.train.config import load

RANKS, CORES_PER_RANK = 4, 0.5
MODEL = (
    *("model.hidden=128", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.experts=8", "model.ffn=128"),
    *("data.batch=4", "data.micro_batches=1", "data.documents=separate", "data.packing=best_fit"),
    *("data.validation=0.12", "run.steps=40", "run.sample_tokens=0", "run.gc_every=0"),
    *("parallel.ep=4", "parallel.context=ring"),
)
Settings = dict[str, list[str]]
Work = tuple[Settings, int, bool]
"""Settings by name, steps, and whether each rank is on a separate host."""


@dataclass
class Rates:
    """Steps of one setting: seconds, seconds of computation by rank, work of the slowest rank over the mean, and bytes
    that the host of rank 0 sends."""

    seconds: list[float]
    compute: list[float]
    imbalance: list[float]
    sent: list[int]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lengths", description=__doc__)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--machine")
    parser.add_argument("--link-gbit", type=float)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of all settings")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = {"log-normal": _log_normal(args.seq_len), "equal": ["c" * (args.seq_len // 8 - 1)] * 320}
        for kind, documents in texts.items():
            lines = (json.dumps({"text": text}) + "\n" for text in documents)
            (Path(folder) / f"{kind}.jsonl").write_text("".join(lines))
            data = (f"data.seq_len={args.seq_len}", f"data.cache={folder}/{kind}", f"data.source={folder}/{kind}.jsonl")
            settings = {
                "static, dp 4": ["parallel.dp=4"],
                "static, cp 4": ["parallel.cp=4"],
                "balanced": ["parallel.cp=4", "parallel.lengths=balanced"],
            }
            if kind == "log-normal" and args.machine:
                settings["balanced by time"] = [*settings["balanced"], f"parallel.machine={args.machine}"]
            runs = {name: [*MODEL, *data, *own, *args.overrides] for name, own in settings.items()}
            work: Work = runs, args.steps, args.link_gbit is not None
            if args.link_gbit is None:
                rates = on_ranks(lengths.measure, work, RANKS, "cpu", CORES_PER_RANK)
            else:
                rates, _ = on_hosts(lengths.measure, work, RANKS, 1, args.link_gbit, CORES_PER_RANK)
            if rates is not None:
                _print(kind, rates)


def measure(argument: Work, threads: int) -> dict[str, Rates]:
    """Measure on this rank. Returns the rates by setting."""
    settings, steps, hosts = argument
    rates = {name: Rates([], [], [], []) for name in settings}
    with contextlib.ExitStack() as stack:
        active = {name: stack.enter_context(session(load(None, overrides))) for name, overrides in settings.items()}
        for step in range(steps + 1):
            for name, run in active.items():
                _step(run, step, rates[name] if step else None, hosts)
    for rate in rates.values():
        compute = torch.tensor([mean(rate.compute)], dtype=torch.float64, device="cpu")
        by_rank = [torch.empty_like(compute) for _ in range(dist.get_world_size())]
        dist.all_gather(by_rank, compute)
        rate.compute = [float(value) for value in by_rank]
    return rates


def _step(run: Session, step: int, rates: Rates | None, hosts: bool) -> None:
    dist.barrier()
    sent = interface_bytes().sent if hosts else 0
    began = time.perf_counter()
    report = run.trainer.train_step(step)
    dist.barrier()
    if rates is not None:
        rates.seconds.append(time.perf_counter() - began)
        rates.compute.append(report.times.compute)
        rates.sent.append(interface_bytes().sent - sent if hosts else 0)
        if report.lengths is not None:
            rates.imbalance.append(max(report.lengths.balanced))


def _print(kind: str, rates: dict[str, Rates]) -> None:
    first = median(rates["static, dp 4"].seconds)
    for name, rate in rates.items():
        middle = median(rate.seconds)
        idle = 1 - mean(rate.compute) / max(rate.compute)
        slowest = f", slowest rank {mean(rate.imbalance):.3f} times the mean work" if rate.imbalance else ""
        slowest += f", {mean(rate.sent) / 1e6:.1f} MB sent" if any(rate.sent) else ""
        print(
            f"{kind:10} {name:16} {1e3 * middle:6.0f} ms a step (mean {1e3 * mean(rate.seconds):.0f}), "
            f"{first / middle:.2f}x the speed of static dp, idle share {idle:.1%}{slowest}",
            flush=True,
        )


def _log_normal(longest: int) -> list[str]:
    """Return 10 documents that fill a sequence, and 30 sequences of shorter ones."""
    source = random.Random(0)
    documents, total = ["a" * (longest - 1)] * 10, 0
    while total < 30 * longest:
        length = min(longest - 96, max(8, int(source.lognormvariate(5.5, 1))))
        documents.append("b" * length)
        total += length + 1
    return documents


if __name__ == "__main__":
    main()
