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


# --- several calls ---


def in_flight(rank: int, world: int, job: Job) -> list[bool]:
    """Run two dispatches before their combines, in both orders. Compare with separate calls."""
    group = dist.group.WORLD
    pair = [cases.BY_NAME["plain"], replace(cases.BY_NAME["some slots dropped"], num_experts=8, seed=3)]
    dispatcher = build(pair[0], group, job, rank, world)
    parts = [to_device(cases.make(case)[0].part(case, rank, world), job.device) for case in pair]

    def run(order: Callable[[list[Any]], list[int]], together: bool) -> list[Tensor]:
        xs = [part.x_TD.clone().requires_grad_() for part in parts]
        ws = [part.weights_TK.clone().requires_grad_() for part in parts]
        sent: list[Any] = []
        ys: dict[int, Tensor] = {}
        for i, part in enumerate(parts):
            sent.append(dispatcher.dispatch(xs[i], part.ids_TK, label=str(i)))
            if not together:
                ys[i] = dispatcher.combine(sent[i].rows_RD * 2, ws[i], sent[i].handle)
        for i in order([0, 1]) if together else []:
            ys[i] = dispatcher.combine(sent[i].rows_RD * 2, ws[i], sent[i].handle)
        torch.autograd.backward([ys[0], ys[1]], [part.grad_TD for part in parts])
        return [ys[0], ys[1], *(t.grad for t in (*xs, *ws) if t.grad is not None)]

    alone = run(list, False)
    both = [run(order, True) for order in (list, lambda pair: pair[::-1])]
    return [all(map(torch.equal, alone, other)) for other in both]


def spread_rows(rank: int, world: int, job: Job) -> list[str]:
    """Spread other rows along the routes of a dispatch. Return the names of cases that differ from a new dispatch."""
    wrong = []
    for case in job.cases:
        if case.experts_per_rank(world) is not None or case.num_experts != 8:
            continue
        dispatcher = build(case, dist.group.WORLD, job, rank, world)
        part = to_device(cases.make(case)[0].part(case, rank, world), job.device)
        grads, ys = [], []
        handle = dispatcher.dispatch(part.grad_TD, part.ids_TK).handle
        for again in (False, True):
            x_TD = part.x_TD.clone().requires_grad_()
            given = cases.strided(x_TD.detach()).requires_grad_() if again and case.strided else x_TD
            sent = None if again else dispatcher.dispatch(given, part.ids_TK)
            rows_RD = dispatcher.spread(given, handle) if sent is None else sent.rows_RD
            y_TD = dispatcher.combine(rows_RD, part.weights_TK, handle if sent is None else sent.handle)
            y_TD.backward(part.grad_TD)
            grads.append(given.grad)
            ys.append((rows_RD.detach(), y_TD.detach()))
        same = torch.equal(*grads) and all(map(torch.equal, *ys))  # type: ignore[arg-type]
        wrong += [] if same else [case.name]
    return wrong


def many_shapes(rank: int, world: int, job: Job) -> list[str]:
    """Run calls with changing tokens, top-k, hidden size and dtype. Return the names of those with different bits."""
    g = torch.Generator().manual_seed(7)
    dispatcher = build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    reference = build(cases.BY_NAME["plain"], None, replace(job, backend="plain"), 0, 1)
    wrong = []
    for i in range(24):
        tokens, hidden, top_k, dtype = (int(torch.randint(0, n, (), generator=g)) for n in (90, 70, 8, 3))
        case = Case(
            f"shape {i}",
            tokens=tokens,
            hidden=hidden + 1,
            top_k=top_k + 1,
            dtype=(torch.float32, torch.bfloat16, torch.float16)[dtype],
            routing=("duplicates", "dropped", "one_expert")[i % 3],
            split=("uneven", "even", "last")[i % 3],
            seed=i,
        )
        batch, _ = cases.make(case)
        ones = torch.ones(8, case.hidden, device=job.device)
        own = dispatcher.local_experts
        expected = layer(reference, case, to_device(batch, job.device), ones)
        actual = layer(
            dispatcher, case, to_device(batch.part(case, rank, world), job.device), ones[own.start : own.stop]
        )
        rows = case.rows(rank, world)
        same = torch.equal(actual.y_TD, expected.y_TD[rows]) and torch.equal(actual.x_grad_TD, expected.x_grad_TD[rows])
        if not same or not torch.equal(actual.weights_grad_TK, expected.weights_grad_TK[rows]):
            wrong.append(str(case))
    return wrong


# --- faults ---

ErrorText = tuple[str, str]


def caught(action: Callable[[], Any]) -> ErrorText:
    """Return the name and text of the exception of ``action``."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _valid_inputs(dispatcher: Dispatcher, job: Job, **changes: Any) -> tuple[Tensor, Tensor]:
    """Return x and ids of a valid call."""
    g = torch.Generator().manual_seed(5)
    hidden, top_k, dtype = changes.get("hidden", 8), changes.get("top_k", 2), changes.get("dtype", torch.float32)
    x_TD = torch.randn(6, hidden, generator=g).to(dtype).to(job.device)
    ids_TK = torch.randint(0, dispatcher.num_experts, (6, top_k), generator=g).to(job.device)
    return x_TD, ids_TK.to(changes.get("ids_dtype", torch.int64))


def _dispatch_with(dispatcher: Dispatcher, job: Job, **changes: Any) -> tuple[Tensor, DispatchHandle]:
    x_TD, ids_TK = _valid_inputs(dispatcher, job, **changes)
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


def faults(rank: int, world: int, job: Job) -> dict[str, tuple[ErrorText, bool]]:
    """Cause each fault on the last rank only. Return what this rank raises, and whether the next call works."""
    dispatcher = build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    outcomes = {}
    expected = _dispatch_with(dispatcher, job)[0]
    for name, (_, _, changes) in INPUT_FAULTS.items():
        error_texts = caught(
            lambda changes=changes: _dispatch_with(dispatcher, job, **(changes if rank == world - 1 else {}))
        )
        outcomes[name] = error_texts, torch.equal(expected, _dispatch_with(dispatcher, job)[0])
    return outcomes


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


def wrong_calls(rank: int, world: int, job: Job) -> dict[str, tuple[ErrorText, bool]]:
    """Make each wrong call on the last rank. Return the errors, and whether the next call works."""
    last, more = rank == world - 1, 8 if job.backend == "peer_to_peer" else 19  # its ranks share memory for 8 experts
    case, group = cases.BY_NAME["plain"], dist.group.WORLD
    first, second, larger = (build(replace(case, num_experts=n), group, job, rank, world) for n in (8, 8, more))
    (rows, handle), (_, later), (_, other) = (_dispatch_with(d, job) for d in (first, first, second))
    _dispatch_with(larger, job)
    weights = torch.ones(6, 2, device=job.device)
    wide = torch.zeros(rows.shape[0], rows.shape[1] + last, device=job.device)
    x_TD = torch.ones(6, handle.hidden + last, device=job.device)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: _dispatch_with(first, job) if last else first.combine(rows, weights, handle),
        lambda: first.combine(rows, weights, later if last else handle),
        lambda: _dispatch_with(second if last else first, job),
        lambda: _dispatch_with(larger if last else first, job),
        lambda: first.combine(rows, weights, other if last else handle),
        lambda: first.combine(wide, weights, handle),
        lambda: first.combine(rows, weights.to("meta") if last else weights, handle),
        lambda: first.spread(x_TD, handle),
    )
    outcomes = {}
    for name, call in zip(WRONG_CALLS, calls, strict=True):
        raised = caught(call)
        outcomes[name] = raised, all(torch.equal(rows, _dispatch_with(d, job)[0]) for d in (first, second))
    return outcomes


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("no such gradient")


def raises_in_between(rank: int, world: int, job: Job) -> tuple[ErrorText, bool]:
    """The last rank's experts raise, forward or backward (job.how)."""
    last = rank == world - 1
    dispatcher = build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    x_TD, ids_TK = _valid_inputs(dispatcher, job)
    expected = dispatcher.dispatch(x_TD, ids_TK).rows_RD

    def act() -> None:
        sent = dispatcher.dispatch(x_TD.clone().requires_grad_(), ids_TK, label="moe.3")
        with dispatcher.abort_on_error("moe.3"):
            if last and job.how == "forward":
                raise ZeroDivisionError("no such expert")
            rows_RD = _RaiseInBackward.apply(sent.rows_RD) if last else sent.rows_RD * 1
        y_TD = dispatcher.combine(rows_RD, torch.ones(6, 2, device=job.device), sent.handle)
        with dispatcher.abort_on_error("moe.3"):
            y_TD.sum().backward()

    error_texts = caught(act)
    return error_texts, torch.equal(expected, dispatcher.dispatch(x_TD, ids_TK).rows_RD)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "one number": lambda x: torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda x: x.T.contiguous().T,
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
}


def any_strides(rank: int, world: int, job: Job) -> list[str]:
    """Use inputs and gradients of different strides; rank 0 has no experts. Return the cases with different bits."""
    wrong = []
    for dtype, hidden in ((torch.float32, 8), (torch.bfloat16, 5), (torch.float32, 1)):
        case = Case("", tokens=9, hidden=hidden, dtype=dtype, num_experts=3, split="even", placement="uneven")
        dispatcher = build(case, dist.group.WORLD, job, rank, world)
        part = to_device(cases.make(case)[0].part(case, rank, world), job.device)
        for name, restride in STRIDES.items():
            results = []
            for change in (restride, lambda x, restride=restride: restride(x).contiguous().clone()):
                x_TD, w_TK = (change(t).detach().requires_grad_() for t in (part.x_TD, part.weights_TK))
                sent = dispatcher.dispatch(x_TD, part.ids_TK)
                rows_RD = change(sent.rows_RD)
                y_TD = dispatcher.combine(rows_RD, w_TK, sent.handle)
                y_TD.backward(change(part.grad_TD))
                results.append((sent.rows_RD, y_TD, w_TK.grad, torch.zeros(()) if x_TD.grad is None else x_TD.grad))
            if not all(map(torch.equal, *results)):
                wrong.append(f"{name} {dtype} {hidden}")
    return wrong


def never_calls(rank: int, world: int, job: Job) -> list[ErrorText]:
    """Rank 1 builds and then does nothing; the others dispatch, twice."""
    group = dist.new_group()
    dispatcher = build(cases.BY_NAME["plain"], group, job, rank, world)
    error_texts = []
    if rank != 1:
        error_texts = [caught(lambda: _dispatch_with(dispatcher, job)) for _ in range(2)]
    dist.barrier()
    return error_texts


def lose_a_rank(rank: int, world: int, job: Job) -> tuple[ErrorText, ErrorText]:
    """Rank 1 is killed or stopped between dispatch and combine (job.how: SIGKILL, SIGSTOP), or in backward."""
    dist.barrier()  # new processes take long to import modules, which would exceed the dispatcher's deadline
    dispatcher = build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    name, _, where = job.how.partition(" ")
    x_TD, ids_TK = _valid_inputs(dispatcher, job)
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
