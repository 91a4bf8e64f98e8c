"""Features that only ``peer_to_peer`` has, with its kernels run on CPU tensors. test_contract.py tests the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import DispatchOptions, WireDtypes, make_dispatcher
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.errors import ConfigError, InputError, PeerTimeout, RankMismatch
from moe_comm.gpu import protocol
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig, check_grads
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ExpertPlacement
from moe_comm.topology.balance import Balance
from tests.dispatch import cases, workers
from tests.dispatch.cases import BY_NAME
from tests.dispatch.workers import ErrorText, Job, caught
from tests.pool import RankPool, on_ranks
from tests.support.launches import HookedLauncher

pytest.importorskip("moe_comm._C", reason="the native core is not built")

PEERS = PeerToPeerOptions(heap_bytes=1 << 20, emulate=True)
JOB = Job("peer_to_peer", peers=PEERS)
SOME = ("plain", "some slots dropped", "uneven experts, one rank without", "hidden 33", "strided bfloat16")


def one_rank(options: PeerToPeerOptions = PEERS, experts: int = 8, **more: Any) -> PeerToPeerDispatcher:
    settings = DispatchOptions(peer_to_peer=options, **more)
    return PeerToPeerDispatcher(ExpertPlacement.balanced(experts, 1), None, 0, settings, "cpu")


def same_bits(actual: workers.Result, expected: workers.Result) -> bool:
    fields = ("rows_RD", "y_TD", "x_grad_TD", "weights_grad_TK", "experts_grad")
    return all(torch.equal(getattr(actual, f), getattr(expected, f)) for f in fields)


@pytest.mark.parametrize("name", SOME)
def test_one_rank_has_the_bits_of_plain_torch(name: str) -> None:
    case = BY_NAME[name]
    batch, experts = cases.make(case)
    expected = workers.run_case(case, Job("plain"), None, 0, 1)
    assert same_bits(workers.layer(one_rank(experts=case.num_experts), case, batch, experts), expected)


def test_recorded_bytes_are_not_negative_if_slots_are_dropped() -> None:
    """The number of rows that stay on the rank is an estimate for balanced routing, without dropped slots."""
    dispatcher = one_rank()
    handle = dispatcher.dispatch(torch.ones(4, 32), torch.full((4, 2), -1)).handle
    assert dispatcher.sent_bytes("dispatch", handle) == dispatcher.sent_bytes("combine", handle) == 0


# --- relay, wire dtypes, numbers of blocks: the same bits ---


def several(rank: int, world: int, job: Job) -> list[tuple[str, bool]]:
    """Run SOME cases with the settings of ``job``. Return whether the results equal those of ``all_to_all``."""
    results = []
    for name in SOME:
        actual = workers.run_case(BY_NAME[name], job, dist.group.WORLD, rank, world)
        reference_job = replace(job, backend="all_to_all")
        expected = workers.run_case(BY_NAME[name], reference_job, dist.group.WORLD, rank, world)
        results.append((name, same_bits(actual, expected)))
    return results


@pytest.mark.parametrize(
    "job",
    [
        replace(JOB, peers=replace(PEERS, relay=True)),
        replace(JOB, peers=replace(PEERS, num_blocks=1)),
        replace(JOB, peers=replace(PEERS, num_blocks=3, bulk_copies=True)),
        replace(JOB, peers=replace(PEERS, num_blocks=1000)),
        replace(JOB, wire_dtypes=WireDtypes("fp8_block", "fp8_token", "fp8_block", "fp8_block")),
        replace(JOB, wire_dtypes=WireDtypes("fp8_token_pow2", "bf16"), peers=replace(PEERS, relay=True)),
    ],
    ids=["relay", "one block", "bulk copies", "a block a token", "fp8", "fp8, relay"],
)
def test_settings_do_not_change_bits(job: Job, pool4: RankPool) -> None:
    for of_rank in pool4.run(several, job):
        assert of_rank == [(name, True) for name in SOME]


@on_ranks(4)
@pytest.mark.parametrize("overlap", [None, Overlap(executor="pipelined")], ids=["serial", "pipelined"])
def test_gradients_of_a_layer_over_peer_to_peer_are_correct(overlap: Overlap | None) -> None:
    options = replace(JOB, peers=replace(PEERS, heap_bytes=4 << 20)).options
    config = MoEConfig(8, 16, RouterConfig(8, 2))
    layer = MoELayer.build(config, dist.group.WORLD, backend="peer_to_peer", options=options, overlap=overlap)
    report = check_grads(layer, tokens=5)
    assert layer.dispatcher.name == "peer_to_peer" and report.ok, report


# --- room ---


def no_room(rank: int, world: int, job: Job) -> tuple[ErrorText, ErrorText, bool]:
    """Dispatch more rows than the last rank's heap can hold, combine while the heap is full, and run a valid call."""
    dispatcher = workers.build(BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    x_TD, ids_TK = torch.full((8, 64), float(rank), device=job.device), torch.full((8, 1), 7, device=job.device)
    full = caught(lambda: dispatcher.dispatch(x_TD, ids_TK, label="moe.3"))
    dispatched = dispatcher.dispatch(x_TD[:1], torch.tensor([[2 * rank]], device=job.device), label="moe.3")
    reserved = []
    if rank == world - 1:
        reserved.append(dispatcher.memory.operations.heap.reserve())  # type: ignore[attr-defined]
    weights_TK = torch.ones(1, 1, device=job.device)
    combine = caught(lambda: dispatcher.combine(dispatched.rows_RD.clone(), weights_TK, dispatched.handle))
    reserved.clear()
    y_TD = dispatcher.combine(dispatched.rows_RD.clone(), weights_TK, dispatched.handle)
    return full, combine, torch.equal(y_TD, x_TD[:1])


def test_a_full_heap_raises_on_every_rank_and_ranks_stay_usable(pool4: RankPool) -> None:
    job = replace(JOB, peers=replace(PEERS, heap_bytes=4096))
    for full, combine, works_on in pool4.run(no_room, job):
        assert full[0] == "HeapError" and "rank 3 has no room in its heap for 32 rows" in full[1], full
        assert "8192 bytes" in full[1] and "4096" in full[1] and "moe.3" in full[1], full
        assert combine[0] == "HeapError" and works_on, combine


@on_ranks(4)
def test_the_heap_is_empty_after_forward_and_backward(rank: int, world: int) -> None:
    case = BY_NAME["plain"]
    dispatcher = workers.build(case, dist.group.WORLD, JOB, rank, world)
    own, (batch, experts) = dispatcher.local_experts, cases.make(case)
    for _ in range(3):
        workers.layer(dispatcher, case, batch.part(case, rank, world), experts[own.start : own.stop])
        assert dispatcher.memory.operations.heap.used == 0  # type: ignore[attr-defined]


# --- fixed capacity ---


def fixed(rank: int, world: int, job: Job) -> tuple[bool, bool, int, int]:
    """Compare with ``dispatch`` for a sufficient capacity, then use one that is too small."""
    dispatcher = workers.build(BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    assert isinstance(dispatcher, PeerToPeerDispatcher)
    g = torch.Generator().manual_seed(rank)
    x_TD, weights_TK = torch.randn(6, 8, generator=g).to(job.device), torch.rand(6, 2, generator=g).to(job.device)
    ids_TK = torch.randint(-1, 8, (6, 2), generator=g).to(job.device)

    def run(capacity: bool) -> list[Tensor]:
        x, w = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
        if capacity:
            sent = dispatcher.dispatch_fixed(x, ids_TK)
            rows, handle, ends = sent.rows_CD, sent.handle, sent.ends_E.tolist()
        else:
            dispatched = dispatcher.dispatch(x, ids_TK)
            rows, handle = dispatched.rows_RD, dispatched.handle
            ends = torch.tensor(handle.rows_per_expert).cumsum(0).tolist()
        y_TD = dispatcher.combine(rows * 2, w, handle)
        y_TD.backward(torch.ones_like(y_TD))
        assert x.grad is not None and w.grad is not None
        return [y_TD.detach(), x.grad, w.grad, rows.detach()[: ends[-1]].clone(), x.new_tensor(ends)]

    same_bits_as_exact = all(map(torch.equal, run(True), run(False)))
    # Each of the 4 ranks sends 6 tokens to the last expert: 24 rows, but the capacity is 16.
    sent = dispatcher.dispatch_fixed(x_TD, torch.full((6, 1), 7, device=job.device))
    y_TD = dispatcher.combine(sent.rows_CD, torch.ones(6, 1, device=job.device), sent.handle)
    num_kept = max(0, min(6, 16 - 6 * rank))
    dropped_are_zero = torch.equal(y_TD[:num_kept], x_TD[:num_kept]) and not bool(y_TD[num_kept:].any())
    return same_bits_as_exact, dropped_are_zero, dispatcher.overflow, sent.ends_E[-1].item()  # type: ignore[return-value]


def test_fixed_capacity_has_the_bits_of_exact_dispatch_and_drops_the_rest(pool4: RankPool) -> None:
    ranks = pool4.run(fixed, replace(JOB, peers=replace(PEERS, capacity_rows=16)))
    assert [of_rank[:2] for of_rank in ranks] == [(True, True)] * 4
    assert [of_rank[2] for of_rank in ranks] == [0, 0, 2, 6], "overflow must be counted on the rank that sent the slots"
    assert [of_rank[3] for of_rank in ranks] == [0, 0, 0, 16]


def test_fixed_dispatch_needs_a_capacity() -> None:
    with pytest.raises(ConfigError, match="capacity_rows"):
        one_rank().dispatch_fixed(torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int64))


@on_ranks(4)
def test_dispatch_and_dispatch_fixed_are_a_mismatch_on_every_rank(rank: int, world: int) -> None:
    """Call ``dispatch_fixed`` on the last rank and ``dispatch`` on the others. Then make the same call on all ranks."""
    job = replace(JOB, peers=replace(PEERS, capacity_rows=16))
    dispatcher = workers.build(BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    assert isinstance(dispatcher, PeerToPeerDispatcher)
    x_TD, ids_TK = torch.full((3, 8), float(rank)), torch.zeros(3, 1, dtype=torch.int64)
    call = dispatcher.dispatch_fixed if rank == world - 1 else dispatcher.dispatch
    with pytest.raises(RankMismatch, match=r"operation.*rank 0: dispatch, .*rank 3: dispatch_fixed"):
        call(x_TD, ids_TK, label="moe.3")
    assert dispatcher.memory.operations.heap.used == 0
    rows_RD = dispatcher.dispatch(x_TD, ids_TK).rows_RD
    expected_RD = torch.arange(world if rank == 0 else 0).repeat_interleave(3)[:, None].expand(-1, 8)
    assert torch.equal(rows_RD, expected_RD.float())


# --- fast combine ---

FAST = replace(JOB, deterministic=False, peers=replace(PEERS, heap_bytes=4 << 20, fast_combine=True))
MOST_ROUNDINGS = 4
"""Roundings of a value: in the matmul of the expert, as its output, as a partial sum, and in the output."""


def expected_output(case: cases.Case, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Return the output of a rank in float64, and its tolerance."""
    batch, experts = cases.make(case)
    part, wide = batch.part(case, rank, world), experts.double()
    y_TD, sizes_TD = torch.zeros(2, *part.x_TD.shape, dtype=torch.float64)
    for k in range(case.top_k):
        kept_T = part.ids_TK[:, k] >= 0
        x_ND, of_N = part.x_TD[kept_T].double(), wide[part.ids_TK[kept_T, k].long()]
        weight_N1 = part.weights_TK[kept_T, k, None].double()
        for into, x, w in ((y_TD, x_ND, of_N), (sizes_TD, x_ND.abs(), of_N.abs())):
            into[kept_T] += weight_N1 * (x * w if w.dim() == 2 else (x[:, None] @ w)[:, 0])
    return y_TD, MOST_ROUNDINGS * torch.finfo(case.dtype).eps * sizes_TD


def fast(rank: int, world: int, job: Job) -> list[tuple[str, bool, bool, bool]]:
    """Run all cases. Return whether outputs are within the tolerance, gradients have the same bits, and outputs too."""
    results = []
    for case in cases.CASES:
        actual = workers.run_case(case, job, dist.group.WORLD, rank, world)
        exact_job = replace(job, peers=replace(job.peers, fast_combine=False))
        exact = workers.run_case(case, exact_job, dist.group.WORLD, rank, world)
        y_TD, tolerance_TD = expected_output(case, rank, world)
        near = bool(((actual.y_TD.double() - y_TD).abs() <= tolerance_TD).all())
        fields = ("rows_RD", "x_grad_TD", "experts_grad", *(["weights_grad_TK"] if case.weights_grad else []))
        gradients_are_same = all(torch.equal(getattr(actual, f), getattr(exact, f)) for f in fields)
        results.append((case.name, near, gradients_are_same, torch.equal(actual.y_TD, exact.y_TD)))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_fast_combine_is_within_the_rounding_of_the_dtype_and_keeps_gradients(
    world: int, pools: dict[int, RankPool]
) -> None:
    of_ranks = pools[world].run(fast, FAST)
    for of_rank in of_ranks:
        for name, near, same_gradients, _ in of_rank:
            assert near and same_gradients, name
    same_outputs = {name: all(of_rank[i][3] for of_rank in of_ranks) for i, (name, *_) in enumerate(of_ranks[0])}
    assert same_outputs["top-k 1"], "without several rows per token and rank nothing is reduced"
    assert not same_outputs["duplicate experts in a token"], "partial sums must be rounded at the owner"


@on_ranks(4)
def test_a_layer_uses_fast_combine(rank: int) -> None:
    config = MoEConfig(8, 16, RouterConfig(8, 4))
    x_TD = torch.randn(64, 8, generator=torch.Generator().manual_seed(rank))
    outputs = []
    for options in (FAST.options, replace(FAST, peers=replace(FAST.peers, fast_combine=False)).options):
        torch.manual_seed(3)
        layer = MoELayer.build(config, dist.group.WORLD, backend="peer_to_peer", options=options)
        outputs.append(layer(x_TD).detach())
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    assert not torch.equal(*outputs)
    layer = MoELayer.build(config, dist.group.WORLD, backend="peer_to_peer", options=FAST.options)
    report = check_grads(layer, tokens=5)
    assert report.ok, report


@on_ranks(4)
@pytest.mark.parametrize("capacity", [16, 256])
def test_fast_combine_of_fixed_capacity_skips_slots_without_a_row(rank: int, world: int, capacity: int) -> None:
    """Unused rows are not initialised."""
    job = replace(FAST, peers=replace(FAST.peers, capacity_rows=capacity))
    dispatcher = workers.build(BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    assert isinstance(dispatcher, PeerToPeerDispatcher)
    g = torch.Generator().manual_seed(rank)
    x_TD, weights_TK = torch.randn(6, 8, generator=g), torch.rand(6, 6, generator=g)
    ids_TK = torch.randint(-1, 8, (6, 6), generator=g)
    sent = dispatcher.dispatch_fixed(x_TD, ids_TK)
    rows_CD = torch.full_like(sent.rows_CD, torch.nan)
    rows_CD[: sent.ends_E[-1]] = sent.rows_CD[: sent.ends_E[-1]]
    y_TD = dispatcher.combine(rows_CD, weights_TK, sent.handle)
    kept_TK = sent.handle.state >= 0
    expected_TD = ((weights_TK * kept_TK).sum(1, keepdim=True) * x_TD).double()
    torch.testing.assert_close(y_TD.double(), expected_TD, rtol=1e-5, atol=1e-5)
    assert kept_TK.any()


# --- low latency ---


def few(rank: int, world: int, job: Job) -> tuple[bool, ErrorText, ErrorText]:
    """Compare five low-latency rounds with dispatch and combine. Then make two calls that must be refused."""
    dispatcher = workers.build(BY_NAME["plain"], dist.group.WORLD, job, rank, world)
    assert isinstance(dispatcher, PeerToPeerDispatcher)
    same_as_dispatch = True
    for step in range(5):
        g = torch.Generator().manual_seed(10 * step + rank)
        tokens = (rank + step) % 4
        x_TD = torch.randn(tokens, 40, generator=g)
        ids_TK = torch.rand(tokens, 8, generator=g).argsort(1)[:, :3]
        ids_TK[:, 1:].masked_fill_(torch.rand(tokens, 2, generator=g) < 0.3, -1)
        weights_TK = torch.rand(tokens, 3, generator=g)
        x_TD, ids_TK, weights_TK = (t.to(job.device) for t in (x_TD, ids_TK, weights_TK))
        expected = dispatcher.dispatch(x_TD, ids_TK)
        y_TD = dispatcher.combine(expected.rows_RD * 2, weights_TK, expected.handle)
        sent = dispatcher.low_latency_dispatch(x_TD, ids_TK, 4)
        rows_LND, counts_LW = sent.receive()
        rows = [rows_LND[e, 4 * w :][: counts_LW[e, w]] for e in range(len(counts_LW)) for w in range(world)]
        same_as_dispatch &= torch.equal(torch.cat(rows), expected.rows_RD)
        in_place = step % 2 == 1
        results = torch.mul(rows_LND, 2, out=sent.results) if in_place else rows_LND * 2
        same_as_dispatch &= torch.equal(dispatcher.low_latency_combine(results, weights_TK, sent), y_TD)
    x_TD, ids_TK = torch.ones(5, 40, device=job.device), torch.zeros(5, 1, dtype=torch.int64, device=job.device)
    too_many_tokens = caught(lambda: dispatcher.low_latency_dispatch(x_TD, ids_TK, 4))
    sent = dispatcher.low_latency_dispatch(x_TD[:1], ids_TK[:1], 4)
    dispatch_in_between = caught(lambda: dispatcher.dispatch(x_TD[:1], ids_TK[:1]))
    dispatcher.low_latency_combine(sent.receive()[0], x_TD[:1, :1], sent)
    return same_as_dispatch, too_many_tokens, dispatch_in_between


@pytest.mark.parametrize("wire_dtype", ["same", "fp8_block"])
def test_low_latency_has_the_bits_of_dispatch_and_combine(wire_dtype: Any, pool4: RankPool) -> None:
    for same_result, too_many, in_between in pool4.run(few, replace(JOB, wire_dtypes=WireDtypes(dispatch=wire_dtype))):
        assert same_result
        assert too_many[0] == "InputError" and "got 5" in too_many[1]
        assert in_between[0] == "ConfigError" and "low_latency_combine" in in_between[1]


@on_ranks(4)
def test_low_latency_combine_does_not_wait_for_ranks_whose_experts_it_does_not_use(rank: int, world: int) -> None:
    """Combine while the last rank has not computed, if ``rank`` does not use its experts. Then use all experts."""
    dispatcher = workers.build(BY_NAME["plain"], dist.group.WORLD, JOB, rank, world)
    assert isinstance(dispatcher, PeerToPeerDispatcher)
    late, weights_TK = world - 1, torch.ones(2, 1)
    for step in range(6):
        x_TD = torch.full((2, 8), float(10 * step + rank))
        owner = late if rank == late else (rank + 1 + step) % late
        ids_TK = torch.tensor([[2 * owner], [2 * owner + 1]])
        sent = dispatcher.low_latency_dispatch(x_TD, ids_TK, 2)
        rows_LND, _ = sent.receive()
        if rank == late:
            dist.barrier()  # the other ranks have completed the combine
        y_TD = dispatcher.low_latency_combine(rows_LND * 3, weights_TK, sent)
        if rank != late:
            dist.barrier()
        assert torch.equal(y_TD, 3 * x_TD)
        ids_TK = torch.tensor([[rank], [4 + rank]])
        sent = dispatcher.low_latency_dispatch(x_TD, ids_TK, 2)
        assert torch.equal(dispatcher.low_latency_combine(sent.receive()[0], weights_TK, sent), x_TD)
    sent = dispatcher.low_latency_dispatch(x_TD, ids_TK, 2)
    with pytest.raises(ConfigError, match=r"receive\(\)"):
        dispatcher.low_latency_combine(sent.results, weights_TK, sent)
    dispatcher.low_latency_combine(sent.receive()[0], weights_TK, sent)


# --- launches ---


def test_operations_launch_no_kernel_twice_and_combine_reads_rows_of_the_heap_in_place() -> None:
    launches: list[str] = []
    used_by_sum: list[int] = []

    def record(kernel: str) -> None:
        launches.append(kernel)
        if kernel == "sum":
            used_by_sum.append(dispatcher.memory.operations.heap.used)  # type: ignore[attr-defined]

    options = DispatchOptions(peer_to_peer=replace(PEERS, capacity_rows=9))
    dispatcher = PeerToPeerDispatcher(ExpertPlacement.balanced(2, 1), None, 0, options, "cpu", HookedLauncher(record))
    x_TD, ids_TK, weights_TK = torch.ones(2, 6, requires_grad=True), torch.tensor([[0, 0], [0, 1]]), torch.ones(2, 2)
    sent = dispatcher.dispatch(x_TD, ids_TK)
    assert launches == ["count", "scan", "push", "arrive"]  # scan runs meet
    used = dispatcher.memory.operations.heap.used  # type: ignore[attr-defined]
    launches.clear()
    dispatcher.combine(sent.rows_RD, weights_TK.requires_grad_(), sent.handle).sum().backward()
    assert launches == ["meet", "sum", "meet", "spread", "meet", "sum"]
    assert used_by_sum[0] == used
    launches.clear()
    dispatcher.dispatch_fixed(x_TD.detach(), ids_TK)
    assert launches == ["count", "scan", "push", "arrive"]
    few = ["ll_send", "ll_arrive", "ll_ready", "sum"]
    for expected in (["meet", "meet", *few], few):
        launches.clear()
        received = dispatcher.low_latency_dispatch(x_TD.detach(), ids_TK, 4)
        dispatcher.low_latency_combine(received.receive()[0], weights_TK.detach(), received)
        assert launches == expected


# --- faults ---


def test_a_reported_timeout_raises_in_every_later_call() -> None:
    """Write a fault to the report that a GPU would write, after the operation has returned."""
    dispatcher = one_rank()
    dispatcher.memory.operations._report[1:6] = torch.tensor([protocol.TIMED_OUT, 0, protocol.ARRIVED, 7, 6])
    for _ in range(2):
        with pytest.raises(PeerTimeout, match="for rank 0 to send its rows; its flag is 6, expected 7"):
            dispatcher.dispatch(torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int64), label="moe.3")
        dispatcher.memory.operations._report.zero_()
        assert dispatcher.memory.current.label == "", "an operation that failed must not stay in the group's memory"
    with pytest.raises(PeerTimeout):
        dispatcher.check()


def test_unsupported_inputs_are_refused() -> None:
    placement = ExpertPlacement.balanced(2, 1)
    with pytest.raises(ConfigError, match="emulate=True"):
        PeerToPeerDispatcher(placement, None, 0, DispatchOptions(), "cpu")
    with pytest.raises(InputError, match="float64"):
        one_rank().dispatch(torch.ones(1, 4, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ConfigError, match="deterministic=False"):
        one_rank(replace(PEERS, fast_combine=True))
    for name in ("heap_bytes", "num_blocks", "capacity_rows"):
        with pytest.raises(ConfigError, match=name):
            PeerToPeerOptions(**{name: 0})
    with pytest.raises(ConfigError, match="'memory' or None; got 'all'"):
        PeerToPeerOptions(capacity_rows="all")  # type: ignore[arg-type]
    for balance in (None, Balance()):
        with pytest.raises(ConfigError, match=r"Balance\(memory="):
            DispatchOptions(balance=balance, peer_to_peer=PeerToPeerOptions(capacity_rows="memory"))


@on_ranks(4)
def test_cpu_tensors_need_emulation_and_auto_does_not_choose_peer_to_peer() -> None:
    group = dist.group.WORLD
    assert make_dispatcher(4, group, backend="peer_to_peer", options=JOB.options).name == "peer_to_peer"
    assert make_dispatcher(4, group, options=JOB.options).name == "shared_memory"
    with pytest.raises(ConfigError, match="emulate=True"):
        make_dispatcher(4, group, backend="peer_to_peer")
