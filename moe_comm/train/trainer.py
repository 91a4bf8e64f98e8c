"""The training loop, the same for every mapping: one rank or thousands, with a pipeline or without.

step:  batch ─▶ forward, backward of all micro-batches (runner) ─┐
                (rows travel to their experts and back)          ▼
                              one small all-reduce: losses, loads of experts, stop requests, bad losses
                                                                 ▼
       weights ◀─ optimizer ◀─ clip ◀─ global norm ◀─ sum of gradients (data_parallel)
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from moe_comm.errors import NonFiniteLoss
from moe_comm.layers.load import LayerLoad, moe_layers, take_loads, update_biases
from moe_comm.runtime.meter import COMMUNICATION
from moe_comm.topology import FoldedMesh
from moe_comm.train.config import TrainConfig
from moe_comm.train.metrics import Load, MetricsSink, StepReport, StepTimes
from moe_comm.train.optim import Optimizer, Schedule, learning_rate
from moe_comm.train.parallel import DataParallel, clip_
from moe_comm.train.pipeline.batch import MicroBatch
from moe_comm.train.pipeline.runner import Runner
from moe_comm.train.progress import Progress, Silent
from moe_comm.train.ranks import Ranks

STOP_REASONS = ("interrupted", "time limit")


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
class Machinery:
    """A model spread over the mesh and what trains it, as ``build`` puts it together.

    stages: this rank's parts of the model. flops_per_token: of forward and backward, for the whole model.
    peak_flops: a second, of all ranks together, for a plain matrix product; None if not measured.
    """

    mesh: FoldedMesh
    stages: list[nn.Module]
    data_parallel: DataParallel
    optimizer: Optimizer
    runner: Runner
    moe_names: tuple[str, ...]
    num_experts: int
    flops_per_token: float
    peak_flops: float | None = None


@dataclass(frozen=True)
class _Agreed:
    """What all ranks know of a step before any weight changes; the same everywhere."""

    loss: float
    loads: dict[str, LayerLoad]
    balance: tuple[float, ...]
    bad: tuple[int, ...]
    stop: str

    def load(self) -> Load:
        found = list(self.loads.values())
        return Load(
            tuple(layer.imbalance for layer in found),
            tuple(layer.dead for layer in found),
            tuple(layer.drop_rate for layer in found),
            self.balance,
        )


class Trainer:
    """Trains what ``machinery`` holds on what ``feed`` gives. Every rank makes one and calls it alike."""

    def __init__(
        self,
        config: TrainConfig,
        machinery: Machinery,
        feed: Feed,
        ranks: Ranks,
        *,
        saver: Saver | None = None,
        sinks: Sequence[MetricsSink] = (),
        progress: Progress | None = None,
        first_step: int = 0,
    ) -> None:
        self.config = config
        self.machinery = machinery
        self.feed = feed
        self.ranks = ranks
        self.reports: list[StepReport] = []
        self.next_step = first_step
        self._schedule = schedule_of(config)
        self._saver = saver
        self._sinks = sinks
        self._progress = progress or Silent()
        self._stop_requested = False
        self._saved_s = 0.0
        self._began = time.monotonic()
        self._layers = [layer for stage in machinery.stages for layer in moe_layers(stage)]
        for _, layer in self._layers:
            # Auxiliary losses are means over a micro-batch; over the step they are means of these.
            layer.aux_scale = 1 / config.data.micro_batches
            # Not an error inside of the step, which only some ranks would have: all decide together, after it.
            layer.router.drop_invalid = True

    def request_stop(self) -> None:
        """Let training end after the step in progress, on every rank. Safe to call from a signal handler."""
        self._stop_requested = True

    def fit(self, after_step: Callable[[StepReport], None] | None = None) -> str:
        """Train to the last step, the time limit or a stop request; returns why it ended ("finished" or the reason).

        Raises:
            NonFiniteLoss: on every rank, with the weights of the last good step in place.
        """
        run = self.config.run
        self._began = time.monotonic()
        self._train_mode(True)
        self._progress.start(run.steps)
        try:
            while self.next_step < run.steps:
                report = self.train_step(self.next_step)
                self.next_step += 1
                self.reports.append(report)
                for sink in self._sinks:
                    sink.write(report)
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
        machinery, settings = self.machinery, self.config.optimizer
        saved_s, self._saved_s = self._saved_s, 0.0
        began = time.perf_counter()
        batch = self.feed.train(step)
        data_s = time.perf_counter() - began
        machinery.data_parallel.zero_grad()
        COMMUNICATION.take()
        at = time.perf_counter()
        losses_N = machinery.runner.step(batch.micro, 1 / batch.num_targets)
        loss = float(losses_N.sum()) / batch.num_targets
        busy_s = time.perf_counter() - at
        moving_s = COMMUNICATION.take()
        agreed = self._agree(loss)
        agreeing_s = COMMUNICATION.take()
        lr = learning_rate(self._schedule, step)
        grad_norm, skipped, staged_s = math.nan, "", 0.0
        if agreed.bad:
            skipped = f"the loss or a router's logits are NaN or infinite on rank {', '.join(map(str, agreed.bad))}"
        else:
            at = time.perf_counter()
            machinery.data_parallel.reduce()
            grad_norm = clip_(machinery.data_parallel.owned(), settings.clip or math.inf, machinery.mesh)
            if not math.isfinite(grad_norm):
                skipped = f"the gradient's norm is {grad_norm} though the loss is {agreed.loss:.4g}"
            else:
                if self._saver is not None:
                    staged_s = self._saver.wait_staged()
                machinery.optimizer.step(lr)
                machinery.data_parallel.publish()
                for stage in machinery.stages:
                    update_biases(stage, agreed.loads, self.config.model.bias_rate)
            busy_s += time.perf_counter() - at - staged_s
            moving_s += COMMUNICATION.take()
        if skipped and self.config.run.nonfinite == "stop":
            raise NonFiniteLoss(
                f"step {step + 1}: {skipped}; the weights were left as they were. Look at the data of this step, lower "
                'optimizer.lr, set optimizer.clip, or go on without such steps: run.nonfinite="skip"'
            )
        total_s = time.perf_counter() - began + saved_s
        times = StepTimes(total_s, max(busy_s - moving_s, 0.0), moving_s + agreeing_s, data_s, staged_s + saved_s)
        mfu = None
        if machinery.peak_flops is not None:
            mfu = machinery.flops_per_token * batch.num_targets / total_s / machinery.peak_flops
        return StepReport(
            step=step + 1,
            loss=agreed.loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=batch.num_targets,
            times=times,
            load=agreed.load(),
            memory_bytes=peak_memory(machinery.mesh.device),
            mfu=mfu,
            skipped=skipped,
            stop=agreed.stop,
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation batches, nats per token; counters and weights stay as they are. Collective."""
        self._train_mode(False)
        total = torch.zeros(1, dtype=torch.float64)
        targets = 0
        for batch in self.feed.validation(self.config.run.eval_batches):
            total += self.machinery.runner.forward_only(batch.micro).sum().cpu()
            targets += batch.num_targets
        self._train_mode(True)
        loss = float(self.ranks.sum(total)) / max(targets, 1)
        for sink in self._sinks:
            sink.summary(self.next_step, {"validation/loss": loss, "validation/perplexity": math.exp(min(loss, 700))})
        return loss

    def _save(self, report: StepReport) -> None:
        """Save after this step where it is time to; what that takes is the next step's checkpoint time."""
        every = self.config.checkpoint.every
        if self._saver is not None and (report.stop or (every and report.step % every == 0)):
            at = time.perf_counter()
            self._saver.save(report.step)
            self._saved_s = time.perf_counter() - at

    def _train_mode(self, training: bool) -> None:
        for stage in self.machinery.stages:
            stage.train(training)

    def _agree(self, loss: float) -> _Agreed:
        """Join what the ranks know of the step into one small all-reduce, before any of them changes its weights."""
        limit, world = self.config.run.time_limit_s, self.ranks.world
        late = limit is not None and time.monotonic() - self._began >= limit
        invalid = 0
        for _, layer in self._layers:
            invalid += int(layer.router.invalid)
            layer.router.invalid.zero_()
        bad_W = torch.zeros(world, dtype=torch.float64)
        bad_W[self.ranks.rank] = not math.isfinite(loss) or invalid > 0
        stops = torch.tensor([self._stop_requested, late], dtype=torch.float64)
        value = torch.tensor([loss if math.isfinite(loss) else 0.0], dtype=torch.float64)
        parts = [value, bad_W, stops, self._own_loads().flatten()]
        sums = torch.split(self.ranks.sum(torch.cat(parts)), [part.numel() for part in parts])
        loads_LE = sums[3].view(-1, self.machinery.num_experts + 2)
        # ``loss`` is a Python float of the whole step: it was summed over micro-batches, here it is over ranks.
        reasons = [reason for reason, flag in zip(STOP_REASONS, sums[2].tolist(), strict=True) if flag]
        loads = {
            name: LayerLoad(row[:-2].long(), row[-2].long())
            for name, row in zip(self.machinery.moe_names, loads_LE, strict=True)
        }
        return _Agreed(
            loss=float(sums[0]),
            loads=loads,
            balance=tuple(loads_LE[:, -1].tolist()),
            bad=tuple(sums[1].nonzero().flatten().tolist()),
            stop=reasons[0] if reasons else "",
        )

    def _own_loads(self) -> Tensor:
        """[MoE layers, E + 2]: slots to each expert, dropped slots, balance loss; zeros for layers held elsewhere."""
        names = self.machinery.moe_names
        own = torch.zeros(len(names), self.machinery.num_experts + 2, dtype=torch.float64)
        for stage in self.machinery.stages:
            for name, load in take_loads(stage).items():
                row = own[names.index(name)]
                row[:-2] = load.load_E
                row[-2] = load.dropped
        for name, layer in self._layers:  # of the last micro-batch
            own[names.index(name), -1] = float(layer.router.losses.get("balance", 0.0))
        return own


def schedule_of(config: TrainConfig) -> Schedule:
    """The learning rate of the whole run."""
    o = config.optimizer
    return Schedule(o.lr, config.run.steps, o.schedule, o.warmup, o.decay, o.final_lr)


def peak_memory(device: str) -> int:
    """Most bytes this process has held: resident on the CPU, allocated by torch on a GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
