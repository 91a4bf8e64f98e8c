"""Step time of one rank that offloads four times the budget to a file of 1 GB/s, against a run in memory.

    taskset -c 0 python -m benchmarks.offload FOLDER [optimizer | activations] [--rate 1e9] [--steps 5]

All runs are in one process, and their steps alternate. The file is throttled by a token bucket in its read and write
functions. A table shows the median step of each run, and the time and the overlap of transfers and computation in the
update, or in the forward and backward passes. All runs must have the same parameters at the end, to the last bit.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from moe_comm.bench.parity.training import Session, session
from moe_comm.runtime.offload import files
from moe_comm.train.config import load
from moe_comm.train.offload.resident import OffloadReport

MODEL = (
    *(
        "model.hidden=256",
        "model.layers=4",
        "model.heads=4",
        "model.experts=16",
        "model.ffn=512",
        "run.sample_tokens=0",
    ),
    *("data.seq_len=512", "data.batch=8", "data.micro_batches=2", "run.steps=100", "parallel.ranks=1"),
)


class Bucket:
    """Makes calls wait so that together they transfer at most ``rate`` bytes per second."""

    def __init__(self, rate: float) -> None:
        self._rate, self._lock, self._next = rate, threading.Lock(), 0.0

    def limited(self, call: Callable[[int, memoryview, int], int]) -> Callable[[int, memoryview, int], int]:
        def limited(file: int, view: memoryview, offset: int) -> int:
            with self._lock:
                self._next = max(self._next, time.perf_counter()) + len(view) / self._rate
                until = self._next
            count = call(file, view, offset)
            time.sleep(max(0.0, until - time.perf_counter()))
            return count

        return limited


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("part", nargs="?", choices=("optimizer", "activations"), default="optimizer")
    parser.add_argument("--rate", type=float, default=1e9)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bucket = Bucket(args.rate)
    for name in ("read_block", "write_block"):
        setattr(files, name, bucket.limited(getattr(files, name)))
    folder: Path = args.folder
    text = folder / "text.txt"
    text.write_text("".join(f"line {n}: the square of {n} is {n * n}\n" for n in range(20_000)))
    common = [*MODEL, f"data.source={text}", f"data.cache={folder / 'cache'}", f"run.folder={folder}"]
    tier = [f"offload.path={folder}", f"offload.{args.part}=file"]
    with contextlib.ExitStack() as stack:

        def start(*overrides: str) -> Session:
            return stack.enter_context(session(load(None, [*common, *overrides])))

        runs = {"in memory": start()}
        variants: dict[str, tuple[str, ...]] = {"file": ()}
        if args.part == "optimizer":
            budget, stored = "offload.budget", _state_bytes(runs["in memory"])
        else:
            budget = "offload.activation_budget"
            stored = _activation_bytes([*common, *tier, f"{budget}=512MiB"])
            runs["in memory, recompute full"] = start("model.recompute=full")
            variants["file, recompute selective"] = ("model.recompute=selective",)
        runs |= {name: start(*tier, f"{budget}={stored // 4}", *overrides) for name, overrides in variants.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        reports: dict[str, list[OffloadReport]] = {name: [] for name in variants}
        for step in range(args.steps + 2):  # the first sweep reads nothing
            for name, active in runs.items():
                elapsed = _step(active, step)
                if step >= 2:
                    seconds[name].append(elapsed)
                    if name in reports:
                        reports[name].append(_report(active))
        for name in runs:
            _compare(runs["in memory"], runs[name])
    print(f"{args.part}: {stored / 1e6:.0f} MB, budget {stored / 4e6:.0f} MB")
    times = {name: median(values) for name, values in seconds.items()}
    for name, value in times.items():
        print(f"{name:26} {value:.3f} s a step, {times['in memory'] / value:.2f}x the speed", end="")
        _print_transfers(reports.get(name, []), args.rate)


def _print_transfers(reports: list[OffloadReport], rate: float) -> None:
    if not reports:
        print()
        return
    middle = {name: median(getattr(report, name) for report in reports) for name in ("update_s", "waited_s", "overlap")}
    moved = median(report.read + report.written for report in reports)
    print(
        f"; {middle['update_s']:.3f} s, of these {middle['waited_s']:.3f} s waited, overlap {middle['overlap']:.2f}; "
        f"peak {reports[-1].peak / 1e6:.0f} MB, moved {moved / 1e6:.0f} MB in at least {moved / rate:.3f} s"
    )


def _report(active: Session) -> OffloadReport:
    state = active.trainer.train_state
    report = state.optimizer.memory.report if state.activations is None else state.activations.report
    assert report is not None
    return report


def _state_bytes(active: Session) -> int:
    return 8 * sum(item.value.numel() for item in active.trainer.train_state.data_parallel.owned())


def _activation_bytes(overrides: list[str]) -> int:
    """Return the most bytes of activations at a time, from one step."""
    with session(load(None, overrides)) as active:
        _step(active, 0)
        return _report(active).stored


def _step(active: Session, step: int) -> float:
    began = time.perf_counter()
    active.trainer.train_step(step)
    return time.perf_counter() - began


def _compare(first: Session, second: Session) -> None:
    for a, b in zip(*(active.trainer.train_state.data_parallel.owned() for active in (first, second)), strict=True):
        if not torch.equal(a.value, b.value):
            raise SystemExit(f"{a.name} differs")


if __name__ == "__main__":
    main()
