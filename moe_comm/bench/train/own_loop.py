"""The training loop of this library as a contestant: on all ranks, and in one process."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from moe_comm.bench.common.ranks import SingleRankMesh
from moe_comm.bench.train.contestant import ContestantInputs, TrainContestant
from moe_comm.bench.train.settings import TrainBench
from moe_comm.topology import ParallelMesh
from moe_comm.train.loop.build import build
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks


class MoeCommTraining(TrainContestant):
    """Distributes the batch and the experts over all ranks. Reading a batch is part of the step, as in a run."""

    name = "moe_comm"

    @classmethod
    def unavailable_reason(cls, bench: TrainBench) -> str | None:
        return None

    def __init__(self, inputs: ContestantInputs) -> None:
        self._open(inputs, ParallelMesh(inputs.config.parallel.mapping(inputs.bench.ranks)), inputs.ranks)

    def _open(self, inputs: ContestantInputs, mesh: ParallelMesh, ranks: Ranks) -> None:
        self._first = ranks.is_first
        self._stack = ExitStack()
        self._feed = self._stack.enter_context(inputs.feed(mesh))
        self._train_state = build(inputs.config, inputs.architecture, mesh)
        self._trainer = Trainer(inputs.config, self._train_state, self._feed, ranks)
        self.reports: list[StepReport] = []

    def step(self, step: int) -> None:
        self.reports.append(self._trainer.train_step(step))

    def loss(self) -> float:
        return self.reports[-1].loss if self._first else 0.0

    def close(self) -> None:
        for stage in self._train_state.stages:
            stage.close()  # type: ignore[operator]
        self._train_state.runner.close()
        self._stack.close()


class OneProcessTraining(MoeCommTraining):
    """Trains on the global batch in one process with all cores."""

    name = "one_process"
    single_process = True

    @classmethod
    def unavailable_reason(cls, bench: TrainBench) -> str | None:
        return "is the same as moe_comm on one rank" if bench.ranks == 1 else None

    def __init__(self, inputs: ContestantInputs) -> None:
        parallel = inputs.config.parallel.model_copy(update={"ep": 1, "sharding": "replicate"})
        config = inputs.config.model_copy(update={"parallel": parallel})
        self._open(replace(inputs, config=config, ranks=Ranks()), SingleRankMesh(), Ranks())
