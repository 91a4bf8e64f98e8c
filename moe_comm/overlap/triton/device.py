"""Device functions of the fused kernels: access to a peer's block, and the start of a turn.

A turn is one call of an operator. All ranks number their turns in the same way (``memory.py``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.overlap.triton.flags import CALL_SLOTS, notify, wait_at_least

_CALL_SLOTS = tl.constexpr(CALL_SLOTS)


@triton.jit
def words_of(peers_ptr, rank):  # type: ignore[no-untyped-def]
    """Return the block of ``rank`` as int64 words, which flag indices refer to."""
    return tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def data_of(peers_ptr, rank, offset, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a pointer to DTYPE, ``offset`` bytes (a multiple of 256) into the block of ``rank``."""
    address = tl.load(peers_ptr + rank) + offset
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def enter(peers_ptr, rank, world, turn, call):  # type: ignore[no-untyped-def]
    """Notify every rank that this rank starts ``turn`` with operation ``call``. Run by the turn's first program."""
    for step in range(world):
        words_ptr = words_of(peers_ptr, (rank + step) % world)
        tl.store(words_ptr + world + turn % _CALL_SLOTS * world + rank, call)
        notify(words_ptr, rank, turn)


@triton.jit
def may_write_to(peers_ptr, peer, rank, turn, fault_ptr, timeout_ns):  # type: ignore[no-untyped-def]
    """Wait until ``peer`` no longer reads the memory that this turn overwrites. Return False after a timeout."""
    return wait_at_least(words_of(peers_ptr, rank), peer, turn - 1, peer, fault_ptr, timeout_ns)
