"""Simulation of a schedule: waits, workers, and invalid times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moe_comm.errors import ConfigError, InputError
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.schedule import TileSchedule, dispatch_order
from moe_comm.overlap.simulate import simulate
from moe_comm.overlap.tiles import Cut


def four_tiles() -> TileSchedule:
    """Return the tile order of rank 0: two tiles of its own rows, then two of rank 1's rows."""
    return dispatch_order([[2, 2]], Ring(0, 2), Cut(1))


def test_times_match_the_documented_example() -> None:
    timeline = simulate(four_tiles(), [0, 5], 2.0)
    assert timeline.start_N.tolist() == [0, 2, 5, 7]
    assert (timeline.finish, timeline.idle) == (9, 1)


def test_in_order_a_worker_waits_even_if_a_later_tile_could_start() -> None:
    ordered = simulate(four_tiles(), [5, 0], 2.0)
    assert ordered.start_N.tolist() == [5, 7, 9, 11]
    assert (ordered.finish, ordered.idle) == (13, 5)
    unordered = simulate(four_tiles(), [5, 0], 2.0, in_order=False)
    assert unordered.start_N.tolist() == [5, 7, 0, 2]
    assert (unordered.finish, unordered.idle) == (9, 1)


def test_workers_alternate_in_order_and_take_ready_tiles_otherwise() -> None:
    ordered = simulate(four_tiles(), [0, 5], [1.0, 4.0, 1.0, 1.0], workers=2)
    assert ordered.worker_N.tolist() == [0, 1, 0, 1]
    assert ordered.start_N.tolist() == [0, 0, 5, 5]
    assert ordered.idle == 4 + 1
    unordered = simulate(four_tiles(), [0, 5], [1.0, 9.0, 1.0, 1.0], workers=2, in_order=False)
    assert unordered.start_N.tolist() == [0, 0, 5, 6]
    assert unordered.worker_N.tolist() == [0, 1, 0, 0]


def test_workers_without_tiles_do_not_count_as_idle() -> None:
    for in_order in (True, False):
        timeline = simulate(four_tiles(), None, 3.0, workers=9, in_order=in_order)
        assert (timeline.finish, timeline.idle) == (3, 0)


def test_rounding_never_starts_a_tile_before_its_flag() -> None:
    generator = np.random.default_rng(5)
    schedule = dispatch_order(np.full((3, 16), 3), Ring(4, 16), Cut(1))
    for _ in range(50):
        arrivals = np.cumsum(generator.random(16))[Ring(4, 16).distance_W]
        timeline = simulate(schedule, arrivals, generator.random(len(schedule)) / 30)
        assert all(start >= arrivals[list(t.needs)].max() for t, start in zip(schedule, timeline.start_N, strict=True))


@pytest.mark.parametrize("times", [[1.0], -1.0, math.nan, math.inf, [1.0, 1.0, 1.0, math.nan], np.ones((4, 1))])
def test_invalid_times_are_refused(times: object) -> None:
    with pytest.raises(InputError, match="tile_times_N must"):
        simulate(four_tiles(), [0, 1], times)
    with pytest.raises(InputError, match="arrivals_F must"):
        simulate(four_tiles(), [0, -1], 1.0)
    with pytest.raises(InputError, match="arrivals_F must have 2"):
        simulate(four_tiles(), [0, 1, 2], 1.0)
    with pytest.raises(ConfigError, match="workers"):
        simulate(four_tiles(), [0, 1], 1.0, workers=0)
