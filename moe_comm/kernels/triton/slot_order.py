"""Order of slots by expert, without a sort: counts of chunks, one cumulative sum, positions within the chunk.

    ids, chunks of 2     1 0 │ 1 1 │ 0 2
    counts [E, C]        e0: 1 0 1    e1: 1 2 0    e2: 0 0 1
    slots before         e0: 0 1 1    e1: 2 3 5    e2: 5 5 5
    place                2 0 │ 3 4 │ 1 5

Reference: ``order_slots`` and ``count_slots`` of ``dispatch/slots/plain.py``. Dropped and invalid slots are ordered as
if they had two more experts.
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
EXPERTS = 64
"""Experts that are counted at once."""
INTEGERS = (torch.int64, torch.int32)


@triton.jit
def _keys(ids_ptr, slot, slots, experts):  # type: ignore[no-untyped-def]
    """Return the expert of each slot; ``experts`` if it is dropped, ``experts`` + 1 if invalid, -1 beyond the end."""
    id = tl.load(ids_ptr + slot, mask=slot < slots, other=-1).to(tl.int64)
    key = tl.where((id >= 0) & (id < experts), id, tl.where(id == -1, experts, experts + 1))
    return tl.where(slot < slots, key, -1)


@triton.jit
def count_chunks_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,  # [slots]
    counts_ptr,  # [experts + 2, chunks] int64
    slots, chunks, experts,
    SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Count the slots of each expert in one chunk per program."""
    chunk = int64(tl.program_id(0))
    key = _keys(ids_ptr, chunk * SLOTS + tl.arange(0, SLOTS), slots, experts)
    for first in range(0, experts + 2, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        count = tl.sum((key[:, None] == expert[None, :]).to(tl.int32), axis=0)
        tl.store(counts_ptr + expert * int64(chunks) + chunk, count.to(tl.int64), mask=expert < experts + 2)


@triton.jit
def place_slots_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,  # [slots]
    ends_ptr,  # [experts + 2, chunks] int64: cumulative sum of the counts
    place_ptr, order_ptr,  # [slots] int64
    slots, chunks, experts,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Write place and order of the slots of one chunk per program."""
    chunk = int64(tl.program_id(0))
    index = tl.arange(0, SLOTS)
    slot = chunk * SLOTS + index
    key = _keys(ids_ptr, slot, slots, experts)
    entry = key * chunks + chunk
    place = tl.load(ends_ptr + entry - 1, mask=entry > 0, other=0)
    place += tl.sum(((key[:, None] == key[None, :]) & (index[None, :] < index[:, None])).to(tl.int32), axis=1)
    tl.store(place_ptr + slot, tl.where(key < experts, place, -1), mask=slot < slots)
    tl.store(order_ptr + place, slot, mask=slot < slots)


def order_slots(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the T*K slots by (expert, token, slot), then dropped, then invalid slots.

    Args:
        ids_TK: [T, K] integers; -1 drops the slot; other ids out of range are invalid.

    Returns:
        order: [T * K] int64 flat slots.
        place_TK: [T, K] int64 place of each slot in that order; -1 for a slot without an expert.
        ends: [E + 2] int64: end of the slots of each expert in that order, of dropped and of invalid slots.
    """
    check_tensors("order_slots", ids_TK)
    if ids_TK.dtype not in INTEGERS:
        raise InputError(f"order_slots needs ids of {', '.join(map(str, INTEGERS))}; got {ids_TK.dtype}")
    ids_TK = ids_TK.contiguous()
    slots = ids_TK.numel()
    chunks = max(1, triton.cdiv(slots, SLOTS))
    place_TK = torch.empty_like(ids_TK, dtype=torch.int64)
    order = place_TK.new_empty(slots)
    counts = place_TK.new_empty(num_experts + 2, chunks)
    sizes = slots, chunks, num_experts
    launch(count_chunks_kernel, (chunks,), ids_TK, (ids_TK, counts, *sizes), SLOTS=SLOTS, EXPERTS=EXPERTS, num_warps=4)
    ends = counts.view(-1).cumsum(0)
    launch(place_slots_kernel, (chunks,), ids_TK, (ids_TK, ends, place_TK, order, *sizes), SLOTS=SLOTS, num_warps=4)
    return order, place_TK, ends.view(num_experts + 2, chunks)[:, -1]
