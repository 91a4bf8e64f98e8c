"""What recording costs a training step: steps with events on and off take turns in one process of each rank.

    python -m benchmarks.event_overhead --ranks 2 --pairs 150 --json benchmarks/results/event_overhead.json

With events on, a step does all that a run does: its spans, its line in ``ranks/``, and every ``--every`` steps its
spans as lines. Of each step the slowest rank counts. ``ratio`` is the median over pairs of neighbouring steps of time
with events over time without, which is first in every other pair; between ``low`` and ``high`` it lies with 95%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from moe_comm.bench.common.machine import facts
from moe_comm.bench.common.race import Pairs, take_turns
from moe_comm.bench.parity.training import session
from moe_comm.runtime.event_reader import read_state
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.launch import init_ranks, launch
from moe_comm.train.config import load
from moe_comm.train.loop.recording import Recording


def measure(config: str, overrides: list[str], rounds: int, every: int) -> dict[str, Any]:
    """On each rank; the same everywhere."""
    settings = load(config, [*overrides, f"observe.every={every}", f"run.steps={2 * rounds + 100}", "run.eval_every=0"])
    with init_ranks() as ranks, tempfile.TemporaryDirectory() as folder, session(settings) as here:
        del ranks
        trainer = here.trainer
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

        parts = {"off": (("step", lambda: step(False)),), "on": (("step", lambda: step(True)),)}
        found = take_turns(parts, 5, rounds, most=rounds, after=lambda name: recorded.append(_recorded()))
        recording.close()
        EVENTS.enabled = True
        slowest = {
            name: [max(times) for times in zip(*(rank[name, "step"] for rank in found), strict=True)] for name in parts
        }
        return {
            "config": config,
            "overrides": overrides,
            "ranks": trainer.ranks.world,
            "every": every,
            "spans": max(b - a for a, b in pairwise(recorded)),
            "off_ms": 1e3 * statistics.median(slowest["off"]),
            "on_ms": 1e3 * statistics.median(slowest["on"]),
            **asdict(Pairs.of(slowest["off"], slowest["on"])),
        }


def _recorded() -> int:
    state = read_state(EVENTS.region)
    return 0 if state is None else state.head


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_args()
    overrides = [*given.overrides, f"parallel.ranks={given.ranks}"]
    found = launch(measure, (given.config, overrides, given.pairs, given.every), given.ranks)[0]
    found["machine"] = facts("cpu")
    print(
        f"{found['config']} on {found['ranks']} ranks, {found['spans']} spans a step: {found['off_ms']:.2f} ms "
        f"without, {found['on_ms']:.2f} ms with events; "
        f"ratio {found['ratio']:.4f} ({found['low']:.4f} to {found['high']:.4f})"
    )
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
