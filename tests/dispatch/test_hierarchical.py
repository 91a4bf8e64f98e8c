"""Hierarchical dispatch: same bits for any hosts, bytes between hosts as in the formula, faults on every rank."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.group_setup import communicator_of, heap_of
from moe_comm.comm.shared_heap import SharedOptions
from moe_comm.dispatch import WireDtypes, make_dispatcher
from moe_comm.dispatch.hierarchical.dispatcher import HierarchicalDispatcher
from moe_comm.dispatch.hierarchical.rail import ChunkOptions
from moe_comm.dispatch.hierarchical.relay_routes import HostMap, WireBytes, inter_host_bytes
from moe_comm.errors import HeapError
from moe_comm.runtime.memory import block
from moe_comm.topology import ExpertPlacement
from tests.dispatch import cases, workers
from tests.dispatch.cases import Case
from tests.dispatch.workers import ErrorText, Job, Result, caught, two_hosts
from tests.pool import RankPool

FIELDS = ("rows_RD", "y_TD", "x_grad_TD", "weights_grad_TK", "experts_grad")
MIXED = WireDtypes("fp8_block_pow2", "bf16", "bf16", "fp8_token")
WHOLE = ChunkOptions(max_chunks=1)
CUT = ChunkOptions(min_bytes=1, max_chunks=3)
ALL_FP8 = WireDtypes("fp8_token", "fp8_block", "fp8_block", "fp8_token")
GROUPED = WireDtypes("fp8_block", "bf16", "fp8_group", "fp8_group")
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


@dataclass(frozen=True)
class How:
    """hosts: default two. chunks: of rows between hosts."""

    job: Job
    hosts: tuple[int, ...] | None = None
    chunks: ChunkOptions = WHOLE

    def build(self, case: Case, rank: int, world: int) -> HierarchicalDispatcher:
        placement = ExpertPlacement.of(case.num_experts, world, case.experts_per_rank(world))
        hosts = self.hosts or two_hosts(world)
        return HierarchicalDispatcher(placement, dist.group.WORLD, rank, self.job.options, hosts, self.chunks)


def run_few(rank: int, world: int, how: How) -> list[Result]:
    found = []
    for case in FEW:
        batch, experts = cases.make(case)
        dispatcher = how.build(case, rank, world)
        own = experts[dispatcher.local_experts.start : dispatcher.local_experts.stop]
        found.append(workers.layer(dispatcher, case, batch.part(case, rank, world), own))
    return found


def require_bits(ranks: list[list[Result]], wire_dtypes: WireDtypes = WireDtypes()) -> None:  # noqa: B008 - frozen
    for case, of_ranks in zip(FEW, zip(*ranks, strict=True), strict=True):
        whole = workers.run_case(case, Job("plain", wire_dtypes=wire_dtypes), None, 0, 1)
        for field in FIELDS:
            assert torch.equal(torch.cat([getattr(r, field) for r in of_ranks]), getattr(whole, field)), (case, field)


@pytest.mark.parametrize("hosts", [(4, 4, 9, 9, 1, 1, 3, 3), (5,) * 8, tuple(range(8))], ids=["4x2", "1x8", "8x1"])
def test_same_bits_on_any_number_of_hosts(hosts: tuple[int, ...], pool8: RankPool) -> None:
    """The contract suite has 2 x 1, 2 x 2 and 2 x 4 with all its cases, in one chunk."""
    require_bits(pool8.run(run_few, How(Job("hierarchical"), hosts, ChunkOptions(1, 2)), timeout=120))


@pytest.mark.parametrize("wire_dtypes", [WireDtypes(), MIXED, ALL_FP8], ids=["same", "mixed", "fp8"])
def test_same_bits_in_chunks_with_wire_dtypes(wire_dtypes: WireDtypes, pool4: RankPool) -> None:
    require_bits(pool4.run(run_few, How(Job("hierarchical", wire_dtypes=wire_dtypes), chunks=CUT)), wire_dtypes)


@pytest.mark.parametrize("wire_dtypes", [WireDtypes(), GROUPED], ids=["same", "groups"])
def test_sums_of_a_host_have_the_same_bits_in_chunks(wire_dtypes: WireDtypes, pool4: RankPool) -> None:
    job = Job("hierarchical", deterministic=False, wire_dtypes=wire_dtypes)
    whole, cut = (pool4.run(run_few, How(job, chunks=chunks)) for chunks in (WHOLE, CUT))
    for of_whole, of_cut in zip(whole, cut, strict=True):
        for case, one, other in zip(FEW, of_whole, of_cut, strict=True):
            assert all(torch.equal(getattr(one, field), getattr(other, field)) for field in FIELDS), case


def without_native(rank: int, world: int, how: How) -> list[Result]:
    comm = communicator_of(dist.group.WORLD)
    comm.native = False  # as if one rank had no native core
    try:
        return run_few(rank, world, how)
    finally:
        comm.native = True


def test_same_bits_where_a_rank_lacks_the_native_core(pool4: RankPool) -> None:
    require_bits(pool4.run(without_native, How(Job("hierarchical"))))


@pytest.mark.parametrize("wire_dtypes", [WireDtypes(), GROUPED], ids=["same", "groups"])
def test_sums_of_a_host_are_close_without_determinism(wire_dtypes: WireDtypes, pool4: RankPool) -> None:
    job = Job("hierarchical", deterministic=False, wire_dtypes=wire_dtypes)
    ranks = pool4.run(run_few, How(job))
    for case, of_ranks in zip(FEW, zip(*ranks, strict=True), strict=True):
        whole = workers.run_case(case, Job("plain"), None, 0, 1)
        for field in FIELDS:
            found = torch.cat([getattr(r, field) for r in of_ranks]).double()
            expected = getattr(whole, field).double()
            allowed = 0.06 if wire_dtypes is GROUPED else 8 * torch.finfo(case.dtype).eps
            assert (found - expected).norm() <= allowed * expected.norm(), (case.name, field)
            assert found.shape == expected.shape


# --- bytes ---


def wire(rank: int, world: int, how: tuple[How, Case]) -> tuple[dict[str, WireBytes], int, int]:
    """Return the bytes to the other host that the dispatcher reports, those passed to its channel, and the number of
    exchanges."""
    case = how[1]
    batch, experts = cases.make(case)
    dispatcher: Any = how[0].build(case, rank, world)
    given = exchanges = 0
    start = dispatcher.channel.start_all_to_all

    def counted(rows: Tensor, send: list[int], receive: list[int], description: str) -> Any:
        nonlocal given, exchanges
        exchanges += 1
        far = sum(rows_to for to, rows_to in enumerate(send) if two_hosts(world)[to] != two_hosts(world)[rank])
        given += far * (rows.nbytes // max(rows.shape[0], 1))
        return start(rows, send, receive, description)

    dispatcher.channel.start_all_to_all = counted
    own = experts[dispatcher.local_experts.start : dispatcher.local_experts.stop]
    workers.layer(dispatcher, case, batch.part(case, rank, world), own)
    return dispatcher.wire_bytes, given, exchanges


@pytest.mark.parametrize(
    ("deterministic", "wire_dtypes"),
    [(True, WireDtypes()), (True, MIXED), (False, WireDtypes()), (False, MIXED), (False, GROUPED)],
    ids=["same", "mixed", "sums, same", "sums, mixed", "sums, groups"],
)
def test_the_bytes_between_hosts_are_those_of_the_formula(
    deterministic: bool, wire_dtypes: WireDtypes, pool4: RankPool
) -> None:
    how = How(Job("hierarchical", deterministic=deterministic, wire_dtypes=wire_dtypes), chunks=CUT)
    for case in (
        Case("random", hidden=136, top_k=3, tokens=150),
        Case("dropped", routing="dropped", top_k=5, tokens=150, dtype=torch.bfloat16, weights_grad=False),
        Case("one expert", routing="one_expert", num_experts=5, split="first"),
        Case("none", tokens=0),
    ):
        ranks = pool4.run(wire, (how, case))
        ids_WTK = [cases.make(case)[0].part(case, rank, 4).ids_TK for rank in range(4)]
        formula = inter_host_bytes(
            ids_WTK,
            ExpertPlacement.balanced(case.num_experts, 4),
            two_hosts(4),
            case.hidden,
            case.dtype,
            deterministic=deterministic,
            wire_dtypes=wire_dtypes,
            weights_grad=case.weights_grad,
        )
        for op, expected in formula.items():
            assert sum((said[op] for said, _, _ in ranks), WireBytes()) == expected, (case.name, op)
        assert sum(given for _, given, _ in ranks) == sum(part.total for part in formula.values())


def test_large_blocks_are_sent_in_chunks_and_small_ones_in_one(pool4: RankPool) -> None:
    """One token of each of ranks 0 and 1 has both its experts on host 1: 2 rows of 32 bytes for a rank there."""
    case = Case("half of it", tokens=2, routing="one_expert", split="even")
    few = {
        chunks: pool4.run(wire, (How(Job("hierarchical"), chunks=chunks), case))
        for chunks in (WHOLE, ChunkOptions(64, 8), ChunkOptions(32, 8), ChunkOptions(1, 2))
    }
    exchanges = {chunks: {found[2] for found in ranks} for chunks, ranks in few.items()}
    # Sent: ids, rows twice, weights twice. Returned: a gradient of weights, and rows twice.
    assert exchanges[WHOLE] == {8}
    assert exchanges[ChunkOptions(64, 8)] == {8}
    assert exchanges[ChunkOptions(32, 8)] == {8 + 2}, "returned rows in two chunks"
    assert exchanges[ChunkOptions(1, 2)] == {8 + 4}, "all rows in two chunks"


# --- faults ---


def built_with(rank: int, world: int, hosts: list[list[int]]) -> ErrorText:
    placement = ExpertPlacement.balanced(4, world)
    return caught(
        lambda: HierarchicalDispatcher(placement, dist.group.WORLD, rank, Job("").options, hosts[rank % len(hosts)])
    )


@pytest.mark.parametrize(
    ("hosts", "kind", "said"),
    [
        ([[0, 1, 0, 1]], "ConfigError", "next to each other"),
        ([[0, 0, 0, 1]], "ConfigError", "equal numbers"),
        ([[0, 0], [0, 0, 1, 1]], "ConfigError", "one number for each of the 4 ranks; got 2"),
        ([[0, 0, 1, 1], [0, 0, 0, 0]], "RankMismatch", "hosts"),
    ],
)
def test_invalid_hosts_are_refused_on_every_rank(hosts: list[list[int]], kind: str, said: str, pool4: RankPool) -> None:
    for raised, message in pool4.run(built_with, hosts):
        assert raised == kind and said in message


def cut_alike(rank: int, world: int, _: None) -> ErrorText:
    placement, chunks = ExpertPlacement.balanced(4, world), ChunkOptions(max_chunks=1 + rank // 2)
    return caught(
        lambda: HierarchicalDispatcher(placement, dist.group.WORLD, rank, chunks=chunks, hosts=two_hosts(world))
    )


def test_different_chunk_options_on_ranks_are_refused(pool4: RankPool) -> None:
    for raised, message in pool4.run(cut_alike, None):
        assert raised == "RankMismatch" and "chunks" in message


def on_one_host(rank: int, world: int, _: None) -> ErrorText:
    return caught(lambda: make_dispatcher(4, dist.group.WORLD, backend="hierarchical"))


def test_a_single_host_is_refused_with_an_alternative(pool2: RankPool) -> None:
    for raised, message in pool2.run(on_one_host, None):
        assert raised == "ConfigError" and "all ranks are on one host; use 'shared_memory'" in message


def filled(heap: Any) -> list[Tensor]:
    """Blocks that leave no room in ``heap`` for rows."""
    blocks: list[Tensor] = []
    while True:
        try:
            blocks.append(block(heap, 1, 1 << 14, torch.float32))
        except HeapError:
            return blocks


def little_memory(rank: int, world: int, operation: str) -> tuple[bool, list[str]]:
    """Fill the shared memory of a rank before ``operation``. Return whether bits equal one rank's, and warnings."""
    import warnings

    hosts = HostMap.of(two_hosts(world))
    group = dist.new_group()
    own = communicator_of(communicator_of(group).subgroup(hosts.members(hosts.host(rank)), 30.0))
    heap = heap_of(own, 30.0, SharedOptions(initial_bytes=1 << 20, reserve_bytes=8 << 20)).heap
    case = Case("wide", tokens=600, hidden=2048, top_k=1, split="even")
    batch, experts = cases.make(case)
    dispatcher = workers.build(case, group, Job("hierarchical"), rank, world)
    real, taken = getattr(dispatcher, operation), []

    def full(*arguments: Any) -> Any:
        taken.extend(filled(heap))
        return real(*arguments)

    if rank == 1:
        setattr(dispatcher, operation, full)
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


@pytest.mark.parametrize("operation", ["_send", "_sum", "_spread"])
def test_without_room_in_shared_memory_rows_use_the_backend(operation: str, pool4: RankPool) -> None:
    """150 rows of 8 KB for each rank."""
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    for rank, (same, warned) in enumerate(pool4.run(little_memory, operation)):
        assert same
        assert bool(warned) == (rank < 2), "only that rank's host"
        assert all("are sent over the group's backend instead" in text for text in warned)


def die_inside(rank: int, world: int, job: Job) -> tuple[ErrorText, ErrorText]:
    """Rank 1 dies between the exchange with other hosts and the operation inside its host."""
    dispatcher: Any = workers.build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    x_TD, ids_TK = torch.ones(6, 8), torch.arange(12).view(6, 2) % 8
    sent = dispatcher.dispatch(x_TD, ids_TK, label="moe.3")
    if rank == 1:
        dispatcher._inside.sum = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    error_texts = caught(lambda: dispatcher.combine(sent.rows_RD, torch.ones(6, 2), sent.handle))
    return error_texts, caught(lambda: dispatcher.dispatch(x_TD, ids_TK))


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_rank_lost_inside_its_host_is_an_error_on_every_rank(deterministic: bool, pool4: RankPool) -> None:
    job = replace(Job("hierarchical", timeout_s=60.0), deterministic=deterministic)
    found = pool4.run(die_inside, job, timeout=40, expect_dead={1})
    for rank, error_texts in enumerate(found):
        if rank != 1:
            (raised, message), (again, _) = error_texts
            assert raised == "PeerDied" and "rank 1" in message, error_texts
            assert again == "PeerDied", "later calls raise again"


def die_between_chunks(rank: int, world: int, job: Job) -> tuple[ErrorText, ErrorText]:
    """Rank 1 dies after it has sent one of several chunks of returned rows."""
    dispatcher: Any = How(job, chunks=CUT).build(cases.BY_NAME["plain"], rank, world)
    x_TD, ids_TK = torch.ones(6, 8), torch.arange(12).view(6, 2) % 8
    sent = dispatcher.dispatch(x_TD, ids_TK, label="moe.3")
    start, left = dispatcher.channel.start_all_to_all, 0

    def dies(rows: Tensor, send: list[int], receive: list[int], description: str) -> Any:
        nonlocal left
        left += rows.dim() == 2
        if left == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(rows, send, receive, description)

    if rank == 1:
        dispatcher.channel.start_all_to_all = dies
    error_texts = caught(lambda: dispatcher.combine(sent.rows_RD, torch.ones(6, 2), sent.handle))
    return error_texts, caught(lambda: dispatcher.dispatch(x_TD, ids_TK))


def test_a_rank_lost_between_chunks_is_an_error_on_every_rank(pool4: RankPool) -> None:
    found = pool4.run(die_between_chunks, Job("hierarchical", timeout_s=60.0), timeout=40, expect_dead={1})
    for rank, error_texts in enumerate(found):
        if rank != 1:
            (raised, message), (again, _) = error_texts
            assert raised == "PeerDied" and "rank 1" in message, error_texts
            assert again == "PeerDied", "later calls raise again"
