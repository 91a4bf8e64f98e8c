"""Step time of one rank with optimizer state in a file of 1 GB/s, four times the budget, against state in memory.

    taskset -c 0 python -m benchmarks.offload FOLDER [--rate 1e9] [--steps 5]

Both runs are in one process, and their steps alternate. The file is throttled by a token bucket in its read and write
functions. A table shows the median step, the update, and the overlap of transfers and computation in it.
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
from moe_comm.train.offload.streamed import StreamedState

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
    stored = [f"offload.path={folder}", "offload.optimizer=file"]
    with contextlib.ExitStack() as stack:
        resident = stack.enter_context(session(load(None, common)))
        owned = resident.trainer.train_state.data_parallel.owned()
        state_bytes = 8 * sum(item.value.numel() for item in owned)
        config = load(None, [*common, *stored, f"offload.budget={state_bytes // 4}"])
        offloaded = stack.enter_context(session(config))
        memory = offloaded.trainer.train_state.optimizer.memory
        assert isinstance(memory, StreamedState)
        seconds: dict[str, list[float]] = {"memory": [], "file": []}
        reports = []
        for step in range(args.steps + 2):  # the first sweep reads nothing
            for name, active in (("memory", resident), ("file", offloaded)):
                elapsed = _step(active, step)
                if step >= 2:
                    seconds[name].append(elapsed)
            if step >= 2 and memory.report is not None:
                reports.append(memory.report)
        _compare(resident, offloaded)
    times = {name: median(values) for name, values in seconds.items()}
    budget, peak = (getattr(reports[-1], name) / 1e6 for name in ("budget", "peak"))
    print(f"state {state_bytes / 1e6:.0f} MB, budget {budget:.0f} MB, peak {peak:.0f} MB")
    ratio = times["memory"] / times["file"]
    print(f"step in memory {times['memory']:.3f} s, with the file {times['file']:.3f} s: {ratio:.2f}x the speed")
    for name in ("update_s", "waited_s", "busy_s", "overlap"):
        print(f"{name} {median(getattr(report, name) for report in reports):.3f}")
    moved = median(report.read + report.written for report in reports)
    print(f"moved {moved / 1e6:.0f} MB a step; the bandwidth alone takes {moved / args.rate:.3f} s")


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
