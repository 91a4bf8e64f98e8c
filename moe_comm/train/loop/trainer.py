"""The training loop, the same for every mapping: one rank or thousands, with a pipeline or without.

step:  batch ─▶ forward, backward of all micro-batches (runner) ─┐
         ▲      (rows travel to their experts and back)          ▼
         │                    one small all-reduce: losses, loads of experts, stop requests, bad losses, damaged rows
         │ again, in place                                       ▼
         └─────────────────────────────────────────────  guard: are the numbers right?
                                                                 ▼
       weights ◀─ optimizer ◀─ clip ◀─ guard ◀─ global norm ◀─ sum of gradients (data_parallel)
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from moe_comm.errors import CorruptPayload
from moe_comm.layers.moe.load import moe_layers, update_biases
from moe_comm.observe.records import FaultRecord
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import COMMUNICATION, EVENTS
from moe_comm.topology import ParallelMesh
from moe_comm.train.config import TrainConfig
from moe_comm.train.hooks import StepHook
from moe_comm.train.loop.progress import Progress, Silent
from moe_comm.train.metrics import MetricsSink, StepReport, StepTimes
from moe_comm.train.optim import Optimizer, Schedule, learning_rate
from moe_comm.train.parallel import DataParallel, clip_
from moe_comm.train.pipeline.batch import MicroBatch
from moe_comm.train.pipeline.runner import Runner
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience.agreement import Agreed, Agreement
from moe_comm.train.resilience.guard import DAMAGED_TRIES, FaultSink, Guard, History, StepDecision

STOP_REASONS = ("interrupted", "time limit")
SAID = {"stop": "; the run ends", "skip": "; the step is left out"}
"""What the progress says of a ``FaultRecord``'s action, where its text does not."""


@dataclass(frozen=True)
class StepBatch:
    """This rank's micro-batches of one step, and the targets in the whole step over all ranks."""

    micro: list[MicroBatch]
    num_targets: int


class Feed(Protocol):
    """Where batches come from. A batch depends on the step alone, not on what was read before."""

    def train(self, step: int) -> StepBatch: ...

    def validation(self, count: int) -> Iterable[StepBatch]: ...


class Saver(Protocol):
    """Saves the state of a run while it goes on."""

    def wait_staged(self) -> float:
        """Before the weights change: wait until they are copied; returns the seconds waited."""
        ...

    def save(self, step: int) -> None:
        """After ``step`` steps."""
        ...


@dataclass(frozen=True)
class TrainState:
    """A model spread over the mesh and what trains it, as ``build`` puts it together.

    stages: this rank's parts of the model. flops_per_token: of forward and backward, for the whole model.
    peak_flops: a second, of all ranks together, for a plain matrix product; None if not measured.
    history: of the last updates, by which spikes are told; part of what is saved.
    """

    mesh: ParallelMesh
    stages: list[nn.Module]
    data_parallel: DataParallel
    optimizer: Optimizer
    runner: Runner
    moe_names: tuple[str, ...]
    num_experts: int
    top_k: int
    flops_per_token: float
    peak_flops: float | None = None
    history: History = field(default_factory=History)


@dataclass
class _Clock:
    """Seconds of a step so far. busy: in forward, backward and update, with what moves in them (moving). agreeing:
    between them."""

    busy: float = 0.0
    moving: float = 0.0
    agreeing: float = 0.0


class Trainer:
    """Trains what ``machinery`` holds on what ``feed`` gives. Every rank makes one and calls it alike."""

    def __init__(
        self,
        config: TrainConfig,
        machinery: TrainState,
        feed: Feed,
        ranks: Ranks,
        *,
        saver: Saver | None = None,
        sinks: Sequence[MetricsSink] = (),
        hooks: Sequence[StepHook] = (),
        progress: Progress | None = None,
        on_fault: FaultSink | None = None,
        first_step: int = 0,
    ) -> None:
        """``on_fault`` takes what the guard notices, on every rank alike; the progress shows it anyway."""
        self.config = config
        self.machinery = machinery
        self.feed = feed
        self.ranks = ranks
        self.reports: list[StepReport] = []
        self.next_step = first_step
        self._schedule = schedule_of(config)
        self._saver = saver
        self._sinks = sinks
        self._hooks = hooks
        self._progress = progress or Silent()
        self._stop_requested = False
        self._saved_s = 0.0
        self._began = time.monotonic()
        self._on_fault = on_fault
        self._agreement = Agreement(machinery.stages, machinery.moe_names, machinery.num_experts, ranks)
        self._guard = Guard(config.guard, config.run.nonfinite, ranks, machinery.history, self._tell)
        for stage in machinery.stages:
            for _, layer in moe_layers(stage):
                # Auxiliary losses are means over a micro-batch; over the step they are means of these.
                layer.aux_scale = 1 / config.data.micro_batches

    def request_stop(self) -> None:
        """Let training end after the step in progress, on every rank. Safe to call from a signal handler."""
        self._stop_requested = True

    def fit(self, after_step: Callable[[StepReport], None] | None = None) -> str:
        """Train to the last step, the time limit or a stop request; returns why it ended ("finished" or the reason).

        Raises:
            NonFiniteLoss, UnsettledStep, CorruptPayload: on every rank; the weights are those of the last good step.
        """
        run = self.config.run
        self._began = time.monotonic()
        self._train_mode(True)
        self._progress.start(run.steps)
        try:
            while self.next_step < run.steps:
                report = self.train_step(self.next_step)
                self.next_step += 1
                self.reports.append(report.without_slots())
                with _records():
                    for sink in self._sinks:
                        sink.write(report)
                for hook in self._hooks:
                    with _records(hook.on_disk):
                        hook.after_step(report)
                self._progress.update(report)
                if after_step is not None:
                    after_step(report)
                if not report.stop and run.eval_every and report.step % run.eval_every == 0 and report.step < run.steps:
                    loss = self.evaluate()
                    self._progress.say(f"validation loss after step {report.step}: {loss:.3f}")
                # Last, so that a run that goes on from here lacks nothing of what was written about the steps before.
                self._save(report)
                if report.stop:
                    return report.stop
        finally:
            self._progress.close()
        return "finished"

    def train_step(self, step: int) -> StepReport:
        """One update from the global batch of ``step`` (from 0). Collective."""
        for hook in self._hooks:
            with _records(hook.on_disk):
                hook.before_step(step + 1)
        EVENTS.at(step + 1)
        with EVENTS.span(Kind.STEP, "step"):
            return self._train_step(step)

    def _train_step(self, step: int) -> StepReport:
        machinery, guard = self.machinery, self._guard
        saved_s, self._saved_s = self._saved_s, 0.0
        began = time.perf_counter()
        guard.begin(step + 1)
        with EVENTS.span(Kind.DATA, "batch"):
            batch = self.feed.train(step)
        data_s = time.perf_counter() - began
        COMMUNICATION.take()
        clock, lr = _Clock(), learning_rate(self._schedule, step)
        while True:
            agreed, done = self._try(step, batch, clock)
            grad_norm = math.nan
            if done is StepDecision.GO:
                grad_norm, done = self._sum_gradients(clock)
            if done is not StepDecision.RERUN:
                break
        staged_s = self._update(lr, agreed, clock) if done is StepDecision.GO else 0.0
        total_s = time.perf_counter() - began + saved_s
        compute_s, communication_s = max(clock.busy - clock.moving, 0.0), clock.moving + clock.agreeing
        mfu = None
        if machinery.peak_flops is not None:
            mfu = machinery.flops_per_token * batch.num_targets / total_s / machinery.peak_flops
        return StepReport(
            step=step + 1,
            loss=agreed.loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=batch.num_targets,
            times=StepTimes(total_s, compute_s, communication_s, data_s, staged_s + saved_s),
            load=agreed.load(),
            memory_bytes=peak_memory(machinery.mesh.device),
            mfu=mfu,
            skipped=guard.skipped,
            stop=next((reason for reason, flag in zip(STOP_REASONS, agreed.stops, strict=True) if flag), ""),
            reruns=guard.reruns,
        )

    def _try(self, step: int, batch: StepBatch, clock: _Clock) -> tuple[Agreed, StepDecision]:
        """Forward and backward of a step, from nothing: what came of an earlier try is forgotten."""
        machinery = self.machinery
        at = time.perf_counter()
        machinery.data_parallel.zero_grad()
        with EVENTS.span(Kind.COMPUTE, "forward and backward"):
            losses_N = machinery.runner.step(batch.micro, 1 / batch.num_targets)
            loss = float(losses_N.sum()) / batch.num_targets
        for hook in self._hooks:
            loss = hook.after_backward(step + 1, loss)
        clock.busy += time.perf_counter() - at
        clock.moving += COMMUNICATION.take()
        limit = self.config.run.time_limit_s
        late = limit is not None and time.monotonic() - self._began >= limit
        agreed = self._agreement.agree(loss, (self._stop_requested, late))
        parameters = (param for stage in machinery.stages for param in stage.parameters())
        done = self._guard.after_loss(agreed, loss, parameters)
        clock.agreeing += COMMUNICATION.take()
        return agreed, done

    def _sum_gradients(self, clock: _Clock) -> tuple[float, StepDecision]:
        """Sum gradients over ranks and clip them: their norm, and whether it is right."""
        machinery = self.machinery
        at = time.perf_counter()
        machinery.data_parallel.reduce()
        norm = clip_(machinery.data_parallel.owned(), self.config.optimizer.clip or math.inf, machinery.mesh)
        clock.busy += time.perf_counter() - at
        clock.moving += COMMUNICATION.take()
        return norm, self._guard.after_norm(norm)

    def _update(self, lr: float, agreed: Agreed, clock: _Clock) -> float:
        """Change the weights; seconds waited for the copy of the old ones."""
        machinery, staged_s = self.machinery, 0.0
        at = time.perf_counter()
        if self._saver is not None:
            with EVENTS.span(Kind.CHECKPOINT, "staging"):
                staged_s = self._saver.wait_staged()
        with EVENTS.span(Kind.OPTIMIZER, machinery.optimizer.__class__.__name__):
            machinery.optimizer.step(lr)
        machinery.data_parallel.publish()
        for stage in machinery.stages:
            update_biases(stage, agreed.loads, self.config.model.bias_rate)
        clock.busy += time.perf_counter() - at - staged_s
        clock.moving += COMMUNICATION.take()
        return staged_s

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation batches, nats per token; counters and weights stay as they are. Collective.

        Raises:
            CorruptPayload: on every rank: rows arrived damaged, and again when they were sent again.
        """
        self._train_mode(False)
        for _ in range(1 + DAMAGED_TRIES):
            told = torch.zeros(2, dtype=torch.float64)
            targets = 0
            for batch in self.feed.validation(self.config.run.eval_batches):
                told[0] += self.machinery.runner.forward_only(batch.micro).sum().cpu()
                targets += batch.num_targets
            told[1] = self._agreement.take_damage()
            self._agreement.take_invalid()  # or the next step would be taken for a bad one
            total, damaged = self.ranks.sum(told).tolist()
            if not damaged:
                break
        self._train_mode(True)
        if damaged:
            raise CorruptPayload(f"rows arrived damaged in {1 + DAMAGED_TRIES} evaluations one after another")
        loss = float(total) / max(targets, 1)
        for sink in self._sinks:
            sink.summary(self.next_step, {"validation/loss": loss, "validation/perplexity": math.exp(min(loss, 700))})
        return loss

    def _save(self, report: StepReport) -> None:
        """Save after this step where it is time to; what that takes is the next step's checkpoint time."""
        every = self.config.checkpoint.every
        if self._saver is not None and (report.stop or (every and report.step % every == 0)):
            at = time.perf_counter()
            with EVENTS.span(Kind.CHECKPOINT, "save"):
                self._saver.save(report.step)
            self._saved_s = time.perf_counter() - at

    def _train_mode(self, training: bool) -> None:
        for stage in self.machinery.stages:
            stage.train(training)

    def _tell(self, record: FaultRecord) -> None:
        """Pass on what the guard noticed."""
        self._progress.say(f"step {record.step}: {record.what}{SAID.get(record.action, '')}")
        if self._on_fault is not None:
            with _records():
                self._on_fault(record)


def _records(on_disk: bool = True) -> contextlib.AbstractContextManager[object]:
    """Around what writes files: a disk that does not answer for a while makes no rank stuck."""
    return EVENTS.span(Kind.CHECKPOINT, "records") if on_disk else contextlib.nullcontext()


def schedule_of(config: TrainConfig) -> Schedule:
    """The learning rate of the whole run."""
    o = config.optimizer
    return Schedule(o.lr, config.run.steps, o.schedule, o.warmup, o.decay, o.final_lr)


def peak_memory(device: str) -> int:
    """Most bytes this process has held: resident on the CPU, allocated by torch on a GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
