"""Functions that the ranks of the contract suite run. They return CPU tensors by value."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_comm.comm import shared_heap
from moe_comm.dispatch import Dispatcher, DispatchHandle, DispatchOptions, WireDtypes, make_dispatcher
from moe_comm.dispatch.backends.local import LocalDispatcher
from moe_comm.dispatch.hierarchical.dispatcher import HierarchicalDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.topology import ExpertPlacement
from tests.dispatch import cases
from tests.dispatch.cases import Batch, Case


@contextmanager
def heap_constants(**constants: int) -> Iterator[None]:
    """Change constants of ``comm/shared_heap.py`` for heaps that the block creates."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(shared_heap, name, value)
        yield


@dataclass(frozen=True)
class Job:
    """backend: of ``make_dispatcher``, or "plain" for the reference. device: of the tensors. how: how a rank fails.
    names: of the cases to run.
    """

    backend: str
    device: str = "cpu"
    timeout_s: float = 60.0
    checked: bool = True
    deterministic: bool = True
    how: str = ""
    wire_dtypes: WireDtypes = WireDtypes()  # noqa: RUF009 - frozen
    peers: PeerToPeerOptions = PeerToPeerOptions()  # noqa: RUF009
    checksums: bool = False
    names: tuple[str, ...] = tuple(cases.BY_NAME)

    @property
    def cases(self) -> list[Case]:
        return [cases.BY_NAME[name] for name in self.names]

    @property
    def options(self) -> DispatchOptions:
        peers = self.peers
        if self.backend == "peer_to_peer":
            peers = replace(peers, emulate=self.device == "cpu", heap_bytes=peers.heap_bytes or 1 << 20)
        return DispatchOptions(
            self.timeout_s, self.deterministic, self.checked, self.wire_dtypes, peers, self.checksums
        )


@dataclass(frozen=True)
class Result:
    """Results of one rank. experts_grad: gradients of this rank's experts. rows_RD: the dispatched rows."""

    y_TD: Tensor
    x_grad_TD: Tensor
    weights_grad_TK: Tensor | None
    experts_grad: Tensor
    rows_RD: Tensor
    rows_per_expert: tuple[int, ...]
    num_dropped: int


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill new tensors with NaN (bytes with 255, which is NaN in every float format)."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class _Copy(torch.autograd.Function):
    """Copy in both directions, because the bits of a GEMM depend on the alignment of its operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone()


def run_experts(rows_RD: Tensor, counts: tuple[int, ...], experts: Tensor) -> Tensor:
    """Apply the experts one by one, in fp32."""
    out, start = [], 0
    for weight, count in zip(experts, counts, strict=True):
        rows, weight = _Copy.apply(rows_RD[start : start + count].float()), _Copy.apply(weight)
        out.append(_Copy.apply(rows @ weight if weight.dim() == 2 else rows * weight).to(rows_RD.dtype))
        start += count
    return torch.cat([*out, rows_RD[:0]])


def layer(dispatcher: Dispatcher, case: Case, part: Batch, experts: Tensor) -> Result:
    """Forward and backward of dispatch, experts, combine."""
    x_TD = part.x_TD.clone().requires_grad_()
    weights_TK = part.weights_TK.clone().requires_grad_(case.weights_grad)
    experts = experts.clone().requires_grad_()
    ids_TK = part.ids_TK
    dispatched: list[Any] = []

    def forward(x_TD: Tensor, weights_TK: Tensor) -> Tensor:
        ids = ids_TK
        if case.strided:
            view = cases.strided(x_TD.detach())
            x_TD = x_TD.as_strided(x_TD.shape, x_TD.stride()) if view.numel() == 0 else _Restride.apply(x_TD)
            ids = cases.strided(ids)
        rows, handle = (d := dispatcher.dispatch(x_TD, ids, label=case.name)).rows_RD, d.handle
        dispatched.append((rows.detach().clone(), handle))
        out = run_experts(rows, handle.rows_per_expert, experts)
        return dispatcher.combine(out, weights_TK, handle)

    if case.checkpoint:
        y_TD = checkpoint(forward, x_TD, weights_TK, use_reentrant=case.checkpoint == "reentrant")
    else:
        y_TD = forward(x_TD, weights_TK)
    y_TD.backward(cases.strided(part.grad_TD) if case.strided else part.grad_TD)
    rows_RD, handle = dispatched[-1]
    assert x_TD.grad is not None
    grad_TK = weights_TK.grad
    assert experts.grad is not None or not len(experts) or case.checkpoint
    grad = torch.zeros_like(experts) if experts.grad is None else experts.grad
    return Result(
        y_TD.detach().cpu(),
        x_TD.grad.cpu(),
        None if grad_TK is None else grad_TK.cpu(),
        grad.cpu(),
        rows_RD.cpu(),
        handle.rows_per_expert,
        handle.num_dropped,
    )


class _Restride(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor) -> Tensor:
        return cases.strided(x_TD)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> Tensor:
        return grad_TD.contiguous()


def to_device(batch: Batch, device: str) -> Batch:
    return Batch(*(t.to(device) for t in (batch.x_TD, batch.ids_TK, batch.weights_TK, batch.grad_TD)))


def two_hosts(world: int) -> list[int]:
    """Assign ``world`` ranks of this machine to two hosts."""
    return [rank * 2 // world for rank in range(world)]


def build(case: Case, group: Any, job: Job, rank: int, world: int) -> Dispatcher:
    """The dispatcher for one case."""
    if job.backend == "plain":
        return LocalDispatcher(ExpertPlacement.balanced(case.num_experts, 1), None, 0, job.options)
    if job.backend == "hierarchical":
        placement = ExpertPlacement.of(case.num_experts, world, case.experts_per_rank(world))
        return HierarchicalDispatcher(placement, group, rank, job.options, two_hosts(world))
    return make_dispatcher(
        case.num_experts,
        group,
        backend=job.backend,
        experts_per_rank=case.experts_per_rank(world),
        options=job.options,
        device=job.device,
    )


def run_case(case: Case, job: Job, group: Any, rank: int, world: int) -> Result:
    batch, experts = cases.make(case)
    dispatcher = build(case, group, job, rank, world)
    part = to_device(batch.part(case, rank, world), job.device)
    own = experts[dispatcher.local_experts.start : dispatcher.local_experts.stop].to(job.device)
    with poisoned():
        # Dispatch rows of NaN first, so that reused memory of a backend contains NaN, too.
        poison = part.x_TD.detach() * float("nan")
        dispatched = dispatcher.dispatch(poison, part.ids_TK)
        dispatcher.combine(dispatched.rows_RD, part.weights_TK, dispatched.handle)
        del dispatched
        return layer(dispatcher, case, part, own)


def run_cases(rank: int, world: int, job: Job) -> dict[str, Result | str]:
    """Run the cases of ``job``. Return each case's result, or the traceback of the first failure."""
    results: dict[str, Result | str] = {}
    group = dist.group.WORLD
    for case in job.cases:
        try:
            results[case.name] = run_case(case, job, group, rank, world)
        except Exception:
            results[case.name] = traceback.format_exc()
            break  # after a failure the ranks may be in different operations
    return results


# --- faults ---

ErrorText = tuple[str, str]


def caught(action: Callable[[], Any]) -> ErrorText:
    """Return the name and text of the exception of ``action``."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def valid_inputs(dispatcher: Dispatcher, job: Job, **changes: Any) -> tuple[Tensor, Tensor]:
    """Return x and ids of a valid call."""
    g = torch.Generator().manual_seed(5)
    hidden, top_k, dtype = changes.get("hidden", 8), changes.get("top_k", 2), changes.get("dtype", torch.float32)
    x_TD = torch.randn(6, hidden, generator=g).to(dtype).to(job.device)
    ids_TK = torch.randint(0, dispatcher.num_experts, (6, top_k), generator=g).to(job.device)
    return x_TD, ids_TK.to(changes.get("ids_dtype", torch.int64))


def dispatch_with(dispatcher: Dispatcher, job: Job, **changes: Any) -> tuple[Tensor, DispatchHandle]:
    x_TD, ids_TK = valid_inputs(dispatcher, job, **changes)
    if "bad_id" in changes:
        ids_TK[4, 1] = changes["bad_id"]
    if "flat" in changes:
        x_TD = x_TD[0]
    if "grad" in changes:
        x_TD.requires_grad_()
    dispatched = dispatcher.dispatch(x_TD, ids_TK, label=changes.get("label", "moe.3"))
    return dispatched.rows_RD, dispatched.handle


INPUT_FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "id = E": ("RoutingError", "expert id 8 of token 4, slot 1", {"bad_id": 8}),
    "id = INT_MAX": ("RoutingError", "expert id 2147483647", {"bad_id": 2**31 - 1}),
    "id = INT_MAX as int32": ("RoutingError", "2147483647", {"bad_id": 2**31 - 1, "ids_dtype": torch.int32}),
    "id = LONG_MIN": ("RoutingError", "expert id -9223372036854775808", {"bad_id": -(2**63)}),
    "invalid logits": ("RoutingError", "NaN or all -Inf", {"bad_id": -2}),
    "x of one dimension": ("InputError", "needs x", {"flat": True}),
    "ids of floats": ("InputError", "int64 or int32", {"ids_dtype": torch.float32}),
    "hidden differs": ("RankMismatch", "hidden", {"hidden": 9}),
    "dtype differs": ("RankMismatch", "dtype", {"dtype": torch.bfloat16}),
    "top-k differs": ("RankMismatch", "top-k", {"top_k": 3}),
    "requires_grad differs": ("RankMismatch", "requires_grad", {"grad": True}),
    "layer differs": ("RankMismatch", "moe.4", {"label": "moe.4"}),
}
"""Fault of the last rank: the error and part of its text, expected on every rank."""


WRONG_CALLS = {
    "dispatch instead of combine": "RankMismatch",
    "combine of later rows": "RankMismatch",
    "dispatch of another dispatcher": "RankMismatch",
    "dispatch of a dispatcher of more experts": "RankMismatch",
    "combine with a handle of another dispatcher": "InputError",
    "combine of wider rows": "InputError",
    "combine with weights on another device": "InputError",
    "spread of wider rows": "InputError",
}
"""Call of the last rank while the others make the right one, and the error that is expected on every rank."""


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("no such gradient")


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "one number": lambda x: torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.T.contiguous().T,
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
}


def never_calls(rank: int, world: int, job: Job) -> list[ErrorText]:
    """Rank 1 builds and then does nothing; the others dispatch, twice."""
    group = dist.new_group()
    dispatcher = build(cases.BY_NAME["plain"], group, job, rank, world)
    error_texts = []
    if rank != 1:
        error_texts = [caught(lambda: dispatch_with(dispatcher, job)) for _ in range(2)]
    dist.barrier()
    return error_texts


def lose_a_rank(rank: int, world: int, job: Job) -> tuple[ErrorText, ErrorText]:
    """Rank 1 is killed or stopped between dispatch and combine (job.how: SIGKILL, SIGSTOP), or in backward."""
    dist.barrier()  # new processes take long to import modules, which would exceed the dispatcher's deadline
    dispatcher = build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    name, _, where = job.how.partition(" ")
    x_TD, ids_TK = valid_inputs(dispatcher, job)
    sent = dispatcher.dispatch(x_TD.requires_grad_(), ids_TK, label="moe.3")
    weights_TK = torch.ones(6, 2, device=job.device, requires_grad=True)
    dist.barrier()

    def die() -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.Signals[name])

    if where == "backward":
        y_TD = dispatcher.combine(sent.rows_RD, weights_TK, sent.handle)
        die()
        error_texts = caught(lambda: y_TD.sum().backward())
    else:
        die()
        error_texts = caught(lambda: dispatcher.combine(sent.rows_RD, weights_TK, sent.handle))
    return error_texts, caught(lambda: dispatcher.dispatch(x_TD, ids_TK))
