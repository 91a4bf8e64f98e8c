"""Explanations of slower mappings: the largest causes, savings, and memory that is nearly full."""

from __future__ import annotations

from dataclasses import replace

from moe_comm.topology import ParallelConfig
from moe_plan.model.mapping import Mapping
from moe_plan.model.memory import PositionMemory
from moe_plan.search.preference import why_slower
from moe_plan.search.request import Fit, PlanCandidate
from moe_plan.step.step import StepPrediction

GIB = 1 << 30


def candidate(used: int = 10, **seconds: float) -> PlanCandidate:
    named = {name.replace("_", " "): value for name, value in seconds.items()}
    step = StepPrediction(sum(named.values()), 1, 1, 1.0, 1.0, named)
    return PlanCandidate(
        Mapping(ParallelConfig()), step, Fit(PositionMemory(0, 1, used * GIB, 0, 0, 0, 0, 0), 80 * GIB)
    )


BEST = candidate(products=4.0, pipeline=0.5, dispatch=0.3, combine=0.3, attention_gather=0.4)


def test_the_two_largest_causes_and_what_is_saved() -> None:
    other = candidate(products=4.0, pipeline=0.92, dispatch=0.36, combine=0.34, attention_gather=0.2)
    expected = "+0.42 s pipeline bubble, +0.10 s dispatch and combine; saves 0.20 s attention's gathers and scatters"
    assert why_slower(BEST, other) == expected


def test_one_cause_is_reported_alone_if_it_is_nearly_all() -> None:
    other = candidate(products=5.0, pipeline=0.6, dispatch=0.3, combine=0.3, attention_gather=0.4)
    assert why_slower(BEST, other) == "+1.00 s products"


def test_causes_that_only_one_mapping_has_are_counted() -> None:
    other = candidate(products=4.0, pipeline=0.5, dispatch=0.3, combine=0.3, gradients_and_weights=0.9)
    assert why_slower(BEST, other) == "+0.90 s gradient sums; saves 0.40 s attention's gathers and scatters"


def test_small_steps_are_reported_in_small_units() -> None:
    one, other = candidate(products=1e-3, pipeline=1e-4), candidate(products=1e-3, pipeline=1.5e-3)
    assert why_slower(one, other) == "+1.40 ms pipeline bubble"
    assert why_slower(one, candidate(products=1.02e-3, pipeline=1e-4)) == "+20.0 us products"


def test_memory_is_reported_if_it_is_close_or_insufficient() -> None:
    slower = candidate(used=78, products=4.5, pipeline=0.5, dispatch=0.3, combine=0.3, attention_gather=0.4)
    assert why_slower(BEST, slower) == "+0.50 s products; fills 98% of memory"
    assert why_slower(BEST, replace(slower, fit=replace(slower.fit, available=70 * GIB))).endswith("; lacks 8.0 GiB")


def test_equal_steps_are_reported_as_equal() -> None:
    assert why_slower(BEST, BEST) == "equal up to rounding"
