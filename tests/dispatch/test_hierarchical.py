"""Two levels: same bits whatever the hosts, bytes between them that equal the formula, faults told to every rank."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_comm.dispatch.hierarchical as module
from moe_comm.dispatch import Payloads, make_dispatcher
from moe_comm.dispatch.hierarchical import HierarchicalDispatcher
from moe_comm.dispatch.inside_host import host_group
from moe_comm.dispatch.relay_routes import (
    HostMap,
    WireBytes,
    inter_host_bytes,
)
from moe_comm.runtime.shared import SharedGroup, SharedOptions
from moe_comm.topology import ExpertPlacement
from tests.dispatch import cases, workers
from tests.dispatch.cases import Case
from tests.dispatch.workers import Job, Result, Told, caught, two_hosts
from tests.pool import RankPool

FIELDS = ("rows_RD", "y_TD", "x_grad_TD", "weights_grad_TK", "experts_grad")
MIXED = Payloads("fp8_block_pow2", "bf16", "bf16", "fp8_token")
ALL_FP8 = Payloads("fp8_token", "fp8_block", "fp8_block", "fp8_token")
GROUPED = Payloads("fp8_block", "bf16", "fp8_group", "fp8_group")
FEW = tuple(
    cases.BY_NAME[name]
    for name in (
        "plain",
        "no tokens anywhere",
        "all tokens on the last rank",
        "uneven experts, one rank without",
        "one expert in all",
        "all slots to one expert",
        "duplicate experts in a token",
        "bfloat16",
        "checkpointed, reentrant",
    )
)


# --- bits ---


def run_few(rank: int, world: int, how: tuple[Job, list[int]]) -> list[Result]:
    job, hosts = how
    found = []
    for case in FEW:
        batch, experts = cases.make(case)
        placement = ExpertPlacement.of(case.num_experts, world, case.experts_per_rank(world))
        dispatcher = HierarchicalDispatcher(placement, dist.group.WORLD, rank, job.options, hosts)
        own = experts[dispatcher.local_experts.start : dispatcher.local_experts.stop]
        found.append(workers.layer(dispatcher, case, batch.part(case, rank, world), own))
    return found


def require_bits(ranks: list[list[Result]], payloads: Payloads = Payloads()) -> None:  # noqa: B008 - frozen
    for case, of_ranks in zip(FEW, zip(*ranks, strict=True), strict=True):
        whole = workers.run_case(case, Job("plain", payloads=payloads), None, 0, 1)
        for field in FIELDS:
            assert torch.equal(torch.cat([getattr(r, field) for r in of_ranks]), getattr(whole, field)), (case, field)


@pytest.mark.parametrize("hosts", [[4, 4, 9, 9, 1, 1, 3, 3], [5] * 8, list(range(8))], ids=["4x2", "1x8", "8x1"])
def test_same_bits_on_any_number_of_hosts(hosts: list[int], pool8: RankPool) -> None:
    """The contract suite has 2 x 1, 2 x 2 and 2 x 4, with all its cases."""
    require_bits(pool8.run(run_few, (Job("hierarchical"), hosts), timeout=60))


@pytest.mark.parametrize("payloads", [MIXED, ALL_FP8], ids=["mixed", "fp8"])
def test_same_bits_with_payloads(payloads: Payloads, pool4: RankPool) -> None:
    require_bits(pool4.run(run_few, (Job("hierarchical", payloads=payloads), two_hosts(4))), payloads)


def without_native(rank: int, world: int, how: tuple[Job, list[int]]) -> list[Result]:
    real = module.native_is_built
    module.native_is_built = lambda: rank != 1
    try:
        return run_few(rank, world, how)
    finally:
        module.native_is_built = real


def test_same_bits_where_a_rank_lacks_the_native_core(pool4: RankPool) -> None:
    require_bits(pool4.run(without_native, (Job("hierarchical"), two_hosts(4))))


@pytest.mark.parametrize("payloads", [Payloads(), GROUPED], ids=["same", "groups"])
def test_sums_of_a_host_come_close_where_bits_are_not_asked_for(payloads: Payloads, pool4: RankPool) -> None:
    job = Job("hierarchical", deterministic=False, payloads=payloads)
    ranks = pool4.run(run_few, (job, two_hosts(4)))
    for case, of_ranks in zip(FEW, zip(*ranks, strict=True), strict=True):
        whole = workers.run_case(case, Job("plain"), None, 0, 1)
        for field in FIELDS:
            found = torch.cat([getattr(r, field) for r in of_ranks]).double()
            expected = getattr(whole, field).double()
            allowed = 0.06 if payloads is GROUPED else 8 * torch.finfo(case.dtype).eps
            assert (found - expected).norm() <= allowed * expected.norm(), (case.name, field)
            assert found.shape == expected.shape


# --- bytes ---


def wire(rank: int, world: int, how: tuple[Job, Case]) -> tuple[dict[str, WireBytes], int]:
    """What the dispatcher says it sent to the other host, and what its channel was given for ranks there."""
    job, case = how
    batch, experts = cases.make(case)
    dispatcher: Any = workers.build(case, dist.group.WORLD, job, rank, world)
    given = 0
    start = dispatcher.channel.start_all_to_all

    def counted(rows: Tensor, send: list[int], receive: list[int], doing: str) -> Any:
        nonlocal given
        far = sum(rows_to for to, rows_to in enumerate(send) if two_hosts(world)[to] != two_hosts(world)[rank])
        given += far * (rows.nbytes // max(rows.shape[0], 1))
        return start(rows, send, receive, doing)

    dispatcher.channel.start_all_to_all = counted
    own = experts[dispatcher.local_experts.start : dispatcher.local_experts.stop]
    workers.layer(dispatcher, case, batch.part(case, rank, world), own)
    return dispatcher.wire_bytes, given


@pytest.mark.parametrize(
    ("deterministic", "payloads"),
    [(True, Payloads()), (True, MIXED), (False, Payloads()), (False, MIXED), (False, GROUPED)],
    ids=["same", "mixed", "sums, same", "sums, mixed", "sums, groups"],
)
def test_the_bytes_between_hosts_are_those_of_the_formula(
    deterministic: bool, payloads: Payloads, pool4: RankPool
) -> None:
    job = Job("hierarchical", deterministic=deterministic, payloads=payloads)
    for case in (
        Case("random", hidden=136, top_k=3, tokens=150),
        Case("dropped", routing="dropped", top_k=5, tokens=150, dtype=torch.bfloat16, weights_grad=False),
        Case("one expert", routing="one_expert", num_experts=5, split="first"),
        Case("none", tokens=0),
    ):
        ranks = pool4.run(wire, (job, case))
        ids_WTK = [cases.make(case)[0].part(case, rank, 4).ids_TK for rank in range(4)]
        formula = inter_host_bytes(
            ids_WTK,
            ExpertPlacement.balanced(case.num_experts, 4),
            two_hosts(4),
            case.hidden,
            case.dtype,
            deterministic=deterministic,
            payloads=payloads,
            weights_grad=case.weights_grad,
        )
        for op, expected in formula.items():
            assert sum((said[op] for said, _ in ranks), WireBytes()) == expected, (case.name, op)
        assert sum(given for _, given in ranks) == sum(part.total for part in formula.values())


# --- what goes wrong ---


def built_with(rank: int, world: int, hosts: list[list[int]]) -> Told:
    placement = ExpertPlacement.balanced(4, world)
    return caught(
        lambda: HierarchicalDispatcher(placement, dist.group.WORLD, rank, Job("").options, hosts[rank % len(hosts)])
    )


@pytest.mark.parametrize(
    ("hosts", "kind", "said"),
    [
        ([[0, 1, 0, 1]], "ConfigError", "next to each other"),
        ([[0, 0, 0, 1]], "ConfigError", "equal numbers"),
        ([[0, 0], [0, 0, 1, 1]], "ConfigError", "a number for each of the 4 ranks; got 2"),
        ([[0, 0, 1, 1], [0, 0, 0, 0]], "RankMismatch", "hosts"),
    ],
)
def test_hosts_that_cannot_be_are_refused_on_every_rank(
    hosts: list[list[int]], kind: str, said: str, pool4: RankPool
) -> None:
    for raised, message in pool4.run(built_with, hosts):
        assert raised == kind and said in message


def on_one_host(rank: int, world: int, _: None) -> Told:
    return caught(lambda: make_dispatcher(4, dist.group.WORLD, "hierarchical"))


def test_one_host_is_told_what_to_use_instead(pool2: RankPool) -> None:
    for raised, message in pool2.run(on_one_host, None):
        assert raised == "ConfigError" and "all ranks are on one host; use 'shared_memory'" in message


def little_memory(rank: int, world: int, reserve: int) -> tuple[bool, list[str]]:
    """One rank's heap may grow to ``reserve`` bytes only. Equal to one rank's bits? And the warnings."""
    import warnings

    hosts = HostMap.of(two_hosts(world))
    group = dist.new_group()
    own = host_group(group, hosts.members(hosts.host(rank)), 30.0)
    SharedGroup.of(own, SharedOptions(initial_bytes=1 << 20, reserve_bytes=reserve if rank == 1 else 1 << 30))
    case = Case("wide", tokens=600, hidden=2048, top_k=1, split="even")
    batch, experts = cases.make(case)
    dispatcher = workers.build(case, group, Job("hierarchical"), rank, world)
    span = dispatcher.local_experts
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        mine = workers.layer(dispatcher, case, batch.part(case, rank, world), experts[span.start : span.stop])
    whole = workers.layer(workers.build(case, None, Job("plain"), 0, 1), case, batch, experts)
    rows = slice(rank * case.tokens // world, (rank + 1) * case.tokens // world)
    same = torch.equal(mine.y_TD, whole.y_TD[rows]) and torch.equal(mine.x_grad_TD, whole.x_grad_TD[rows])
    assert whole.weights_grad_TK is not None and mine.weights_grad_TK is not None
    same = same and torch.equal(mine.weights_grad_TK, whole.weights_grad_TK[rows])
    return same, [str(w.message) for w in caught_warnings if issubclass(w.category, RuntimeWarning)]


@pytest.mark.parametrize("reserve", [1 << 20, 2 << 20], ids=["dispatch", "combine"])
def test_without_room_in_shared_memory_rows_take_another_way(reserve: int, pool4: RankPool) -> None:
    """150 rows of 8 KB for each rank: 1 MiB is too little for them, 2 MiB for the results beside them."""
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    for rank, (same, warned) in enumerate(pool4.run(little_memory, reserve)):
        assert same
        assert bool(warned) == (rank < 2), "only that rank's host"
        assert all("go over the group's backend instead" in text for text in warned)


def die_inside(rank: int, world: int, job: Job) -> tuple[Told, Told]:
    """Rank 1 dies when the exchange between hosts is over and its host's is about to begin."""
    dispatcher: Any = workers.build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    x_TD, ids_TK = torch.ones(6, 8), torch.arange(12).view(6, 2) % 8
    sent = dispatcher.dispatch(x_TD, ids_TK, label="moe.3")
    if rank == 1:
        dispatcher._inside.sum = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    told = caught(lambda: dispatcher.combine(sent.rows_RD, torch.ones(6, 2), sent.layout))
    return told, caught(lambda: dispatcher.dispatch(x_TD, ids_TK))


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_rank_lost_inside_its_host_is_an_error_on_every_rank(deterministic: bool, pool4: RankPool) -> None:
    job = replace(Job("hierarchical", timeout_s=20.0), deterministic=deterministic)
    found = pool4.run(die_inside, job, timeout=15, expect_dead={1})
    for rank, told in enumerate(found):
        if rank != 1:
            (raised, message), (again, _) = told
            assert raised == "PeerDied" and "rank 1" in message, told
            assert again == "PeerDied", "refused from then on"
