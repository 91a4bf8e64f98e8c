"""Flags between the programs of several ranks: raised with release, waited for with acquire and a deadline.

A flag is an int64 in symmetric memory. It holds the number of the last turn (call of an operator) in which it was
raised. A turn waits until the flag is at least its number, so flags are never reset.

    producer on rank 0                          consumer on rank 1
    store rows to rank 1's buffer
    notify(flags of rank 1, i, turn) ─release──▶ wait_at_least(own flags, i, turn, ...) ─acquire─▶ load the rows

If a wait in a kernel times out, it writes the rank that it waited for into the fault words, and all pending waits of
that kernel fail at once. A program whose wait failed neither writes to a peer nor raises a flag; tiles that it should
have computed become NaN. The CPU then raises ``PeerTimeout`` (``memory.py``).

The only assembly is Triton's clock, which the interpreter replaces by Python's. Polls are volatile loads (relaxed,
system scope). They may end differently in the warps of one program. So an atomic after the polls determines the result:
it returns the same value to all warps.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from moe_comm.kernels.triton.launch import INTERPRETING

FAULT_WORDS = 5
"""int64 words of a rank's fault report, in its own memory: whether there is one, rank waited for, flag index, number of
the awaited turn, value of the flag. They are those of Report in csrc/cuda/args.h behind its first word."""

CALL_SLOTS = 4
"""Number of turns for which a block stores each rank's operation. No rank can be more turns ahead of another."""

POLL_S = 0.0002
"""Seconds that an interpreted program sleeps between two polls, because there may be more ranks than cores."""


if INTERPRETING:

    def clock_ns() -> int:
        """Return the CPU's clock in nanoseconds."""
        return time.monotonic_ns()

    def rest() -> None:
        """Yield the core to other ranks."""
        time.sleep(POLL_S)

else:

    @triton.jit
    def clock_ns():  # type: ignore[no-untyped-def]
        """Return the device's clock in nanoseconds."""
        return globaltimer()

    @triton.jit
    def rest():  # type: ignore[no-untyped-def]
        """Do nothing: other programs have their own processors."""


@triton.jit
def notify(flags_ptr, index, turn):  # type: ignore[no-untyped-def]
    """Raise flag ``index`` of ``flags_ptr`` (int64, may be a peer's) to ``turn``. Release: a program that reads the
    flag also sees all earlier writes of this program."""
    tl.debug_barrier()  # one thread raises the flag, after the stores of all
    tl.atomic_xchg(flags_ptr + index, tl.full((), 0, tl.int64) + turn, sem="release", scope="sys")


@triton.jit
def wait_at_least(flags_ptr, index, turn, rank, fault_ptr, timeout_ns):  # type: ignore[no-untyped-def]
    """Wait until flag ``index`` of this rank's ``flags_ptr`` (int64) is at least ``turn``.

    Args:
        rank: The rank that raises the flag, for the report.
        fault_ptr: int64 [FAULT_WORDS] of this rank, initially zero.
        timeout_ns: Maximum duration of this wait.

    Returns:
        Whether the flag was raised in time, the same in all warps. If not, the fault words are set, and the caller must
        not write to peers.
    """
    flag_ptr = flags_ptr + index
    value = tl.load(flag_ptr, volatile=True)
    if value < turn:
        start = clock_ns()
        waiting = tl.load(fault_ptr, volatile=True) == 0
        while (value < turn) & waiting:
            rest()
            waiting = (tl.load(fault_ptr, volatile=True) == 0) & (clock_ns() - start < timeout_ns)
            value = tl.load(flag_ptr, volatile=True)
    tl.debug_barrier()
    zero = tl.full((), 0, tl.int64)
    value = tl.atomic_add(flag_ptr, zero, sem="acquire", scope="sys")
    tl.debug_barrier()
    raised = value >= turn
    if not raised:
        # Only the first failed wait writes the report; the others fail because of it.
        if tl.atomic_cas(fault_ptr, zero, zero + 1, sem="acq_rel", scope="gpu") == 0:
            tl.store(fault_ptr + 1, zero + rank)
            tl.store(fault_ptr + 2, zero + index)
            tl.store(fault_ptr + 3, zero + turn)
            tl.store(fault_ptr + 4, value)
    return raised


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
