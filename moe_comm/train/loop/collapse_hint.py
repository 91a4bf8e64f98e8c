"""Detect routers that send all tokens to the same experts."""

from __future__ import annotations

from collections.abc import Callable

from moe_comm.train.architecture import family_of
from moe_comm.train.config import TrainConfig
from moe_comm.train.hooks import StepHook
from moe_comm.train.metrics import StepReport

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
