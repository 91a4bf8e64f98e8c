"""Measure the overhead of event recording in a training step.

    python -m benchmarks.event_overhead --ranks 2 --pairs 150 --json benchmarks/results/event_overhead.json

Steps with and without events alternate in the same processes. With events, a step records its spans and a line in
``ranks/``, and every ``--every`` steps all spans are written. The slowest rank of each step counts. ``ratio`` is the
median over pairs of adjacent steps of the time with events over that without; ``low`` and ``high`` are its 95%
confidence interval.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_comm.bench.common import report
from moe_comm.bench.common.interleave import PairedRatio, interleaved_times, slowest
from moe_comm.bench.common.machine import machine_info
from moe_comm.bench.parity.training import session
from moe_comm.runtime.event_reader import read_header
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.launch import init_ranks, launch
from moe_comm.train.config import load
from moe_comm.train.loop.recording import Recording


def measure(config: str, overrides: list[str], rounds: int, every: int) -> dict[str, Any]:
    """Measure on this rank. Return the result, the same on every rank."""
    settings = load(config, [*overrides, f"observe.every={every}", f"run.steps={2 * rounds + 100}", "run.eval_every=0"])
    with init_ranks() as ranks, tempfile.TemporaryDirectory() as folder, session(settings) as training:
        del ranks
        trainer = training.trainer
        recording = Recording(Path(folder), trainer.ranks, settings.observe, 0)
        recorded = []

        def step(on: bool) -> None:
            EVENTS.enabled = on
            number = trainer.next_step
            if on:
                recording.before_step(number + 1)
            report = trainer.train_step(number)
            if on:
                recording.after_step(report)
            trainer.next_step += 1

        contestants = {"off": (("step", lambda: step(False)),), "on": (("step", lambda: step(True)),)}
        times = interleaved_times(
            contestants, 5, rounds, max_rounds=rounds, on_done=lambda name: recorded.append(_recorded())
        )
        recording.close()
        EVENTS.enabled = True
        off, on = (slowest(times, name, "step") for name in contestants)
        return {
            "config": config,
            "overrides": overrides,
            "ranks": trainer.ranks.world,
            "every": every,
            "spans": max(b - a for a, b in pairwise(recorded)),
            "off_ms": 1e3 * statistics.median(off),
            "on_ms": 1e3 * statistics.median(on),
            **asdict(PairedRatio.of(off, on)),
        }


def _recorded() -> int:
    state = read_header(EVENTS.region)
    return 0 if state is None else state.head


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--json")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    overrides = [*args.overrides, f"parallel.ranks={args.ranks}"]
    result = launch(measure, (args.config, overrides, args.pairs, args.every), args.ranks)[0]
    result["machine"] = machine_info("cpu")
    print(
        f"{result['config']} on {result['ranks']} ranks, {result['spans']} spans per step: {result['off_ms']:.2f} ms "
        f"without, {result['on_ms']:.2f} ms with events; "
        f"ratio {result['ratio']:.4f} ({result['low']:.4f} to {result['high']:.4f})"
    )
    report.write_json(result, args.json)


if __name__ == "__main__":
    main()
