"""What may look into a training step, or interfere with it: watching, faults on purpose, records.

    before_step ─▶ batch ─▶ forward, backward ─▶ after_backward ─▶ all ranks agree ─▶ gradients, update ─▶ after_step

A hook's methods are called by every rank alike, in the order in which the hooks were given.
"""

from __future__ import annotations

from moe_comm.train.metrics import StepReport


class StepHook:
    """Does nothing; what a hook is for is overridden. Steps count from 1, as in reports.

    on_disk: before and after a step it writes files, which may take long and makes no rank stuck.
    """

    on_disk = False

    def before_step(self, step: int) -> None:
        """Before the batch of ``step`` is read."""

    def after_backward(self, step: int, loss: float) -> float:
        """This rank's gradients are whole; no other has seen them or ``loss``. Returns the loss to go on with."""
        return loss

    def after_step(self, report: StepReport) -> None:
        """The weights have changed, or the step was left out."""

    def close(self) -> None:
        """The run ends, in whichever way."""
