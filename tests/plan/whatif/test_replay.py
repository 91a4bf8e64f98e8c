"""``replay``: what decisions on the placement of experts would have done in a run."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from moe_comm.errors import ConfigError
from moe_comm.topology.load_window import LoadWindow
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import DecisionSettings, busiest_rows, replayed_ratio
from moe_plan.whatif.placement import best_ratio, replay

CURRENT = Placement.contiguous(4, 2)
SKEWED = [4000, 3000, 2000, 1000]
EVEN = [2500] * 4


def test_skewed_loads_switch_at_the_first_decision_and_the_ratio_is_that_of_the_placements() -> None:
    loads = dict.fromkeys(range(1, 11), SKEWED)
    result = replay(loads, CURRENT, DecisionSettings(every=4, window=2))
    assert [step for step, _ in result.decisions] == [4, 8] and result.switches == 1
    assert result.ratios == (1.4,) * 4 + (1.0,) * 6
    assert result.ratio == pytest.approx((4 * 1.4 + 6) / 10)
    assert result.saved_rows == 6 * 2000
    assert busiest_rows(SKEWED, result.placement) == 5000


def test_even_loads_never_switch() -> None:
    result = replay(dict.fromkeys(range(1, 9), EVEN), CURRENT, DecisionSettings(every=2, window=2))
    assert result.switches == 0 and result.placement is CURRENT and result.saved_rows == 0


def test_decisions_follow_recorded_steps_that_are_sparse() -> None:
    result = replay(dict.fromkeys((1, 20, 40, 60), SKEWED), CURRENT, DecisionSettings(every=30))
    assert [step for step, _ in result.decisions] == [40, 60]


def test_a_decision_sees_the_last_steps_of_two_intervals() -> None:
    window, settings = LoadWindow(2), DecisionSettings(threshold=0.99)
    seen = []
    for loads in (SKEWED, EVEN, SKEWED):
        window.add([1, 2, 3, 4])
        for _ in range(2):
            window.add(loads)
        window.decide(CURRENT, settings)
        seen.append(list(window.intervals))
    assert seen == [[[SKEWED] * 2], [[SKEWED] * 2, [EVEN] * 2], [[EVEN] * 2, [SKEWED] * 2]]


@pytest.mark.parametrize("period", [1, 3, 10, 15, 20])
def test_loads_that_alternate_do_not_move_experts_back_and_forth(period: int) -> None:
    other = [1000, 4000, 3000, 2000]
    loads = {step: SKEWED if step // period % 2 else other for step in range(1, 401)}
    result = replay(loads, CURRENT, DecisionSettings(every=10, window=5))
    assert result.switches <= 5 and not any(step > 200 for step, one in result.decisions if one.placement is not None)


def test_a_restored_window_makes_the_same_decisions() -> None:
    settings = DecisionSettings(every=1, window=1)
    window = LoadWindow(2)
    for loads in (EVEN, SKEWED):
        window.add(loads)
        decision = window.decide(CURRENT, settings)
    window.add(SKEWED)
    assert decision.placement is not None and window.previous == CURRENT
    restored = LoadWindow.of(2, json.loads(json.dumps(window.state())), decision.placement)
    assert restored == window
    assert restored.decide(decision.placement, settings) == window.decide(decision.placement, settings)
    assert restored == window
    wrong: tuple[dict[str, Any], ...] = (
        {"recent": [["x"]]},
        {"previous": "{}"},
        {"memory": 1},
        {"memory": 2.0},
        {"memory": True},
        {"intervals": [[[1]]]},
    )
    for damaged in ({}, *(window.state() | change for change in wrong)):
        with pytest.raises(ConfigError, match="not a window of loads"):
            LoadWindow.of(2, damaged, CURRENT)


def test_a_restored_window_that_is_smaller_has_the_last_steps_of_each_interval() -> None:
    window = LoadWindow(3)
    for loads in (EVEN, SKEWED, SKEWED):
        window.add(loads)
    window.decide(CURRENT, DecisionSettings(threshold=0.99))
    for loads in (SKEWED, EVEN):
        window.add(loads)
    smaller = LoadWindow.of(1, json.loads(json.dumps(window.state())), CURRENT)
    assert smaller.recent == [EVEN] and smaller.intervals == [[SKEWED]]


def test_a_lasting_change_of_loads_is_followed_at_the_next_decisions() -> None:
    loads = {step: EVEN if step <= 100 else SKEWED for step in range(1, 201)}
    result = replay(loads, CURRENT, DecisionSettings(every=10, window=5))
    assert [step for step, one in result.decisions if one.placement is not None] == [110]


def test_the_best_ratio_bounds_every_replay() -> None:
    rng = random.Random(0)
    loads = {step: [rng.randrange(1, 1000) ** 2 for _ in range(16)] for step in range(1, 41)}
    first = Placement.contiguous(16, 4)
    result = replay(loads, first, DecisionSettings(every=10))
    assert 1 <= best_ratio(loads, first) <= result.ratio
    assert best_ratio(loads, first) < replayed_ratio(list(loads.values()), first)


def test_settings_and_loads_are_checked() -> None:
    for wrong in ("every", "window"):
        with pytest.raises(ConfigError, match=f"{wrong} must be an integer of at least 1; got 0"):
            DecisionSettings(**dict[str, Any]({wrong: 0}))
    with pytest.raises(ConfigError, match=r"window \(5\) must be at most every \(4\)"):
        DecisionSettings(every=4)
    with pytest.raises(ConfigError, match="at least one step"):
        replay({}, CURRENT, DecisionSettings())
    with pytest.raises(ConfigError, match="4 integers"):
        replay({1: [1, 2]}, CURRENT, DecisionSettings())
