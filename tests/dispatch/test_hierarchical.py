"""Hierarchical dispatch: bits do not depend on hosts, inter-host bytes equal the formula, faults raise on all ranks."""

from __future__ import annotations

import os
import signal
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.group_setup import communicator_of, heap_of
from moe_comm.dispatch import WireDtypes, make_dispatcher
from moe_comm.dispatch.hierarchical.dispatcher import HierarchicalDispatcher
from moe_comm.dispatch.hierarchical.rail import WireBytes
from moe_comm.dispatch.hierarchical.relay_routes import HostMap
from moe_comm.errors import ConfigError, HeapError
from moe_comm.runtime.memory import block
from moe_comm.topology import ExpertPlacement
from tests.dispatch import cases, workers
from tests.dispatch.cases import Case
from tests.dispatch.inter_host import inter_host_bytes
from tests.dispatch.workers import ErrorText, Job, Result, caught, heap_constants, two_hosts
from tests.pool import RankPool, on_ranks

FIELDS = ("rows_RD", "y_TD", "x_grad_TD", "weights_grad_TK", "experts_grad")
MIXED = WireDtypes("fp8_block_pow2", "bf16", "bf16", "fp8_token")
ONE_CHUNK, THREE_CHUNKS = (1, 1), (1, 3)
"""Minimum bytes, and maximum number, of chunks."""
ALL_FP8 = WireDtypes("fp8_token", "fp8_block", "fp8_block", "fp8_token")
GROUP_SCALES = WireDtypes("fp8_block", "bf16", "fp8_group", "fp8_group")
FEW_CASES = tuple(
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
class Settings:
    """Settings of a dispatcher. hosts: the host of each rank; two hosts by default. chunks: of rows between hosts."""

    job: Job
    hosts: tuple[int, ...] | None = None
    chunks: tuple[int, int] = ONE_CHUNK

    def build(self, case: Case, rank: int, world: int) -> HierarchicalDispatcher:
        placement = ExpertPlacement.of(case.num_experts, world, case.experts_per_rank(world))
        hosts = self.hosts or two_hosts(world)
        dispatcher = HierarchicalDispatcher(placement, dist.group.WORLD, rank, self.job.options, hosts)
        dispatcher.rail.min_chunk_bytes, dispatcher.rail.max_chunks = self.chunks
        return dispatcher


def run_few(rank: int, world: int, settings: Settings) -> list[Result]:
    results = []
    for case in FEW_CASES:
        batch, experts = cases.make(case)
        dispatcher = settings.build(case, rank, world)
        own = experts[dispatcher.local_experts.start : dispatcher.local_experts.stop]
        results.append(workers.layer(dispatcher, case, batch.part(case, rank, world), own))
    return results


def assert_bits_of_one_rank(ranks: list[list[Result]], wire_dtypes: WireDtypes = WireDtypes()) -> None:  # noqa: B008 - frozen
    for case, of_ranks in zip(FEW_CASES, zip(*ranks, strict=True), strict=True):
        whole = workers.run_case(case, Job("plain", wire_dtypes=wire_dtypes), None, 0, 1)
        for field in FIELDS:
            assert torch.equal(torch.cat([getattr(r, field) for r in of_ranks]), getattr(whole, field)), (case, field)


@pytest.mark.parametrize("hosts", [(4, 4, 9, 9, 1, 1, 3, 3), (5,) * 8, tuple(range(8))], ids=["4x2", "1x8", "8x1"])
def test_same_bits_on_any_number_of_hosts(hosts: tuple[int, ...], pool8: RankPool) -> None:
    """The contract suite covers 2 hosts of 1, 2 and 4 ranks with all its cases, in one chunk."""
    assert_bits_of_one_rank(pool8.run(run_few, Settings(Job("hierarchical"), hosts, (1, 2)), timeout=120))


@pytest.mark.parametrize("wire_dtypes", [WireDtypes(), MIXED, ALL_FP8], ids=["same", "mixed", "fp8"])
def test_same_bits_in_chunks_with_wire_dtypes(wire_dtypes: WireDtypes, pool4: RankPool) -> None:
    assert_bits_of_one_rank(
        pool4.run(run_few, Settings(Job("hierarchical", wire_dtypes=wire_dtypes), chunks=THREE_CHUNKS)), wire_dtypes
    )


@pytest.mark.parametrize("wire_dtypes", [WireDtypes(), GROUP_SCALES], ids=["same", "groups"])
def test_partial_sums_of_a_host_have_the_same_bits_in_chunks(wire_dtypes: WireDtypes, pool4: RankPool) -> None:
    job = Job("hierarchical", deterministic=False, wire_dtypes=wire_dtypes)
    unchunked, chunked = (pool4.run(run_few, Settings(job, chunks=chunks)) for chunks in (ONE_CHUNK, THREE_CHUNKS))
    for results, chunked_results in zip(unchunked, chunked, strict=True):
        for case, expected, actual in zip(FEW_CASES, results, chunked_results, strict=True):
            assert all(torch.equal(getattr(expected, field), getattr(actual, field)) for field in FIELDS), case


def without_native(rank: int, world: int, settings: Settings) -> list[Result]:
    comm = communicator_of(dist.group.WORLD)
    comm.native = False  # as if one rank had no native core
    try:
        return run_few(rank, world, settings)
    finally:
        comm.native = True


def test_same_bits_where_a_rank_lacks_the_native_core(pool4: RankPool) -> None:
    assert_bits_of_one_rank(pool4.run(without_native, Settings(Job("hierarchical"))))


@pytest.mark.parametrize("wire_dtypes", [WireDtypes(), GROUP_SCALES], ids=["same", "groups"])
def test_partial_sums_of_a_host_are_close_without_determinism(wire_dtypes: WireDtypes, pool4: RankPool) -> None:
    job = Job("hierarchical", deterministic=False, wire_dtypes=wire_dtypes)
    ranks = pool4.run(run_few, Settings(job))
    for case, of_ranks in zip(FEW_CASES, zip(*ranks, strict=True), strict=True):
        whole = workers.run_case(case, Job("plain"), None, 0, 1)
        for field in FIELDS:
            actual = torch.cat([getattr(r, field) for r in of_ranks]).double()
            expected = getattr(whole, field).double()
            allowed = 0.06 if wire_dtypes is GROUP_SCALES else 8 * torch.finfo(case.dtype).eps
            assert (actual - expected).norm() <= allowed * expected.norm(), (case.name, field)
            assert actual.shape == expected.shape


# --- bytes ---


def record_wire_bytes(
    rank: int, world: int, settings_and_case: tuple[Settings, Case]
) -> tuple[dict[str, WireBytes], int, int]:
    """Return the inter-host bytes that the dispatcher reports, those passed to its channel, and the exchanges."""
    case = settings_and_case[1]
    batch, experts = cases.make(case)
    dispatcher: Any = settings_and_case[0].build(case, rank, world)
    num_bytes = exchanges = 0
    start = dispatcher.channel.start_all_to_all

    def counted(rows: Tensor, send: list[int], receive: list[int], *args: Any) -> Any:
        nonlocal num_bytes, exchanges
        exchanges += 1
        inter_host_rows = sum(n for to, n in enumerate(send) if two_hosts(world)[to] != two_hosts(world)[rank])
        num_bytes += inter_host_rows * (rows.nbytes // max(rows.shape[0], 1))
        return start(rows, send, receive, *args)

    dispatcher.channel.start_all_to_all = counted
    own = experts[dispatcher.local_experts.start : dispatcher.local_experts.stop]
    workers.layer(dispatcher, case, batch.part(case, rank, world), own)
    return dispatcher.wire_bytes, num_bytes, exchanges


@pytest.mark.parametrize(
    ("deterministic", "wire_dtypes"),
    [(True, WireDtypes()), (True, MIXED), (False, WireDtypes()), (False, MIXED), (False, GROUP_SCALES)],
    ids=["same", "mixed", "sums, same", "sums, mixed", "sums, groups"],
)
def test_inter_host_bytes_equal_the_formula(deterministic: bool, wire_dtypes: WireDtypes, pool4: RankPool) -> None:
    settings = Settings(Job("hierarchical", deterministic=deterministic, wire_dtypes=wire_dtypes), chunks=THREE_CHUNKS)
    for case in (
        Case("random", hidden=136, top_k=3, tokens=150),
        Case("dropped", routing="dropped", top_k=5, tokens=150, dtype=torch.bfloat16, weights_grad=False),
        Case("one expert", routing="one_expert", num_experts=5, split="first"),
        Case("none", tokens=0),
    ):
        ranks = pool4.run(record_wire_bytes, (settings, case))
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
            assert sum((reported[op] for reported, _, _ in ranks), WireBytes()) == expected, (case.name, op)
        assert sum(num_bytes for _, num_bytes, _ in ranks) == sum(op_bytes.total for op_bytes in formula.values())


def test_the_number_of_chunks_follows_the_bytes_of_a_block(pool4: RankPool) -> None:
    """The tokens of ranks 0 and 1 have both experts on host 1, so a rank of host 1 receives 2 rows of 32 bytes."""
    case = Case("half of it", tokens=2, routing="one_expert", split="even")
    results = {
        chunks: pool4.run(record_wire_bytes, (Settings(Job("hierarchical"), chunks=chunks), case))
        for chunks in (ONE_CHUNK, (64, 8), (32, 8), (1, 2))
    }
    exchanges = {chunks: {result[2] for result in ranks} for chunks, ranks in results.items()}
    # 5 exchanges forth (ids, 2 of rows, 2 of weights) and 3 back (the gradient of weights, 2 of rows).
    assert exchanges[ONE_CHUNK] == {8}
    assert exchanges[(64, 8)] == {8}
    assert exchanges[(32, 8)] == {8 + 2}, "returned rows must be sent in two chunks"
    assert exchanges[(1, 2)] == {8 + 4}, "all rows must be sent in two chunks"


# --- faults ---


@on_ranks(4)
@pytest.mark.parametrize("hosts", [[0, 1, 0, 1], [0, 0, 0, 1]])
def test_invalid_hosts_are_refused_on_every_rank(rank: int, world: int, hosts: list[int]) -> None:
    with pytest.raises(ConfigError, match="equal numbers of ranks"):
        HierarchicalDispatcher(ExpertPlacement.balanced(4, world), dist.group.WORLD, rank, Job("").options, hosts)


@on_ranks(2)
def test_a_single_host_is_refused_and_the_error_names_an_alternative() -> None:
    with pytest.raises(ConfigError, match="all ranks are on one host; use 'shared_memory'"):
        make_dispatcher(4, dist.group.WORLD, backend="hierarchical")


def fill(heap: Any) -> list[Tensor]:
    """Blocks that leave no room in ``heap`` for rows."""
    blocks: list[Tensor] = []
    while True:
        try:
            blocks.append(block(heap, 1, 1 << 14, torch.float32))
        except HeapError:
            return blocks


@on_ranks(4)
@pytest.mark.parametrize("operation", ["_send", "_sum", "_spread"])
def test_rows_use_the_backend_if_shared_memory_is_full(rank: int, world: int, operation: str) -> None:
    """The shared memory of rank 1 is full before ``operation``. Each rank receives 150 rows of 8 KB."""
    pytest.importorskip("moe_comm._C", reason="the native core is not built")
    hosts = HostMap.of(two_hosts(world))
    group = dist.new_group()
    own = communicator_of(communicator_of(group).subgroup(hosts.members(hosts.host(rank)), 30.0))
    with heap_constants(INITIAL_BYTES=1 << 20, RESERVE_BYTES=8 << 20):
        heap = heap_of(own, 30.0).heap
    case = Case("wide", tokens=600, hidden=2048, top_k=1, split="even")
    batch, experts = cases.make(case)
    dispatcher = workers.build(case, group, Job("hierarchical"), rank, world)
    original, blocks = getattr(dispatcher, operation), []

    def fill_then_run(*arguments: Any) -> Any:
        blocks.extend(fill(heap))
        return original(*arguments)

    if rank == 1:
        setattr(dispatcher, operation, fill_then_run)
    span = dispatcher.local_experts
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        result = workers.layer(dispatcher, case, batch.part(case, rank, world), experts[span.start : span.stop])
    whole = workers.layer(workers.build(case, None, Job("plain"), 0, 1), case, batch, experts)
    rows = case.rows(rank, world)
    for field in ("y_TD", "x_grad_TD", "weights_grad_TK"):
        assert torch.equal(getattr(result, field), getattr(whole, field)[rows]), field
    texts = [str(w.message) for w in caught_warnings if issubclass(w.category, RuntimeWarning)]
    assert bool(texts) == (rank < 2), "only the host of rank 1 must warn"
    assert all("are sent over the group's backend instead" in text for text in texts)


def die_inside_host(rank: int, world: int, job: Job) -> tuple[ErrorText, ErrorText]:
    """Rank 1 dies between the exchange with other hosts and the operation inside its host."""
    dispatcher: Any = workers.build(cases.BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    x_TD, ids_TK = torch.ones(6, 8), torch.arange(12).view(6, 2) % 8
    sent = dispatcher.dispatch(x_TD, ids_TK, label="moe.3")
    if rank == 1:
        dispatcher._inside.sum = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    error_texts = caught(lambda: dispatcher.combine(sent.rows_RD, torch.ones(6, 2), sent.handle))
    return error_texts, caught(lambda: dispatcher.dispatch(x_TD, ids_TK))


def die_between_chunks(rank: int, world: int, job: Job) -> tuple[ErrorText, ErrorText]:
    """Rank 1 dies after it has sent one of several chunks of returned rows."""
    dispatcher: Any = Settings(job, chunks=THREE_CHUNKS).build(cases.BY_NAME["plain"], rank, world)
    x_TD, ids_TK = torch.ones(6, 8), torch.arange(12).view(6, 2) % 8
    sent = dispatcher.dispatch(x_TD, ids_TK, label="moe.3")
    start, sent_chunks = dispatcher.channel.start_all_to_all, 0

    def start_or_die(rows: Tensor, send: list[int], receive: list[int], *args: Any) -> Any:
        nonlocal sent_chunks
        sent_chunks += rows.dim() == 2
        if sent_chunks == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return start(rows, send, receive, *args)

    if rank == 1:
        dispatcher.channel.start_all_to_all = start_or_die
    error_texts = caught(lambda: dispatcher.combine(sent.rows_RD, torch.ones(6, 2), sent.handle))
    return error_texts, caught(lambda: dispatcher.dispatch(x_TD, ids_TK))


@pytest.mark.parametrize(
    ("die", "deterministic"), [(die_inside_host, True), (die_inside_host, False), (die_between_chunks, True)]
)
def test_a_rank_lost_in_an_operation_is_an_error_on_every_rank(die: Any, deterministic: bool, pool4: RankPool) -> None:
    job = Job("hierarchical", timeout_s=200.0, deterministic=deterministic)
    for rank, error_texts in enumerate(pool4.run(die, job, timeout=120, expect_dead={1})):
        if rank != 1:
            (raised, message), (again, _) = error_texts
            assert raised == "PeerDied" and "rank 1" in message, error_texts
            assert again == "PeerDied", "later calls must raise again"
