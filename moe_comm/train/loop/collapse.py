"""Notices routers that send all tokens to the same experts, and says once what to set."""

from __future__ import annotations

from collections.abc import Callable

from moe_comm.train.architecture import family_of
from moe_comm.train.config import TrainConfig
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport

STEPS = 20
"""Steps in a row after which a router is taken to have collapsed."""
NEAR = 0.95
"""Share of the largest possible imbalance from which on it counts."""
NAMED = 4


class CollapseHint(StepHook):
    """Says it, and keeps it in ``text``; "" while no router has collapsed.

    With K of E experts for each token the load of the busiest expert is at most E / K times the mean.
    """

    def __init__(self, config: TrainConfig, num_experts: int, top_k: int, say: Callable[[str], None]) -> None:
        self.text = ""
        self._model, self._num_experts, self._top_k, self._say = config.model, num_experts, top_k, say
        self._steps: dict[str, int] = {}

    def after_step(self, report: StepReport) -> None:
        if self.text:
            return
        load, model, experts, top_k = report.load, self._model, self._num_experts, self._top_k
        largest = experts / top_k
        for name, imbalance in zip(load.names, load.imbalance, strict=True):
            collapsed = largest > 1 and imbalance >= NEAR * largest
            self._steps[name] = self._steps.get(name, 0) + 1 if collapsed else 0
        if not (found := [name for name, steps in self._steps.items() if steps >= STEPS]):
            return
        named = ", ".join(found[:NAMED]) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")
        rate = f" or model.bias_rate (now {model.bias_rate:g})" if family_of(model) == "deepseek_v3" else ""
        self.text = (
            f"hint: load imbalance has stayed at its maximum for {STEPS} steps ({experts} / {top_k} = "
            f"{largest:.2f}): nearly all tokens go to the same {top_k} of {experts} experts in {named}. "
            f"Raise model.aux_loss (now {model.aux_loss:g}){rate}, lower optimizer.lr, or look at the data"
        )
        self._say(self.text)
