"""Checksums of dispatched rows: a flipped bit raises on every rank with its location, and results do not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import Dispatcher, DispatchOptions, WireDtypes, make_dispatcher
from moe_comm.dispatch.checksums import row_sums
from moe_comm.dispatch.wire_dtype import WireDtypeName
from moe_comm.errors import CorruptPayload
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.overlap.executors.choice import dispatch_rows
from moe_comm.overlap.executors.chunked_rows import ChunkedSend
from moe_comm.overlap.executors.pipelined import PipelinedCall
from moe_comm.overlap.options import Overlap
from tests.dispatch import cases, workers
from tests.dispatch.test_contract import BACKENDS, usable
from tests.dispatch.workers import Job
from tests.pool import on_ranks

WIRE_DTYPES: tuple[WireDtypeName, ...] = ("same", "bf16", "fp8_token", "fp8_block", "fp8_token_pow2", "fp8_block_pow2")
CASE = cases.BY_NAME["plain"]
NAMES = ("plain", "some slots dropped", "all slots dropped")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("width", [1, 3, 8, 130])
def test_any_flipped_bit_changes_only_the_checksum_of_its_row(dtype: torch.dtype, width: int) -> None:
    rows_RD = torch.randn(5, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    before = row_sums(rows_RD)
    for bit in range(8 * dtype.itemsize):
        flipped = rows_RD.clone()
        _flip(flipped, 3, width - 1, bit)
        assert (row_sums(flipped) != before).tolist() == [False, False, False, True, False], bit


def test_checksums_do_not_depend_on_strides_or_alignment() -> None:
    rows_RD = torch.randn(6, 10, generator=torch.Generator().manual_seed(1)).bfloat16()
    unaligned = torch.empty(6 * 10 + 1, dtype=torch.bfloat16)[1:].view(6, 10)
    unaligned.copy_(rows_RD)
    for other in (cases.strided(rows_RD), unaligned, rows_RD.clone().requires_grad_()):
        assert torch.equal(row_sums(other), row_sums(rows_RD))
    assert row_sums(rows_RD[:0]).shape == (0,)
    assert row_sums(rows_RD[:, :0]).tolist() == [0] * 6


def _flip(rows_RD: Tensor, row: int, column: int, bit: int) -> None:
    """Flip one bit of one number, in place."""
    numbers = rows_RD[row, column : column + 1].view(torch.uint8)
    numbers[bit // 8] ^= torch.tensor(1 << bit % 8, dtype=torch.uint8)


def _corrupt_next_dispatch(dispatcher: Dispatcher, row: int) -> list[str]:
    """Flip a bit in ``row`` of the next dispatch that has this row. The returned list records the flip."""
    flips: list[str] = []
    send = dispatcher._send_with

    def corrupted(x_TD: Tensor, ids_TK: Tensor, words_TKX: Tensor | None) -> Any:
        rows_RD, handle, words_RX = send(x_TD, ids_TK, words_TKX)
        if not flips and rows_RD.shape[0] > row:
            rows_RD = rows_RD.clone()
            _flip(rows_RD, row, 1, 9)
            flips.append("flipped")
        return rows_RD, handle, words_RX

    dispatcher._send_with = corrupted  # type: ignore[method-assign]
    return flips


def _special_values(x_TD: Tensor) -> Tensor:
    """Rows with values that wire dtypes and kernels may treat differently."""
    x_TD = x_TD.clone()
    for row, value in enumerate((0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-42, -1e-42)):
        if row < x_TD.shape[0]:
            x_TD[row, row % x_TD.shape[1]] = value
    x_TD[-1:] = -0.0
    return x_TD


def check_flipped_bit(rank: int, world: int, job: Job, wire_dtype: str) -> None:
    """Run with and without checksums, which must give the same bits. Then flip a bit on the last rank."""
    group = dist.group.WORLD if dist.is_initialized() else None
    job = replace(job, wire_dtypes=WireDtypes(wire_dtype, wire_dtype, wire_dtype, wire_dtype))  # type: ignore[arg-type]
    for name in NAMES:
        case = replace(cases.BY_NAME[name], tokens=37, hidden=136)
        batch, _ = cases.make(case)
        part = batch.part(case, rank, world)
        dispatchers = [workers.build(case, group, replace(job, checksums=on), rank, world) for on in (False, True)]
        dispatchers[1].corruption.count_only = True
        results = []
        for candidate in dispatchers:
            x_TD = _special_values(part.x_TD).requires_grad_()
            rows = candidate.dispatch(x_TD, part.ids_TK, label=name)
            y_TD = candidate.combine(rows.rows_RD * 2, part.weights_TK, rows.handle)
            y_TD.backward(part.grad_TD)
            assert x_TD.grad is not None
            results.append((rows.rows_RD.detach(), y_TD.detach(), x_TD.grad))
        assert dispatchers[1].corruption.take() == 0
        assert all(_same_bits(a, b) for a, b in zip(*results, strict=True))
    dispatcher = dispatchers[1]
    dispatcher.corruption.count_only = False
    case = CASE
    batch, _ = cases.make(case)
    part = batch.part(case, rank, world)
    if rank == world - 1:
        _corrupt_next_dispatch(dispatcher, 2)
    rows = dispatcher.dispatch(part.x_TD, part.ids_TK, label="moe.1")
    where = "rank 3: " if 0 < world - 1 != rank else ""
    expected = f"^{where}rows of expert {6 if world > 1 else 0} from rank .* of layer 'moe.1'.*1 of . blocks differ"
    with pytest.raises(CorruptPayload, match=expected):
        dispatcher.combine(rows.rows_RD, part.weights_TK, rows.handle)
    again = dispatcher.dispatch(part.x_TD, part.ids_TK)
    dispatcher.combine(again.rows_RD, part.weights_TK, again.handle)
    dispatcher.close()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)) and torch.equal(a.isnan(), b.isnan())


@on_ranks(4, timeout=60)
@pytest.mark.parametrize(
    ("backend", "wire_dtype"),
    [*(("all_to_all", name) for name in WIRE_DTYPES), *zip(BACKENDS[1:], WIRE_DTYPES[:4], strict=True)],
)
def test_a_flipped_bit_raises_on_every_rank_and_intact_rows_pass(
    rank: int, world: int, backend: str, wire_dtype: str, device: str
) -> None:
    usable(backend, device)
    check_flipped_bit(rank, world, Job(backend, device), wire_dtype)


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
@pytest.mark.parametrize("backend", ["local", "plain"])
def test_a_flipped_bit_raises_on_a_single_rank(backend: str, wire_dtype: str) -> None:
    check_flipped_bit(0, 1, Job(backend), wire_dtype)


@on_ranks(4, timeout=60)
@pytest.mark.parametrize("checked", [True, False])
def test_the_next_dispatch_raises_unless_corruption_is_only_counted(rank: int, checked: bool) -> None:
    dispatcher = make_dispatcher(
        4, dist.group.WORLD, backend="all_to_all", options=DispatchOptions(30, checked=checked, checksums=True)
    )
    x_TD, ids_TK = torch.ones(4, 8), torch.tensor([[0], [1], [2], [3]])
    if rank == 0:
        _corrupt_next_dispatch(dispatcher, 0)
    rows = dispatcher.dispatch(x_TD, ids_TK)
    if not checked:
        dispatcher.combine(rows.rows_RD, torch.ones(4, 1), rows.handle)
    with pytest.raises(CorruptPayload, match="rows of expert 0 from rank 0 differ from those that were sent"):
        dispatcher.dispatch(x_TD, ids_TK)
    dispatcher.corruption.count_only = True
    if rank == 0:
        _corrupt_next_dispatch(dispatcher, 0)
    dispatcher.dispatch(x_TD, ids_TK)
    dispatcher.dispatch(x_TD, ids_TK)
    assert dispatcher.corruption.take() == (rank == 0)


@on_ranks(4, timeout=60)
def test_a_flipped_bit_in_a_chunk_is_counted_on_its_rank(rank: int) -> None:
    """Run a layer with chunked rows: without checksums, with them, and with a corrupt chunk on rank 1."""
    results, counts = [], []
    relu = Activation("relu", torch.relu, gated=False)
    for checksums, corrupt in ((False, False), (True, False), (True, True)):
        options = DispatchOptions(30, checksums=checksums)
        dispatcher = make_dispatcher(4, dist.group.WORLD, backend="all_to_all", options=options)
        dispatcher.corruption.count_only = True
        g = torch.Generator().manual_seed(rank)
        x_TD = torch.randn(12, 8, generator=g)
        ids_TK = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(12)])
        call = dispatch_rows(dispatcher, x_TD, ids_TK, torch.ones(12, 2), Overlap(2, 1), label="m")
        assert isinstance(call, PipelinedCall)
        if corrupt and rank == 1:
            _corrupt_first_chunk(call)
        mlp = ExpertMLP((torch.ones(1, 6, 8), torch.ones(1, 8, 6), None, None), relu)
        results.append(call.combine(call.compute(call.rows, call.handle.rows_per_expert, mlp)))
        counts.append(dispatcher.corruption.take())
    assert torch.equal(results[0], results[1]) and counts[1:] == [0, rank == 1]


def _corrupt_first_chunk(call: PipelinedCall) -> None:
    """Corrupt the first row of the first chunk when it is received."""
    send = call._run.send
    assert isinstance(send, ChunkedSend)
    receive_chunk = send.receive_chunk

    def corrupted(chunk: int) -> None:
        receive_chunk(chunk)
        if chunk == 0:
            _flip(send.rows_RD, int(send._plan.chunks[0].receive_R[0]), 3, 30)

    send.receive_chunk = corrupted  # type: ignore[method-assign]
