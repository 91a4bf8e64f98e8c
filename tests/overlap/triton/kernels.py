"""Small kernels for tests; import only where Triton interprets (see ``common.interpreted``)."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.kernels.triton.device import rounded
from moe_comm.overlap.triton.flags import data_of, enter, may_write_to, notify, wait_at_least, words_of


@triton.jit
def pass_on(x_ptr, peers_ptr, fault_ptr, count, rank, world, turn, call, first_flag, data, timeout_ns):  # type: ignore[no-untyped-def]
    """Send ``count`` numbers of x to the next rank, then overwrite x with those of the previous rank.

    A turn is one call of an operator; flags hold the number of the turn that raised them.
    """
    enter(peers_ptr, rank, world, turn, call)
    after = (rank + 1) % world
    before = (rank + world - 1) % world
    place = tl.arange(0, 64)
    if may_write_to(peers_ptr, after, rank, turn, fault_ptr, timeout_ns):
        tl.store(data_of(peers_ptr, after, data, tl.float32) + place, tl.load(x_ptr + place), mask=place < count)
        notify(words_of(peers_ptr, after), first_flag + 3, turn)
    if wait_at_least(words_of(peers_ptr, rank), first_flag + 3, turn, before, fault_ptr, timeout_ns):
        received = tl.load(data_of(peers_ptr, rank, data, tl.float32) + place, mask=place < count)
        tl.store(x_ptr + place, received, mask=place < count)


@triton.jit
def wait_each(flags_ptr, ok_ptr, count, turn, fault_ptr, timeout_ns):  # type: ignore[no-untyped-def]
    """Store whether each of ``count`` flags reached ``turn`` before the timeout. Flag i belongs to rank 10 + i."""
    for i in range(count):
        ok = wait_at_least(flags_ptr, i, turn, 10 + i, fault_ptr, timeout_ns)
        tl.store(ok_ptr + i, ok.to(tl.int64))


@triton.jit
def round_all(x_ptr, y_ptr, COUNT: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, COUNT)
    tl.store(y_ptr + place, rounded(tl.load(x_ptr + place), DTYPE))
