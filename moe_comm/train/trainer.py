"""The training loop. One process group, every rank both data-parallel and expert-parallel.

step:  own sequences ─▶ forward ─▶ loss / global tokens ─┐
            (rows travel to their experts and back)      ▼
                                    one small all-reduce: loss, expert counts, stop requests, bad losses
                                                         ▼
       weights ◀─ clip ◀─ global norm ◀─ sum of replicated gradients ◀─ backward
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_comm.errors import ConfigError, NonFiniteLoss
from moe_comm.train.config import TrainConfig
from moe_comm.train.data import Batch, Corpus
from moe_comm.train.gradients import Gradients, clip
from moe_comm.train.metrics import MetricsSink, StepReport
from moe_comm.train.model import Routing, SpreadModel
from moe_comm.train.optimizer import learning_rate, make_optimizer
from moe_comm.train.progress import Progress, Silent
from moe_comm.train.ranks import Ranks, digest

STOP_REASONS = ("interrupted", "time limit")


@dataclass(frozen=True)
class _Agreed:
    """What all ranks know of a step after its forward pass; the same everywhere."""

    loss: float
    balance: float
    counts_LE: Tensor
    stop: str


class Trainer:
    """Trains ``model`` on ``corpus``. Every rank makes one and calls the same methods in the same order.

    Raises:
        ConfigError: a batch has fewer sequences than there are ranks.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: SpreadModel,
        corpus: Corpus,
        ranks: Ranks,
        sinks: Sequence[MetricsSink] = (),
        progress: Progress | None = None,
    ) -> None:
        if config.data.batch < ranks.world:
            raise ConfigError(
                f"data.batch ({config.data.batch}) must give every one of the {ranks.world} ranks at least one sequence"
            )
        self.config = config
        self.model = model
        self.corpus = corpus
        self.ranks = ranks
        self.gradients = Gradients(model.replicated, model.experts, ranks)
        self.optimizer = make_optimizer([*model.replicated, *model.experts], config.optimizer)
        self.reports: list[StepReport] = []
        self._sinks = sinks
        self._progress = progress or Silent()
        self._stop_requested = False
        self._began = time.monotonic()

    def request_stop(self) -> None:
        """Let training end after the step in progress, on every rank. Safe to call from a signal handler."""
        self._stop_requested = True

    def fit(self) -> str:
        """Train to the last step, the time limit or a stop request; returns why it ended ("finished" or the reason).

        Raises:
            NonFiniteLoss: on every rank, with the weights of the last good step in place.
        """
        self._began = time.monotonic()
        self.model.module.train()
        self._progress.start(self.config.run.steps)
        try:
            for step in range(self.config.run.steps):
                report = self.train_step(step)
                self.reports.append(report)
                for sink in self._sinks:
                    sink.write(report)
                self._progress.update(report)
                if report.stop:
                    return report.stop
        finally:
            self._progress.close()
        return "finished"

    def train_step(self, step: int) -> StepReport:
        """One update from the global batch of ``step`` (from 0). Collective."""
        began = time.perf_counter()
        settings = self.config.optimizer
        batch = self.corpus.train_batch(step, self.ranks.rank, self.ranks.world)
        self.gradients.zero()
        loss = self._loss(batch)
        routing = self.model.probe.take()
        agreed = self._agree(step, loss, routing, batch.num_targets)
        balance = routing.balance_loss(agreed.counts_LE, batch.num_targets)
        (loss + self.config.model.aux_loss * balance).backward()
        self.gradients.reduce()
        grad_norm = clip(self.gradients, settings.clip)
        if not math.isfinite(grad_norm):
            raise NonFiniteLoss(
                f"step {step + 1}: the gradient's norm is {grad_norm} though the loss is {agreed.loss:.4g}; "
                "the weights were left as they were. Lower optimizer.lr or set optimizer.clip"
            )
        lr = learning_rate(step, self.config.run.steps, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return StepReport(
            step=step + 1,
            loss=agreed.loss,
            balance=agreed.balance,
            lr=lr,
            grad_norm=grad_norm,
            tokens=batch.num_targets,
            seconds=time.perf_counter() - began,
            imbalance=tuple((agreed.counts_LE.amax(1) / agreed.counts_LE.mean(1)).tolist()),
            stop=agreed.stop,
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the validation batches, nats per byte. Collective."""
        self.model.module.train(False)
        batches = self.corpus.validation_batches(self.config.run.eval_batches, self.ranks.rank, self.ranks.world)
        total = torch.zeros(1, dtype=torch.float64)
        for batch in batches:
            total += self._loss(batch).double()
            self.model.probe.take()
        loss = float(self.ranks.sum(total)) / len(batches)
        for sink in self._sinks:
            sink.summary(len(self.reports), {"validation/loss": loss})
        return loss

    def check_replicas(self) -> None:
        """Raise ``RankMismatch`` unless every rank holds the same bits of what they all hold. Collective."""
        self.ranks.check_equal(
            "the replicated weights",
            digest(self.model.replicated),
            "their gradients or their start differed; check that every rank runs the same code and configuration",
        )

    def _loss(self, batch: Batch) -> Tensor:
        """This rank's part of the mean cross entropy of the global batch."""
        logits_BSV = self.model.logits(batch.inputs_BS)
        total = F.cross_entropy(logits_BSV.flatten(0, 1).float(), batch.targets_BS.flatten(), reduction="sum")
        return total / batch.num_targets

    def _agree(self, step: int, loss: Tensor, routing: Routing, num_tokens: int) -> _Agreed:
        """Join what the ranks know into one small all-reduce, before any of them changes its weights."""
        limit, world = self.config.run.time_limit_s, self.ranks.world
        late = limit is not None and time.monotonic() - self._began >= limit
        value = loss.detach().double().cpu()
        bad_W = torch.zeros(world, dtype=torch.float64)
        bad_W[self.ranks.rank] = not math.isfinite(float(value))
        stops = torch.tensor([self._stop_requested, late], dtype=torch.float64)
        counts_LE = routing.counts_LE.cpu()
        probs_LE = routing.probs_LE.detach().double().cpu()
        parts = [value.view(1).nan_to_num(0, 0, 0), bad_W, stops, counts_LE.flatten(), probs_LE.flatten()]
        joined = torch.split(self.ranks.sum(torch.cat(parts)), [part.numel() for part in parts])
        if bad := joined[1].nonzero().flatten().tolist():
            raise NonFiniteLoss(
                f"step {step + 1}: the loss is NaN or infinite on rank {', '.join(map(str, bad))}; "
                "the weights were left as they were. Lower optimizer.lr or look at the data of this step"
            )
        reasons = [reason for reason, flag in zip(STOP_REASONS, joined[2].tolist(), strict=True) if flag]
        counts_LE = joined[3].view_as(counts_LE)
        total = Routing(counts_LE, joined[4].view_as(probs_LE))
        return _Agreed(
            loss=float(joined[0]),
            balance=float(total.balance_loss(counts_LE, num_tokens)),
            counts_LE=counts_LE,
            stop=reasons[0] if reasons else "",
        )
