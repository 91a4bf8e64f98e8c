"""The contract of every backend, for any transport and number of ranks."""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np
import pytest
import torch

from moe_comm.errors import InputError, RoutingError
from tests.dispatch import cases, workers
from tests.dispatch.cases import CASES, Case
from tests.dispatch.workers import INPUT_FAULTS, Job, Result
from tests.pool import RankPool, with_longer_deadline

BACKENDS = ("all_to_all", "all_gather", "shared_memory", "hierarchical", "peer_to_peer")
NAMES = tuple(case.name for case in CASES)
NAMES_OF = {2: NAMES[::2], 4: NAMES, 8: NAMES[1::3]}
"""Cases by number of ranks. All run with 4 ranks, because few of their branches depend on the number."""
HALF = {2: NAMES[::2], 4: NAMES[1::2]}
SLOW = partial(pytest.param, marks=pytest.mark.slow)
CHECKED = ((2, True), (4, False), SLOW(2, False), SLOW(4, True))
"""Numbers of ranks, and whether calls are checked. The two do not depend on each other."""


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


@pytest.mark.parametrize("world", [2, 4, SLOW(8)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_dispatches_in_flight_have_the_bits_of_separate_calls(
    backend: str, world: int, pools: dict[int, RankPool], device: str
) -> None:
    usable(backend, device)
    assert pools[world].run(workers.in_flight, Job(backend, device)) == [[True, True]] * world


@pytest.mark.parametrize(("world", "checked"), CHECKED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_spread_sends_other_rows_along_the_same_routes(
    backend: str, world: int, checked: bool, pools: dict[int, RankPool], device: str
) -> None:
    """Rows, combined output and gradient equal those of a new dispatch with the same ids."""
    usable(backend, device)
    job = Job(backend, device, checked=checked, names=HALF[world])
    assert pools[world].run(workers.spread_rows, job, timeout=120) == [[]] * world


@pytest.mark.parametrize(("world", "checked"), CHECKED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_may_change_from_call_to_call(
    backend: str, world: int, checked: bool, pools: dict[int, RankPool], device: str
) -> None:
    usable(backend, device)
    assert pools[world].run(workers.many_shapes, Job(backend, device, checked=checked)) == [[]] * world


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


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_input_on_one_rank_raises_the_same_error_on_every_rank(
    backend: str, world: int, pools: dict[int, RankPool], device: str
) -> None:
    usable(backend, device)
    ranks = pools[world].run(workers.faults, Job(backend, device))
    for name, (kind, text, _) in INPUT_FAULTS.items():
        for rank, outcomes in enumerate(ranks):
            (raised, message), works_on = outcomes[name]
            assert raised == kind and text in message, f"{name}, rank {rank}: {raised}: {message}"
            assert works_on, f"{name}, rank {rank}"
            if kind != "RankMismatch" and rank != world - 1:
                assert f"rank {world - 1}" in message


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_in_a_different_operation_raises_on_every_rank(
    backend: str, world: int, pools: dict[int, RankPool], device: str
) -> None:
    usable(backend, device)
    for outcomes in pools[world].run(workers.wrong_calls, Job(backend, device)):
        assert {name: (kind, works_on) for name, ((kind, _), works_on) in outcomes.items()} == {
            name: (kind, True) for name, kind in workers.WRONG_CALLS.items()
        }, outcomes


@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_between_operations_raises_on_every_rank_and_the_group_stays_usable(
    backend: str, world: int, how: str, pools: dict[int, RankPool], device: str
) -> None:
    """Operations time out later than the run, so a rank that waits for its own timeout fails the test."""
    usable(backend, device)
    job = Job(backend, device, timeout_s=200.0, how=how)
    ranks = pools[world].run(workers.raises_in_between, job, timeout=120)
    for rank, ((raised, message), works_on) in enumerate(ranks):
        assert works_on
        if rank == world - 1:
            assert raised == "ZeroDivisionError" and message.startswith("no such")
        else:
            assert raised == "PeerRaised", message
            for expected in (f"rank {world - 1}", "ZeroDivisionError", "no such", "moe.3"):
                assert expected in message


@pytest.mark.parametrize("world", [SLOW(2), 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_arguments_give_the_bits_of_dense_arguments(
    backend: str, world: int, pools: dict[int, RankPool], device: str
) -> None:
    """Test all arguments, also on ranks without rows."""
    usable(backend, device)
    assert pools[world].run(workers.any_strides, Job(backend, device), timeout=60) == [[]] * world


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
