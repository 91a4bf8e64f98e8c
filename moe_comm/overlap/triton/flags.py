"""Flags between the programs of several ranks: raised with release, waited for with acquire, and with a deadline.

A flag is an int64 in symmetric memory. It holds the number of the last turn (call of an operator) in which it was
raised, so nobody ever has to lower it: a turn waits for "at least my number".

    producer on rank 0                          consumer on rank 1
    store rows to rank 1's buffer
    notify(flags of rank 1, i, turn) ─release──▶ wait_at_least(own flags, i, turn, ...) ─acquire─▶ load the rows

One wait of a kernel that runs out of time writes who was waited for into the fault words, and every wait of that
kernel that is not over fails with it at once. A program whose wait failed neither writes to a peer nor raises a flag;
tiles that it should have computed become NaN. The host then raises ``PeerTimeout`` (``memory.py``).

There is no assembly here but the clock that comes with Triton, which the interpreter gets from Python. Polls are
volatile loads (relaxed, of system scope); they may end differently in the warps of one program, so what counts is the
atomic after them, whose value all warps share.
"""

from __future__ import annotations

import time

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from moe_comm.kernels.triton.interpreter import INTERPRETING

FAULT_WORDS = 5
"""int64 words of a rank's fault report, in its own memory: whether there is one, the index of the flag, the rank
waited for, the number of the turn waited for, the number seen."""

CALL_SLOTS = 4
"""Turns for which a block keeps what each rank said it would do; none can be further ahead of another."""

POLL_S = 0.0002
"""How long an interpreted program sleeps between two looks, for ranks may be more than cores."""


if INTERPRETING:

    def clock_ns() -> int:
        """Nanoseconds of the host's clock."""
        return time.monotonic_ns()

    def rest() -> None:
        """Leave the core to other ranks for a moment."""
        time.sleep(POLL_S)

else:

    @triton.jit
    def clock_ns():  # type: ignore[no-untyped-def]
        """Nanoseconds of the device's clock."""
        return globaltimer()

    @triton.jit
    def rest():  # type: ignore[no-untyped-def]
        """Nothing: other programs have their own processors."""


@triton.jit
def notify(flags_ptr, index, turn):  # type: ignore[no-untyped-def]
    """Raise flag ``index`` of ``flags_ptr`` (int64, may be a peer's) to ``turn``: what this program has written before
    is seen by whoever sees the flag."""
    tl.debug_barrier()  # one thread raises it, for the stores of all
    tl.atomic_xchg(flags_ptr + index, tl.full((), 0, tl.int64) + turn, sem="release", scope="sys")


@triton.jit
def wait_at_least(flags_ptr, index, turn, rank, fault_ptr, timeout_ns):  # type: ignore[no-untyped-def]
    """Wait until flag ``index`` of the own ``flags_ptr`` (int64) is ``turn`` or more.

    Args:
        rank: who is to raise it, for the report.
        fault_ptr: int64 [FAULT_WORDS] of this rank, zero at the start.
        timeout_ns: of this wait.

    Returns:
        Whether it is, the same in all warps. If not, the fault words are set, and the caller leaves peers alone.
    """
    flag_ptr = flags_ptr + index
    seen = tl.load(flag_ptr, volatile=True)
    if seen < turn:
        start = clock_ns()
        going = tl.load(fault_ptr, volatile=True) == 0
        while (seen < turn) & going:
            rest()
            going = (tl.load(fault_ptr, volatile=True) == 0) & (clock_ns() - start < timeout_ns)
            seen = tl.load(flag_ptr, volatile=True)
    tl.debug_barrier()
    zero = tl.full((), 0, tl.int64)
    seen = tl.atomic_add(flag_ptr, zero, sem="acquire", scope="sys")
    tl.debug_barrier()
    raised = seen >= turn
    if not raised:
        # The first to fail tells whom it waited for; the others fail because of it.
        if tl.atomic_cas(fault_ptr, zero, zero + 1, sem="acq_rel", scope="gpu") == 0:
            tl.store(fault_ptr + 1, zero + index)
            tl.store(fault_ptr + 2, zero + rank)
            tl.store(fault_ptr + 3, zero + turn)
            tl.store(fault_ptr + 4, seen)
    return raised
