"""Hooks of the training step, used for the watcher, fault injection and records.

    before_step ─▶ batch ─▶ forward, backward ─▶ after_backward ─▶ all-reduce, decide ─▶ gradients, update ─▶ after_step

All ranks call the same hooks in the same order.
"""

from __future__ import annotations

from moe_comm.train.metrics import StepReport


class StepHook:
    """Base class of hooks; all methods do nothing. Steps count from 1.

    Attributes:
        on_disk: the hook writes files. The watcher does not report the rank as hung meanwhile.
    """

    on_disk = False

    def before_step(self, step: int) -> None:
        """Called before the batch of ``step`` is read."""

    def after_backward(self, step: int, loss: float) -> float:
        """Called when this rank's gradients are complete, before any reduction over ranks. Returns the loss to use."""
        return loss

    def after_step(self, report: StepReport) -> None:
        """Called after the weights were updated or the step was skipped."""

    def close(self) -> None:
        """Called when the run ends, also after an error."""
