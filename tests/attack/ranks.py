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
from moe_comm.dispatch.peer_options import PeerToPeerOptions
from moe_comm.errors import PeerError
from moe_comm.topology import ExpertPlacement
from tests.attack.sequences import DTYPES, Odd, Sequence, Step

TIMEOUT_S = 30.0
LABEL = "moe.1"

Outcome = tuple[str, str]
"""Type and text of the error. ("", ""): correct result. ("wrong", text): wrong result. ("none", ""): nothing to do."""


class Boom(Exception):
    """Raised by the experts of one rank."""


@dataclass(frozen=True)
class Inputs:
    """Of one rank."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    grad_TD: Tensor


@dataclass
class Handle:
    """One dispatch. fails: whether the experts' backward raises here, now."""

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
    """The same values in other strides; "expanded" is for ``expanded``."""
    if strides == "transposed":
        return x.T.contiguous().T
    if strides == "every other column":
        return x.repeat_interleave(2, 1)[:, ::2]
    if strides == "every other row":
        return x.repeat_interleave(2, 0)[::2]
    return x.clone()


def given(x: Tensor, strides: str) -> Tensor:
    """``x`` as passed to the library: with "expanded", its first column is expanded to all columns."""
    return x[:, :1].expand(x.shape) if strides == "expanded" else restrided(x, strides)


def inputs(sequence: Sequence, step: Step, rank: int) -> Inputs:
    """Of ``rank``: every rank can make those of all."""
    g = torch.Generator().manual_seed(1000 * step.seed + rank)
    tokens, dtype = step.tokens[rank], DTYPES[sequence.dtype]
    shape, slots = (tokens, sequence.hidden), (tokens, sequence.top_k)
    experts = sequence.experts[step.dispatcher]
    x_TD, grad_TD = (given(torch.randn(shape, generator=g).to(dtype), step.strides) for _ in range(2))
    ids_TK = torch.randint(-1, experts, slots, generator=g)
    return Inputs(x_TD, ids_TK, given(torch.rand(slots, generator=g), step.strides), grad_TD)


def scale_of(expert: Tensor | int) -> Tensor:
    return 2.0 ** (torch.as_tensor(expert) % 3)


def experts_of(handle: Handle) -> Tensor:
    """Rows times the scale of their expert."""
    own, layout = handle.dispatcher.local_experts, handle.sent.handle
    counts = torch.tensor(layout.rows_per_expert, dtype=torch.int64)
    scale_R = scale_of(torch.arange(own.start, own.stop)).repeat_interleave(counts)
    return handle.sent.rows_RD * scale_R.to(layout.dtype).unsqueeze(1)


def run(rank: int, world: int, sequence: Sequence) -> list[Outcome]:
    """One outcome a step; none after the one that ended the group's use."""
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
        found: list[Outcome] = []
        for step in self.sequence.steps:
            odd = self.sequence.deviation(step)
            own = odd.how if odd is not None and odd.rank == self.rank else ""
            if own == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                found.append(getattr(self, "_" + step.kind)(step, own))
            except PeerError as error:
                found.append((type(error).__name__, str(error)))
                break
            except Exception as error:
                found.append((type(error).__name__, str(error)))
        return found

    def _dispatch(self, step: Step, own: str) -> Outcome:
        dispatcher = self.dispatchers[step.dispatcher ^ (own == "other dispatcher")]
        part = inputs(self.sequence, step, self.rank)
        ids_TK = part.ids_TK.clone()
        if own == "bad id":
            ids_TK[0, 0] = 99
        self._act(own, dispatcher)
        # A separate leaf would lose the strides.
        x_TD = part.x_TD.detach().requires_grad_()
        sent = dispatcher.dispatch(x_TD, ids_TK, label=LABEL)
        self.handles.append(Handle(step, dispatcher, sent, Inputs(x_TD, ids_TK, part.weights_TK, part.grad_TD)))
        return verdict(rows=torch.equal(sent.rows_RD, self._rows(step, dispatcher)))

    def _combine(self, step: Step, own: str) -> Outcome:
        if not self.handles:
            return "none", ""
        handle = other = self.handles[step.pick % len(self.handles)]
        if own == "other handle":
            other = self.handles[(step.pick + 1) % len(self.handles)]
        self._act(own, handle.dispatcher)
        rows_RD = experts_of(handle)
        # Gradients of expanded tensors are sums, whose order the library does not define.
        strides = "transposed" if step.strides == "expanded" else step.strides
        rows_RD = _MayFail.apply(rows_RD, handle.fails, strides)
        if own == "bad rows":
            rows_RD = torch.cat((rows_RD, rows_RD[:, :1]), 1)
        weights_TK = handle.inputs.weights_TK.detach().requires_grad_()
        y_TD = handle.dispatcher.combine(rows_RD, weights_TK, other.sent.handle)
        handle.y_TD, handle.weights_TK = y_TD, weights_TK
        return verdict(y=torch.equal(y_TD, self._sum(handle)))

    def _backward(self, step: Step, own: str) -> Outcome:
        done = [handle for handle in self.handles if handle.y_TD is not None]
        if not done:
            return "none", ""
        handle = done[step.pick % len(done)]
        assert handle.y_TD is not None and handle.weights_TK is not None
        handle.fails[0] = own == "raise"
        leaves = [handle.inputs.x_TD, handle.weights_TK]
        try:
            with handle.dispatcher.abort_on_error(LABEL):
                grads = torch.autograd.grad(handle.y_TD, leaves, handle.inputs.grad_TD, retain_graph=True)
        finally:
            handle.fails[0] = False
        x_grad_TD, weights_grad_TK = self._gradients(handle)
        # The library adds up products in lanes: another order.
        close = torch.allclose(grads[1].double(), weights_grad_TK, rtol=1e-4, atol=1e-4)
        return verdict(x_grad=torch.equal(grads[0], x_grad_TD), weights_grad=close)

    def _act(self, own: str, dispatcher: Dispatcher) -> None:
        """Raise between operations."""
        with dispatcher.abort_on_error(LABEL):
            if own == "raise":
                raise Boom("forward")

    # --- the reference ---

    def _rows(self, step: Step, dispatcher: Dispatcher) -> Tensor:
        """Of this rank's experts: by expert, source rank, token and slot."""
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
        total, of_weights = torch.zeros(x_TD.shape, dtype=wide), []
        for k in range(part.ids_TK.shape[1]):
            ids_T1, weights_T1 = part.ids_TK[:, k : k + 1], part.weights_TK[:, k : k + 1].to(wide)
            scale_T1 = scale_of(ids_T1).to(dtype)
            grad_TD = (part.grad_TD.to(wide) * weights_T1).to(dtype) * scale_T1
            total = torch.where(ids_T1 < 0, total, total + grad_TD.to(wide))
            dot_T1 = ((x_TD * scale_T1).double() * part.grad_TD.double()).sum(1, keepdim=True)
            of_weights.append(dot_T1.masked_fill(ids_T1 < 0, 0.0))
        return total.to(dtype), torch.cat(of_weights, 1)

    def _wide(self, handle: Handle) -> torch.dtype:
        return torch.promote_types(handle.inputs.x_TD.dtype, torch.float32)


def verdict(**right: bool) -> Outcome:
    wrong = [name for name, good in right.items() if not good]
    return ("wrong", ", ".join(wrong)) if wrong else ("", "")


__all__ = ["Odd", "Outcome", "run"]
