"""A number of chunks chosen while a layer runs: alike on all ranks, whatever each of them sees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from moe_comm.errors import ConfigError
from moe_comm.overlap.degree import RunningChoice, Trials
from tests.pool import RankPool

TRIALS = Trials(candidates=(1, 2, 4), warmup=1, rounds=2, check_every=5)
ROUND = 9
"""Calls of one round of trials."""


class Ranks:
    """Ranks of a layer in one process: each calls ``next``, and what they agree on is put together afterwards."""

    def __init__(self, world: int, trials: Trials = TRIALS) -> None:
        self._said: list[Sequence[float]] = []
        self.exchanges = 0
        self.choices = [RunningChoice(trials=trials, agree=self._agree) for _ in range(world)]

    def _agree(self, values: Sequence[float]) -> Sequence[float]:
        # What the others say is what they would: the same lists are asked of every rank first, without answering.
        if self._asking:
            raise _Asked(values)
        return [max(column) for column in zip(*self._said, strict=True)]

    _asking = False

    def call(self, rows: Sequence[int], seconds: Mapping[int, Sequence[float]]) -> int:
        """One call of the layer; ``seconds``: of each rank, by chunks. Returns what all ranks picked."""
        self._said, self._asking = [], True
        for choice, own in zip(self.choices, rows, strict=True):
            state = dict(vars(choice))
            try:
                choice.next(own)
            except _Asked as asked:
                self._said.append(asked.values)
            vars(choice).update(state)
        self._asking = False
        assert len(self._said) in (0, len(self.choices))
        self.exchanges += bool(self._said)
        picked = {choice.next(own) for choice, own in zip(self.choices, rows, strict=True)}
        assert len(picked) == 1
        chunks = picked.pop()
        for choice, took in zip(self.choices, seconds[chunks], strict=True):
            choice.took(took, chunks)
        return chunks


class _Asked(Exception):
    def __init__(self, values: Sequence[float]) -> None:
        self.values = values


SECONDS = {1: (3.0, 3.0), 2: (1.0, 9.0), 4: (2.0, 2.0)}
"""2 chunks are the fastest for rank 0 and the slowest of all for rank 1."""


def test_candidates_take_turns_and_the_slowest_ranks_time_counts() -> None:
    ranks = Ranks(2)
    assert [ranks.call((100, 90), SECONDS) for _ in range(ROUND)] == [1, 2, 4] * 3
    assert ranks.exchanges == 0
    assert ranks.choices[0].settled is None
    assert [ranks.call((100, 90), SECONDS) for _ in range(20)] == [4] * 20
    assert ranks.choices[1].settled == 4


def test_ranks_talk_at_the_end_of_a_round_and_now_and_then() -> None:
    ranks = Ranks(2)
    for _ in range(ROUND + 4 * TRIALS.check_every):
        ranks.call((100, 100), SECONDS)
    assert ranks.exchanges == 1 + 3


def test_the_first_calls_are_not_counted() -> None:
    ranks = Ranks(1)
    slow_at_first = dict.fromkeys(TRIALS.candidates, (100.0,))
    for _ in range(3):
        ranks.call((10,), slow_at_first | {4: (0.001,)})
    for _ in range(6):
        ranks.call((10,), {1: (2.0,), 2: (1.0,), 4: (3.0,)})
    assert ranks.call((10,), SECONDS | {2: (1.0,)}) == 2


@pytest.mark.parametrize("rows", [(201, 40), (40, 201), (49, 3)])
def test_it_tries_again_when_rows_have_more_than_doubled_or_halved(rows: tuple[int, int]) -> None:
    ranks = Ranks(2)
    for _ in range(ROUND + TRIALS.check_every):
        ranks.call((100, 100), SECONDS)
    assert [ranks.call(rows, SECONDS) for _ in range(TRIALS.check_every)] == [4] * TRIALS.check_every
    faster = {1: (1.0, 1.0), 2: (5.0, 5.0), 4: (5.0, 5.0)}
    assert [ranks.call(rows, faster) for _ in range(ROUND)] == [1, 2, 4] * 3
    assert ranks.call(rows, faster) == 1


def test_a_change_of_less_than_that_changes_nothing() -> None:
    ranks = Ranks(2)
    for _ in range(ROUND):
        ranks.call((100, 100), SECONDS)
    found = [ranks.call(rows, SECONDS) for rows in [(190, 60)] * 20 + [(55, 10)] * 20]
    assert set(found) == {4}


def test_calls_that_nobody_timed_leave_the_first_candidate() -> None:
    ranks = Ranks(2)
    nothing = dict.fromkeys(TRIALS.candidates, (math.nan, math.nan))
    assert [ranks.call((5, 5), nothing) for _ in range(12)][-3:] == [1] * 3


def test_a_candidate_that_one_rank_did_not_time_is_out() -> None:
    ranks = Ranks(2)
    seconds = {1: (3.0, 3.0), 2: (1.0, math.nan), 4: (2.0, 2.0)}
    assert [ranks.call((5, 5), seconds) for _ in range(12)][-1] == 4


def test_times_belong_to_the_chunks_they_are_told_with() -> None:
    choice = RunningChoice(trials=TRIALS)
    calls = [choice.next(8) for _ in range(ROUND)]  # all forward passes, then all backward ones
    for chunks in calls:
        choice.took({1: 3.0, 2: 1.0, 4: 2.0}[chunks], chunks)
    assert choice.next(8) == 2


def test_bad_trials_are_refused() -> None:
    for bad in ({"candidates": ()}, {"candidates": (2, 2)}, {"candidates": (0,)}, {"rounds": 0}, {"changed": 1.0}):
        with pytest.raises(ConfigError):
            Trials(**bad)


def _settles(rank: int, world: int, arg: Any) -> list[int]:
    choice = RunningChoice(dist.group.WORLD, TRIALS)
    found = []
    for _ in range(ROUND + 2 * TRIALS.check_every):
        chunks = choice.next(100 + rank)
        choice.took(SECONDS[chunks][rank], chunks)
        found.append(chunks)
    return found


def test_ranks_of_a_group_pick_alike(pool2: RankPool) -> None:
    first, second = pool2.run(_settles)
    assert first == second == [1, 2, 4] * 3 + [4] * 10
