"""Hooks of the training step, used for the watcher, fault injection and records.

    before_step ─▶ batch ─▶ forward, backward ─▶ after_backward ─▶ all-reduce, decide ─▶ gradients, update ─▶ after_step

All ranks call the same hooks in the same order.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.train.architecture import family_of
from moe_comm.train.config import TrainConfig
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


STEPS = 20
"""Consecutive steps near the maximum imbalance after which a router counts as collapsed."""
THRESHOLD = 0.95
"""Fraction of the maximum imbalance."""
MAX_NAMES = 4


class CollapseHint(StepHook):
    """Log a hint once and store it in ``text`` when routers collapse.

    With top-K routing over E experts the load of the busiest expert is at most E / K times the mean.
    """

    def __init__(self, config: TrainConfig, num_experts: int, top_k: int, log: Callable[[str], None]) -> None:
        self.text = ""
        self._model, self._num_experts, self._top_k, self._log = config.model, num_experts, top_k, log
        self._steps: dict[str, int] = {}

    def after_step(self, report: StepReport) -> None:
        if self.text:
            return
        load, model, experts, top_k = report.load, self._model, self._num_experts, self._top_k
        largest = experts / top_k
        for name, imbalance in zip(load.names, load.imbalance, strict=True):
            collapsed = largest > 1 and imbalance >= THRESHOLD * largest
            self._steps[name] = self._steps.get(name, 0) + 1 if collapsed else 0
        if not (layers := [name for name, steps in self._steps.items() if steps >= STEPS]):
            return
        more = f" and {len(layers) - MAX_NAMES} more" if len(layers) > MAX_NAMES else ""
        rate = f" or model.bias_rate (now {model.bias_rate:g})" if family_of(model) == "deepseek_v3" else ""
        self.text = (
            f"hint: load imbalance has stayed at its maximum for {STEPS} steps ({experts} / {top_k} = "
            f"{largest:.2f}): nearly all tokens go to the same {top_k} of {experts} experts in "
            f"{', '.join(layers[:MAX_NAMES])}{more}. "
            f"Raise model.aux_loss (now {model.aux_loss:g}){rate}, lower optimizer.lr, or check the data"
        )
        self._log(self.text)


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
