"""Garbage collections that all ranks make together.

Python collects whenever one process has made enough objects, so in a group of ranks one pauses now and another then,
and each time all the others wait: planned collections saved 12.6% in a job of 128 data-parallel ranks (arXiv
2505.05713). Here every rank collects after the same step, and not in between.
"""

from __future__ import annotations

import gc

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport


class PlannedCollections(StepHook):
    """Takes Python's own collections out of training, and collects after every ``every`` steps.

    What lives after the first step (modules, optimizer, data) is set aside and never looked through again. ``close``
    leaves the collector as it was found.
    """

    def __init__(self, every: int) -> None:
        """every: steps; counted from the run's first, so that ranks that go on from a checkpoint keep to it."""
        self._every = every
        self._was_enabled: bool | None = None

    def after_step(self, report: StepReport) -> None:
        """Collect, if it is time to."""
        if self._was_enabled is None:
            self._was_enabled = gc.isenabled()
            gc.disable()
            self._collect()
            gc.freeze()
        elif report.step % self._every == 0:
            self._collect()

    def close(self) -> None:
        """Give the collector back."""
        if self._was_enabled is None:
            return
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()
        self._was_enabled = None

    def _collect(self) -> None:
        with EVENTS.span(Kind.PAUSE, "garbage collection"):
            gc.collect()
