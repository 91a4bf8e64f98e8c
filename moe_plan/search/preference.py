"""Which of the mappings of a search to prefer: predictions have an error, and memory should not be full.

``common_mappings`` finds the mappings that published runs use, to compare the result of a search with them.
"""

from __future__ import annotations

from collections.abc import Mapping as Table, Sequence
from dataclasses import replace

from moe_comm.errors import ConfigError
from moe_plan.search.explain import CLOSE
from moe_plan.search.request import PlanCandidate, PlanRequest
from moe_plan.search.search import search
from moe_plan.search.space import SearchSpace

STEP_ERROR = 0.08
"""Median error of predicted steps: that of the published steps which docs/plan.md lists as added without fitting."""


def is_equal(candidate: PlanCandidate, candidates: Sequence[PlanCandidate]) -> bool:
    """Return whether the step of ``candidate`` is within ``STEP_ERROR`` of that of the fastest candidate."""
    return candidate.step.seconds <= (1 + STEP_ERROR) * min(one.step.seconds for one in candidates)


def is_full(candidate: PlanCandidate) -> bool:
    """Return whether the fullest rank has less than 5% of the available memory left."""
    return candidate.fit.fullest.total > CLOSE * candidate.fit.available


def preferred(candidates: Sequence[PlanCandidate]) -> tuple[PlanCandidate, ...]:
    """Return the candidates in the order of preference.

    First those that are equal to the fastest one and leave memory, then the equal ones that do not, then the slower
    ones; each by predicted step.
    """
    return tuple(
        sorted(
            candidates,
            key=lambda one: (
                not is_equal(one, candidates),
                is_equal(one, candidates) and is_full(one),
                one.step.seconds,
            ),
        )
    )


COMMON = {"schedule": ("1f1b", "interleaved_1f1b"), "sharding": ("zero1",), "dispatcher": ("all_to_all",)}
"""Settings of most published runs, for those that the user leaves open."""
COMMON_PIPELINES = 2


def common_mappings(request: PlanRequest, given: Table[str, object], limit_s: float = 5.0) -> tuple[PlanCandidate, ...]:
    """Return the fastest mappings of the kind that most published runs use, with different numbers of stages.

    Each expert is whole (etp 1), the experts are distributed over a host, sequences are not (cp 1), and the rest is
    ``COMMON``.

    Args:
        given: settings of the space that the user has chosen.
        limit_s: time limit in seconds.
    """
    ep = min(request.shape.experts, request.cluster.host_size)
    if ep < 2:
        return ()
    space = SearchSpace.of(**{**COMMON, **given})
    try:
        found = search(
            request, replace(space, fixed=(("cp", 1), ("etp", 1)), ep=(ep,)), keep=4 * COMMON_PIPELINES, limit_s=limit_s
        )
    except ConfigError:  # no such mapping can run
        return ()
    fastest: dict[int, PlanCandidate] = {}
    for candidate in found.best:
        fastest.setdefault(candidate.mapping.parallel.pp, candidate)
    return tuple(fastest.values())[:COMMON_PIPELINES]
