"""Run garbage collection on all ranks after the same step.

Python collects when a process has allocated enough objects, so ranks pause at different times and each pause delays all
ranks. Synchronous collection saved 12.6% in a job of 128 data-parallel ranks (arXiv 2505.05713).
"""

from __future__ import annotations

import gc

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport


class PlannedCollections(StepHook):
    """Disable Python's automatic collection, and collect after each step that is a multiple of ``every``.

    Objects that exist after the first step (modules, optimizer, data) are frozen: later collections skip them.
    ``close`` restores the state of the collector.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._was_enabled: bool | None = None

    def after_step(self, report: StepReport) -> None:
        if self._was_enabled is None:
            self._was_enabled = gc.isenabled()
            gc.disable()
            self._collect()
            gc.freeze()
        elif report.step % self._every == 0:
            self._collect()

    def close(self) -> None:
        if self._was_enabled is None:
            return
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None

    def _collect(self) -> None:
        with EVENTS.span(Kind.PAUSE, "garbage collection"):
            gc.collect()
