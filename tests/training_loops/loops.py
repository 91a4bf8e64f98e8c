"""Training loops as users write them, on one process and on ranks that each hold part of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moe_comm
from tests.pool import RankPool
from tests.training_loops.models import KINDS, VOCAB, ep_group

STEPS, SEQUENCES, LENGTH = 5, 8, 9
MAX_NORM = 0.05
TOLERANCE = 1e-5

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.2),
    "adamw": lambda params: torch.optim.AdamW(params, 1e-2, eps=1e-5),
}
CLIPS: dict[str, Callable[[nn.Module], Any] | None] = {
    "no clip": None,
    "torch clip": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    "our clip": lambda model: moe_comm.clip_grad_norm_(model, MAX_NORM),
    "torch clip inf": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM / 10, torch.inf),
    "our clip inf": lambda model: moe_comm.clip_grad_norm_(model, MAX_NORM / 10, torch.inf),
    "torch clip 1": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM * 10, 1.0),
    "our clip 1": lambda model: moe_comm.clip_grad_norm_(model, MAX_NORM * 10, 1.0),
    "torch clip foreach": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True),
}


@dataclass(frozen=True)
class Case:
    """One loop on one model.

    Attributes:
        loop: "own sum" or "own mean" (a user-written loop that calls ``sync_gradients``), "ddp" or "fsdp".
        ep: ranks of an expert-parallel group.
        accumulate: micro-batches per step.
        ddp: arguments of ``DistributedDataParallel``.
        no_sync: DDP reduces only with the last micro-batch of a step.
        hook: a communication hook for DDP, by its name in torch's ``default_hooks``.
        zero: ``set_to_none`` of ``zero_grad``.
    """

    kind: str
    loop: str
    ep: int
    optimizer: str = "sgd"
    clip: str = "no clip"
    accumulate: int = 1
    ddp: dict[str, Any] = field(default_factory=dict)
    no_sync: bool = False
    hook: str = ""
    zero: bool = True
    tolerance: float = TOLERANCE

    def __str__(self) -> str:
        settings = [self.kind, self.loop, f"ep {self.ep}", self.optimizer, self.clip, f"accumulate {self.accumulate}"]
        extra = [*self.ddp, "no_sync" * self.no_sync, self.hook, "zeros kept" * (not self.zero)]
        return ", ".join([*settings, *filter(None, extra)])

    @property
    def reference(self) -> tuple[str, str, str]:
        """Return the settings of the reference run of this case on one process."""
        return self.kind, self.optimizer, self.clip


def batch(step: int) -> Tensor:
    """Return the token ids of one step, of all ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(VOCAB, (SEQUENCES, LENGTH), generator=generator)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss summed over tokens."""
    out = model(ids)
    logits = getattr(out, "logits", out)[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")


def loss_at(model: nn.Module, step: int, rank: int = 0, world: int = 1, mean: bool = False) -> Tensor:
    """Return the loss of this rank's part of a batch.

    Args:
        mean: a mean over this rank's tokens; else the sum over them, divided by the tokens of all ranks.
    """
    loss = loss_of(model, batch(step).chunk(world)[rank]) / (SEQUENCES * (LENGTH - 1))
    return loss * world if mean else loss


@cache
def alone(kind: str, optimizer: str, clip: str, steps: int = STEPS) -> tuple[dict[str, Tensor], list[float]]:
    """Return the parameters after training on one process, and the norms of its gradients."""
    model = KINDS[kind].on(None)
    stepper, clipping, norms = OPTIMIZERS[optimizer](model.parameters()), CLIPS[clip], []
    for step in range(steps):
        stepper.zero_grad()
        loss_at(model, step).backward()
        if clipping is not None:
            norms.append(float(clipping(model)))
        stepper.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, norms


def wrap(model: Any, case: Case) -> Any:
    if case.loop == "ddp":
        wrapped = DistributedDataParallel(moe_comm.prepare_ddp(model), **case.ddp)
        if case.hook:
            wrapped.register_comm_hook(None, getattr(default_hooks, case.hook))
        return wrapped
    if case.loop == "fsdp":
        moe_comm.prepare_fsdp(model)
        for block in blocks_of(model):
            fully_shard(block)
        fully_shard(model)
    return model


def blocks_of(model: Any) -> Any:
    inner = getattr(model, "inner", model)
    return inner.blocks if hasattr(inner, "blocks") else inner.model.layers


def train(case: Case, rank: int, world: int) -> tuple[dict[str, Tensor], list[float]]:
    """Return the full parameters after training on all ranks, and the norms of the gradients. Collective."""
    model = wrap(KINDS[case.kind].on(ep_group(case.ep)), case)
    for module in model.modules():
        if isinstance(module, moe_comm.MoELayer) and case.loop == "own mean":
            module.aux_scale = float(world)
    optimizer, clipping, norms = OPTIMIZERS[case.optimizer](model.parameters()), CLIPS[case.clip], []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=case.zero)
        parts = batch(step).chunk(world)[rank].chunk(case.accumulate)
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            with model.no_sync() if case.no_sync and not last else contextlib.nullcontext():
                loss = loss_of(model, part) / (SEQUENCES * (LENGTH - 1))
                (loss if case.loop == "own sum" else loss * world).backward()
        if case.loop.startswith("own"):
            moe_comm.sync_gradients(model, reduction="sum" if case.loop == "own sum" else "mean")
        if clipping is not None:
            norms.append(float(clipping(model)))
        optimizer.step()
    return moe_comm.state_dict(model), norms


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Return the largest difference of an element of any parameter."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    return max(float((got[name] - value).abs().max()) for name, value in want.items())


References = dict[tuple[str, str, str], tuple[dict[str, Tensor], list[float]]]


def run_cases(rank: int, world: int, arg: tuple[list[Case], References]) -> list[str]:
    """Train each case and compare it with one process. Return a line for each difference."""
    cases, references = arg
    wrong = []
    for case in cases:
        want, want_norms = references[case.reference]
        try:
            got, norms = train(case, rank, world)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        if not (error := difference(got, want)) <= case.tolerance:
            wrong.append(f"{case}: parameters differ by {error:.1e}")
        if max((abs(a - b) / b for a, b in zip(norms, want_norms, strict=True)), default=0.0) > case.tolerance:
            wrong.append(f"{case}: norms {norms} instead of {want_norms}")
        norms_by_rank: list[Any] = [None] * world
        dist.all_gather_object(norms_by_rank, norms)
        if any(other != norms for other in norms_by_rank):
            wrong.append(f"{case}: norms differ between ranks: {norms_by_rank}")
    return wrong


def check(pool: RankPool, cases: list[Case], timeout: float = 200) -> None:
    """Train each case on the ranks of ``pool``. Fail once, with all differences."""
    references: References = {case.reference: alone(*case.reference) for case in cases}
    wrong = {line for lines in pool.run(run_cases, (cases, references), timeout=timeout) for line in lines}
    assert not wrong, "\n".join(sorted(wrong))


def error_of(call: Callable[[], Any], kinds: type[Exception] | tuple[type[Exception], ...] = Exception) -> str:
    """Return the type and the message of the error that ``call`` raises; empty if none."""
    try:
        call()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return ""
