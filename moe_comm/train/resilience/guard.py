"""Detect corrupted rows, non-finite values and spikes in a step. All ranks make the same decision.

    forward, backward  ─▶ all-reduce ─▶ corrupted rows:                       rerun, at most three times
                                        loss is NaN, infinite or a spike:     stop, skip, warn or rerun once
    gradient reduction ─▶ norm       ─▶ norm is NaN, infinite or a spike:     stop, skip, warn or rerun once

``run.nonfinite`` selects the action for NaN and infinity (never "warn"). ``guard.on_spike`` selects
the action for spikes (never "stop").

A rerun repeats the step in place with the same batch and the same weights. (This is Megatron's rerun state machine,
reduced to one process group.)

    result of the rerun                 fault         action
    good                                transient     use it; the run is bit-identical to a run without the fault
    bad, same bits on all ranks         persistent    NaN or infinite: end the run. Spike: the data caused it, accept it
    bad, different bits on some rank    unsettled     end the run; the error names the ranks whose results changed

The guard compares digests of each rank's loss and gradients between the two executions. Digests are computed before
gradients are reduced, so they identify the ranks whose results changed.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_comm.dispatch.checksums import row_sums
from moe_comm.errors import CheckpointError, CorruptPayload, MoeCommError, NonFiniteLoss, UnsettledStep
from moe_comm.layers.moe.expert_parallel import LENT_COUNTS
from moe_comm.layers.moe.load import LayerLoad, moe_layers, take_loads
from moe_comm.observe.records import FaultRecord
from moe_comm.train.metrics import ExpertLoad
from moe_comm.train.ranks import Ranks
from moe_comm.train.sections import GuardSection


@dataclass(frozen=True)
class StepSummary:
    """The summary of a step over all ranks, equal on every rank."""

    loss: float  # loss of the step; ranks with a non-finite loss contribute zero
    loads: dict[str, LayerLoad]  # expert loads, by layer
    balance: tuple[float, ...]  # balance losses, by layer
    bad: tuple[int, ...]  # ranks with a non-finite loss or router logits
    damaged: dict[int, int]  # number of row blocks with a wrong checksum, by rank; only ranks that have any
    stops: tuple[bool, ...]  # for each reason to stop: whether any rank has it

    def load(self) -> ExpertLoad:
        return ExpertLoad.of(self.loads, self.balance)


class Agreement:
    """Reduces losses, stop requests and MoE counters over the ranks.

    ``stages`` are those of this rank, ``names`` the MoE layers of the whole model, equal on all ranks.
    """

    def __init__(self, stages: Sequence[nn.Module], names: Sequence[str], num_experts: int, ranks: Ranks) -> None:
        self._stages, self._names, self._num_experts, self._ranks = list(stages), list(names), num_experts, ranks
        self._layers = [layer for stage in stages for layer in moe_layers(stage)]
        for _, layer in self._layers:
            # An error inside the step would be raised on some ranks only. Count, and decide together after the step.
            layer.router.drop_invalid = True
            layer.dispatcher.corruption.count_only = True

    def agree(self, loss: float, stops: Sequence[bool]) -> StepSummary:
        """Return the summary of the step over all ranks, and reset the counters. Collective.

        ``loss`` is that of this rank; ``stops`` has a flag for each reason to stop.
        """
        invalid = self.take_invalid()
        bad_W, damaged_W = torch.zeros(2, self._ranks.world, dtype=torch.float64, device="cpu")
        bad_W[self._ranks.rank] = not math.isfinite(loss) or invalid > 0
        damaged_W[self._ranks.rank] = self.take_damage()
        value = torch.tensor([loss if math.isfinite(loss) else 0.0], dtype=torch.float64, device="cpu")
        parts = [
            value,
            bad_W,
            damaged_W,
            torch.tensor(stops, dtype=torch.float64, device="cpu"),
            self._local_loads().flatten(),
        ]
        sums = torch.split(self._ranks.sum(torch.cat(parts)), [part.numel() for part in parts])
        loads_LX = sums[4].view(len(self._names), self._num_experts + 2 + len(LENT_COUNTS))
        loads = {
            name: LayerLoad(load_E.long(), dropped.long(), lent.long())
            for name, (load_E, dropped, lent, _) in zip(self._names, map(self._split, loads_LX), strict=True)
        }
        # ``loss`` was already summed over micro-batches; here it is summed over ranks.
        return StepSummary(
            loss=float(sums[0]),
            loads=loads,
            balance=tuple(loads_LX[:, -1].tolist()),
            bad=tuple(sums[1].nonzero().flatten().tolist()),
            damaged={rank: int(count) for rank, count in enumerate(sums[2].tolist()) if count},
            stops=tuple(flag > 0 for flag in sums[3].tolist()),
        )

    def take_invalid(self) -> int:
        """Return and reset the number of tokens with invalid router logits on this rank."""
        count = 0
        for _, layer in self._layers:
            count += int(layer.router.invalid)
            layer.router.invalid.zero_()
        return count

    def take_damage(self) -> int:
        """Return and reset the number of damaged blocks of rows on this rank."""
        return sum(layer.dispatcher.corruption.take() for _, layer in self._layers)

    def _local_loads(self) -> Tensor:
        """Return [MoE layers, X], the values of ``_split`` of this rank; zeros for other stages."""
        width = self._num_experts + 2 + len(LENT_COUNTS)
        loads = torch.zeros(len(self._names), width, dtype=torch.float64, device="cpu")
        for stage in self._stages:
            for name, load in take_loads(stage).items():
                parts = self._split(loads[self._names.index(name)])
                for part, values in zip(parts, (load.load_E, load.dropped, load.lent), strict=False):
                    part.copy_(values)
        for name, layer in self._layers:  # the balance loss is that of the last micro-batch
            loads[self._names.index(name), -1] = float(layer.router.losses.get("balance", 0.0))
        return loads

    def _split(self, row: Tensor) -> Sequence[Tensor]:
        """Return views of the values of a layer: slots per expert, dropped slots, ``LENT_COUNTS``, balance loss."""
        load_E, dropped, lent, balance = row.split([self._num_experts, 1, len(LENT_COUNTS), 1])
        return load_E, dropped[0], lent, balance


DAMAGED_TRIES = 3
"""Maximum number of reruns of a step with corrupted rows. Corruption in a rerun is an independent fault."""
LOSS, GRADIENT = 1, 2
"""Bit flags: which part of a rank's digest changed."""

FaultSink = Callable[[FaultRecord], None]
"""Receives fault records. Called on every rank with equal records; one rank writes them."""


class StepDecision(Enum):
    """Decision about a step: apply the update, skip the update, or rerun the step."""

    GO = "go"
    SKIP = "skip"
    RERUN = "rerun"


@dataclass
class History:
    """Losses and gradient norms of the last updates, equal on every rank.

    Checkpoints contain the history, so a resumed run makes the same decisions.
    """

    losses: deque[float] = field(default_factory=deque)
    norms: deque[float] = field(default_factory=deque)

    def add(self, loss: float, norm: float, window: int) -> None:
        for values, value in ((self.losses, loss), (self.norms, norm)):
            values.append(value)
            while len(values) > window:
                values.popleft()

    def state(self) -> dict[str, list[float]]:
        """Return a JSON object. JSON preserves the bits of floats."""
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def load(self, state: Mapping[str, Sequence[float]] | None) -> None:
        """Load the result of ``state``. None clears the history, so no spike is detected until the window is full."""
        values = {"losses": [], "norms": []} if state is None else state
        try:
            self.losses, self.norms = (deque(map(float, values[key])) for key in ("losses", "norms"))
        except (TypeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint's losses and norms of the last updates are unreadable: {error}"
            ) from error


@dataclass(frozen=True)
class StepDigest:
    """Digest of one execution of a step on one rank: the bits of the loss, and a checksum of each gradient."""

    loss: bytes
    gradients: tuple[int, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, loss: float, gradients: Iterable[Tensor]) -> StepDigest:
        sums = list(map(_gradient_checksum, gradients))
        # Gradients of offloaded weights are on the host, and others may not be.
        values = torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []
        return cls(struct.pack("<d", loss), tuple(values))

    def changed(self, other: StepDigest) -> int:
        """Return the flags ``LOSS`` and ``GRADIENT`` for the parts that differ."""
        return LOSS * (self.loss != other.loss) + GRADIENT * (self.gradients != other.gradients)


@dataclass(frozen=True)
class _Problem:
    kind: str
    ranks: tuple[int, ...]
    what: str


class StepGuard:
    """Decide about each step of a run. Decisions depend only on reduced values, so they are equal on all ranks.

    Each step updates ``history``. ``nonfinite`` is ``run.nonfinite``.
    """

    def __init__(
        self,
        settings: GuardSection,
        nonfinite: str,
        ranks: Ranks,
        history: History,
        record: FaultSink = lambda fault: None,
    ) -> None:
        self._settings, self._nonfinite, self._ranks, self._history = settings, nonfinite, ranks, history
        self._record = record
        # Digests are computed only if bad steps are rerun.
        self.compares = "rerun" in (nonfinite, settings.on_spike)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begin a step. Steps are counted from 1."""
        self.step, self.reruns = step, 0
        self._damaged = 0
        self._first: _Problem | None = None  # problem of the execution that caused the last rerun
        self._rerun_kinds: set[str] = set()  # kinds of problems for which the step was rerun
        self._first_digest: StepDigest | None = None
        self._current: StepDigest | None = None
        self._changed: tuple[int, ...] = ()  # flags of each rank, ``LOSS`` and ``GRADIENT``; () if none changed
        self._accepted = False  # a persistent spike was accepted
        self._recorded = False  # a fault record of ``_first`` was written
        self._loss = self._noticed_s = 0.0  # _noticed_s: seconds from the execution's start to detection
        self.skipped = ""  # why the step is skipped
        self._execution_start = time.monotonic()

    def after_loss(self, summary: StepSummary, loss: float, gradients: Iterable[Tensor]) -> StepDecision:
        """Decide about a step before its gradients are reduced. Collective in a rerun.

        ``loss`` and ``gradients`` are those of this rank. Gradients are read only if bad steps are rerun. Raises
        NonFiniteLoss, UnsettledStep or CorruptPayload on every rank; the weights are unchanged.
        """
        self._loss = summary.loss
        if summary.damaged:
            return self._handle_damage(summary.damaged)
        if self.compares:
            digest = StepDigest.of(loss, gradients)
            if self._first_digest is not None:
                self._compare(digest)
            elif summary.bad or self._exceeds(summary.loss, self._history.losses, self._settings.loss_spike):
                self._first_digest = digest
            self._current = digest  # reference for a rerun because of the norm or of a second problem
        if summary.bad:
            bad_ranks = ", ".join(map(str, summary.bad))
            return self._handle_problem(
                _Problem(
                    "nonfinite", summary.bad, f"the loss or a router's logits are NaN or infinite on rank {bad_ranks}"
                )
            )
        return self._check_spike("loss", summary.loss, self._history.losses, self._settings.loss_spike)

    def after_norm(self, norm: float) -> StepDecision:
        """Decide about a step from the global norm, after ``after_loss`` has returned ``GO``."""
        if self.compares and self._first_digest is None:
            self._first_digest = self._current
        if not isfinite(norm):
            what = f"the gradient's norm is {norm} though the loss is {self._loss:.4g}"
            decision = self._handle_problem(_Problem("nonfinite", (), what))
        else:
            decision = self._check_spike("gradient's norm", norm, self._history.norms, self._settings.norm_spike)
        if decision is StepDecision.GO:
            self._record_solved()
            self._history.add(self._loss, norm, self._settings.window)
        return decision

    # --- handlers: corrupted rows, spikes, and bad values ---

    def _handle_damage(self, damaged: Mapping[int, int]) -> StepDecision:
        blocks = ", ".join(f"{count} block(s) on rank {rank}" for rank, count in damaged.items())
        what = f"rows arrived damaged: {blocks}"
        self._damaged += 1
        self._noticed_s = time.monotonic() - self._execution_start
        if self._damaged <= DAMAGED_TRIES:
            self._record_fault("corrupt", tuple(damaged), "rerun", f"{what}; the step is rerun")
            return self._rerun()
        self._record_fault("corrupt", tuple(damaged), "stop", what)
        raise CorruptPayload(
            f"step {self.step}: {what}, for the {self._damaged}th time; the weights are unchanged. Remove the hosts "
            "of these ranks, or check their memory and network"
        )

    def _check_spike(self, name: str, value: float, history: deque[float], factor: float | None) -> StepDecision:
        if not self._exceeds(value, history, factor):
            return StepDecision.GO
        mean = fmean(history)
        times = value / mean if mean else math.inf
        what = f"the {name} is {value:.4g}, {times:.3g} times its mean of {mean:.4g}"
        return self._handle_problem(_Problem("spike", (), what))

    def _exceeds(self, value: float, history: deque[float], factor: float | None) -> bool:
        if factor is None or len(history) < self._settings.window:
            return False
        return value > factor * fmean(history)

    def _handle_problem(self, problem: _Problem) -> StepDecision:
        spike = problem.kind == "spike"
        policy = self._settings.on_spike if spike else self._nonfinite
        if policy == "rerun" and problem.kind in self._rerun_kinds:
            return self._handle_repeated(problem)
        self._record_solved()
        self._noticed_s = time.monotonic() - self._execution_start
        if policy == "rerun":
            if self._first is not None:  # the rerun solved a problem of the other kind: start a new comparison
                self._first_digest, self._changed, self._recorded = self._current, (), False
            self._first = problem
            self._rerun_kinds.add(problem.kind)
            return self._rerun()
        if policy == "warn":
            self._record_fault(problem.kind, problem.ranks, "none", problem.what)
            return StepDecision.GO
        if policy == "skip":
            self._record_fault(problem.kind, problem.ranks, "skip", problem.what)
            self.skipped = problem.what
            return StepDecision.SKIP
        self._record_fault(problem.kind, problem.ranks, "stop", problem.what)
        raise self._nonfinite_error(problem, 'or skip such steps with run.nonfinite="skip"')

    def _handle_repeated(self, problem: _Problem) -> StepDecision:
        """Handle a rerun that has the same kind of problem as the first execution."""
        if self._changed:
            changed = self._describe_changes()
            what = f"{problem.what}; the rerun was also bad, with different results ({changed})"
            self._record_fault(problem.kind, self._suspects(), "stop", what)
            raise UnsettledStep(
                f"step {self.step}: {what}; the weights are unchanged. Suspect the hardware of "
                f"rank(s) {', '.join(map(str, self._suspects()))}"
            )
        if problem.kind == "spike":
            if not self._accepted:
                self._accepted = True
                what = f"{problem.what}; the rerun gave the same bits, so the data caused it; the step is accepted"
                self._record_fault("spike", (), "rerun", what)
            return StepDecision.GO
        what = f"{problem.what}; the rerun gave the same bits, so the fault is not transient"
        self._record_fault(problem.kind, problem.ranks, "stop", what)
        raise self._nonfinite_error(_Problem(problem.kind, problem.ranks, what), "or resume from before this step")

    def _record_solved(self) -> None:
        """Write a fault record for the first problem, if there was one and the rerun solved it."""
        if self._first is None or self._recorded or (self._accepted and self._first.kind == "spike"):
            return
        self._recorded = True
        ranks = self._first.ranks or self._suspects()
        changed = self._describe_changes() or "no rank's local results changed, so it happened in a sum over ranks"
        what = f"{self._first.what}; the rerun was good: a transient fault ({changed})"
        self._record_fault(self._first.kind, ranks, "rerun", what)

    def _rerun(self) -> StepDecision:
        self.reruns += 1
        self._execution_start = time.monotonic()
        return StepDecision.RERUN

    # --- ranks whose results changed between two executions ---

    def _compare(self, digest: StepDigest) -> None:
        assert self._first_digest is not None
        changed_W = torch.zeros(self._ranks.world, dtype=torch.float64, device="cpu")
        changed_W[self._ranks.rank] = digest.changed(self._first_digest)
        changed = tuple(int(value) for value in self._ranks.sum(changed_W).tolist())
        self._changed = changed if any(changed) else ()

    def _suspects(self) -> tuple[int, ...]:
        """Return the ranks whose loss changed; if there are none, the ranks whose gradients changed.

        A changed loss on one rank can change the gradients on all ranks, so the loss identifies the faulty rank better.
        """
        loss = tuple(rank for rank, flags in enumerate(self._changed) if flags & LOSS)
        return loss or tuple(rank for rank, flags in enumerate(self._changed) if flags)

    def _describe_changes(self) -> str:
        names = {LOSS: "loss", GRADIENT: "gradients", LOSS | GRADIENT: "loss and gradients"}
        return ", ".join(f"{names[flags]} of rank {rank}" for rank, flags in enumerate(self._changed) if flags)

    # --- messages ---

    def _nonfinite_error(self, problem: _Problem, advice: str) -> MoeCommError:
        return NonFiniteLoss(
            f"step {self.step}: {problem.what}; the weights are unchanged. Check the data of this step, "
            f"lower optimizer.lr, set optimizer.clip, {advice}"
        )

    def _record_fault(self, kind: str, ranks: Sequence[int], action: str, what: str) -> None:
        self._record(
            FaultRecord(
                time_s=time.time(),
                step=self.step,
                kind=kind,
                ranks=list(ranks),
                action=action,
                what=what,
                noticed_s=self._noticed_s,
            )
        )


def _gradient_checksum(grad: Tensor) -> Tensor:
    """Return the checksum (``row_sums``) of a gradient; of a DTensor, the checksum of its local shard."""
    local: Any = grad.to_local() if isinstance(grad, DTensor) else grad
    return row_sums(local.reshape(1, -1)).sum()
