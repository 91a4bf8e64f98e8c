"""Pipelines whose ranks share cores: ranks run faster while others wait, and no work is lost."""

from __future__ import annotations

import pytest

from moe_plan.orders import pass_order
from moe_plan.step.pipeline import shared_span
from moe_plan.step.replay import TaskGraph, replay
from tests.plan.pipelines import timed_tasks


def pipeline(pp: int, micro_batches: int, hop: float = 0.0, name: str = "1f1b") -> tuple[TaskGraph, int]:
    order = pass_order(name, pp, micro_batches, 1)
    return timed_tasks(order, transfer=hop), len(order)


@pytest.mark.parametrize(("pp", "micro_batches"), [(2, 4), (4, 4), (3, 7)])
def test_ranks_with_their_own_cores_take_the_replayed_time(pp: int, micro_batches: int) -> None:
    tasks, passes = pipeline(pp, micro_batches, hop=0.25)
    assert shared_span(tasks, tasks.duration, passes, pp, 1.0) == pytest.approx(float(replay(tasks).span))


def test_ranks_on_one_core_use_it_while_others_wait() -> None:
    tasks, passes = pipeline(4, 4)
    work = tasks.duration[:passes].sum() / 4
    assert shared_span(tasks, tasks.duration, passes, 4, 4.0) == pytest.approx(work)
    assert float(replay(tasks).span) > 1.5 * work


def test_a_single_active_rank_uses_only_one_of_two_cores() -> None:
    tasks, passes = pipeline(4, 1, name="gpipe")  # one micro-batch: only one rank computes at a time
    alone = tasks.duration[:passes].sum()
    assert shared_span(tasks, tasks.duration, passes, 4, 2.0) == pytest.approx(alone / 2)


def test_idle_cores_do_not_accelerate_transfers() -> None:
    tasks, passes = pipeline(2, 1, hop=10.0, name="gpipe")
    assert shared_span(tasks, tasks.duration, passes, 2, 2.0) == pytest.approx(6.0 / 2 + 2 * 10.0)
