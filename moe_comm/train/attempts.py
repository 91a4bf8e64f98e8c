"""Writes down every start of a run's ranks, from which the effective training time is told."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

from moe_comm.observe.effective import last_step_s, step_times
from moe_comm.observe.records import ATTEMPTS, Attempt, append, read_lines
from moe_comm.runtime.keeper import start_ticks
from moe_comm.runtime.launch import under_torchrun
from moe_comm.topology import FoldedMesh
from moe_comm.train.hooks import StepHook


class AttemptLog(StepHook):
    """Adds a line to ``attempts.jsonl`` when the first step begins. Made by rank 0, before the lines of steps that are
    done again are taken out of ``metrics.jsonl``.

    Args:
        run: the run's folder. done: steps after which it goes on. source, hosts: as in ``Attempt``.
    """

    def __init__(self, run: Path, mesh: FoldedMesh, done: int, source: str, hosts: list[str]) -> None:
        self._path = run / ATTEMPTS
        lost = [total for step, total, _, counted in step_times(run) if step > done and counted]
        number = sum(1 for _ in read_lines(self._path, Attempt))
        self._begun = False
        self.attempt = Attempt(
            number=number,
            world=mesh.config.world,
            started_s=process_start_s() if under_torchrun() else time.time(),
            ready_s=math.nan,
            first_step=done + 1,
            source=source,
            mapping=dict(mesh.sizes),
            hosts=hosts,
            last_s=last_step_s(run) if number else math.nan,
            lost_steps=len(lost),
            lost_s=sum(lost),
        )

    on_disk = True

    def before_step(self, step: int) -> None:
        if not self._begun:
            self._begun = True
            append(self._path, Attempt(**vars(self.attempt) | {"ready_s": time.time()}))


def process_start_s() -> float:
    """When this process started, in seconds since 1970, to a hundredth."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s
