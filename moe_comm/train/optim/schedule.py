"""Learning rate schedules without state.

lr        ┌──cosine──╮            ┌──wsd─────────────┐           ┌──constant───────
         ╱            ╲          ╱                    ╲         ╱
final   ╱              ╰──      ╱                      ╲──     ╱
        warmup     steps        warmup      steps - decay      warmup
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from moe_comm.errors import ConfigError

Shape = Literal["cosine", "linear", "wsd", "constant"]


@dataclass(frozen=True)
class LRSchedule:
    """Linear warm-up to ``lr`` over ``warmup`` steps, then ``shape`` until the last of ``steps`` steps.

    Args:
        lr: maximum learning rate.
        steps: number of steps of the run.
        shape: "cosine" or "linear": decay from ``lr`` to ``final_lr * lr``. "wsd" (warm-up, stable, decay; arXiv
            2404.06395): constant, then linear decay over the last ``decay`` steps. "constant": no decay.
        warmup: warm-up steps.
        decay: decay steps of "wsd".
        final_lr: learning rate of the last step, relative to ``lr``.
    """

    lr: float
    steps: int
    shape: Shape = "cosine"
    warmup: int = 0
    decay: int = 0
    final_lr: float = 0.1

    def __post_init__(self) -> None:
        if self.shape not in get_args(Shape):
            raise ConfigError(f"schedule must be one of {', '.join(get_args(Shape))}; got {self.shape!r}")
        if self.lr <= 0 or self.steps < 1 or min(self.warmup, self.decay) < 0 or not 0 <= self.final_lr <= 1:
            raise ConfigError(
                "a schedule requires lr above 0, at least one step, warmup and decay of at least 0 and final_lr in "
                f"[0, 1]; got {self}"
            )
        if self.shape == "wsd" and self.decay > self.steps:
            raise ConfigError(f"decay ({self.decay} steps) must not be longer than the run ({self.steps} steps)")


def learning_rate(schedule: LRSchedule, step: int) -> float:
    """Return the learning rate of ``step``, counted from 0. After the last step it stays constant.

    The first warm-up step has lr / warmup, the last one lr.
    """
    if step < 0:
        raise ConfigError(f"steps count from 0; got {step}")
    if step < schedule.warmup:
        return schedule.lr * (step + 1) / schedule.warmup
    if schedule.shape == "constant":
        return schedule.lr
    last = schedule.steps - 1
    begin = schedule.warmup
    if schedule.shape == "wsd":
        begin = max(begin, schedule.steps - schedule.decay) - 1  # the step before the first decay step
        if schedule.decay == 0:
            return schedule.lr
    progress = min(max(step - begin, 0) / max(last - begin, 1), 1.0)
    remaining = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.shape == "cosine" else 1 - progress
    return schedule.lr * (schedule.final_lr + (1 - schedule.final_lr) * remaining)
