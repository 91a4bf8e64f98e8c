"""Contestants of ``bench train``: their interface and inputs, and the training loop of this library on all ranks and
in one process, with its trace and prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, get_args

from moe_comm.bench.calibrate.steps import imbalance
from moe_comm.bench.common.ranks import SingleRankMesh
from moe_comm.bench.train.settings import OWN, TrainBench
from moe_comm.layers.moe.load import moe_layers
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.observe import trace
from moe_comm.observe.records import SpanLine
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.safe_files import write_file
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.topology.pipeline import stages_per_rank
from moe_comm.train.auto.choose import workload
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.feed import CorpusFeed
from moe_comm.train.loop.build import build
from moe_comm.train.loop.trainer import Trainer
from moe_comm.train.metrics import StepReport
from moe_comm.train.ranks import Ranks
from moe_plan.machine.hardware import Cluster
from moe_plan.model.mapping import Dispatcher, Mapping, PlacedMapping
from moe_plan.step.step import StepModel

STEP = Kind.STEP.name.lower()


@dataclass(frozen=True)
class ContestantInputs:
    """Inputs that are the same for all contestants on this rank.

    Attributes:
        weights: folder with the initial weights of this library's model, for ``from_pretrained``.
    """

    bench: TrainBench
    config: TrainConfig
    architecture: TransformerConfig
    corpus: Corpus
    ranks: Ranks
    weights: Path

    def feed(self, mesh: ParallelMesh) -> CorpusFeed:
        """Return the batches of this rank, the same for all contestants on the same mesh."""
        data = self.config.data
        return CorpusFeed(self.corpus, mesh, self.config.parallel.context, data.micro_batches, self.config.run.steps)


class TrainContestant(ABC):
    """A training loop with its own copy of the model and of the optimizer state. The constructor is collective.

    Attributes:
        single_process: only the first rank builds and runs it, with all cores, and the other ranks wait.
        note: remark in the result.
    """

    name: ClassVar[str]
    single_process: ClassVar[bool] = False
    note: ClassVar[str] = ""

    @classmethod
    def unavailable_reason(cls, bench: TrainBench) -> str | None:
        """Return the reason why it cannot run here, or None."""
        return "requires more than one rank" if bench.ranks == 1 and not cls.single_process else None

    @abstractmethod
    def __init__(self, inputs: ContestantInputs) -> None:
        """Build model and optimizer."""

    def prepare(self, step: int) -> None:  # noqa: B027
        """Fetch the batch of ``step`` (from 0), unless the loop does so itself. Not timed."""

    @abstractmethod
    def step(self, step: int) -> None:
        """Update the weights once. Collective, unless it runs in a single process."""

    def without_communication(self) -> AbstractContextManager[object] | None:
        """Return a context in which ``step`` computes the same without communication; None if that is not possible.

        The weights are invalid afterwards.
        """
        return None

    def finish(self) -> None:  # noqa: B027
        """Wait for transfers of the last step that are in flight. Not timed."""

    @abstractmethod
    def loss(self) -> float:
        """Return this rank's contribution to the loss of the last step. The sum over ranks is the mean loss."""

    def close(self) -> None:  # noqa: B027
        """Release resources. Collective, unless it runs in a single process."""


class MoeCommTraining(TrainContestant):
    """Distributes the batch and the experts over all ranks. Reading a batch is part of the step, as in a run."""

    name = OWN

    @classmethod
    def unavailable_reason(cls, bench: TrainBench) -> str | None:
        return None

    def __init__(self, inputs: ContestantInputs) -> None:
        self._open(inputs, ParallelMesh(inputs.config.parallel.mapping(inputs.bench.ranks)), inputs.ranks)

    def _open(self, inputs: ContestantInputs, mesh: ParallelMesh, ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._stack = ExitStack()
        self._feed = self._stack.enter_context(inputs.feed(mesh))
        self.config = inputs.config
        self._train_state = build(inputs.config, inputs.architecture, mesh)
        self._trainer = Trainer(inputs.config, self._train_state, self._feed, ranks)
        self.reports: list[StepReport] = []

    def step(self, step: int) -> None:
        self.reports.append(self._trainer.train_step(step))

    def finish(self) -> None:
        self._train_state.data_parallel.wait_weights()

    def spans(self, title: str) -> list[SpanLine]:
        """Return the spans of the last step, on the monotonic clock. The span of the step is named ``title``.

        Call it directly after ``step``. It is empty if the step has more spans than the recorder stores.
        """
        lines = [SpanLine.of(span, 0) for span in read_spans(EVENTS.region)]
        first = max((at for at, line in enumerate(lines) if line.kind == STEP), default=len(lines))
        step = [replace(line, rank=self._rank) for line in lines[first:] if line.end_ns]
        return [replace(step[0], name=title), *step[1:]] if step else []

    @property
    def parallel(self) -> ParallelConfig:
        """The mapping."""
        return self._train_state.mesh.config

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees of the mapping by axis."""
        return {axis: self.parallel.sizes[axis] for axis in ("tp", "cp", "dp", "pp", "ep", "etp")}

    @property
    def backend(self) -> str:
        """Name of the dispatch backend of the MoE layers on this rank."""
        names = (layer.dispatcher.name for stage in self._train_state.stages for _, layer in moe_layers(stage))
        return next(names, "")

    @property
    def placement(self) -> dict[str, Any]:
        """The switches of the placement of experts so far.

        ``busiest_over_mean``: rows of the busiest rank over the mean in the loads of the first and the last decision,
        with the placement before and after it; mean of all layers. None without a decision.
        """
        decided = [report.placement for report in self.reports if report.placement is not None]
        ratios = None
        if decided:
            after = [line.ratio_after if line.switched else line.ratio_before for line in decided[-1].decisions]
            ratios = {"before": fmean(line.ratio_before for line in decided[0].decisions), "after": fmean(after)}
        return {
            "switches": sum(bool(switch.layers) for switch in decided),
            "moved_bytes": sum(switch.moved_bytes for switch in decided),
            "busiest_over_mean": ratios,
        }

    def loss(self) -> float:
        return self.reports[-1].loss if self._rank == 0 else 0.0

    def close(self) -> None:
        self._train_state.close()
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


PAUSE_NS = 5_000_000
"""Gap between two steps of a trace."""


def write_trace(steps: Sequence[Sequence[Sequence[SpanLine]]], ranks_per_host: int, out: str) -> None:
    """Write ``steps`` in sequence to the file ``out``.

    Args:
        steps: for each step, the spans of each rank, on the monotonic clock. Spans of different steps may have been
            recorded at any time.
        ranks_per_host: number of ranks on each host.
    """
    lines: list[SpanLine] = []
    begun = 0
    for ranks in steps:
        spans = [span for rank in ranks for span in rank]
        if not spans:
            continue
        first = min(span.begin_ns for span in spans)
        lines += [replace(span, skew_ns=begun - first) for span in spans]
        begun += max(span.end_ns for span in spans) - first + PAUSE_NS
    hosts = {span.rank: f"host {span.rank // ranks_per_host}" for span in lines}
    write_file(Path(out), trace.build(lines, hosts))


def predicted_ms(inputs: ContestantInputs, training: MoeCommTraining, cluster: Cluster) -> float | None:
    """Return the predicted time of a step with the expert loads of the last step, in ms.

    None if the planner does not model the configuration: a given number of chunks, interleaved micro-batches, or
    experts that move between ranks.
    """
    config, parallel = training.config, training.parallel
    p = config.parallel
    moves = config.placement.kind != "fixed"
    if p.overlap_chunks not in (None, 0, "auto") or p.interleave or moves:
        return None
    shape = ModelShape.of(inputs.architecture)
    pipeline = p.schedule if parallel.pp > 1 else None
    mapping = Mapping(
        parallel,
        virtual=stages_per_rank(p.schedule, parallel.pp, p.virtual),
        micro_batch=config.data.batch // (parallel.dp * config.data.micro_batches),
        sharding=p.sharding,
        replicas=p.dp_replicate,
        recompute=config.model.recompute,
        pipeline=pipeline,
        overlap="chunks" if p.overlap_chunks else "none",
        # The other backends send each row to the rank of its expert, as all_to_all does.
        dispatcher=training.backend if training.backend in get_args(Dispatcher) else "all_to_all",  # type: ignore[arg-type]
    )
    rows = training.reports[-1].load.slots
    load = replace(workload(config, shape), imbalance=imbalance(rows, parallel.ep))
    return StepModel(shape, PlacedMapping(mapping, cluster), load, config.data.batch).predict().seconds * 1e3
