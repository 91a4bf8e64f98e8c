"""Which of the mappings of a search to prefer, and why the others are slower.

Predictions have an error, and memory should not be full. ``common_mappings`` finds the mappings that published runs
use, to compare the result of a search with them.
"""

from __future__ import annotations

from collections.abc import Mapping as Table, Sequence
from dataclasses import replace

from moe_comm.errors import ConfigError
from moe_plan.search.request import PlanCandidate, PlanRequest
from moe_plan.search.search import search
from moe_plan.search.space import SearchSpace

CALLED = {"pipeline": "pipeline bubble", "gradients and weights": "gradient sums", "sharded weights": "weight gathers"}
"""Clearer names of causes in a breakdown."""
TRANSFERS = {
    "attention gather": "attention's gathers and scatters",
    "attention scatter": "attention's gathers and scatters",
    "attention swap in": "attention's swaps",
    "attention swap out": "attention's swaps",
    "dispatch": "dispatch and combine",
    "combine": "dispatch and combine",
    "expert gather": "experts' gathers and scatters",
    "expert scatter": "experts' gathers and scatters",
    "dense gather": "dense blocks' gathers and scatters",
    "dense scatter": "dense blocks' gathers and scatters",
    "shared gather": "shared experts' gathers and scatters",
    "shared scatter": "shared experts' gathers and scatters",
}
"""A transfer and its reverse are reported together."""
MAX_CAUSES = 2
"""Maximum number of reported causes that take more time, and of causes that take less."""
ENOUGH = 0.9
"""A cause that explains at least this share of the additional time is reported alone."""
LEAST = 0.1
"""Differences below this share of the largest one are not reported."""
CLOSE = 0.95
"""Memory use is reported if it is above this share of the available memory."""


def why_slower(best: PlanCandidate, other: PlanCandidate) -> str:
    """Return which causes take more and less time in ``other`` than in ``best``.

    An example is "+0.42 s pipeline bubble, +0.10 s dispatch and combine; saves 0.20 s gradient sums". Memory is
    reported if it is nearly full or insufficient.
    """
    best_s, other_s = _causes(best), _causes(other)
    names = dict.fromkeys([*other_s, *best_s])
    difference_s = {name: other_s.get(name, 0.0) - best_s.get(name, 0.0) for name in names}
    least = LEAST * max(map(abs, difference_s.values()), default=0.0)
    costs, saves = _largest(difference_s, 1, least), _largest(difference_s, -1, least)
    unit = _unit(max((seconds for _, seconds in costs + saves), default=0.0))
    parts = [", ".join(f"+{_format_seconds(seconds, unit)} {name}" for name, seconds in costs)] if costs else []
    if saves:
        parts.append(f"saves {', '.join(f'{_format_seconds(seconds, unit)} {name}' for name, seconds in saves)}")
    fit = other.fit
    if not fit:
        parts.append(f"lacks {fit.missing / 2**30:.1f} GiB")
    elif fit.fullest.total > CLOSE * fit.available:
        parts.append(f"fills {fit.fullest.total / fit.available:.0%} of memory")
    return "; ".join(parts) or "equal up to rounding"


def _causes(candidate: PlanCandidate) -> dict[str, float]:
    """Return the seconds by reported name."""
    result: dict[str, float] = {}
    for cause, seconds in candidate.step.breakdown.items():
        name = CALLED.get(cause) or TRANSFERS.get(cause, cause)
        result[name] = result.get(name, 0.0) + seconds
    return result


def _largest(difference_s: dict[str, float], sign: int, least: float) -> list[tuple[str, float]]:
    """Return the largest differences of a sign as positive seconds: one if it explains nearly all, else two."""
    result = sorted(((name, sign * seconds) for name, seconds in difference_s.items()), key=lambda item: -item[1])
    result = [(name, seconds) for name, seconds in result if seconds > max(least, 1e-9)]
    alone = bool(result) and result[0][1] >= ENOUGH * sum(seconds for _, seconds in result)
    return result[: 1 if alone else MAX_CAUSES]


def _unit(largest: float) -> tuple[str, float]:
    """Return a unit for the line in which the largest number has a digit before the decimal point."""
    return next((unit for unit in (("s", 1.0), ("ms", 1e-3)) if largest >= 0.095 * unit[1]), ("us", 1e-6))


def _format_seconds(seconds: float, unit: tuple[str, float]) -> str:
    name, size = unit
    value = seconds / size
    return f"{value:.2f} {name}" if value < 10 else f"{value:.1f} {name}" if value < 100 else f"{value:,.0f} {name}"


STEP_ERROR = 0.08
"""Median error of predicted steps: that of the published steps which docs/plan.md lists as added without fitting."""


def is_equal(candidate: PlanCandidate, candidates: Sequence[PlanCandidate]) -> bool:
    """Return whether the step of ``candidate`` is within ``STEP_ERROR`` of that of the fastest candidate."""
    return candidate.step.seconds <= (1 + STEP_ERROR) * min(other.step.seconds for other in candidates)


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
            key=lambda candidate: (
                not is_equal(candidate, candidates),
                is_equal(candidate, candidates) and is_full(candidate),
                candidate.step.seconds,
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
