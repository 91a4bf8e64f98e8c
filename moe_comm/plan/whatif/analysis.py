"""What stragglers cost: a run's steps replayed as they were, and as if nothing had been slow (arXiv 2505.05713).

    T        replay of the operations as they were, without the gaps between them
    T_ideal  replay with each operation as long as those like it on average (``trace_table.ideal_seconds``)
    S        T / T_ideal; 1 - 1 / S of the time was wasted
    S_x      T_ideal with only the operations of x as they were, / T_ideal: what x alone would cost; x is a kind of
             operation, or the ranks at one place of a dimension ("dp", "pp", "ep", ...)
    M_x      (T - T with x as it should be) / (T - T_ideal): how much of it went if x alone were mended

What that study lacks: dimensions other than dp and pp, and their groups; and S as the product of what uneven routing
costs (``even_routing``) and the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moe_comm.errors import ConfigError
from moe_comm.plan.arrays import Bools, Floats, Ints
from moe_comm.plan.step.replay import Plan, Tasks, prepare, replay
from moe_comm.plan.whatif.trace_table import TraceGraph, ideal_seconds

WORST = 0.03
"""Share of the workers that are mended for M_W."""
MOST_RANKS = 64
"""Up to so many, each is looked at by itself."""
_CELLS = 1 << 23
"""Operations times variants that are replayed at once: 64 MB an array."""
_ATTENTION, _EXPERT = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
_SIDES = {"tp": _ATTENTION, "cp": _ATTENTION, "ep": _EXPERT, "etp": _EXPERT}
"""Dimensions whose groups are looked at, and those of the same side, of which a rank has one place each."""
_TRANSFER = re.compile(r"(forward|backward)-(?:send|recv)")
_ENDS = re.compile(r"(?:send|receive) (.+)")


@dataclass(frozen=True)
class Worker:
    """A rank and its place in each dimension. slowdown: S if only its operations had been as they were; with more ranks
    than ``MOST_RANKS`` estimated, as the smallest S of its places."""

    rank: int
    places: Mapping[str, int]
    slowdown: float


@dataclass(frozen=True)
class WhatIf:
    """Of S steps.

    measured_S, replayed_S, ideal_S: seconds of each step, as it was, T and T_ideal. exact_S: replayed with the gaps,
    which is what was measured if the graph is right.

    by_operation: S_t by kind of operation, worst first. by_place: by dimension, S_x of each place in it. by_group: by
    dimension ("tp", "cp", "ep", "etp"), S_x of each group of ranks along it. ranks: how the workers did, one by one.
    worker_DP: [DP, PP], the smaller of the two S of its places. worst_ranks: those that M_W mends.
    mended_workers, mended_last_stage: M_W and M_S; NaN where T is T_ideal. even_S: T with even routing, NaN where that
    is not known. correlation: Pearson's, of forward and backward passes of the same micro-batch; near 1 if they differ
    by what they have to do, NaN where not known.
    """

    steps: tuple[int, ...]
    measured_S: Floats
    exact_S: Floats
    replayed_S: Floats
    ideal_S: Floats
    by_operation: Mapping[str, float]
    by_place: Mapping[str, tuple[float, ...]]
    by_group: Mapping[str, Mapping[tuple[int, ...], float]]
    ranks: tuple[Worker, ...]
    worker_DP: Floats
    worst_ranks: tuple[int, ...]
    mended_workers: float
    mended_last_stage: float
    even_S: Floats
    correlation: float

    @property
    def slowdown(self) -> float:
        """S, of all steps together."""
        return float(self.replayed_S.sum() / self.ideal_S.sum())

    @property
    def slowdown_S(self) -> Floats:
        """S of each step by itself; NaN of one that would take no time."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.where(self.ideal_S > 0, self.replayed_S / self.ideal_S, np.nan))

    @property
    def routing(self) -> float:
        """The part of S that uneven routing makes, ``slowdown / routing`` is the rest; NaN where not known."""
        return float(self.replayed_S.sum() / self.even_S.sum())

    @property
    def waste(self) -> float:
        """Share of the time that stragglers cost."""
        return 1 - 1 / self.slowdown

    @property
    def replay_error(self) -> float:
        """How far T is from what was measured: the gaps, and what the graph does not know of. Mean over the steps."""
        return float(np.abs(self.replayed_S / self.measured_S - 1).mean())

    @property
    def graph_error(self) -> float:
        """The same with gaps: what the graph alone gets wrong."""
        return float(np.abs(self.exact_S / self.measured_S - 1).mean())


def make_tasks(graph: TraceGraph) -> Tasks:
    """For a replay without gaps."""
    table = graph.table
    return Tasks(
        graph.value_N,
        graph.stream_N,
        graph.before_D,
        graph.after_D,
        graph.meeting_N,
        lambda at: f"{table.names[table.name_N[at]]} of rank {table.rank_N[at]} in step {table.step_N[at]}",
    )


def replay_with_gaps(graph: TraceGraph) -> Floats:
    """[S] seconds of each step when every operation also waits as long as it did after it could have begun."""
    count = len(graph.table)
    tasks = Tasks(
        np.stack([graph.gap_N, graph.value_N], axis=1).reshape(-1),
        np.repeat(graph.stream_N, 2),
        2 * graph.before_D + 1,
        2 * graph.after_D,
        np.stack([np.full(count, -1), graph.meeting_N], axis=1).reshape(-1),
    )
    return _Steps(graph).of(replay(tasks).end[1::2, None])[:, 0]


def what_if(graph: TraceGraph, even_N: Floats | None = None) -> WhatIf:
    """Answers to all questions.

    Args:
        even_N: seconds of each operation if routing were even (``even_routing.even_seconds``).

    Raises:
        ConfigError: the trace is empty. ReplayError: operations wait for each other.
    """
    if not len(graph.table):
        raise ConfigError("a trace without operations has no stragglers")
    asked = _Questions(graph)
    table = graph.table
    kinds = np.array([operation_of(name) for name in table.names])[table.name_N]
    ranks, first, of_rank_N = np.unique(table.rank_N, return_index=True, return_inverse=True)
    of_rank_N = of_rank_N.reshape(-1)
    places = {dimension: place_N[first] for dimension, place_N in table.places.items()}
    lanes: dict[tuple[str, object], Bools] = {("operation", str(kind)): kinds == kind for kind in np.unique(kinds)}
    for dimension, place_N in table.places.items():
        lanes |= {(dimension, place): place_N == place for place in range(int(place_N.max()) + 1)}
    if len(ranks) <= MOST_RANKS:
        lanes |= {("rank", int(rank)): table.rank_N == rank for rank in ranks}
    groups = {dimension: _groups(ranks, places, dimension) for dimension in _SIDES if dimension in places}
    for dimension, members in groups.items():
        lanes |= {(f"{dimension} group", group): np.isin(table.rank_N, group) for group in members}
    alone = asked.only_as_they_were(lanes)
    by_place = {
        dimension: tuple(alone[dimension, place] for place in range(int(place_N.max()) + 1))
        for dimension, place_N in table.places.items()
    }
    score_R = np.array([alone.get(("rank", int(rank)), np.inf) for rank in ranks])
    if not np.isfinite(score_R).all():
        score_R = _least_of_places(places, by_place)
    worker_DP = np.minimum.outer(np.array(by_place.get("dp", (np.inf,))), np.array(by_place.get("pp", (np.inf,))))
    worst = _worst(ranks, score_R)
    mended = asked.mended(
        [np.isin(table.rank_N, worst), table.places["pp"] == table.places["pp"].max()]
        if "pp" in table.places
        else [np.isin(table.rank_N, worst)]
    )
    by_operation = {str(kind): value for (what, kind), value in alone.items() if what == "operation"}
    workers = (
        Worker(int(rank), {dimension: int(at[place]) for dimension, at in places.items()}, float(score_R[place]))
        for place, rank in enumerate(ranks)
    )
    steps = tuple(int(step) for step in table.steps)
    return WhatIf(
        steps,
        table.measured_S(),
        replay_with_gaps(graph),
        asked.replayed_S,
        asked.ideal_S,
        dict(sorted(by_operation.items(), key=lambda item: -item[1])),
        by_place,
        {key: {group: alone[f"{key} group", group] for group in members} for key, members in groups.items() if members},
        tuple(workers),
        worker_DP,
        tuple(worst),
        mended[0],
        mended[1] if len(mended) > 1 else float("nan"),
        np.full(len(steps), np.nan) if even_N is None else asked.seconds(even_N[:, None])[:, 0],
        correlation(graph),
    )


def operation_of(name: str) -> str:
    """Both ends of a transfer are one kind of operation."""
    if found := _TRANSFER.fullmatch(name):
        return f"{found[1]}-transfer"
    if found := _ENDS.fullmatch(name):
        return f"transfer of {found[1]}"
    return name


def correlation(graph: TraceGraph) -> float:
    """Pearson's, over micro-batches of ranks, of the seconds of forward and backward passes in the trace's words; NaN
    where there are none, or all take the same."""
    table = graph.table
    found = []
    for names in (("forward-compute", "forward"), ("backward-compute", "backward")):
        chosen = np.isin(table.name_N, [at for at, name in enumerate(table.names) if name in names])
        chosen &= table.micro_N >= 0
        keys = np.stack([of[chosen] for of in (table.step_N, table.rank_N, table.chunk_N, table.micro_N)], axis=1)
        unique, place = np.unique(keys, axis=0, return_inverse=True)
        found.append((unique, np.bincount(place.reshape(-1), table.seconds_N[chosen], len(unique))))
    (first, forward), (second, backward) = found
    if len(first) < 2 or first.shape != second.shape or (first != second).any():
        return float("nan")
    if min(np.ptp(forward), np.ptp(backward)) <= 0:
        return float("nan")
    return float(np.corrcoef(forward, backward)[0, 1])


class _Steps:
    """Takes the end of each step from those of operations."""

    def __init__(self, graph: TraceGraph) -> None:
        step_N = graph.table.step_N
        self._order = np.argsort(step_N, kind="stable")
        self._first = np.flatnonzero(np.diff(step_N[self._order], prepend=step_N.min() - 1))

    def of(self, end_NL: Floats) -> Floats:
        """[S, L] from [N, L]."""
        return np.asarray(np.maximum.reduceat(end_NL[self._order], self._first, axis=0))


class _Questions:
    """Replays of one graph with other durations."""

    def __init__(self, graph: TraceGraph) -> None:
        self._graph = graph
        self._plan: Plan = prepare(make_tasks(graph))
        self._steps = _Steps(graph)
        self._ideal_N = ideal_seconds(graph)
        both = self.seconds(np.stack([graph.value_N, self._ideal_N], axis=1))
        self.replayed_S, self.ideal_S = both[:, 0], both[:, 1]
        if not self.ideal_S.sum() > 0:
            raise ConfigError("every operation of the trace takes no time")

    def seconds(self, value_NL: Floats) -> Floats:
        """[S, L] seconds of each step in each variant [N, L]."""
        lanes = max(_CELLS // len(value_NL), 1)
        parts = [
            self._steps.of(replay(self._plan, value_NL[:, at : at + lanes]).end)
            for at in range(0, value_NL.shape[1], lanes)
        ]
        return np.concatenate(parts, axis=1)

    def only_as_they_were(self, lanes: Mapping[tuple[str, object], Bools]) -> dict[tuple[str, object], float]:
        """S_x for each set of operations [N]."""
        chosen = list(lanes.values())
        total = self._totals(chosen, self._graph.value_N, self._ideal_N)
        return dict(zip(lanes, (float(one) for one in total / self.ideal_S.sum()), strict=True))

    def mended(self, lanes: list[Bools]) -> list[float]:
        """M_x for each set of operations [N]."""
        lost = float(self.replayed_S.sum() - self.ideal_S.sum())
        if abs(lost) <= 1e-9 * self.ideal_S.sum():
            return [float("nan")] * len(lanes)
        total = self._totals(lanes, self._ideal_N, self._graph.value_N)
        return [float(self.replayed_S.sum() - one) / lost for one in total]

    def _totals(self, lanes: list[Bools], inside_N: Floats, outside_N: Floats) -> Floats:
        """[L] seconds of all steps with one thing in each set of operations and another outside."""
        at_once = max(_CELLS // len(inside_N), 1)
        parts = []
        for at in range(0, len(lanes), at_once):
            chosen_NL = np.stack(lanes[at : at + at_once], axis=1)
            parts.append(self.seconds(np.where(chosen_NL, inside_N[:, None], outside_N[:, None])).sum(axis=0))
        return np.concatenate(parts)


def _groups(ranks: Ints, places: Mapping[str, Ints], dimension: str) -> list[tuple[int, ...]]:
    """The groups of ranks that differ in ``dimension`` alone; none if it is the whole world, or there are too many."""
    others = [places[other] for other in _SIDES[dimension] if other in places and other != dimension]
    if not others:
        return []
    _, group_R = np.unique(np.stack(others, axis=1), axis=0, return_inverse=True)
    group_R = group_R.reshape(-1)
    count = int(group_R.max()) + 1
    if not 1 < count <= MOST_RANKS or count == len(ranks):
        return []
    return [tuple(ranks[group_R == group].tolist()) for group in range(count)]


def _least_of_places(places: Mapping[str, Ints], by_place: Mapping[str, tuple[float, ...]]) -> Floats:
    """[R] the smallest S of each rank's places in dimensions that have several."""
    score_R = np.full(len(next(iter(places.values()))), np.inf)
    for dimension, place_R in places.items():
        if len(by_place[dimension]) > 1:
            score_R = np.minimum(score_R, np.array(by_place[dimension])[place_R])
    return score_R


def _worst(ranks: Ints, score_R: Floats) -> list[int]:
    """The ranks with the highest S; of equals the first."""
    count = -(-len(ranks) * int(100 * WORST) // 100)
    return [int(rank) for rank in ranks[np.lexsort((ranks, -score_R))[:count]]]
