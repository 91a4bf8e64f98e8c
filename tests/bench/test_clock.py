"""Pinning of ranks to cores, and statistics of measured times. No test depends on real durations."""

from __future__ import annotations

import os

import pytest

from moe_comm.bench.common.clock import Clock, summarize
from moe_comm.bench.common.ranks import cores_of_rank, pinned
from moe_comm.bench.common.settings import DispatchBench
from moe_comm.errors import ConfigError


@pytest.mark.parametrize(
    ("ranks", "cores", "expected"),
    [
        (1, [0, 1], [[0, 1]]),
        (2, [0, 1], [[0], [1]]),
        (4, [0, 1], [[0], [0], [1], [1]]),
        (2, [3, 5, 7, 9], [[3, 5], [7, 9]]),
        (3, [0, 1, 2, 3], [[0], [1], [2, 3]]),
    ],
)
def test_ranks_have_separate_cores_if_there_are_enough(ranks: int, cores: list[int], expected: list[list[int]]) -> None:
    assert [cores_of_rank(rank, ranks, cores) for rank in range(ranks)] == expected


def test_pinning_ends_with_its_block() -> None:
    before = os.sched_getaffinity(0)
    with pinned(0, len(before)) as threads:
        assert threads == 1
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


def test_the_median_over_the_slowest_ranks_is_reported() -> None:
    key = ("ours", "dispatch")
    stats = summarize([{key: [0.001, 0.005, 0.003]}, {key: [0.004, 0.002, 0.003]}])[key]
    assert stats["median_ms"] == pytest.approx(4.0)
    assert stats["min_ms"] == pytest.approx(3.0)
    assert stats["iterations"] == 3


def test_phases_are_timed_separately_and_in_total() -> None:
    clock = Clock(sync=lambda value: value)
    done: list[str] = []
    clock.measure("ours", ("forward", lambda: done.append("f")), ("backward", lambda: done.append("b")))
    clock.measure("gemm", ("total", lambda: done.append("g")))
    assert done == ["f", "b", "g"]
    assert {phase for _, phase in clock.times} == {"forward", "backward", "total"}
    (total,) = clock.times["ours", "total"]
    assert total >= clock.times["ours", "forward"][0] + clock.times["ours", "backward"][0] - 1e-9
    clock.clear()
    assert not clock.times


def test_the_mean_of_consecutive_calls_is_recorded() -> None:
    done: list[str] = []
    clock = Clock(sync=lambda value: value)
    clock.measure("ours", ("dispatch", lambda: done.append("d")), in_a_row=5)
    assert done == ["d"] * 5
    assert len(clock.times["ours", "dispatch"]) == 1


def test_consecutive_backward_calls_are_rejected() -> None:
    with pytest.raises(ConfigError, match="in_a_row=3 requires backward=False"):
        DispatchBench(in_a_row=3)
