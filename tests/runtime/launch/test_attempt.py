"""Ranks that are started again meet each other, and nothing that dead ranks have left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from moe_comm.errors import PeerTimeout
from moe_comm.runtime.launch.attempt import own_part


def _numbered(store: dist.Store, world: int, again: bool = False) -> list[tuple[dist.Store, int]]:
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: own_part(store, rank, world, 20.0, again=again), range(world)))


def _attempt(store: dist.Store, world: int) -> list[dist.Store]:
    return [part for part, _ in _numbered(store, world)]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_of_one_attempt_share_keys_and_those_of_the_next_find_none_of_them(world: int) -> None:
    store = dist.HashStore()
    first = _attempt(store, world)
    first[-1].set("address", "of a rank that is dead by now")
    assert all(part.check(["address"]) for part in first)
    second = _attempt(store, world)
    assert not any(part.check(["address"]) for part in second)
    second[0].set("address", "new")
    assert {part.get("address") for part in second} == {b"new"}


def test_all_ranks_know_alike_how_many_attempts_there_were_before() -> None:
    store = dist.HashStore()
    for number in range(3):
        assert [before for _, before in _numbered(store, 3)] == [number] * 3
    assert [before for _, before in _numbered(store, 3, again=True)] == [2] * 3, "the same attempt"
    assert [before for _, before in _numbered(store, 3)] == [3] * 3


def _left_alone(store: dist.Store, rank: int, world: int) -> str:
    """What a rank says that does not find all others; "" if it was named and went on."""
    try:
        own_part(store, rank, world, 0.05)
    except PeerTimeout as error:
        return str(error)
    return ""


@pytest.mark.parametrize("early", [[0], [1, 2], [0, 1]])
def test_an_attempt_that_broke_off_while_its_ranks_met_does_not_mislead_the_next(early: list[int]) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(len(early)) as pool:
        assert any(pool.map(lambda rank: _left_alone(store, rank, 3), early))
    parts = _attempt(store, 3)
    parts[1].set("k", "v")
    assert all(part.check(["k"]) for part in parts)


def test_the_first_rank_says_who_did_not_come_and_the_others_whom_they_waited_for() -> None:
    assert "rank 1, 2 within 0.05 s" in _left_alone(dist.HashStore(), 0, 3)
    assert "no word from rank 0" in _left_alone(dist.HashStore(), 2, 3)


def test_a_rank_that_comes_late_is_waited_for() -> None:
    store, here = dist.HashStore(), threading.Event()
    found: list[Any] = []

    def run(rank: int, first: Callable[[], Any]) -> None:
        first()
        found.append(own_part(store, rank, 2, 20.0))

    threads = [
        threading.Thread(target=run, args=(0, here.set)),
        threading.Thread(target=run, args=(1, here.wait)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(found) == 2
