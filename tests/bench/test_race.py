"""Turns of pieces of work: who is first, how many rounds fit, and what pairs of neighbours say."""

from __future__ import annotations

import random

import pytest

from moe_comm.bench.common import race
from moe_comm.bench.common.race import Pairs, pairs, take_turns
from tests.pool import RankPool


def test_the_median_of_pairs_tells_three_percent_where_medians_do_not() -> None:
    draw = random.Random(0)
    noise = [draw.uniform(1, 10) for _ in range(300)]  # of the machine, longer than a call
    first = [slow * draw.uniform(0.98, 1.02) for slow in noise]
    second = [slow * 1.03 * draw.uniform(0.98, 1.02) for slow in noise]
    found = Pairs.of(first, second)
    assert found.ratio == pytest.approx(1.03, abs=0.005) and found.count == 300
    assert 1 < found.low < found.ratio < found.high < 1.05


@pytest.mark.parametrize("count", [1, 2, 7])
def test_few_pairs_claim_no_more_than_they_saw(count: int) -> None:
    ratios = [1.0 + n for n in range(count)]
    found = Pairs.of([1.0] * count, ratios)
    assert (found.low <= found.ratio <= found.high) and found.low >= ratios[0] and found.high <= ratios[-1]
    if count <= 2:
        assert (found.low, found.high) == (ratios[0], ratios[-1])


def test_rounds_that_fit_are_added_little_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "sync_group", lambda ns: ns)
    monkeypatch.setattr(race.time, "monotonic_ns", lambda: 10**9)  # since 0: a second has passed
    assert race._more(4, 0, 0.0, 500) == 0  # none was asked for
    assert race._more(4, 0, 1.0, 500) == 0  # the time is over
    assert race._more(4, 0, 1.5, 500) == 2
    assert race._more(4, 0, 60.0, 500) == 4  # no more at a time than there were
    assert race._more(4, 0, 60.0, 5) == 1 and race._more(7, 0, 60.0, 5) == 0


def _turns(rank: int, world: int, arg: None) -> tuple[str, int, int, int]:
    order: list[str] = []
    parts = {name: (("total", lambda name=name: order.append(name)),) for name in "AB"}
    take_turns(parts, 0, 4)
    many = take_turns(parts, 0, 2, seconds=1e9, most=9)
    found = pairs(lambda: None, lambda: None, 1, 3)
    return "".join(order[:8]), len(many), len(many[0]["A", "total"]), found.count


def test_each_is_first_in_every_other_round_and_all_ranks_stop_alike(pool2: RankPool) -> None:
    assert pool2.run(_turns, None, timeout=60) == [("ABBAABBA", 2, 9, 3)] * 2
