"""The contract of every backend, for any transport and number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.errors import InputError, RoutingError
from tests.dispatch import cases, workers
from tests.dispatch.cases import CASES, Case
from tests.dispatch.workers import INPUT_FAULTS, Job, Result
from tests.pool import RankPool, on_ranks, with_longer_deadline

BACKENDS = ("all_to_all", "all_gather", "shared_memory", "hierarchical", "peer_to_peer")
NAMES = tuple(case.name for case in CASES)
NAMES_OF = {2: NAMES[::2], 4: NAMES, 8: NAMES[1::3]}
"""Cases by number of ranks. All run with 4 ranks, because few of their branches depend on the number."""
HALF = {2: NAMES[::2], 4: NAMES[1::2]}
SLOW = partial(pytest.param, marks=pytest.mark.slow)


def usable(backend: str, device: str) -> None:
    if backend not in ("shared_memory", "peer_to_peer"):
        return
    if device != "cpu" and backend == "shared_memory":
        pytest.skip("shared_memory moves CPU tensors")
    pytest.importorskip("moe_comm._C", reason="the native core is not built")


@pytest.fixture(scope="module")
def results(pools: dict[int, RankPool], device: str) -> dict[tuple[str, int], list[dict[str, Result | str]]]:
    """Results by backend and number of ranks, filled on demand: all cases of one pair run together."""
    return {}


@lru_cache
def reference(name: str, device: str) -> Result:
    """Return the result of one rank in plain torch."""
    return workers.run_case(cases.BY_NAME[name], Job("plain", device), None, 0, 1)


def ranks_of(
    backend: str,
    world: int,
    name: str,
    pools: dict[int, RankPool],
    results: dict[tuple[str, int], list[dict[str, Result | str]]],
    device: str,
) -> list[Result]:
    usable(backend, device)
    if (backend, world) not in results:
        results[backend, world] = pools[world].run(
            workers.run_cases, Job(backend, device, names=NAMES_OF[world]), timeout=120
        )
    outcomes = [by_case.get(name, "did not run: an earlier case failed") for by_case in results[backend, world]]
    for rank, result in enumerate(outcomes):
        assert isinstance(result, Result), f"rank {rank}: {result}"
    return outcomes  # type: ignore[return-value]


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in NAMES_OF.items() for name in names])
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_bits_as_one_rank(backend: str, world: int, name: str, pools, results, device: str) -> None:  # type: ignore[no-untyped-def]
    """Output, input gradient, routing-weight gradient, expert gradients, and the rows themselves."""
    ranks = ranks_of(backend, world, name, pools, results, device)
    whole = reference(name, device)
    assert torch.equal(torch.cat([r.rows_RD for r in ranks]), whole.rows_RD)
    assert sum((r.rows_per_expert for r in ranks), ()) == whole.rows_per_expert
    assert sum(r.num_dropped for r in ranks) == whole.num_dropped
    assert torch.equal(torch.cat([r.y_TD for r in ranks]), whole.y_TD)
    assert torch.equal(torch.cat([r.x_grad_TD for r in ranks]), whole.x_grad_TD)
    assert torch.equal(torch.cat([r.experts_grad for r in ranks]), whole.experts_grad)
    if whole.weights_grad_TK is not None:
        assert torch.equal(torch.cat([r.weights_grad_TK for r in ranks]), whole.weights_grad_TK)


@pytest.mark.parametrize("name", NAMES)
def test_local_has_the_same_bits_as_plain_torch(name: str, device: str) -> None:
    native = workers.run_case(cases.BY_NAME[name], Job("local", device), None, 0, 1)
    whole = reference(name, device)
    for field in ("rows_RD", "y_TD", "x_grad_TD", "weights_grad_TK", "experts_grad"):
        actual, expected = getattr(native, field), getattr(whole, field)
        assert (actual is None and expected is None) or torch.equal(actual, expected), field
    assert native.rows_per_expert == whole.rows_per_expert and native.num_dropped == whole.num_dropped


def oracle(case: Case) -> dict[str, np.ndarray]:
    """Compute the same in float64 without dispatch, for each token and slot."""
    batch, experts_t = cases.make(case)
    x, grad, weights = (t.double().numpy() for t in (batch.x_TD, batch.grad_TD, batch.weights_TK))
    ids, experts = batch.ids_TK.numpy(), experts_t.double().numpy()
    full = experts if experts.ndim == 3 else None
    y, x_grad, w_grad, e_grad = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights), np.zeros_like(experts)
    for t, k in np.argwhere(ids >= 0):
        e = ids[t, k]
        out = x[t] @ full[e] if full is not None else x[t] * experts[e]
        y[t] += weights[t, k] * out
        w_grad[t, k] = out @ grad[t]
        back = weights[t, k] * grad[t]
        x_grad[t] += full[e] @ back if full is not None else back * experts[e]
        e_grad[e] += np.outer(x[t], back) if full is not None else x[t] * back
    order = [(t, k) for e in range(case.num_experts) for t, k in np.argwhere(ids == e)]
    rows = x[[t for t, _ in order]] if order else x[:0]
    return {"y_TD": y, "x_grad_TD": x_grad, "weights_grad_TK": w_grad, "experts_grad": e_grad, "rows_RD": rows}


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_agrees_with_a_float64_oracle(name: str, device: str) -> None:
    case = cases.BY_NAME[name]
    result, expected = reference(name, device), oracle(case)
    eps = torch.finfo(torch.float32 if case.dtype == torch.float32 else case.dtype).eps
    if case.weights_dtype != torch.float32:
        eps = max(eps, torch.finfo(case.weights_dtype).eps)
    for field, value in expected.items():
        actual = getattr(result, field)
        if actual is None:
            continue
        actual = actual.double().numpy()
        assert actual.shape == value.shape, field
        if field == "rows_RD":
            assert np.array_equal(actual, value)
        elif value.size:
            scale = max(1.0, float(np.abs(value).max()))
            assert np.abs(actual - value).max() <= 8 * eps * scale * case.hidden**0.5, field


@on_ranks(2, 4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_dispatches_in_flight_have_the_bits_of_separate_calls(
    rank: int, world: int, backend: str, device: str
) -> None:
    """Run two dispatches before their combines, in both orders."""
    usable(backend, device)
    job = Job(backend, device)
    group = dist.group.WORLD
    pair = [cases.BY_NAME["plain"], replace(cases.BY_NAME["some slots dropped"], num_experts=8, seed=3)]
    dispatcher = workers.build(pair[0], group, job, rank, world)
    parts = [workers.to_device(cases.make(case)[0].part(case, rank, world), job.device) for case in pair]

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
    assert all(all(map(torch.equal, alone, other)) for other in both)


@on_ranks(2, 4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_spread_sends_other_rows_along_the_same_routes(rank: int, world: int, backend: str, device: str) -> None:
    """Rows, combined output and gradient equal those of a new dispatch with the same ids."""
    usable(backend, device)
    job = Job(backend, device, checked=world == 2, names=HALF[world])
    for case in job.cases:
        if case.experts_per_rank(world) is not None or case.num_experts != 8:
            continue
        dispatcher = workers.build(case, dist.group.WORLD, job, rank, world)
        part = workers.to_device(cases.make(case)[0].part(case, rank, world), job.device)
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
        assert torch.equal(*grads) and all(map(torch.equal, *ys)), case.name  # type: ignore[arg-type]


@on_ranks(2, 4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_may_change_from_call_to_call(rank: int, world: int, backend: str, device: str) -> None:
    """Tokens, top-k, hidden size and dtype change."""
    usable(backend, device)
    job = Job(backend, device, checked=world == 2)
    g = torch.Generator().manual_seed(7)
    dispatcher = workers.build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    reference = workers.build(cases.BY_NAME["plain"], None, replace(job, backend="plain"), 0, 1)
    for i in range(12):
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
        expected = workers.layer(reference, case, workers.to_device(batch, job.device), ones)
        actual = workers.layer(
            dispatcher, case, workers.to_device(batch.part(case, rank, world), job.device), ones[own.start : own.stop]
        )
        rows = case.rows(rank, world)
        for field in ("y_TD", "x_grad_TD", "weights_grad_TK"):
            assert torch.equal(getattr(actual, field), getattr(expected, field)[rows]), (field, case)


def test_partial_sums_are_close_without_determinism(pools: dict[int, RankPool], device: str) -> None:
    ranks = pools[4].run(workers.run_cases, Job("all_gather", device, deterministic=False), timeout=120)
    for name in NAMES:
        whole = reference(name, device)
        for field in ("y_TD", "x_grad_TD", "weights_grad_TK"):
            if (expected := getattr(whole, field)) is not None:
                actual = torch.cat([getattr(of_rank[name], field) for of_rank in ranks])
                eps = torch.finfo(expected.dtype).eps
                torch.testing.assert_close(actual, expected, rtol=8 * eps, atol=32 * eps, msg=f"{name}: {field}")


# --- faults: the same typed error on every rank, and the group stays usable ---


@on_ranks(2, 4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input_on_one_rank_raises_the_same_error_on_every_rank(
    rank: int, world: int, backend: str, device: str
) -> None:
    """Cause each fault on the last rank only. The next call must work."""
    usable(backend, device)
    job = Job(backend, device)
    dispatcher = workers.build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    expected = workers.dispatch_with(dispatcher, job)[0]
    for name, (kind, text, changes) in INPUT_FAULTS.items():
        raised, message = workers.caught(
            lambda changes=changes: workers.dispatch_with(dispatcher, job, **(changes if rank == world - 1 else {}))
        )
        assert raised == kind and text in message, f"{name}: {raised}: {message}"
        assert kind == "RankMismatch" or rank == world - 1 or f"rank {world - 1}" in message
        assert torch.equal(expected, workers.dispatch_with(dispatcher, job)[0]), name


@on_ranks(2, 4)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_in_a_different_operation_raises_on_every_rank(rank: int, world: int, backend: str, device: str) -> None:
    """Make each wrong call on the last rank. The next call must work."""
    usable(backend, device)
    job = Job(backend, device)
    last, more = rank == world - 1, 8 if job.backend == "peer_to_peer" else 19  # its ranks share memory for 8 experts
    case, group = cases.BY_NAME["plain"], dist.group.WORLD
    first, second, larger = (workers.build(replace(case, num_experts=n), group, job, rank, world) for n in (8, 8, more))
    (rows, handle), (_, later), (_, other) = (workers.dispatch_with(d, job) for d in (first, first, second))
    workers.dispatch_with(larger, job)
    weights = torch.ones(6, 2, device=job.device)
    wide = torch.zeros(rows.shape[0], rows.shape[1] + last, device=job.device)
    x_TD = torch.ones(6, handle.hidden + last, device=job.device)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: workers.dispatch_with(first, job) if last else first.combine(rows, weights, handle),
        lambda: first.combine(rows, weights, later if last else handle),
        lambda: workers.dispatch_with(second if last else first, job),
        lambda: workers.dispatch_with(larger if last else first, job),
        lambda: first.combine(rows, weights, other if last else handle),
        lambda: first.combine(wide, weights, handle),
        lambda: first.combine(rows, weights.to("meta") if last else weights, handle),
        lambda: first.spread(x_TD, handle),
    )
    for (name, kind), call in zip(workers.WRONG_CALLS.items(), calls, strict=True):
        raised, message = workers.caught(call)
        assert raised == kind, f"{name}: {raised}: {message}"
        assert all(torch.equal(rows, workers.dispatch_with(d, job)[0]) for d in (first, second)), name


@on_ranks(2, 4)
@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_between_operations_raises_on_every_rank_and_the_group_stays_usable(
    rank: int, world: int, backend: str, how: str, device: str
) -> None:
    """Operations time out later than the run, so a rank that waits for its own timeout fails the test."""
    usable(backend, device)
    job = Job(backend, device, timeout_s=200.0)
    last = rank == world - 1
    dispatcher = workers.build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    x_TD, ids_TK = workers.valid_inputs(dispatcher, job)
    rows = dispatcher.dispatch(x_TD, ids_TK).rows_RD

    def act() -> None:
        sent = dispatcher.dispatch(x_TD.clone().requires_grad_(), ids_TK, label="moe.3")
        with dispatcher.abort_on_error("moe.3"):
            if last and how == "forward":
                raise ZeroDivisionError("no such expert")
            rows_RD = workers.RaiseInBackward.apply(sent.rows_RD) if last else sent.rows_RD * 1
        y_TD = dispatcher.combine(rows_RD, torch.ones(6, 2, device=job.device), sent.handle)
        with dispatcher.abort_on_error("moe.3"):
            y_TD.sum().backward()

    raised, message = workers.caught(act)
    if last:
        assert raised == "ZeroDivisionError" and message.startswith("no such")
    else:
        assert raised == "PeerRaised", message
        for expected in (f"rank {world - 1}", "ZeroDivisionError", "no such", "moe.3"):
            assert expected in message
    assert torch.equal(rows, dispatcher.dispatch(x_TD, ids_TK).rows_RD)


@on_ranks(4, timeout=60)
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_arguments_give_the_bits_of_dense_arguments(rank: int, world: int, backend: str, device: str) -> None:
    """Test all arguments, also on ranks without rows; rank 0 has no experts."""
    usable(backend, device)
    job = Job(backend, device)
    for dtype, hidden in ((torch.float32, 8), (torch.bfloat16, 5), (torch.float32, 1)):
        case = Case("", tokens=9, hidden=hidden, dtype=dtype, num_experts=3, split="even", placement="uneven")
        dispatcher = workers.build(case, dist.group.WORLD, job, rank, world)
        part = workers.to_device(cases.make(case)[0].part(case, rank, world), job.device)
        for name, restride in workers.STRIDES.items():
            results = []
            for change in (restride, lambda x, restride=restride: restride(x).contiguous().clone()):
                x_TD, w_TK = (change(t).detach().requires_grad_() for t in (part.x_TD, part.weights_TK))
                sent = dispatcher.dispatch(x_TD, part.ids_TK)
                rows_RD = change(sent.rows_RD)
                y_TD = dispatcher.combine(rows_RD, w_TK, sent.handle)
                y_TD.backward(change(part.grad_TD))
                results.append((sent.rows_RD, y_TD, w_TK.grad, torch.zeros(()) if x_TD.grad is None else x_TD.grad))
            assert all(map(torch.equal, *results)), f"{name} {dtype} {hidden}"


@pytest.mark.parametrize("world", [SLOW(2), 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_timeout_names_the_rank_that_did_not_call(
    backend: str, world: int, pools: dict[int, RankPool], device: str
) -> None:
    usable(backend, device)

    def check(timeout_s: float) -> None:
        ranks = pools[world].run(workers.never_calls, Job(backend, device, timeout_s=timeout_s), timeout=120)
        for rank, error_texts in enumerate(ranks):
            if rank != 1:
                (raised, message), (again, _) = error_texts
                assert raised == "PeerTimeout" and "rank 1" in message and "moe.3" in message, error_texts
                assert again == "PeerTimeout", "later calls must raise again"

    with_longer_deadline(check, 2.0, 30.0)


LOSSES = ("SIGKILL", "SIGKILL backward", "SIGSTOP", "SIGSTOP backward")
LOST = [
    (backend, world, how)
    for index, backend in enumerate(BACKENDS)
    for world, how in ((4, "SIGKILL"), (2, "SIGKILL backward"), (2 + index % 2 * 2, LOSSES[2 + index % 2]))
    if backend != "all_gather" or how == "SIGKILL"  # it waits as all_to_all does
]


@pytest.mark.parametrize(
    ("backend", "world", "how"),
    [
        *LOST,
        *(
            SLOW(backend, world, how)
            for backend in BACKENDS
            for world in (2, 4)
            for how in LOSSES
            if (backend, world, how) not in LOST
        ),
    ],
)
def test_a_killed_or_stopped_rank_is_named_on_every_other_rank(
    backend: str, world: int, how: str, pools: dict[int, RankPool], device: str
) -> None:
    usable(backend, device)
    kind = "PeerDied" if "KILL" in how else "PeerTimeout"

    def check(timeout_s: float) -> None:
        job = Job(backend, device, timeout_s=timeout_s, how=how)
        ranks = pools[world].run(workers.lose_a_rank, job, timeout=120, expect_dead={1})
        for rank, error_texts in enumerate(ranks):
            if rank != 1:
                (raised, message), (again, _) = error_texts
                assert raised == kind and "rank 1" in message and "moe.3" in message, error_texts
                assert again == kind, "later calls must raise again"

    with_longer_deadline(check, *([200.0] if "KILL" in how else [1.0 + world / 2, 30.0]))


def test_local_refuses_bad_ids_and_stays_usable(device: str) -> None:
    dispatcher = workers.build(cases.BY_NAME["plain"], None, Job("local", device), 0, 1)
    x_TD = torch.ones(3, 4, device=device)
    for bad in (8, -2, 2**31 - 1):
        with pytest.raises(RoutingError):
            dispatcher.dispatch(x_TD, torch.tensor([[0, 1], [1, bad], [2, 3]], device=device))
    assert dispatcher.dispatch(x_TD, torch.tensor([[0, 1], [1, 2], [2, 3]], device=device)).handle.num_rows == 6


@pytest.mark.parametrize("backend", ["local", "plain"])
def test_one_rank_refuses_the_handle_of_another_dispatcher(backend: str, device: str) -> None:
    first, second = (workers.build(cases.BY_NAME["plain"], None, Job(backend, device), 0, 1) for _ in range(2))
    x_TD, ids_TK = torch.ones(3, 4, device=device), torch.zeros(3, 1, dtype=torch.int64, device=device)
    sent = first.dispatch(x_TD, ids_TK)
    with pytest.raises(InputError, match="another dispatcher"):
        second.combine(sent.rows_RD, torch.ones(3, 1, device=device), sent.handle)
