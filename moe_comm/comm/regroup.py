"""The ranks of a group that go on after one has died.

    rank 0    operation ─▶ PeerDied    state of rank 0 ─╮
    rank 1    died                                      ├─▶ members 0 2, with their states
    rank 2    operation ─▶ PeerError   state of rank 2 ─╯

The ranks communicate through the store of the group, which must outlive the rank that died. On the host of a rank that
died, its absence is known at once. If all ranks of a host are lost, the others wait for them until the deadline.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress

from moe_comm.comm.communicator import Communicator
from moe_comm.errors import MoeCommError, PeerDied, PeerError

BEGUN, MEMBERS = "regroup/begun", "regroup/members"
POLL_S = 2e-3
"""Interval at which ranks look for those that they wait for."""


def allow(comm: Communicator) -> None:
    """Undo ``decline``. Other ranks must not have failed since."""
    comm.store.delete_key(_key(comm.rank))


def decline(comm: Communicator) -> None:
    """Report that this rank will not go on after a failure. The other ranks then raise the error of the failure."""
    with suppress(Exception):  # the group may be destroyed, or its store lost
        comm.store.set(_key(comm.rank), "")


def begin(comm: Communicator, error: PeerError) -> None:
    """Stop the operations of a group in which a rank has died, on all ranks. Raise ``error`` if none has died."""
    try:
        if not isinstance(error, PeerDied) and not comm.store.check([BEGUN]):
            raise error
        comm.store.set(BEGUN, "1")
    except MoeCommError:
        raise
    except Exception as lost:
        raise error from lost
    comm.abandon(f"rank {comm.rank} has found that a rank died")  # else ranks on other hosts would wait for this one


def survivors(comm: Communicator, error: PeerError, state: object, timeout_s: float) -> dict[int, object]:
    """Return the states of the ranks that go on, by rank, after ``begin``. Collective over the ranks that are alive.

    The group is unusable afterwards. Use ``comm.subgroup`` of these ranks.

    Args:
        error: of the operation that has failed.
        state: of this rank, as JSON. Not None.
        timeout_s: seconds to wait for ranks that are not known to have died.

    Raises:
        PeerError: ``error``, if a rank has declined, or the store does not respond.
        PeerDied: the other ranks went on without this one.
    """
    try:
        states = _survivors(comm, error, state, timeout_s)
    except MoeCommError:
        raise
    except Exception as lost:
        raise error from lost
    # The frames of the error refer to operations in flight, and these keep connections of the group open.
    failed: BaseException | None = error
    while failed is not None:
        failed.__traceback__ = None
        failed = failed.__cause__ or failed.__context__
    return states


def _survivors(comm: Communicator, error: PeerError, state: object, timeout_s: float) -> dict[int, object]:
    store, ranks, end = comm.store, set(range(comm.world)), time.monotonic() + timeout_s
    states: dict[int, object] = {}
    dead: set[int] = set()
    while not store.check([MEMBERS]):
        own = comm.peers.ended() if comm.peers is not None else []
        store.set(_key(comm.rank), json.dumps([state, own]))
        for rank in ranks - set(states):
            if store.check([_key(rank)]):
                text = store.get(_key(rank))
                states[rank], ended = json.loads(text) if text else (None, [])
                dead.update(ended)
        dead.update(own)
        if ranks <= dead | set(states) or time.monotonic() > end or None in states.values():
            gone = ranks - set(states) | dead
            go_on = gone and None not in states.values()
            store.compare_set(MEMBERS, "", json.dumps(sorted(ranks - gone) if go_on else []))
        else:
            time.sleep(POLL_S)
    members: list[int] = json.loads(store.get(MEMBERS))
    if not members:
        raise error
    if comm.rank not in members:
        raise PeerDied(f"rank {comm.rank}: the other ranks took this one for dead, and went on without it") from error
    return {rank: json.loads(store.get(_key(rank)))[0] for rank in members}


def _key(rank: int) -> str:
    return f"regroup/{rank}"
