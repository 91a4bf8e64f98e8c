"""Replay of recorded expert loads: what the placement of experts costs with given settings.

steps    1 2 3 4 5 6 7 8 9 ...          every 4, window 2
loads    a b c d e f g h i              decision after step 4 from c d, after step 8 from c d g h
placed   0 0 0 0 1 1 1 1 2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from moe_comm.errors import ConfigError
from moe_comm.topology.assignment import Loads
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import (
    Decision,
    DecisionSettings,
    busiest_rows,
    check_loads,
    decide,
    over_mean,
    rebalance,
    replayed_ratio,
)

MOST_MEMORY = 8
"""Largest number of intervals from whose loads a decision is made."""


@dataclass(frozen=True)
class ReplaySettings(DecisionSettings):
    """Settings of decisions in a replay.

    Args:
        window: number of last recorded steps of each interval that decisions use. An interval is the time between two
            decisions.
    """

    window: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_integers(window=1)
        if self.window > self.every:
            raise ConfigError(f"window ({self.window}) must be at most every ({self.every})")


@dataclass
class LoadWindow:
    """The loads from which a decision is made: of the last ``size`` steps of each of the last ``memory`` intervals.

    An interval is the time between two decisions. ``memory`` is 2 at first, because with one interval, loads that
    alternate would move experts back and forth. If the placement before a switch would have had fewer rows on the
    busiest rank in the interval after it, the switch was wrong, and ``memory`` is doubled, up to ``MOST_MEMORY``.

    Attributes:
        recent: loads of the last steps of the present interval.
        intervals: loads of the intervals before, the oldest first.
        previous: the placement before the switch of the last decision; None if it did not switch.
    """

    size: int
    memory: int = 2
    recent: list[Loads] = field(default_factory=list)
    intervals: list[list[Loads]] = field(default_factory=list)
    previous: Placement | None = None

    def add(self, loads_E: Loads) -> None:
        """Add a step."""
        self.recent = [*self.recent, loads_E][-self.size :]

    def decide(self, current: Placement, settings: DecisionSettings) -> Decision:
        """Return the decision for the next ``settings.every`` steps, and begin a new interval."""
        if self.previous is not None and replayed_ratio(self.recent, self.previous) < replayed_ratio(
            self.recent, current
        ):
            self.memory = min(2 * self.memory, MOST_MEMORY)
        self.intervals = [*self.intervals, self.recent][-self.memory :]
        self.recent = []
        decision = decide([step for interval in self.intervals for step in interval], current, settings)
        self.previous = current if decision.placement is not None else None
        return decision

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        previous = None if self.previous is None else self.previous.to_json()
        return {"memory": self.memory, "recent": self.recent, "intervals": self.intervals, "previous": previous}

    @classmethod
    def of(cls, size: int, state: Mapping[str, Any], current: Placement) -> LoadWindow:
        """Return the window with a result of ``state``, for decisions on ``current``."""
        try:
            memory, recent, intervals = state["memory"], list(state["recent"]), list(map(list, state["intervals"]))
            if type(memory) is not int or not 2 <= memory <= MOST_MEMORY:
                raise ValueError(f"memory {memory!r} is not from 2 to {MOST_MEMORY}")
            for loads_E in (*recent, *chain(*intervals)):
                check_loads(loads_E, current.num_experts)
            previous = None if state["previous"] is None else Placement.from_json(state["previous"])
            if previous is not None and (previous.num_experts, previous.world) != (current.num_experts, current.world):
                raise ValueError(f"{previous} is for other experts or ranks than {current}")
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"not a window of loads: {type(error).__name__}: {error}") from error
        return cls(size, memory, recent[-size:], [steps[-size:] for steps in intervals], previous)


@dataclass(frozen=True)
class PlacementReplay:
    """The result of ``replay``, for the steps with recorded loads.

    Attributes:
        steps: the steps.
        ratios: rows of the busiest rank over the mean, with the placement of the step.
        ratio: the same over all steps.
        decisions: (step, decision) of all decisions.
        placement: the last one.
        saved_rows: rows of the busiest rank that the steps saved against the first placement.
    """

    steps: tuple[int, ...]
    ratios: tuple[float, ...]
    ratio: float
    decisions: tuple[tuple[int, Decision], ...]
    placement: Placement
    saved_rows: int

    @property
    def switches(self) -> int:
        """Number of decisions that changed the placement."""
        return sum(decision.placement is not None for _, decision in self.decisions)


def replay(loads: Mapping[int, Loads], first: Placement, settings: ReplaySettings) -> PlacementReplay:
    """Return what the decisions of ``settings`` would have done in a run that began with ``first``.

    Args:
        loads: rows of each expert by step, in order. Steps can be missing; a decision is made after the first recorded
            step at or after its step.
    """
    if not loads:
        raise ConfigError("a replay needs the loads of at least one step")
    placement, window = first, LoadWindow(settings.window)
    ratios, decisions, busiest, saved, rows = [], [], 0, 0, 0
    due = settings.every
    for step, loads_E in loads.items():
        most = busiest_rows(loads_E, placement)
        ratios.append(over_mean(most, sum(loads_E), first.world))
        saved += busiest_rows(loads_E, first) - most
        busiest, rows = busiest + most, rows + sum(loads_E)
        window.add(loads_E)
        if step >= due:
            due = (step // settings.every + 1) * settings.every
            decision = window.decide(placement, settings)
            placement = decision.placement or placement
            decisions.append((step, decision))
    ratio = over_mean(busiest, rows, first.world)
    return PlacementReplay(tuple(loads), tuple(ratios), ratio, tuple(decisions), placement, saved)


def placed_ratio(loads: Iterable[Loads], placed: Iterable[Placement]) -> float:
    """Return the rows of the busiest rank over the mean for steps with the placement of each."""
    pairs = list(zip(loads, placed, strict=True))
    rows = sum(sum(loads_E) for loads_E, _ in pairs)
    busiest = sum(busiest_rows(loads_E, placement) for loads_E, placement in pairs)
    return over_mean(busiest, rows, pairs[0][1].world if pairs else 1)


def best_ratio(loads: Mapping[int, Loads], first: Placement, slots: int = 0) -> float:
    """Return the ratio if each step had the placement for its own loads: a bound for all forecasts."""
    return placed_ratio(loads.values(), [rebalance(loads_E, first, slots) for loads_E in loads.values()])
