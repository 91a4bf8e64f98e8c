"""The training loop for all mappings.

step:  batch ─▶ forward, backward of all micro-batches (runner) ─┐
         ▲      (dispatch and combine of rows)                   ▼
         │           one small all-reduce: losses, expert loads, stop requests, non-finite losses, corrupted rows
         │ rerun                                                 ▼
         └──────────────────────────────────────────────  guard: check the loss
                                                                 ▼
       weights ◀─ optimizer ◀─ clip ◀─ guard ◀─ global norm ◀─ sum of gradients (data_parallel)
"""

from __future__ import annotations

import contextlib
import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moe_comm.errors import CorruptPayload
from moe_comm.layers.moe.load import moe_layers, update_biases
from moe_comm.layers.transformer.config import TransformerConfig
from moe_comm.observe.records import FaultRecord
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import COMMUNICATION, EVENTS
from moe_comm.topology import ParallelMesh
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Corpus
from moe_comm.train.feed import Feed, StepBatch
from moe_comm.train.hooks import StepHook
from moe_comm.train.lengths.feed import open_feed
from moe_comm.train.loop.build import TrainState, build
from moe_comm.train.loop.progress import Progress
from moe_comm.train.loop.saver import RunSaver
from moe_comm.train.metrics import MetricsSink, PlacementReport, StepReport, StepTimes
from moe_comm.train.optim import learning_rate
from moe_comm.train.parallel import clip_
from moe_comm.train.parallel.norm import check_equal_weights
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience.guard import DAMAGED_TRIES, Agreement, FaultSink, StepDecision, StepGuard, StepSummary

STOP_REASONS = ("interrupted", "time limit")
ACTION_TEXT = {"stop": "; the run ends", "skip": "; the step is skipped"}
"""Text for the action of a ``FaultRecord`` in the log."""


@dataclass
class _Clock:
    """Seconds of a step so far.

    busy: forward, backward and update, including their communication. communication: the communication in ``busy``.
    agreement: communication of the guard and of the all-reduce of the step summary, which is not in ``busy``.
    """

    busy: float = 0.0
    communication: float = 0.0
    agreement: float = 0.0


class Trainer:
    """Train ``train_state`` on the batches of ``feed``. All ranks construct a trainer and make the same calls.

    Args:
        saver: saves checkpoints; None: no checkpoints.
        sinks: receive the metrics of each step.
        progress: shows progress and messages; None: no output.
        on_fault: receives the faults that the guard detects, on all ranks. They are logged in any case.
        first_step: completed steps when the run resumes.
    """

    def __init__(
        self,
        config: TrainConfig,
        train_state: TrainState,
        feed: Feed,
        ranks: Ranks,
        *,
        saver: RunSaver | None = None,
        sinks: Sequence[MetricsSink] = (),
        hooks: Sequence[StepHook] = (),
        progress: Progress | None = None,
        on_fault: FaultSink | None = None,
        first_step: int = 0,
    ) -> None:
        self.config = config
        self.train_state = train_state
        self.feed = feed
        self.ranks = ranks
        self.reports: list[StepReport] = []
        self.next_step = first_step
        self._saver = saver
        self._sinks = sinks
        self._hooks = hooks
        self._progress = progress or Progress()
        self._stop_requested = False
        self._saved_s = 0.0
        self._began = time.monotonic()
        self._on_fault = on_fault
        self._agreement = Agreement(train_state.stages, train_state.moe_names, train_state.num_experts, ranks)
        self._guard = StepGuard(config.guard, config.run.nonfinite, ranks, train_state.history, self._report_fault)
        for stage in train_state.stages:
            for _, layer in moe_layers(stage):
                # An auxiliary loss is a mean over a micro-batch; over the step it is the mean over its micro-batches.
                layer.aux_scale = 1 / config.data.micro_batches

    def request_stop(self) -> None:
        """Stop training after the current step on all ranks. Safe to call from a signal handler."""
        self._stop_requested = True

    def fit(self, after_step: Callable[[StepReport], None] | None = None) -> str:
        """Train to the last step, the time limit or a stop request. Collective.

        Args:
            after_step: called with the report of each step.

        Returns:
            "finished", "time limit" or "interrupted".

        Raises:
            RankMismatch: weights that several ranks hold differ; raised on all ranks.
            NonFiniteLoss, UnsettledStep, CorruptPayload: raised on all ranks; the weights are those of the last good
                step.
        """
        run = self.config.run
        self._began = time.monotonic()
        self._train_mode(True)
        self._check_weights()
        self._progress.start(run.steps)
        try:
            while self.next_step < run.steps:
                report = self.train_step(self.next_step)
                self.next_step += 1
                self.reports.append(report.without_slots())
                with _disk_span():
                    for sink in self._sinks:
                        sink.write(report)
                for hook in self._hooks:
                    with _disk_span(hook.on_disk):
                        hook.after_step(report)
                self._progress.update(report)
                if after_step is not None:
                    after_step(report)
                if not report.stop and run.eval_every and report.step % run.eval_every == 0 and report.step < run.steps:
                    loss = self.evaluate()
                    self._progress.log(f"validation loss after step {report.step}: {loss:.3f}")
                # Save last, so that a resumed run has the records of all steps before the checkpoint.
                self._save(report)
                if report.stop:
                    self.train_state.data_parallel.wait_weights()
                    return report.stop
        finally:
            self._progress.close()
        self.train_state.data_parallel.wait_weights()
        return "finished"

    def train_step(self, step: int) -> StepReport:
        """Train on the global batch of ``step`` (from 0). Collective."""
        for hook in self._hooks:
            with _disk_span(hook.on_disk):
                hook.before_step(step + 1)
        EVENTS.begin_step(step + 1)
        with EVENTS.span(Kind.STEP, "step"):
            return self._train_step(step)

    def _train_step(self, step: int) -> StepReport:
        train_state, guard = self.train_state, self._guard
        saved_s, self._saved_s = self._saved_s, 0.0
        began = time.perf_counter()
        guard.begin(step + 1)
        with EVENTS.span(Kind.DATA, "batch"):
            batch = self.feed.train(step)
        data_s = time.perf_counter() - began
        COMMUNICATION.take()
        clock, lr = _Clock(), learning_rate(self.config.optimizer, step, self.config.run.steps)
        # The guard may request reruns: because of the loss, before gradients are reduced, or because of their norm.
        while True:
            summary, decision = self._forward_backward(step, batch, clock)
            grad_norm = math.nan
            if decision is StepDecision.GO:
                grad_norm, decision = self._reduce_gradients(clock)
            if decision is not StepDecision.RERUN:
                break
        staged_s, placement = 0.0, None
        if decision is StepDecision.GO:
            staged_s, placement = self._update(step + 1, lr, summary, clock)
        if (every := self.config.guard.weights_every) and (step + 1) % every == 0:
            self._check_weights()
        # The save after the previous step counts as time of this step.
        total_s = time.perf_counter() - began + saved_s
        compute_s, communication_s = max(clock.busy - clock.communication, 0.0), clock.communication + clock.agreement
        mfu = None
        if train_state.peak_flops is not None:
            mfu = train_state.flops_per_token * batch.num_targets / total_s / train_state.peak_flops
        return StepReport(
            step=step + 1,
            loss=summary.loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=batch.num_targets,
            times=StepTimes(total_s, compute_s, communication_s, data_s, staged_s + saved_s),
            load=summary.load(),
            memory_bytes=peak_memory(train_state.mesh.device),
            mfu=mfu,
            skipped=guard.skipped,
            stop=next((reason for reason, flag in zip(STOP_REASONS, summary.stops, strict=True) if flag), ""),
            reruns=guard.reruns,
            placement=placement,
            offload=train_state.optimizer.memory.report,
            lengths=batch.lengths,
            activations=None if train_state.activations is None else train_state.activations.report,
            weights=train_state.data_parallel.take_copies(),
        )

    def _check_weights(self) -> None:
        state = self.train_state
        check_equal_weights(state.data_parallel.owned(), state.stages, state.mesh, self.ranks)

    def _forward_backward(self, step: int, batch: StepBatch, clock: _Clock) -> tuple[StepSummary, StepDecision]:
        """Run forward and backward from zero gradients, and combine the results of all ranks."""
        train_state = self.train_state
        start = time.perf_counter()
        train_state.data_parallel.zero_grad()
        with EVENTS.span(Kind.COMPUTE, "forward and backward"):
            losses_N = train_state.runner.step(batch.micro, 1 / batch.num_targets)
            loss = float(losses_N.sum()) / batch.num_targets
        if train_state.activations is not None:
            train_state.activations.finish()
        for hook in self._hooks:
            loss = hook.after_backward(step + 1, loss)
        clock.busy += time.perf_counter() - start
        clock.communication += COMMUNICATION.take()
        limit = self.config.run.time_limit_s
        over_time = limit is not None and time.monotonic() - self._began >= limit
        summary = self._agreement.agree(loss, (self._stop_requested, over_time))
        decision = self._guard.after_loss(summary, loss, train_state.data_parallel.local_gradients())
        clock.agreement += COMMUNICATION.take()
        return summary, decision

    def _reduce_gradients(self, clock: _Clock) -> tuple[float, StepDecision]:
        """Reduce and clip gradients; return their norm and the guard's decision."""
        train_state = self.train_state
        start = time.perf_counter()
        train_state.data_parallel.reduce()
        norm = clip_(train_state.data_parallel.owned(), self.config.optimizer.clip or math.inf, train_state.mesh)
        clock.busy += time.perf_counter() - start
        clock.communication += COMMUNICATION.take()
        return norm, self._guard.after_norm(norm)

    def _update(
        self, step: int, lr: float, summary: StepSummary, clock: _Clock
    ) -> tuple[float, PlacementReport | None]:
        """Update the weights, and move experts if a decision is due.

        Returns:
            The seconds waited for the saver's copy of the old weights, and the switch of placements.
        """
        train_state, staged_s = self.train_state, 0.0
        start = time.perf_counter()
        if self._saver is not None:
            with EVENTS.span(Kind.CHECKPOINT, "staging"):
                staged_s = self._saver.wait_staged()
        with EVENTS.span(Kind.OPTIMIZER, train_state.optimizer.__class__.__name__):
            train_state.optimizer.step(lr)
        with EVENTS.span(Kind.OPTIMIZER, "placement"):
            placement = train_state.placements.after_optimizer(step, summary.loads)
        if placement is not None and placement.layers:
            self._progress.log(f"step {step}: {placement}")
        train_state.data_parallel.publish()
        for stage in train_state.stages:
            update_biases(stage, summary.loads, self.config.model.bias_rate)
        clock.busy += time.perf_counter() - start - staged_s
        clock.communication += COMMUNICATION.take()
        return staged_s, placement

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean validation loss in nats per token. Weights and counters do not change. Collective."""
        self._train_mode(False)
        for _ in range(1 + DAMAGED_TRIES):
            loss_and_damage = torch.zeros(2, dtype=torch.float64, device="cpu")
            targets = 0
            for batch in self.feed.validation(self.config.run.eval_batches):
                loss_and_damage[0] += self.train_state.runner.forward_only(batch.micro).sum().cpu()
                targets += batch.num_targets
            loss_and_damage[1] = self._agreement.take_damage()
            self._agreement.take_invalid()  # otherwise the next step would count as invalid
            total, damaged = self.ranks.sum(loss_and_damage).tolist()
            if not damaged:
                break
        self._train_mode(True)
        if damaged:
            raise CorruptPayload(f"dispatched rows were corrupted in {1 + DAMAGED_TRIES} consecutive evaluations")
        loss = float(total) / max(targets, 1)
        for sink in self._sinks:
            sink.summary(self.next_step, {"validation/loss": loss, "validation/perplexity": math.exp(min(loss, 700))})
        return loss

    def _save(self, report: StepReport) -> None:
        """Save a checkpoint if it is due. The time counts as checkpoint time of the next step."""
        every, peer_every = self.config.checkpoint.every, self.config.checkpoint.peer_every
        if any(one and report.step % one == 0 for one in (every, peer_every)):
            self.train_state.data_parallel.forget_residents()
        if self._saver is not None and (report.stop or (every and report.step % every == 0)):
            start = time.perf_counter()
            with EVENTS.span(Kind.CHECKPOINT, "save"):
                self._saver.save(report.step)
            self._saved_s = time.perf_counter() - start

    def _train_mode(self, training: bool) -> None:
        for stage in self.train_state.stages:
            stage.train(training)

    def _report_fault(self, record: FaultRecord) -> None:
        self._progress.log(f"step {record.step}: {record.what}{ACTION_TEXT.get(record.action, '')}")
        if self._on_fault is not None:
            with _disk_span():
                self._on_fault(record)


def _disk_span(on_disk: bool = True) -> contextlib.AbstractContextManager[object]:
    """Return a span for code that writes files, so that the watcher does not report a slow disk as a hung rank."""
    return EVENTS.span(Kind.CHECKPOINT, "records") if on_disk else contextlib.nullcontext()


def peak_memory(device: str) -> int:
    """Return the peak memory of this process in bytes: resident on the CPU, allocated by torch on a GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def trial_seconds(
    config: TrainConfig,
    steps: int,
    *,
    architecture: TransformerConfig,
    corpus: Corpus,
    ranks: Ranks,
    device: str,
) -> Sequence[float]:
    """Train a new model of ``config`` for a few steps and return the seconds of each on this rank. Collective.

    The model and its process groups are released. Nothing is written.
    """
    mesh = ParallelMesh(config.parallel.mapping(ranks.world), device)
    state = build(config, architecture, mesh)
    with open_feed(config, corpus, mesh, architecture, steps) as feed:
        trainer = Trainer(config, state, feed, ranks)
        seconds = [trainer.train_step(step).times.total for step in range(steps)]
    state.close()
    mesh.close()
    return seconds
