"""Restarted ranks use separate store keys and read no entries of earlier attempts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from moe_comm.errors import PeerTimeout
from moe_comm.runtime.launch.launcher import attempt_store


def _numbered(store: dist.Store, world: int, again: bool = False) -> list[tuple[dist.Store, int]]:
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: attempt_store(store, rank, world, 60.0, again=again), range(world)))


def _attempt(store: dist.Store, world: int) -> list[dist.Store]:
    return [keys for keys, _ in _numbered(store, world)]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_of_one_attempt_share_keys_and_the_next_attempt_has_others(world: int) -> None:
    store = dist.HashStore()
    first = _attempt(store, world)
    first[-1].set("address", "of a rank that is dead by now")
    assert all(keys.check(["address"]) for keys in first)
    second = _attempt(store, world)
    assert not any(keys.check(["address"]) for keys in second)
    second[0].set("address", "new")
    assert {keys.get("address") for keys in second} == {b"new"}


def test_all_ranks_get_the_number_of_previous_attempts() -> None:
    store = dist.HashStore()
    for number in range(3):
        assert [before for _, before in _numbered(store, 3)] == [number] * 3
    assert [before for _, before in _numbered(store, 3, again=True)] == [2] * 3, "the same attempt"
    assert [before for _, before in _numbered(store, 3)] == [3] * 3


def _join_error(store: dist.Store, rank: int, world: int) -> str:
    """Return the error of a rank whose peers do not join; "" if they all joined."""
    try:
        attempt_store(store, rank, world, 0.05)
    except PeerTimeout as error:
        return str(error)
    return ""


@pytest.mark.parametrize("early", [[0], [1, 2], [0, 1]])
def test_an_attempt_that_failed_while_joining_does_not_affect_the_next(early: list[int]) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(len(early)) as pool:
        assert any(pool.map(lambda rank: _join_error(store, rank, 3), early))
    stores = _attempt(store, 3)
    stores[1].set("k", "v")
    assert all(keys.check(["k"]) for keys in stores)


def test_rank_0_names_the_missing_ranks_and_the_others_name_rank_0() -> None:
    assert "rank 1, 2 did not join within 0.05 s" in _join_error(dist.HashStore(), 0, 3)
    assert "no answer from rank 0" in _join_error(dist.HashStore(), 2, 3)


def test_a_late_rank_is_waited_for() -> None:
    store, started = dist.HashStore(), threading.Event()
    results: list[Any] = []

    def run(rank: int, first: Callable[[], Any]) -> None:
        first()
        results.append(attempt_store(store, rank, 2, 60.0))

    threads = [
        threading.Thread(target=run, args=(0, started.set)),
        threading.Thread(target=run, args=(1, started.wait)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    assert len(results) == 2
