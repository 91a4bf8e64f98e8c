"""Separate store keys for each attempt of ranks that torchrun restarts.

torchrun's agent has one key-value store for a whole run, and all attempts of its ranks use it. Torch creates no new
store for a restart, and its keys do not contain the attempt (pytorch issue 167288). So a restarted rank may read the
address of a dead one, connect to it, and fail or hang. The number of restarts does not identify the attempt either:
each host counts its own. Therefore rank 0 creates a name for the attempt, and sends it to the ranks that request it:

    rank r   here/r = nonce ────────▶ rank 0        the answer to a nonce of a dead rank is never read
    rank 0   name/nonce = attempt ──▶ rank r
    rank r   attempt/r = "" ────────▶ rank 0        rank 0 polls until all ranks have set this

The name begins with a number that the store counts. So all ranks know the number of previous attempts, even if agents
count differently (a host was replaced) or not at all (hosts joined or left).
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from moe_comm.errors import PeerTimeout

_joined: set[tuple[str, int]] = set()
POLL_S = 0.01
"""Poll interval of rank 0."""


def join(agent: tuple[str, int], rank: int, world: int, timeout_s: float) -> tuple[Store, int]:
    """Return ``attempt_store`` of the store at the address and port of torchrun's agent."""
    wait = timedelta(seconds=timeout_s)
    joined_before = agent in _joined  # a process that initialises its group twice is not a new attempt
    _joined.add(agent)
    return attempt_store(TCPStore(*agent, is_master=False, timeout=wait), rank, world, timeout_s, again=joined_before)


def attempt_store(store: Store, rank: int, world: int, timeout_s: float, *, again: bool = False) -> tuple[Store, int]:
    """Return a store with unused keys, and the number of previous attempts. All ``world`` ranks call it.

    Args:
        again: this attempt has such a store already and needs another one.
    """
    keys = PrefixStore("moe_comm", store)
    attempt = _assign_name(keys, world, timeout_s, again) if rank == 0 else _receive_name(keys, rank, timeout_s)
    return PrefixStore(f"moe_comm/{attempt}", store), int(attempt.partition("-")[0])


def _assign_name(keys: Store, world: int, timeout_s: float, again: bool) -> str:
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
            names = ", ".join(map(str, sorted(missing)[:8])) + (" ..." if len(missing) > 8 else "")
            raise PeerTimeout(f"rank 0: rank {names} did not join within {timeout_s:g} s of the start of {world} ranks")
        if missing:
            time.sleep(POLL_S)
    return attempt


def _receive_name(keys: Store, rank: int, timeout_s: float) -> str:
    nonce = secrets.token_hex(8)
    keys.set(f"here/{rank}", nonce)
    try:
        keys.wait([f"name/{nonce}"], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerTimeout(f"rank {rank}: no answer from rank 0 within {timeout_s:g} s of the start: {error}") from error
    attempt = keys.get(f"name/{nonce}").decode()
    keys.set(f"{attempt}/{rank}", "")
    return attempt
