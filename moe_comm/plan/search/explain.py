"""Why one mapping is slower than another, in a line, from what each spends its step on."""

from __future__ import annotations

from moe_comm.plan.search.question import Candidate

CALLED = {"pipeline": "pipeline bubble", "gradients and weights": "gradient sums", "sharded weights": "weight gathers"}
"""Causes of a breakdown that have a plainer name."""
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
"""Transfers there and back are told as one."""
NAMED = 2
"""Causes told of each kind."""
ENOUGH = 0.9
"""Share of what a step costs more that one cause must explain to be told alone."""
LEAST = 0.1
"""Share of the largest difference below which another is not worth a word."""
CLOSE = 0.95
"""Share of the memory there is from which a mapping is told to be close to it."""


def why_slower(best: Candidate, other: Candidate) -> str:
    """What ``other`` spends more seconds on than ``best``, and what it saves.

    Like "+0.42 s pipeline bubble, +0.10 s dispatch and combine; saves 0.20 s gradient sums"; with how much of the
    memory it takes if that is close to all or too much.
    """
    ours, theirs = _causes(best), _causes(other)
    more = {name: theirs.get(name, 0.0) - ours.get(name, 0.0) for name in dict.fromkeys([*theirs, *ours])}
    least = LEAST * max(map(abs, more.values()), default=0.0)
    costs, saves = _largest(more, 1, least), _largest(more, -1, least)
    unit = _unit(max((seconds for _, seconds in costs + saves), default=0.0))
    told = [", ".join(f"+{_in(seconds, unit)} {name}" for name, seconds in costs)] if costs else []
    if saves:
        told.append(f"saves {', '.join(f'{_in(seconds, unit)} {name}' for name, seconds in saves)}")
    fit = other.fit
    if not fit:
        told.append(f"lacks {fit.missing / 2**30:.1f} GiB")
    elif fit.worst.total > CLOSE * fit.available:
        told.append(f"fills {fit.worst.total / fit.available:.0%} of memory")
    return "; ".join(told) or "the same to within rounding"


def _causes(one: Candidate) -> dict[str, float]:
    """Seconds by name, as they are told."""
    found: dict[str, float] = {}
    for cause, seconds in one.step.breakdown.items():
        name = CALLED.get(cause) or TRANSFERS.get(cause, cause)
        found[name] = found.get(name, 0.0) + seconds
    return found


def _largest(more: dict[str, float], sign: int, least: float) -> list[tuple[str, float]]:
    """The one or two largest differences of a sign, as positive seconds; one if it is nearly all of them."""
    found = sorted(((name, sign * seconds) for name, seconds in more.items()), key=lambda one: -one[1])
    found = [(name, seconds) for name, seconds in found if seconds > max(least, 1e-9)]
    alone = bool(found) and found[0][1] >= ENOUGH * sum(seconds for _, seconds in found)
    return found[: 1 if alone else NAMED]


def _unit(largest: float) -> tuple[str, float]:
    """One unit for the whole line, in which the largest number has a digit before the point."""
    return next((unit for unit in (("s", 1.0), ("ms", 1e-3)) if largest >= 0.095 * unit[1]), ("us", 1e-6))


def _in(seconds: float, unit: tuple[str, float]) -> str:
    name, size = unit
    value = seconds / size
    return f"{value:.2f} {name}" if value < 10 else f"{value:.1f} {name}" if value < 100 else f"{value:,.0f} {name}"
