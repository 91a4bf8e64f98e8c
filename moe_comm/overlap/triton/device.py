"""What the fused kernels share on the device: a peer's block, entering a turn, and arithmetic that also holds in
Triton's interpreter (which keeps bfloat16 as bits: it multiplies and adds them as integers, and drops bits in casts).
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.overlap.triton.flags import CALL_SLOTS, INTERPRETED, notify, wait_at_least

_CALL_SLOTS = tl.constexpr(CALL_SLOTS)


@triton.jit
def int64(x):  # type: ignore[no-untyped-def]
    """``x`` as int64: an argument, a constant, or a loop's variable (in the interpreter an int)."""
    return tl.full((), 0, tl.int64) + x


@triton.jit
def words_of(peers_ptr, rank):  # type: ignore[no-untyped-def]
    """The block of ``rank`` as int64 words: what flags are indices into."""
    return tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int64))


@triton.jit
def data_of(peers_ptr, rank, offset, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A pointer to DTYPE, ``offset`` bytes (a multiple of 256) into the block of ``rank``."""
    address = tl.load(peers_ptr + rank) + offset
    return tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def enter(peers_ptr, rank, world, turn, call):  # type: ignore[no-untyped-def]
    """Tell every rank that this one enters ``turn``, to do ``call``; by one program, the first of the turn."""
    for step in range(world):
        words_ptr = words_of(peers_ptr, (rank + step) % world)
        tl.store(words_ptr + world + turn % _CALL_SLOTS * world + rank, call)
        notify(words_ptr, rank, turn)


@triton.jit
def may_write_to(peers_ptr, peer, rank, turn, fault_ptr, timeout_ns):  # type: ignore[no-untyped-def]
    """Wait until ``peer`` no longer reads what this turn overwrites there; whether it came to that."""
    return wait_at_least(words_of(peers_ptr, rank), peer, turn - 1, peer, fault_ptr, timeout_ns)


@triton.jit
def multiply_add(a, b, acc):  # type: ignore[no-untyped-def]
    """acc + a @ b in fp32; a [M, K] and b [K, N] of one dtype. Tensor cores, but no TF32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 ``x`` in DTYPE, rounded to the nearest, ties to even."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, nearest, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
