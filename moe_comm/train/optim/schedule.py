"""The learning rate by step. Pure arithmetic: a resumed run needs no state for it.

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
class Schedule:
    """Linear warm-up to ``lr`` over ``warmup`` steps, then a shape that ends at the last of ``steps`` steps.

    shape: "cosine" (half a wave) or "linear" from ``lr`` down to ``final_lr`` times it; "wsd" (warm-up, stable, decay;
        arXiv 2404.06395): ``lr`` until the last ``decay`` steps, over which it falls linearly; "constant".
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
                "a schedule needs lr above 0, at least one step, warmup and decay of at least 0 and final_lr in "
                f"[0, 1]; got {self}"
            )
        if self.shape == "wsd" and self.decay > self.steps:
            raise ConfigError(f"decay ({self.decay} steps) must not be longer than the run ({self.steps} steps)")


def learning_rate(schedule: Schedule, step: int) -> float:
    """Rate of ``step``, counted from 0. From the last step on it stays as it is there.

    The first step of a warm-up has lr / warmup, its last one lr. A run that ends in its warm-up never leaves it.
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
        begin = max(begin, schedule.steps - schedule.decay) - 1  # the step before the first that is lower
        if schedule.decay == 0:
            return schedule.lr
    done = min(max(step - begin, 0) / max(last - begin, 1), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * done)) if schedule.shape == "cosine" else 1 - done
    return schedule.lr * (schedule.final_lr + (1 - schedule.final_lr) * left)
