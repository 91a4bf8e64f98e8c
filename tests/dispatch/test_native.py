"""The native dispatchers: memory is reused and freed, rows are read in place, and differences between ranks raise."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

_C = pytest.importorskip("moe_comm._C", reason="the native core is not built")

from moe_comm.comm.header import FAULTS, NUM_COMPARED, OPS, WORDS, Header  # noqa: E402
from moe_comm.dispatch.backends.local import NativeLocalDispatcher  # noqa: E402
from moe_comm.dispatch.backends.native import SharedMemoryDispatcher  # noqa: E402
from moe_comm.dispatch.dispatcher import Dispatcher  # noqa: E402
from moe_comm.dispatch.types import DispatchOptions  # noqa: E402
from moe_comm.errors import ConfigError, HeapError, InputError, MoeCommError, RankMismatch, RoutingError  # noqa: E402
from moe_comm.runtime.memory import private_heap  # noqa: E402
from moe_comm.topology import ExpertPlacement  # noqa: E402
from tests.dispatch.workers import heap_constants  # noqa: E402
from tests.pool import on_ranks  # noqa: E402

EXPERTS = 6


def make_shared(rank: int, world: int, **constants: int) -> SharedMemoryDispatcher:
    with heap_constants(**constants):
        return SharedMemoryDispatcher(
            ExpertPlacement.balanced(EXPERTS, world), dist.new_group(), rank, DispatchOptions(timeout_s=60.0)
        )


def random_call(dispatcher: Dispatcher, shared_random: torch.Generator, own_random: torch.Generator) -> None:
    """Run a dispatch and a combine of a random shape, usually with backward, sometimes with a second pair in flight."""
    hidden, top_k, grad_variant, variant = (int(torch.randint(n, (), generator=shared_random)) for n in (300, 4, 4, 3))
    dtype = (torch.float32, torch.bfloat16, torch.float16)[int(torch.randint(3, (), generator=shared_random))]
    sent = []
    for _ in range(1 + (variant == 0)):
        tokens = int(torch.randint(60, (), generator=own_random))
        x_TD = torch.randn(tokens, hidden, generator=own_random).to(dtype).requires_grad_(grad_variant > 0)
        ids_TK = torch.randint(-1, EXPERTS, (tokens, top_k + 1), generator=own_random)
        weights_TK = torch.rand(tokens, top_k + 1, generator=own_random).requires_grad_(grad_variant > 1)
        sent.append((dispatcher.dispatch(x_TD, ids_TK), weights_TK))
    for dispatched, weights_TK in sent:
        rows = dispatched.rows_RD
        if variant == 1:  # rows in the heap, which peers read in place, as experts write them
            out = dispatcher.empty_rows(*rows.shape, rows.dtype, rows.device)
            out.copy_(rows.detach())
            rows = rows + (out - rows).detach()
        y_TD = dispatcher.combine(rows * 2, weights_TK, dispatched.handle)
        if grad_variant:
            y_TD.sum().backward()


def exercise(dispatcher: Dispatcher, rank: int, heap: Any) -> None:
    """Run the same 100 random calls three times. The memory must be free afterwards, and grow in the first run only."""
    gc.collect()
    before, sizes = (heap.blocks, heap.used), []
    for _ in range(3):
        shared_random, own_random = torch.Generator().manual_seed(1), torch.Generator().manual_seed(100 + rank)
        for _ in range(100):
            random_call(dispatcher, shared_random, own_random)
        gc.collect()
        assert (heap.blocks, heap.used) == before
        sizes.append(heap.size)
    assert sizes[0] == sizes[1] == sizes[2]


@on_ranks(2)
def test_memory_is_freed_and_stops_growing(rank: int, world: int) -> None:
    dispatcher = make_shared(rank, world, INITIAL_BYTES=0)
    assert dispatcher.shared.heap.blocks == 0
    exercise(dispatcher, rank, dispatcher.shared.heap)


def test_local_memory_is_freed_and_stops_growing() -> None:
    exercise(NativeLocalDispatcher(ExpertPlacement.balanced(EXPERTS, 1)), 0, private_heap())


@on_ranks(2)
def test_combine_reads_rows_of_the_heap_in_place_and_copies_others(rank: int, world: int) -> None:
    dispatcher = make_shared(rank, world)
    heap = dispatcher.shared.heap
    x_TD = torch.randn(64, 256)
    dispatched = dispatcher.dispatch(x_TD, torch.arange(64).remainder(EXPERTS)[:, None])
    rows = dispatched.rows_RD
    out = dispatcher.empty_rows(*rows.shape, rows.dtype, rows.device)
    out.copy_(rows)
    peak = heap.peak
    for source, copied in ((out, 0), (rows.clone(), rows.numel() * 4)):
        assert torch.equal(dispatcher.combine(source, torch.ones(64, 1), dispatched.handle), x_TD)
        assert heap.peak == peak + copied
    assert heap.blocks == 2


@on_ranks(2)
def test_a_rank_without_room_is_a_heap_error_on_every_rank_and_the_group_stays_usable(rank: int, world: int) -> None:
    """Rank 1's heap is too small for its rows."""
    dispatcher = make_shared(rank, world, INITIAL_BYTES=0, RESERVE_BYTES=(2 << 20) if rank else (1 << 30))
    x_TD = torch.ones(2048, 512)
    last_expert_ids = torch.full((2048, 1), EXPERTS - 1)
    with pytest.raises(HeapError, match="at most 2097152" if rank else "rank 1 has no room for its rows"):
        dispatcher.dispatch(x_TD, last_expert_ids)
    small = dispatcher.dispatch(x_TD[:4], last_expert_ids[:4])
    assert torch.equal(dispatcher.combine(small.rows_RD, torch.ones(4, 1), small.handle), x_TD[:4])
    del small
    assert dispatcher.shared.heap.blocks == 0


@on_ranks(2)
def test_a_difference_in_requires_grad_of_weights_raises_in_forward(rank: int, world: int) -> None:
    dispatcher = make_shared(rank, world)
    x_TD, weights_TK = torch.ones(3, 8), torch.ones(3, 2)
    sent = dispatcher.dispatch(x_TD, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(RankMismatch, match=r"requires_grad in combine \(call 2\): rank 0: True, rank 1: False"):
        dispatcher.combine(sent.rows_RD, weights_TK.clone().requires_grad_(rank == 0), sent.handle)
    assert torch.equal(dispatcher.combine(sent.rows_RD, weights_TK, sent.handle), 2 * x_TD)


@pytest.mark.parametrize("label", ["", "moe.3", "Schicht äöü " * 40, "x" * 320, "x" * 321])
@pytest.mark.parametrize(
    "fault",
    [None, InputError("bad"), RoutingError("y" * 500), ConfigError("ü" * 200), HeapError("full"), MoeCommError("?")],
)
def test_native_and_python_headers_have_the_same_bytes(label: str, fault: MoeCommError | None) -> None:
    for i, op in enumerate(OPS):
        dtype = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64)[i % 5]
        header = Header(op, 2**40 + i, 1024, dtype, 8, 64, bool(i % 2), label, fault)
        kind, text = 0, ""
        if fault is not None:
            kind = 1 + (FAULTS.index(type(fault)) if type(fault) in FAULTS else 0)
            text = str(fault)
        packed = _C.pack_header(header.compared(), label, kind, text)
        assert packed == header.pack().tobytes()
        assert len(np.frombuffer(packed, np.int64)) == WORDS and len(header.compared()) == NUM_COMPARED


def test_hidden_and_tokens_may_be_zero() -> None:
    dispatcher = NativeLocalDispatcher(ExpertPlacement.balanced(EXPERTS, 1))
    for tokens, hidden in ((0, 8), (5, 0), (0, 0)):
        x_TD = torch.ones(tokens, hidden, requires_grad=True)
        weights_TK = torch.ones(tokens, 2, requires_grad=True)
        dispatched = dispatcher.dispatch(x_TD, torch.ones(tokens, 2, dtype=torch.int64))
        assert dispatched.rows_RD.shape == (2 * tokens, hidden) and sum(dispatched.handle.rows_per_expert) == 2 * tokens
        y_TD = dispatcher.combine(dispatched.rows_RD, weights_TK, dispatched.handle)
        y_TD.sum().backward()
        assert y_TD.shape == (tokens, hidden)
        assert x_TD.grad is not None and x_TD.grad.shape == (tokens, hidden)
        assert weights_TK.grad is not None and torch.equal(weights_TK.grad, torch.zeros(tokens, 2))


def test_a_transfer_checks_its_expert_offsets() -> None:
    with pytest.raises(ValueError, match="expert_offsets"):
        _C.Transfer(None, _C.Heap(""), [0, 2, 4], 1)
