"""Wrong numbers in a step: what becomes of it, decided by all ranks alike.

    forward, backward ─▶ all agree ─▶ damaged rows?  run again, at most three times
                                      NaN or infinite? a spike of the loss?     ─▶ as configured: stop, skip, warn, or
    sum of gradients ─▶ norm       ─▶ NaN or infinite? a spike of the norm?     ─▶ run again, once

Run again means the same batch with the same weights, in place (Megatron's rerun machine, reduced to one process group):

    second result good                   transient     the run goes on with it, with the bits of a run without the fault
    bad, and the same bits on all ranks  persistent    not finite: it ends. A spike: it is the data, and is accepted
    bad, and other bits                  unsettled     it ends, and says which rank's numbers changed between the tries

Whose numbers changed is known from a digest of every rank's loss and gradients, before gradients are summed over ranks.
"""

from __future__ import annotations

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
from moe_comm.observe.records import FaultRecord
from moe_comm.train.ranks import Ranks
from moe_comm.train.resilience.agreement import Agreed
from moe_comm.train.sections import GuardSection

DAMAGED_TRIES = 3
"""Times that a step with damaged rows is run again: each would be another fault."""
LOSS, GRADIENT = 1, 2

FaultSink = Callable[[FaultRecord], None]
"""Takes what was noticed; on every rank alike, and it is enough that one rank writes it."""


class StepDecision(Enum):
    """What to do with a step."""

    GO = "go"
    SKIP = "skip"
    RERUN = "rerun"


@dataclass
class History:
    """Losses and norms of the last updates, the same on every rank; saved with a run, which then decides as it would
    have without the interruption."""

    losses: deque[float] = field(default_factory=deque)
    norms: deque[float] = field(default_factory=deque)

    def add(self, loss: float, norm: float, window: int) -> None:
        for values, value in ((self.losses, loss), (self.norms, norm)):
            values.append(value)
            while len(values) > window:
                values.popleft()

    def state(self) -> dict[str, list[float]]:
        """For JSON, which keeps a float's bits."""
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def load(self, state: Mapping[str, Sequence[float]] | None) -> None:
        """None: of a checkpoint without any; there is no spike until the window is full again.

        Raises:
            CheckpointError: it is no such state.
        """
        found = state if state is not None else {"losses": [], "norms": []}
        try:
            self.losses, self.norms = (deque(map(float, found[key])) for key in ("losses", "norms"))
        except (TypeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint's losses and norms of the last updates are unreadable: {error}"
            ) from error


@dataclass(frozen=True)
class Digest:
    """Of one try on one rank: the loss's bits, and a sum of the words of each gradient."""

    loss: bytes
    gradients: tuple[int, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, loss: float, parameters: Iterable[nn.Parameter]) -> Digest:
        sums = [_words(param.grad) for param in parameters if param.grad is not None]
        values = torch.stack(sums).tolist() if sums else []
        return cls(struct.pack("<d", loss), tuple(values))

    def changed(self, other: Digest) -> int:
        """``LOSS`` and ``GRADIENT``, where they differ."""
        return LOSS * (self.loss != other.loss) + GRADIENT * (self.gradients != other.gradients)


@dataclass(frozen=True)
class _Problem:
    kind: str
    ranks: tuple[int, ...]
    what: str


class Guard:
    """The decisions of one rank, which are those of all: they depend on what was agreed alone.

    Args:
        nonfinite: ``run.nonfinite``.
        history: of the run so far; kept up to date.
        tell: takes what was noticed.
    """

    def __init__(
        self,
        settings: GuardSection,
        nonfinite: str,
        ranks: Ranks,
        history: History,
        tell: FaultSink = lambda record: None,
    ) -> None:
        self._settings, self._nonfinite, self._ranks, self._history = settings, nonfinite, ranks, history
        self._tell = tell
        self.compares = "rerun" in (nonfinite, settings.on_spike)
        self.begin(0)

    def begin(self, step: int) -> None:
        """A step, counted from 1, begins."""
        self.step, self.reruns = step, 0
        self._damaged = 0
        self._first: _Problem | None = None
        self._tried_again: set[str] = set()
        self._kept: Digest | None = None
        self._spare: Digest | None = None
        self._changed: tuple[int, ...] = ()
        self._accepted = self._settled = False
        self._loss = self._noticed_s = 0.0
        self._skipped = ""
        self._tried = time.monotonic()

    @property
    def skipped(self) -> str:
        """Why the step is left out."""
        return self._skipped

    def after_loss(self, agreed: Agreed, loss: float, parameters: Iterable[nn.Parameter]) -> StepDecision:
        """All ranks have agreed on a try. Collective, where the step was run again.

        Args:
            loss: this rank's own.
            parameters: with this rank's gradients, before they are summed over ranks.

        Raises:
            NonFiniteLoss, UnsettledStep, CorruptPayload: on every rank; the weights are as they were.
        """
        self._loss = agreed.loss
        if agreed.damaged:
            return self._damage(agreed.damaged)
        if self.compares:
            digest = Digest.of(loss, parameters)
            if self._kept is not None:
                self._compare(digest)
            elif agreed.bad or self._over(agreed.loss, self._history.losses, self._settings.loss_spike):
                self._kept = digest
            self._spare = digest  # in case the norm is bad, or another problem comes after the first
        if agreed.bad:
            who = ", ".join(map(str, agreed.bad))
            return self._bad(
                _Problem("nonfinite", agreed.bad, f"the loss or a router's logits are NaN or infinite on rank {who}")
            )
        return self._spike("loss", agreed.loss, self._history.losses, self._settings.loss_spike)

    def after_norm(self, norm: float) -> StepDecision:
        """The norm of the summed gradients is known; ``after_loss`` said to go on.

        Raises:
            NonFiniteLoss, UnsettledStep: as ``after_loss``.
        """
        if self.compares and self._kept is None:
            self._kept = self._spare
        if not isfinite(norm):
            what = f"the gradient's norm is {norm} though the loss is {self._loss:.4g}"
            done = self._bad(_Problem("nonfinite", (), what))
        else:
            done = self._spike("gradient's norm", norm, self._history.norms, self._settings.norm_spike)
        if done is StepDecision.GO:
            self._settle()
            self._history.add(self._loss, norm, self._settings.window)
        return done

    # --- one kind of problem each ---

    def _damage(self, damaged: Mapping[int, int]) -> StepDecision:
        who = ", ".join(f"{count} block(s) on rank {rank}" for rank, count in damaged.items())
        what = f"rows arrived damaged: {who}"
        self._damaged += 1
        self._noticed_s = time.monotonic() - self._tried
        again = self._damaged <= DAMAGED_TRIES
        if again:
            self._note("corrupt", tuple(damaged), "rerun", f"{what}; run again")
            return self._again()
        self._note("corrupt", tuple(damaged), "stop", what)
        raise CorruptPayload(
            f"step {self.step}: {what}, for the {self._damaged}th time; the weights were left as they were. Take these "
            "ranks' hosts out, or look at their memory and network"
        )

    def _spike(self, name: str, value: float, known: deque[float], factor: float | None) -> StepDecision:
        if not self._over(value, known, factor):
            return StepDecision.GO
        mean = fmean(known)
        return self._bad(
            _Problem("spike", (), f"the {name} is {value:.4g}, {value / mean:.3g} times its mean of {mean:.4g}")
        )

    def _over(self, value: float, known: deque[float], factor: float | None) -> bool:
        if factor is None or len(known) < self._settings.window:
            return False
        return value > factor * fmean(known)

    def _bad(self, problem: _Problem) -> StepDecision:
        spike = problem.kind == "spike"
        policy = self._settings.on_spike if spike else self._nonfinite
        if policy == "rerun" and problem.kind in self._tried_again:
            return self._bad_again(problem)
        self._settle()
        self._noticed_s = time.monotonic() - self._tried
        if policy == "rerun":
            if self._first is not None:  # that was of another kind, and is gone: from here it is as if there was none
                self._kept, self._changed, self._settled = self._spare, (), False
            self._first = problem
            self._tried_again.add(problem.kind)
            return self._again()
        if policy == "warn":
            self._note(problem.kind, problem.ranks, "none", problem.what)
            return StepDecision.GO
        if policy == "skip":
            self._note(problem.kind, problem.ranks, "skip", problem.what)
            self._skipped = problem.what
            return StepDecision.SKIP
        self._note(problem.kind, problem.ranks, "stop", problem.what)
        raise self._nonfinite_error(problem, 'or go on without such steps: run.nonfinite="skip"')

    def _bad_again(self, problem: _Problem) -> StepDecision:
        """The step was run again, and its numbers are bad again."""
        if self._changed:
            who = self._who_changed()
            what = f"{problem.what}; run again, it was bad again with other numbers ({who})"
            self._note(problem.kind, self._changed_most(), "stop", what)
            raise UnsettledStep(
                f"step {self.step}: {what}; the weights were left as they were. Suspect the hardware of "
                f"rank(s) {', '.join(map(str, self._changed_most()))}"
            )
        if problem.kind == "spike":
            if not self._accepted:
                self._accepted = True
                self._note(
                    "spike", (), "rerun", f"{problem.what}; the same bits again: it is the data, and is accepted"
                )
            return StepDecision.GO
        what = f"{problem.what}; run again, the step gave the same bits, so it is no transient fault"
        self._note(problem.kind, problem.ranks, "stop", what)
        raise self._nonfinite_error(_Problem(problem.kind, problem.ranks, what), "or start again before this step")

    def _settle(self) -> None:
        """What was wrong at first is gone, if anything was: say so."""
        if self._first is None or self._settled or (self._accepted and self._first.kind == "spike"):
            return
        self._settled = True
        ranks = self._first.ranks or self._changed_most()
        who = self._who_changed() or "no rank's own numbers changed, so it happened in a sum over ranks"
        what = f"{self._first.what}; run again, that was gone: a transient fault ({who})"
        self._note(self._first.kind, ranks, "rerun", what)

    def _again(self) -> StepDecision:
        self.reruns += 1
        self._tried = time.monotonic()
        return StepDecision.RERUN

    # --- whose numbers changed between two tries ---

    def _compare(self, digest: Digest) -> None:
        assert self._kept is not None
        changed_W = torch.zeros(self._ranks.world, dtype=torch.float64)
        changed_W[self._ranks.rank] = digest.changed(self._kept)
        found = tuple(int(value) for value in self._ranks.sum(changed_W).tolist())
        self._changed = found if any(found) else ()

    def _changed_most(self) -> tuple[int, ...]:
        """Ranks whose loss changed; if there is none, ranks whose gradients did: those follow from any rank's loss."""
        loss = tuple(rank for rank, flags in enumerate(self._changed) if flags & LOSS)
        return loss or tuple(rank for rank, flags in enumerate(self._changed) if flags)

    def _who_changed(self) -> str:
        shown = {LOSS: "loss", GRADIENT: "gradients", LOSS | GRADIENT: "loss and gradients"}
        return ", ".join(f"{shown[flags]} of rank {rank}" for rank, flags in enumerate(self._changed) if flags)

    # --- what is said ---

    def _nonfinite_error(self, problem: _Problem, instead: str) -> MoeCommError:
        return NonFiniteLoss(
            f"step {self.step}: {problem.what}; the weights were left as they were. Look at the data of this step, "
            f"lower optimizer.lr, set optimizer.clip, {instead}"
        )

    def _note(self, kind: str, ranks: Sequence[int], action: str, what: str) -> None:
        self._tell(
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


def _words(grad: Tensor) -> Tensor:
    """Sum of a gradient's words; of FSDP's, of this rank's share."""
    local: Any = grad.to_local() if isinstance(grad, DTensor) else grad
    return row_sums(local.reshape(1, -1)).sum()
