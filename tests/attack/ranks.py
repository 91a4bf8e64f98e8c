"""The operations of each rank in a sequence, and the expected results from a single-rank reference in plain torch.

An expert multiplies its rows by a power of two, so every value before the sums is exact.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import Dispatched, Dispatcher, DispatchOptions, make_dispatcher
from moe_comm.dispatch.hierarchical.dispatcher import HierarchicalDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.errors import PeerError
from moe_comm.topology import ExpertPlacement
from tests.attack.sequences import DTYPES, Odd, Sequence, Step

TIMEOUT_S = 60.0
LABEL = "moe.1"

Outcome = tuple[str, str]
"""Type and text of the error. ("", ""): correct result. ("wrong", text): wrong result. ("none", ""): nothing to do."""


class Boom(Exception):
    """The exception that a rank with the deviation "raise" raises."""


@dataclass(frozen=True)
class Inputs:
    """Input tensors of one rank in one step, and the gradient of its output."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    grad_TD: Tensor


@dataclass
class Handle:
    """One dispatch and the tensors of its combine. fails[0]: whether the experts' backward raises on this rank."""

    step: Step
    dispatcher: Dispatcher
    sent: Dispatched
    inputs: Inputs
    fails: list[bool] = field(default_factory=lambda: [False])
    y_TD: Tensor | None = None
    weights_TK: Tensor | None = None


class _MayFail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, fails: list[bool], strides: str) -> Tensor:
        ctx.fails = fails
        return restrided(rows_RD, strides)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        if ctx.fails[0]:
            raise Boom("backward")
        return grad_RD, None, None


def restrided(x: Tensor, strides: str) -> Tensor:
    """Return a copy of ``x`` with other strides. ``with_strides`` handles "expanded"."""
    if strides == "transposed":
        return x.T.contiguous().T
    if strides == "every other column":
        return x.repeat_interleave(2, 1)[:, ::2]
    if strides == "every other row":
        return x.repeat_interleave(2, 0)[::2]
    return x.clone()


def with_strides(x: Tensor, strides: str) -> Tensor:
    """Return ``x`` with other strides. With "expanded", its first column is expanded to all columns."""
    return x[:, :1].expand(x.shape) if strides == "expanded" else restrided(x, strides)


def inputs(sequence: Sequence, step: Step, rank: int) -> Inputs:
    """Return the inputs of ``rank``. They depend on the seed only, so every rank can compute those of all ranks."""
    g = torch.Generator().manual_seed(1000 * step.seed + rank)
    tokens, dtype = step.tokens[rank], DTYPES[sequence.dtype]
    shape, slots = (tokens, sequence.hidden), (tokens, sequence.top_k)
    experts = sequence.experts[step.dispatcher]
    x_TD, grad_TD = (with_strides(torch.randn(shape, generator=g).to(dtype), step.strides) for _ in range(2))
    ids_TK = torch.randint(-1, experts, slots, generator=g)
    return Inputs(x_TD, ids_TK, with_strides(torch.rand(slots, generator=g), step.strides), grad_TD)


def scale_of(expert: Tensor | int) -> Tensor:
    return 2.0 ** (torch.as_tensor(expert) % 3)


def experts_of(handle: Handle) -> Tensor:
    """Return the expert outputs: rows times the scale of their expert."""
    local_experts, dispatch_handle = handle.dispatcher.local_experts, handle.sent.handle
    counts = torch.tensor(dispatch_handle.rows_per_expert, dtype=torch.int64)
    scale_R = scale_of(torch.arange(local_experts.start, local_experts.stop)).repeat_interleave(counts)
    return handle.sent.rows_RD * scale_R.to(dispatch_handle.dtype).unsqueeze(1)


def run(rank: int, world: int, sequence: Sequence) -> list[Outcome]:
    """Return one outcome per step. A ``PeerError`` makes the group unusable and ends the list."""
    return Run(rank, sequence).outcomes()


class Run:
    """One rank's run of a sequence."""

    def __init__(self, rank: int, sequence: Sequence) -> None:
        self.rank, self.sequence = rank, sequence
        self.dispatchers = [self._build(experts) for experts in sequence.experts]
        self.handles: list[Handle] = []

    def _build(self, experts: int) -> Dispatcher:
        backend, world = self.sequence.backend, self.sequence.world
        peers = PeerToPeerOptions(emulate=backend == "peer_to_peer", heap_bytes=1 << 20)
        options = DispatchOptions(TIMEOUT_S, checked=self.sequence.checked, peer_to_peer=peers)
        group = dist.group.WORLD if world > 1 else None
        if backend == "hierarchical":
            assert group is not None
            hosts = [rank if world == 3 else rank * 2 // world for rank in range(world)]
            return HierarchicalDispatcher(ExpertPlacement.of(experts, world, None), group, self.rank, options, hosts)
        return make_dispatcher(experts, group, backend=backend, options=options)

    def outcomes(self) -> list[Outcome]:
        results: list[Outcome] = []
        for step in self.sequence.steps:
            odd = self.sequence.deviation(step)
            deviation = odd.how if odd is not None and odd.rank == self.rank else ""
            if deviation == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                results.append(getattr(self, "_" + step.kind)(step, deviation))
            except PeerError as error:
                results.append((type(error).__name__, str(error)))
                break
            except Exception as error:
                results.append((type(error).__name__, str(error)))
        return results

    def _dispatch(self, step: Step, deviation: str) -> Outcome:
        dispatcher = self.dispatchers[step.dispatcher ^ (deviation == "other dispatcher")]
        part = inputs(self.sequence, step, self.rank)
        ids_TK = part.ids_TK.clone()
        if deviation == "bad id":
            ids_TK[0, 0] = 99
        self._maybe_raise(deviation, dispatcher)
        # detach() keeps the strides; a copy could lose them.
        x_TD = part.x_TD.detach().requires_grad_()
        sent = dispatcher.dispatch(x_TD, ids_TK, label=LABEL)
        self.handles.append(Handle(step, dispatcher, sent, Inputs(x_TD, ids_TK, part.weights_TK, part.grad_TD)))
        return verdict(rows=torch.equal(sent.rows_RD, self._rows(step, dispatcher)))

    def _combine(self, step: Step, deviation: str) -> Outcome:
        if not self.handles:
            return "none", ""
        handle = other = self.handles[step.pick % len(self.handles)]
        if deviation == "other handle":
            other = self.handles[(step.pick + 1) % len(self.handles)]
        self._maybe_raise(deviation, handle.dispatcher)
        rows_RD = experts_of(handle)
        # Gradients of expanded tensors are sums, whose order the library does not define.
        strides = "transposed" if step.strides == "expanded" else step.strides
        rows_RD = _MayFail.apply(rows_RD, handle.fails, strides)
        if deviation == "bad rows":
            rows_RD = torch.cat((rows_RD, rows_RD[:, :1]), 1)
        weights_TK = handle.inputs.weights_TK.detach().requires_grad_()
        y_TD = handle.dispatcher.combine(rows_RD, weights_TK, other.sent.handle)
        handle.y_TD, handle.weights_TK = y_TD, weights_TK
        return verdict(y=torch.equal(y_TD, self._sum(handle)))

    def _backward(self, step: Step, deviation: str) -> Outcome:
        done = [handle for handle in self.handles if handle.y_TD is not None]
        if not done:
            return "none", ""
        handle = done[step.pick % len(done)]
        assert handle.y_TD is not None and handle.weights_TK is not None
        handle.fails[0] = deviation == "raise"
        leaves = [handle.inputs.x_TD, handle.weights_TK]
        try:
            with handle.dispatcher.abort_on_error(LABEL):
                grads = torch.autograd.grad(handle.y_TD, leaves, handle.inputs.grad_TD, retain_graph=True)
        finally:
            handle.fails[0] = False
        x_grad_TD, weights_grad_TK = self._gradients(handle)
        # The library sums the products in SIMD lanes, which is a different order.
        close = torch.allclose(grads[1].double(), weights_grad_TK, rtol=1e-4, atol=1e-4)
        return verdict(x_grad=torch.equal(grads[0], x_grad_TD), weights_grad=close)

    def _maybe_raise(self, deviation: str, dispatcher: Dispatcher) -> None:
        """Raise before the operation if that is the deviation of this rank."""
        with dispatcher.abort_on_error(LABEL):
            if deviation == "raise":
                raise Boom("forward")

    # --- the reference ---

    def _rows(self, step: Step, dispatcher: Dispatcher) -> Tensor:
        """Return the expected rows of this rank's experts, ordered by expert, source rank, token and slot."""
        parts = [inputs(self.sequence, step, rank) for rank in range(self.sequence.world)]
        rows = [part.x_TD[(part.ids_TK == e).nonzero()[:, 0]] for e in dispatcher.local_experts for part in parts]
        return torch.cat([*rows, parts[0].x_TD[:0]])

    def _sum(self, handle: Handle) -> Tensor:
        part, wide = handle.inputs, self._wide(handle)
        total = torch.zeros(part.x_TD.shape, dtype=wide)
        for k in range(part.ids_TK.shape[1]):
            ids_T1 = part.ids_TK[:, k : k + 1]
            out_TD = part.x_TD.detach() * scale_of(ids_T1).to(part.x_TD.dtype)
            term = out_TD.to(wide) * part.weights_TK[:, k : k + 1].to(wide)
            total = torch.where(ids_T1 < 0, total, total + term)
        return total.to(part.x_TD.dtype)

    def _gradients(self, handle: Handle) -> tuple[Tensor, Tensor]:
        part, wide = handle.inputs, self._wide(handle)
        dtype, x_TD = part.x_TD.dtype, part.x_TD.detach()
        total, weight_grads = torch.zeros(x_TD.shape, dtype=wide), []
        for k in range(part.ids_TK.shape[1]):
            ids_T1, weights_T1 = part.ids_TK[:, k : k + 1], part.weights_TK[:, k : k + 1].to(wide)
            scale_T1 = scale_of(ids_T1).to(dtype)
            grad_TD = (part.grad_TD.to(wide) * weights_T1).to(dtype) * scale_T1
            total = torch.where(ids_T1 < 0, total, total + grad_TD.to(wide))
            dot_T1 = ((x_TD * scale_T1).double() * part.grad_TD.double()).sum(1, keepdim=True)
            weight_grads.append(dot_T1.masked_fill(ids_T1 < 0, 0.0))
        return total.to(dtype), torch.cat(weight_grads, 1)

    def _wide(self, handle: Handle) -> torch.dtype:
        return torch.promote_types(handle.inputs.x_TD.dtype, torch.float32)


def verdict(**checks: bool) -> Outcome:
    wrong = [name for name, correct in checks.items() if not correct]
    return ("wrong", ", ".join(wrong)) if wrong else ("", "")


__all__ = ["Odd", "Outcome", "run"]
