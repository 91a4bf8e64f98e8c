"""Keys of their own for ranks that torchrun started again.

torchrun's agent keeps one key-value store for a whole run and lets every attempt of its ranks meet there (torch makes
no new store for a restart, and none of its keys name the attempt: pytorch issue 167288). So a rank that was started
again may find the address of a dead one, connect to it, and fail or wait for ever. Nor does the number of restarts name
the attempt: each host counts its own. Hence the first rank draws a name, and hands it to ranks that answer:

    rank r   here/r = nonce ────────▶ rank 0        a nonce that a dead rank left gets an answer that nobody reads
    rank 0   name/nonce = attempt ──▶ rank r
    rank r   attempt/r = "" ────────▶ rank 0        rank 0 asks again until all of them have said this

The name begins with a number that the store counts up: so all ranks know alike how many attempts there were before,
also where agents counted differently (a host that was replaced) or not at all (hosts that joined or left).
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from moe_comm.errors import PeerTimeout

_joined: set[tuple[str, int]] = set()
ASK_S = 0.01
"""Seconds between two rounds of rank 0's questions."""


def join(agent: tuple[str, int], rank: int, world: int, timeout_s: float) -> tuple[Store, int]:
    """What ``own_part`` gives of the store that torchrun's agent keeps at this address and port."""
    wait = timedelta(seconds=timeout_s)
    again = agent in _joined  # a process that meets the others twice is not a second attempt
    _joined.add(agent)
    return own_part(TCPStore(*agent, is_master=False, timeout=wait), rank, world, timeout_s, again=again)


def own_part(store: Store, rank: int, world: int, timeout_s: float, *, again: bool = False) -> tuple[Store, int]:
    """A part of ``store`` that nobody has written to, and the number of attempts before this. All ``world`` ranks call.

    Args:
        again: this attempt has such a part already, and wants another one.

    Raises:
        PeerTimeout: a rank did not come within ``timeout_s`` seconds; the message names those missing.
    """
    keys = PrefixStore("moe_comm", store)
    attempt = _name_all(keys, world, timeout_s, again) if rank == 0 else _be_named(keys, rank, timeout_s)
    return PrefixStore(f"moe_comm/{attempt}", store), int(attempt.partition("-")[0])


def _name_all(keys: Store, world: int, timeout_s: float, again: bool) -> str:
    attempt = f"{keys.add('attempts', 0 if again else 1) - 1}-{secrets.token_hex(8)}"
    missing = set(range(1, world))
    end = time.monotonic() + timeout_s
    while missing:
        for rank in sorted(missing):
            if keys.check([f"{attempt}/{rank}"]):
                missing.discard(rank)
            elif keys.check([f"here/{rank}"]):
                keys.set(f"name/{keys.get(f'here/{rank}').decode()}", attempt)
        if missing and time.monotonic() > end:
            some = ", ".join(map(str, sorted(missing)[:8])) + (" ..." if len(missing) > 8 else "")
            raise PeerTimeout(f"rank 0: no word from rank {some} within {timeout_s:g} s of the start of {world} ranks")
        if missing:
            time.sleep(ASK_S)
    return attempt


def _be_named(keys: Store, rank: int, timeout_s: float) -> str:
    nonce = secrets.token_hex(8)
    keys.set(f"here/{rank}", nonce)
    try:
        keys.wait([f"name/{nonce}"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerTimeout(f"rank {rank}: no word from rank 0 within {timeout_s:g} s of the start: {error}") from error
    attempt = keys.get(f"name/{nonce}").decode()
    keys.set(f"{attempt}/{rank}", "")
    return attempt
