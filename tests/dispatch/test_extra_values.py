"""Extra values, which are sent with the rows of a dispatch, against plain torch on the global batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import Dispatcher, WireDtypes
from tests.dispatch import cases
from tests.dispatch.cases import Case
from tests.dispatch.test_contract import BACKENDS, NAMES, usable
from tests.dispatch.workers import Job, build, caught, to_device
from tests.pool import on_ranks

WIDTHS = (1, 3)
SOME = {2: NAMES[::4], 4: NAMES[2::4]}
"""Cases by number of ranks. One rank runs all."""
FAST = ("local", "plain", "shared_memory", "peer_to_peer")


def slots_of(case: Case, dispatcher: Dispatcher) -> tuple[Tensor, Tensor]:
    """Return the tokens and slots of this rank's rows in the global batch, in the order of the contract."""
    ids_TK = cases.make(case)[0].ids_TK
    pairs = [(ids_TK == expert).nonzero() for expert in dispatcher.local_experts]
    token, slot = torch.cat([*pairs, torch.zeros(0, 2, dtype=torch.int64)]).unbind(1)
    return token, slot


def values(case: Case, width: int, seed: int) -> Tensor:
    """Return extra values of the global batch. Some have the bits of NaN and of denormal numbers."""
    words = torch.randint(
        -(2**31), 2**31, (case.tokens, case.top_k, width), generator=torch.Generator().manual_seed(seed)
    )
    return words.int()


def set_up(case: Case, job: Job, rank: int, world: int) -> tuple[Dispatcher, cases.Batch, slice]:
    """Return a dispatcher, this rank's part of the global batch, and its tokens there."""
    dispatcher = build(case, dist.group.WORLD if world > 1 else None, job, rank, world)
    return dispatcher, to_device(cases.make(case)[0].part(case, rank, world), job.device), case.rows(rank, world)


def check_values(rank: int, world: int, job: Job) -> None:
    """Dispatch, send again and differentiate extra values."""
    for number, case in enumerate(job.cases):
        dispatcher, part, own = set_up(case, job, rank, world)
        token, slot = slots_of(case, dispatcher)
        # The collectives of process groups are slow: there, cases alternate widths, and which gradients they need.
        fast = job.backend in FAST
        for width in WIDTHS if fast else WIDTHS[number % 2 :][:1]:
            words, other = values(case, width, 1), values(case, width, 2)
            if case.strided:
                words = words.transpose(0, 1).contiguous().transpose(0, 1)
            alone = dispatcher.dispatch(part.x_TD, part.ids_TK)
            sent = dispatcher.dispatch(part.x_TD, part.ids_TK, extra_TKX=words[own].to(job.device))
            assert sent.extra_RX is not None
            rows, again = dispatcher.spread(part.x_TD, sent.handle, other[own].to(job.device))
            same = [
                torch.equal(sent.rows_RD, alone.rows_RD),
                torch.equal(sent.extra_RX.cpu(), words[token, slot]),
                torch.equal(rows, dispatcher.spread(part.x_TD, alone.handle)),
                torch.equal(again.cpu(), other[token, slot]),
            ]
            by_token = words[:, :1].expand(words.shape)  # of stride 0
            sent = dispatcher.dispatch(part.x_TD, part.ids_TK, extra_TKX=by_token[own].to(job.device))
            same.append(torch.equal(sent.extra_RX.cpu(), by_token[token, slot]))  # type: ignore[union-attr]
            for rows_grad in (True, False) if fast else (number % 4 < 2,):
                same += gradients(dispatcher, case, part, own, width, rows_grad)
            assert all(same), f"{case.name}, {width}: {same}"


def gradients(
    dispatcher: Dispatcher, case: Case, part: cases.Batch, own: slice, width: int, rows_grad: bool
) -> list[bool]:
    """Compare the gradients of x and of the values after dispatch and spread, with both or only the values needed."""
    generator = torch.Generator().manual_seed(3)
    weights, grads = torch.randn(2, case.tokens, case.top_k, width, generator=generator)
    token, slot = slots_of(case, dispatcher)
    device, dropped = part.x_TD.device, part.ids_TK < 0
    x_TD = part.x_TD.clone().requires_grad_()
    alone = dispatcher.dispatch(x_TD, part.ids_TK)
    (alone.rows_RD * 2).sum().backward()
    same = []
    for replayed in (False, True):
        x = part.x_TD.clone().requires_grad_(rows_grad)
        extra = weights[own].to(device).requires_grad_()
        sent = dispatcher.dispatch(x, part.ids_TK, extra_TKX=extra)
        rows, received = sent.rows_RD, sent.extra_RX
        if replayed:
            rows, received = dispatcher.spread(x, sent.handle, extra)
        assert received is not None
        loss = (received * grads[token, slot].to(device)).sum()
        if rows_grad:
            loss = loss + (rows * 2).sum()
        assert rows.requires_grad == rows_grad
        loss.backward()
        expected = grads[own].to(device).masked_fill(dropped.unsqueeze(2), 0.0)
        same += [torch.equal(received.detach().cpu(), weights[token, slot]), torch.equal(extra.grad, expected)]
        same.append(x.grad is None if not rows_grad else torch.equal(x.grad, x_TD.grad))
    return same


@on_ranks(2, 4, timeout=240)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_arrive_with_their_rows_and_gradients_return(rank: int, world: int, backend: str, device: str) -> None:
    usable(backend, device)
    check_values(rank, world, Job(backend, device, names=SOME[world]))


@pytest.mark.parametrize("backend", ["local", "plain"])
def test_one_rank(backend: str, device: str) -> None:
    check_values(0, 1, Job(backend, device))


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_are_not_rounded_to_a_wire_dtype(rank: int, world: int, backend: str, device: str) -> None:
    usable(backend, device)
    formats = WireDtypes("bf16", "fp8_block", "bf16", "bf16")
    case, job = cases.BY_NAME["some slots dropped"], Job(backend, device, wire_dtypes=formats, checked=False)
    dispatcher, part, own = set_up(case, job, rank, world)
    assert all(gradients(dispatcher, case, part, own, 2, True))


@on_ranks(2)
@pytest.mark.parametrize("wire_dtypes", [WireDtypes(), WireDtypes(dispatch="fp8_block")], ids=["same", "fp8"])
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "hierarchical"])
def test_values_of_scaled_rows(rank: int, world: int, backend: str, wire_dtypes: WireDtypes, device: str) -> None:
    """Rows as values and scales, with extra values."""
    usable(backend, device)
    case = replace(cases.BY_NAME["some slots dropped"], hidden=128)
    dispatcher, part, own = set_up(case, Job(backend, device, wire_dtypes=wire_dtypes), rank, world)
    extra = values(case, 2, 4)
    sent = dispatcher.dispatch(part.x_TD, part.ids_TK, scaled=True, extra_TKX=extra[own].to(device))
    token, slot = slots_of(case, dispatcher)
    assert sent.scaled is not None and sent.extra_RX is not None
    assert torch.equal(sent.extra_RX.cpu(), extra[token, slot])


FAULTS = {
    "no values": ("RankMismatch", "extra values"),
    "fewer values": ("RankMismatch", "extra values"),
    "without gradients": ("RankMismatch", "that require gradients"),
    "fewer tokens": ("InputError", "[6, 2, X]"),
    "two dimensions": ("InputError", "[6, 2, X]"),
    "no width": ("InputError", "X at least 1"),
    "float64": ("InputError", "float32 or int32"),
    "a list": ("InputError", "list"),
    "another device": ("InputError", "meta"),
    "spread of another width": ("InputError", "dispatch had 2"),
    "spread without values before": ("InputError", "dispatch had none"),
    "spread of fewer tokens": ("InputError", "[6, 2, X]"),
}
"""Fault of the last rank: the error and part of its text, expected on every rank."""


@on_ranks(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_wrong_values_on_one_rank_raise_on_every_rank(rank: int, world: int, backend: str, device: str) -> None:
    usable(backend, device)
    job = Job(backend, device)
    dispatcher = build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    last = rank == world - 1
    x_TD = torch.ones(6, 8, device=job.device)
    ids_TK = torch.arange(12, device=job.device).view(6, 2) % 8
    extra = torch.arange(24.0, device=job.device).view(6, 2, 2)
    good = dispatcher.dispatch(x_TD, ids_TK, extra_TKX=extra)
    bare = dispatcher.dispatch(x_TD, ids_TK)

    def act(name: str) -> None:
        if name.startswith("spread"):
            wrong = {"of another": extra[..., :1], "of fewer": extra[1:]}.get(name[7:].rpartition(" ")[0], extra)
            handle = bare.handle if "without" in name and last else good.handle
            dispatcher.spread(x_TD, handle, wrong if last else extra)
            return
        given = {
            "no values": None,
            "fewer values": extra[..., :1],
            "without gradients": extra.detach(),
            "fewer tokens": extra[1:],
            "two dimensions": extra[..., 0],
            "no width": extra[..., :0],
            "float64": extra.double(),
            "a list": [1],
            "another device": extra.to("meta"),
        }[name]
        right = extra.clone().requires_grad_() if name == "without gradients" else extra
        dispatcher.dispatch(x_TD, ids_TK, extra_TKX=given if last else right)  # type: ignore[arg-type]

    for name, (kind, text) in FAULTS.items():
        raised, message = caught(lambda name=name: act(name))
        assert raised == kind and text in message, f"{name}: {raised}: {message}"
        again = dispatcher.dispatch(x_TD, ids_TK, extra_TKX=extra).extra_RX
        assert torch.equal(again, good.extra_RX), name  # type: ignore[arg-type]
