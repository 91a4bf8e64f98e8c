"""Order of slots by expert, without a sort: counts of chunks, their sums, positions within the chunk.

    ids, chunks of 2     1 0 │ 1 1 │ 0 2
    counts [E, C]        e0: 1 0 1    e1: 1 2 0    e2: 0 0 1
    slots before         e0: 0 1 1    e1: 2 3 5    e2: 5 5 5
    place                2 0 │ 3 4 │ 1 5

Reference: ``order_slots`` and ``count_slots`` of ``dispatch/slots/plain.py``. Dropped and invalid slots are ordered as
if they had two more experts. If there are few chunks, each program of the second kernel sums the counts itself, which
takes less time than a launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.triton.device import int64
from moe_comm.kernels.triton.launch import check_tensors, launch

SLOTS = 128
"""Slots of a chunk."""
FEW = 320
"""Maximum number of chunks whose counts each program sums."""
EXPERTS, CHUNKS = 64, 32
"""Experts that are counted at once, and chunks whose counts are summed at once."""
INVALID = -2
"""Place of an invalid slot, if the kernel reports invalid ids. ``weighted_sum`` returns NaN for its token."""
FAULT_WORDS = 3
"""Words of the report of invalid ids: their number, the first slot, and its id."""
INTEGERS = (torch.int64, torch.int32)
_INVALID = tl.constexpr(INVALID)


@triton.jit
def _keys(ids_ptr, slot, slots, experts):  # type: ignore[no-untyped-def]
    """Return the expert of each slot; ``experts`` if it is dropped, ``experts`` + 1 if invalid, -1 beyond the end."""
    id = tl.load(ids_ptr + slot, mask=slot < slots, other=-1).to(tl.int64)
    key = tl.where((id >= 0) & (id < experts), id, tl.where(id == -1, experts, experts + 1))
    return tl.where(slot < slots, key, -1).to(tl.int32)


@triton.jit
def count_chunks_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,  # [slots]
    counts_ptr,  # [experts + 2, chunks] int32
    slots, chunks, experts,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Count the slots of each expert in one chunk per program."""
    chunk = int64(tl.program_id(0))
    key = _keys(ids_ptr, chunk * SLOTS + tl.arange(0, SLOTS), slots, experts)
    for first in range(0, experts + 2, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        count = tl.sum((key[:, None] == expert[None, :]).to(tl.int32), axis=0)
        tl.store(counts_ptr + expert * int64(chunks) + chunk, count, mask=expert < experts + 2)


@triton.jit
def place_slots_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,  # [slots]
    counts_ptr,  # [experts + 2, chunks] int32
    starts_ptr,  # [chunks, experts + 2] int64 scratch; SUMMED: cumulative sum of the counts
    place_ptr, order_ptr,  # [slots] int64; order: any pointer unless ORDERED
    totals_ptr,  # [experts + 2] int64
    fault_ptr,  # [FAULT_WORDS] int64, also in pinned memory; any pointer unless REPORTED
    slots, chunks, experts,
    SUMMED: tl.constexpr, ORDERED: tl.constexpr, REPORTED: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write place and order of the slots of one chunk per program."""
    chunk = int64(tl.program_id(0))
    end = int64(0)
    first_invalid = int64(0)
    num_invalid = int64(0)
    for first in range(0, experts + 2, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        known = expert < experts + 2
        total = tl.zeros((EXPERTS,), tl.int64)
        start = tl.zeros((EXPERTS,), tl.int64)
        if SUMMED:
            after = (expert + 1) * int64(chunks)
            start = tl.load(starts_ptr + after - chunks - 1, mask=known & (expert > 0), other=0)
            total = tl.load(starts_ptr + after - 1, mask=known, other=0) - start
            total = tl.where(known, total, 0)
        else:
            before = tl.zeros((EXPERTS,), tl.int64)
            for first_chunk in range(0, chunks, CHUNKS):
                other = first_chunk + tl.arange(0, CHUNKS)
                at = (expert * chunks)[:, None] + other[None, :]  # few chunks: below 2 ** 31
                count = tl.load(counts_ptr + at, mask=known[:, None] & (other < chunks)[None, :], other=0)
                total += tl.sum(count, axis=1)
                before += tl.sum(tl.where((other < chunk)[None, :], count, 0), axis=1)
            start = end + tl.cumsum(total, axis=0) - total
            tl.store(starts_ptr + chunk * (experts + 2) + expert, start + before, mask=known)
            end += tl.sum(total, axis=0)
        tl.store(totals_ptr + expert, total, mask=known & (chunk == 0))
        first_invalid += tl.sum(tl.where(expert == experts + 1, start, 0), axis=0)
        num_invalid += tl.sum(tl.where(expert == experts + 1, total, 0), axis=0)
    tl.debug_barrier()  # other threads read the starts
    index = tl.arange(0, SLOTS)
    slot = chunk * SLOTS + index
    key = _keys(ids_ptr, slot, slots, experts)
    if SUMMED:
        entry = key.to(tl.int64) * chunks + chunk
        place = tl.load(starts_ptr + entry - 1, mask=entry > 0, other=0)
    else:
        place = tl.load(starts_ptr + chunk * (experts + 2) + key, mask=key >= 0, other=0)
    place += tl.sum(((key[:, None] == key[None, :]) & (index[None, :] < index[:, None])).to(tl.int32), axis=1)
    if ORDERED:
        tl.store(order_ptr + place, slot, mask=slot < slots)
    written = tl.where(key < experts, place, -1)
    if REPORTED:
        is_first = (key == experts + 1) & (place == first_invalid)
        id = tl.load(ids_ptr + slot, mask=is_first, other=0).to(tl.int64)
        words = fault_ptr + tl.zeros((SLOTS,), tl.int64)
        tl.store(words + 1, slot, mask=is_first)
        tl.store(words + 2, id, mask=is_first)
        tl.store(words, num_invalid + tl.zeros((SLOTS,), tl.int64), mask=is_first)
        written = tl.where(key == experts + 1, _INVALID, written)
    tl.store(place_ptr + slot, written, mask=slot < slots)


def order_slots(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the T*K slots by (expert, token, slot), then dropped, then invalid slots.

    Args:
        ids_TK: [T, K] integers; -1 drops the slot; other ids out of range are invalid.

    Returns:
        order: [T * K] int64 flat slots.
        place_TK: [T, K] int64 place of each slot in that order; -1 for a slot without an expert.
        counts: [E + 2] int64: slots of each expert, dropped and invalid slots.
    """
    check_tensors("order_slots", ids_TK)
    order = torch.empty(ids_TK.numel(), dtype=torch.int64, device=ids_TK.device)
    place_TK, counts = _place(ids_TK, num_experts, order, None)
    return order, place_TK, counts


def place_slots(
    ids_TK: Tensor, num_experts: int, fault: Tensor, *, ordered: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return place_TK and counts of ``order_slots``, and the order if ``ordered``. The kernel reports invalid ids in
    ``fault``.

    Args:
        fault: [``FAULT_WORDS``] int64 in pinned memory. It is written only if an id is invalid. The places of these
            slots are ``INVALID``.
    """
    check_tensors("place_slots", ids_TK)
    order = torch.empty(ids_TK.numel(), dtype=torch.int64, device=ids_TK.device) if ordered else None
    return *_place(ids_TK, num_experts, order, fault), order


def _place(ids_TK: Tensor, num_experts: int, order: Tensor | None, fault: Tensor | None) -> tuple[Tensor, Tensor]:
    if ids_TK.dtype not in INTEGERS:
        raise InputError(f"order_slots needs ids of {', '.join(map(str, INTEGERS))}; got {ids_TK.dtype}")
    ids_TK = ids_TK.contiguous()
    slots, device = ids_TK.numel(), ids_TK.device
    chunks = max(1, -(-slots // SLOTS))
    place_TK = torch.empty(ids_TK.shape, dtype=torch.int64, device=device)
    totals = torch.empty(num_experts + 2, dtype=torch.int64, device=device)
    counts = torch.empty(num_experts + 2, chunks, dtype=torch.int32, device=device)
    sizes = slots, chunks, num_experts
    launch(count_chunks_kernel, (chunks,), ids_TK, (ids_TK, counts, *sizes), SLOTS=SLOTS, EXPERTS=EXPERTS, num_warps=4)
    if chunks > FEW:
        starts = counts.view(-1).cumsum(0, dtype=torch.int64)
    else:
        starts = torch.empty(chunks, num_experts + 2, dtype=torch.int64, device=device)
    launch(
        place_slots_kernel, (chunks,), ids_TK,
        (ids_TK, counts, starts, place_TK, place_TK if order is None else order, totals,
         totals if fault is None else fault, *sizes),
        SUMMED=chunks > FEW, ORDERED=order is not None, REPORTED=fault is not None, SLOTS=SLOTS, EXPERTS=EXPERTS,
        CHUNKS=CHUNKS, num_warps=4,
    )  # fmt: skip
    return place_TK, totals
