"""What is planned: a model on a cluster with a batch, and what a mapping answers to it."""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm.errors import ConfigError
from moe_comm.plan.machine.hardware import Cluster
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import Mapping, Place
from moe_comm.plan.model.memory import POLICY, Policy, memory
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.search.fit import RESERVE, Fit, fits
from moe_comm.plan.step.step import Step, StepModel


@dataclass(frozen=True)
class Candidate:
    """A mapping, the step that is predicted for it, and whether it fits."""

    mapping: Mapping
    step: Step
    fit: Fit


@dataclass(frozen=True)
class Question:
    """global_batch: sequences of a step. reserve: bytes of an accelerator that tensors cannot have."""

    shape: ModelShape
    cluster: Cluster
    load: Load
    global_batch: int
    policy: Policy = POLICY
    reserve: int = RESERVE

    def __post_init__(self) -> None:
        if isinstance(self.global_batch, bool) or not isinstance(self.global_batch, int) or self.global_batch < 1:
            raise ConfigError(f"a batch must have a whole number of sequences from 1, got {self.global_batch!r}")
        self.cluster.accelerator.peak(self.load.dtype)

    def fit(self, mapping: Mapping) -> Fit:
        """Whether ``mapping`` fits. Raises ConfigError where it cannot run at all."""
        held = memory(self.shape, mapping, self.load, self.global_batch, self.policy, self.cluster.host_size)
        return fits(held, self.cluster.accelerator, self.reserve)

    def model(self, mapping: Mapping) -> StepModel:
        """Predicts a step with ``mapping``. Raises ConfigError where it cannot run at all."""
        return StepModel(self.shape, Place(mapping, self.cluster), self.load, self.global_batch)

    def candidate(self, mapping: Mapping) -> Candidate:
        """All that is known of ``mapping``. Raises ConfigError where it cannot run at all."""
        return Candidate(mapping, self.model(mapping).predict(), self.fit(mapping))
