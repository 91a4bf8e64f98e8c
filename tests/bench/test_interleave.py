"""Interleaved timing: order of contestants, number of rounds, and ratios of adjacent calls."""

from __future__ import annotations

import random

import pytest

from moe_comm.bench.common import interleave
from moe_comm.bench.common.interleave import PairedRatio, interleaved_times, measure_pairs
from tests.pool import RankPool


def test_the_paired_ratio_detects_three_percent_in_strong_noise() -> None:
    draw = random.Random(0)
    noise = [draw.uniform(1, 10) for _ in range(300)]  # affects both calls of a pair
    first = [slow * draw.uniform(0.98, 1.02) for slow in noise]
    second = [slow * 1.03 * draw.uniform(0.98, 1.02) for slow in noise]
    paired = PairedRatio.of(first, second)
    assert paired.ratio == pytest.approx(1.03, abs=0.005) and paired.count == 300
    assert 1 < paired.low < paired.ratio < paired.high < 1.05


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_interval_of_few_pairs_is_within_their_ratios(count: int) -> None:
    ratios = [1.0 + n for n in range(count)]
    paired = PairedRatio.of([1.0] * count, ratios)
    assert (paired.low <= paired.ratio <= paired.high) and paired.low >= ratios[0] and paired.high <= ratios[-1]
    if count <= 2:
        assert (paired.low, paired.high) == (ratios[0], ratios[-1])


def test_rounds_are_added_while_they_fit_into_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interleave, "sync_group", lambda ns: ns)
    monkeypatch.setattr(interleave.time, "monotonic_ns", lambda: 10**9)  # one second after the start
    assert interleave._more_rounds(4, 0, 0.0, 500) == 0  # no time for more rounds
    assert interleave._more_rounds(4, 0, 1.0, 500) == 0  # the time is over
    assert interleave._more_rounds(4, 0, 1.5, 500) == 2
    assert interleave._more_rounds(4, 0, 60.0, 500) == 4  # at most as many as are done
    assert interleave._more_rounds(4, 0, 60.0, 5) == 1 and interleave._more_rounds(7, 0, 60.0, 5) == 0


def _order_and_counts(rank: int, world: int, arg: None) -> tuple[str, int, int, int]:
    order: list[str] = []
    contestants = {name: (("total", lambda name=name: order.append(name)),) for name in "AB"}
    interleaved_times(contestants, 0, 4)
    by_rank = interleaved_times(contestants, 0, 2, seconds=1e9, max_rounds=9)
    paired = measure_pairs(lambda: None, lambda: None, 1, 3)
    return "".join(order[:8]), len(by_rank), len(by_rank[0]["A", "total"]), paired.count


def test_the_order_alternates_and_all_ranks_run_the_same_number_of_rounds(pool2: RankPool) -> None:
    assert pool2.run(_order_and_counts, None, timeout=60) == [("ABBAABBA", 2, 9, 3)] * 2
