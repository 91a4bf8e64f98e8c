"""Placement of experts from their loads. Integers only and no process group: every rank computes the same result.

    loads of each step ──sum──▶ rebalance ──candidate──▶ replay of each step ──▶ decide: switch, or keep with a reason

    6 experts, loads 9 5 4 1 1 1, 3 ranks:   contiguous 14 5 2    rebalanced {0 5} {1 3} {2 4}: 10 6 5

The load of an expert is its number of rows in a step. Functions raise ConfigError if loads or settings do not fit the
placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isqrt
from typing import Literal

from moe_comm.errors import ConfigError
from moe_comm.topology.assignment import Loads, homes_near, within
from moe_comm.topology.balance import busiest_transfers, rows_of_ranks, share_rows
from moe_comm.topology.placement import Placement

PlacementKind = Literal["fixed", "relocate"]
KINDS: tuple[PlacementKind, ...] = ("fixed", "relocate")
WORTH = 2
"""Minimum of saved seconds over the seconds of the switch."""
STALL = 0.1
"""Moves that take less than this share of the time of a layer's rows in a step do not count."""
NOISE = 3
"""Minimum of saved rows, in standard deviations of the rows of the busiest rank if routing is random."""


def rows_per_rank(loads_E: Loads, placement: Placement) -> tuple[int, ...]:
    """Return the rows that each rank computes in a step with ``loads_E``, if its copies compute their part."""
    check_loads(loads_E, placement.num_experts)
    return tuple(rows_of_ranks(loads_E, placement.homes, placement.world, share_rows(loads_E, placement)))


def busiest_rows(loads_E: Loads, placement: Placement) -> int:
    """Return the rows of the busiest rank in a step with ``loads_E``."""
    return max(rows_per_rank(loads_E, placement))


def over_mean(busiest: float, rows: float, world: int) -> float:
    """Return the ``busiest`` rank's rows over the mean of ``world`` ranks, which have ``rows``; 1 without rows."""
    return busiest * world / rows if rows else 1.0


def replayed_ratio(steps: Sequence[Loads], placement: Placement) -> float:
    """Return the mean rows of the busiest rank in ``steps`` over the mean rows of a rank; 1 without rows."""
    busiest = sum(busiest_rows(loads_E, placement) for loads_E in steps)
    return over_mean(busiest, sum(map(sum, steps)), placement.world)


def moved_homes(old: Placement, new: Placement) -> list[tuple[int, int]]:
    """Return (source, destination) of each expert whose weights and optimizer state change their rank."""
    return [pair for pair in zip(old.homes, new.homes, strict=True) if pair[0] != pair[1]]


def rebalance(loads_E: Loads, current: Placement, free_moves: int = 0) -> Placement:
    """Return a placement with fewer rows on the busiest rank, or ``current`` if it is ``within`` the best found.

    Each rank keeps its number of homes, and no expert has copies. The best is found by exchanges of experts with the
    busiest rank. Of all placements that were found ``within`` the best, the one with the fewest moves is chosen. Up to
    ``free_moves`` count as none, so that the rows decide.

    Args:
        loads_E: rows of each expert.
        current: the placement before. Its version plus 1 is that of the result.
        free_moves: experts that a rank can send or receive at little cost.
    """
    check_loads(loads_E, current.num_experts)
    found = homes_near(loads_E, current.homes, current.homes_per_rank)
    choices = [current.with_owners([(home,) for home in home_E]) for home_E in found]
    limit = within(min(busiest_rows(loads_E, one) for one in choices))
    if busiest_rows(loads_E, current) <= limit:
        return current

    def cost(new: Placement) -> tuple[int, int, int, int]:
        moved = moved_homes(current, new)
        busiest = busiest_transfers(moved)
        paid = (0, 0) if busiest <= free_moves else (len(moved), busiest)
        return *paid, busiest_rows(loads_E, new), busiest

    return min((one for one in choices if busiest_rows(loads_E, one) <= limit), key=cost)


@dataclass(frozen=True)
class DecisionSettings:
    """Settings of ``decide``.

    Args:
        every: steps between decisions.
        window: number of last steps of each interval between two decisions that are used.
        threshold: minimum share of the busiest rank's rows to save.
        seconds_per_row: seconds of one row on its rank, forward and backward.
        seconds_to_move: seconds in which a rank sends or receives one expert.
    """

    every: int = 100
    threshold: float = 0.05
    seconds_per_row: float = 1.0
    seconds_to_move: float = 0.0
    window: int = 5

    def __post_init__(self) -> None:
        for name, bound in (("every", 1), ("window", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < bound:
                raise ConfigError(f"{name} must be an integer of at least {bound}; got {value!r}")
        if self.window > self.every:
            raise ConfigError(f"window ({self.window}) must be at most every ({self.every})")
        if not 0 <= self.threshold < 1:
            raise ConfigError(f"threshold must be from 0 to below 1; got {self.threshold!r}")
        for name in ("seconds_per_row", "seconds_to_move"):
            if not 0 <= (value := getattr(self, name)) < inf:
                raise ConfigError(f"{name} must be finite and at least 0; got {value!r}")


@dataclass(frozen=True)
class Decision:
    """Whether to switch the placement of a layer.

    Attributes:
        placement: the placement to switch to; None: keep the current one.
        reason: why, with the numbers.
        saved_s: seconds that the candidate saves until the next decision.
        cost_s: seconds of the switch.
        ratio_before: rows of the busiest rank over the mean, in the window with the current placement.
        ratio_after: the same with the candidate; equal to ``ratio_before`` without a candidate.
    """

    placement: Placement | None
    reason: str
    saved_s: float = 0.0
    cost_s: float = 0.0
    ratio_before: float = 1.0
    ratio_after: float = 1.0


def decide(window: Sequence[Loads], current: Placement, settings: DecisionSettings) -> Decision:
    """Decide whether to switch to the placement for the sums of ``window``.

    The candidate is scored by each step of the window, not by their mean. The placement switches only if it saves more
    than ``threshold`` of the busiest rank's rows, more rows than random routing would vary, and more than twice the
    seconds of the switch. Loads that alternate between two decisions need a window with steps of both.

    Args:
        window: rows of each expert in each of some recent steps.
        current: the present placement.
    """
    steps, threshold = settings.every, settings.threshold
    for loads_E in window:
        check_loads(loads_E, current.num_experts)
    rows = sum(map(sum, window))
    if not rows:
        return Decision(None, "the window has no rows")
    before = sum(busiest_rows(loads_E, current) for loads_E in window)
    ratio = over_mean(before, rows, current.world)
    # Skip the search if even the lower bound of the rows would not save enough.
    least = sum(max(-(-sum(loads_E) // current.world), *loads_E) for loads_E in window)
    if least >= (1 - threshold) * before:
        what = "evenly" if least * current.world < 1.01 * rows else "because of one expert"
        reason = f"the busiest rank has {ratio:.2f} times the mean rows and could save at most"
        return Decision(None, f"{reason} {1 - least / before:.1%} ({what} loaded)", 0, 0, ratio, ratio)
    # Find a candidate for the sums of the window.
    sums_E = [sum(loads) for loads in zip(*window, strict=True)]
    free_s = STALL * before / len(window) * settings.seconds_per_row
    experts = current.num_experts
    free_moves = int(min(experts, free_s / settings.seconds_to_move)) if settings.seconds_to_move else experts
    new = rebalance(sums_E, current, free_moves)
    # Score it in each step: the busiest rank of a step determines its time.
    moved = moved_homes(current, new)
    after = sum(busiest_rows(loads_E, new) for loads_E in window)
    saved_s = (before - after) / len(window) * settings.seconds_per_row * steps
    cost_s = busiest_transfers(moved) * settings.seconds_to_move
    ratio_after = over_mean(after, rows, current.world)
    gain, noise = 1 - after / before, NOISE * isqrt(before)
    if gain <= threshold:
        why = f"saves {gain:.1%} of the busiest rank's rows, not above the threshold {threshold:.1%}"
    elif before - after <= noise:
        why = f"saves {before - after} rows in {len(window)} steps, which may be chance (up to {noise})"
    elif saved_s <= WORTH * cost_s:
        why = f"saves {saved_s:.3g} s in {steps} steps, not above {WORTH} times {cost_s:.3g} s of the switch"
    else:
        reason = f"the busiest rank falls from {ratio:.2f} to {ratio_after:.2f} times the mean rows: "
        reason += f"saves {saved_s:.3g} s in {steps} steps for {cost_s:.3g} s ({len(moved)} experts moved)"
        return Decision(new, reason, saved_s, cost_s, ratio, ratio_after)
    return Decision(None, why, saved_s, cost_s, ratio, ratio_after)


def check_loads(loads_E: Loads, experts: int) -> None:
    """Raise ConfigError unless ``loads_E`` has one integer of at least 0 for each of ``experts``."""
    bad = next((load for load in loads_E if type(load) is not int or load < 0), None)
    if len(loads_E) != experts or bad is not None:
        found = f"{len(loads_E)} loads" if bad is None else repr(bad)
        raise ConfigError(f"loads must be {experts} integers of at least 0, one for each expert; got {found}")
