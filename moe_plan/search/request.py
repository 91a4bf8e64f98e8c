"""A planning request: a model on a cluster with a batch. It evaluates mappings."""

from __future__ import annotations

from dataclasses import dataclass

from moe_comm.errors import ConfigError
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig
from moe_plan.machine.collectives import check_integer
from moe_plan.machine.hardware import Cluster
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping, PlacedMapping
from moe_plan.model.memory import DEFAULT_POLICY, MemoryPolicy, memory
from moe_plan.search.fit import RESERVE, Fit, fits
from moe_plan.step.step import StepModel, StepPrediction


@dataclass(frozen=True)
class PlanCandidate:
    """A mapping, its predicted step, and whether it fits memory."""

    mapping: Mapping
    step: StepPrediction
    fit: Fit


@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster and a workload to plan for.

    global_batch: sequences of a step. reserve: bytes of an accelerator that are not available to tensors.
    """

    shape: ModelShape
    cluster: Cluster
    load: Workload
    global_batch: int
    policy: MemoryPolicy = DEFAULT_POLICY
    reserve: int = RESERVE

    def __post_init__(self) -> None:
        check_integer("request", global_batch=self.global_batch)
        self.cluster.accelerator.peak(self.load.dtype)
        if self.load.loads is not None and self.load.loads.experts != self.shape.experts:
            raise ConfigError(
                f"the loads are of {self.load.loads.experts} experts, but {self.shape.name} has {self.shape.experts}"
            )

    def replicates(self, parallel: ParallelConfig, replicas: int) -> bool:
        """Return whether FSDP can have this number of replicas of its shards."""
        try:
            parallel.check_replicas(replicas)
        except ConfigError:
            return False
        return replicas == 1 or not self._moves_experts(parallel)

    def _moves_experts(self, parallel: ParallelConfig) -> bool:
        return self.load.loads is not None and self.load.loads.placed(parallel.ep).kind != "fixed"

    def _check_replicas(self, mapping: Mapping) -> None:
        if mapping.replicas > 1 and self._moves_experts(mapping.parallel):
            raise ConfigError(f"replicas = {mapping.replicas} requires a fixed placement of experts")

    def fit(self, mapping: Mapping) -> Fit:
        """Return whether a mapping fits. Raises ConfigError if it cannot run."""
        self._check_replicas(mapping)
        memories = memory(self.shape, mapping, self.load, self.global_batch, self.policy, self.cluster.host_size)
        return fits(memories, self.cluster.accelerator, self.reserve)

    def model(self, mapping: Mapping) -> StepModel:
        """Return the cost model of a step with a mapping. Raises ConfigError if it cannot run."""
        self._check_replicas(mapping)
        placed = PlacedMapping(mapping, self.cluster)
        return StepModel(self.shape, placed, self.load, self.global_batch, self.policy.reshard)

    def candidate(self, mapping: Mapping) -> PlanCandidate:
        """Evaluate a mapping. Raises ConfigError if it cannot run."""
        return PlanCandidate(mapping, self.model(mapping).predict(), self.fit(mapping))
