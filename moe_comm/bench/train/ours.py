"""This library's training loop as a contestant: over all ranks, and on one process."""

from __future__ import annotations

from contextlib import ExitStack

from moe_comm.bench.train.contestant import AloneMesh, Setting, TrainContestant
from moe_comm.bench.train.settings import TrainBench
from moe_comm.topology import ParallelMesh
from moe_comm.train.loop.build import build
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks


class Ours(TrainContestant):
    """The batch and the experts spread over all ranks; reads its batches within the step, as in a run."""

    name = "moe_comm"

    @classmethod
    def why_not(cls, bench: TrainBench) -> str | None:
        return None

    def __init__(self, setting: Setting) -> None:
        self._open(setting, ParallelMesh(setting.config.parallel.mapping(setting.bench.ranks)), setting.ranks)

    def _open(self, setting: Setting, mesh: ParallelMesh, ranks: Ranks) -> None:
        self._first = ranks.is_first
        self._stack = ExitStack()
        self._feed = self._stack.enter_context(setting.feed(mesh))
        self._machinery = build(setting.config, setting.architecture, mesh)
        self._trainer = Trainer(setting.config, self._machinery, self._feed, ranks)
        self.reports: list[StepReport] = []

    def step(self, step: int) -> None:
        self.reports.append(self._trainer.train_step(step))

    def loss(self) -> float:
        return self.reports[-1].loss if self._first else 0.0

    def close(self) -> None:
        for stage in self._machinery.stages:
            stage.close()  # type: ignore[operator]
        self._machinery.runner.close()
        self._stack.close()


class OneProcess(Ours):
    """The whole batch on one process with all cores."""

    name = "one_process"
    alone = True

    @classmethod
    def why_not(cls, bench: TrainBench) -> str | None:
        return "is the same as moe_comm on one rank" if bench.ranks == 1 else None

    def __init__(self, setting: Setting) -> None:
        parallel = setting.config.parallel.model_copy(update={"ep": 1, "sharding": "replicate"})
        config = setting.config.model_copy(update={"parallel": parallel})
        alone = Setting(setting.bench, config, setting.architecture, setting.corpus, Ranks(), setting.weights)
        self._open(alone, AloneMesh(), Ranks())
