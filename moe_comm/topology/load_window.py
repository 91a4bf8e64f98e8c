"""The recorded loads from which decisions about the placement of experts are made, in a run and in a replay of one.

steps    1 2 3 4 5 6 7 8 9 ...          every 4, window 2
loads    a b c d e f g h i              decision after step 4 from c d, after step 8 from c d g h
placed   0 0 0 0 1 1 1 1 2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from moe_comm.errors import ConfigError
from moe_comm.topology.assignment import Loads
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import Decision, DecisionSettings, check_loads, decide, replayed_ratio

MOST_MEMORY = 8
"""Largest number of intervals from whose loads a decision is made."""


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
