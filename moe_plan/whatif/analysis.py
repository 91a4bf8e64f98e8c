"""The cost of stragglers: replay a run's steps with measured durations and without stragglers (arXiv 2505.05713).

    T        replay with the measured durations, without the gaps between operations
    T_ideal  replay with the mean duration of each class of operations (``trace_table.ideal_seconds``)
    S        T / T_ideal; the share 1 - 1 / S of the time is wasted
    S_x      (T_ideal with the measured durations of x only) / T_ideal: the slowdown that x alone causes; x is a kind of
             operation, or the ranks with one coordinate in a dimension ("dp", "pp", "ep", ...)
    M_x      (T - T with the ideal durations of x) / (T - T_ideal): the share of the lost time that fixing x alone saves
    M_W, M_S: M_x of the slowest ranks (workers), and of the last pipeline stage

In addition to the cited study, this covers dimensions other than dp and pp, and groups of ranks. It also divides S into
the slowdown of uneven routing (``run_spans.even_seconds``) and the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moe_comm.errors import ConfigError
from moe_plan.arrays import Bools, Floats, Ints
from moe_plan.step.replay import ReplayPlan, TaskGraph, prepare, replay
from moe_plan.whatif.trace_table import TraceGraph, ideal_seconds

WORST = 0.03
"""Share of the workers (ranks) that M_W fixes: the slowest ones."""
MOST_RANKS = 64
"""Largest number of ranks that are replayed individually."""
_CELLS = 1 << 23
"""Number of operations times variants in one replay: 64 MB per array."""
_ATTENTION, _EXPERT = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
_SIDES = {"tp": _ATTENTION, "cp": _ATTENTION, "ep": _EXPERT, "etp": _EXPERT}
"""Dimensions whose groups are analyzed, with the dimensions of the same side. A rank has one coordinate in each."""
_TRANSFER = re.compile(r"(forward|backward)-(?:send|recv)")
_ENDS = re.compile(r"(?:send|receive) (.+)")


@dataclass(frozen=True)
class Worker:
    """A rank and its coordinate in each dimension.

    slowdown: S with only its measured durations. With more than ``MOST_RANKS`` ranks, it is estimated as the smallest S
    of its coordinates.
    """

    rank: int
    coordinates: Mapping[str, int]
    slowdown: float


@dataclass(frozen=True)
class WhatIf:
    """Results of S steps.

    measured_S, replayed_S, ideal_S: seconds of each step: measured, T and T_ideal. with_gaps_S: replay with gaps, which
        equals the measurement if the graph is correct.
    by_operation: S_x by kind of operation, the largest first. by_coordinate: S_x of each coordinate, by dimension.
    by_group: S_x of each group of ranks along a dimension ("tp", "cp", "ep", "etp"). ranks: the workers. worker_DP:
    [DP, PP], the smaller S of the two coordinates. worst_ranks: the ranks that M_W fixes. slowest_ranks_share,
    last_stage_share: M_W and M_S; NaN if T equals T_ideal. even_S: T with balanced routing, NaN if unknown.
    correlation: Pearson's, between forward and backward passes of the same micro-batch. Near 1 if their durations
    depend on their work; NaN if unknown.
    """

    steps: tuple[int, ...]
    measured_S: Floats
    with_gaps_S: Floats
    replayed_S: Floats
    ideal_S: Floats
    by_operation: Mapping[str, float]
    by_coordinate: Mapping[str, tuple[float, ...]]
    by_group: Mapping[str, Mapping[tuple[int, ...], float]]
    ranks: tuple[Worker, ...]
    worker_DP: Floats
    worst_ranks: tuple[int, ...]
    slowest_ranks_share: float
    last_stage_share: float
    even_S: Floats
    correlation: float

    @property
    def slowdown(self) -> float:
        """S of all steps together."""
        return float(self.replayed_S.sum() / self.ideal_S.sum())

    @property
    def slowdown_S(self) -> Floats:
        """S of each step; NaN for a step without duration."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.where(self.ideal_S > 0, self.replayed_S / self.ideal_S, np.nan))

    @property
    def routing(self) -> float:
        """The part of S that uneven routing causes; ``slowdown / routing`` is the rest. NaN if unknown."""
        return float(self.replayed_S.sum() / self.even_S.sum())

    @property
    def waste(self) -> float:
        """Share of the time that is wasted."""
        return 1 - 1 / self.slowdown

    @property
    def replay_error(self) -> float:
        """Mean relative error of T, from gaps and from dependencies that are missing in the graph."""
        return float(np.abs(self.replayed_S / self.measured_S - 1).mean())

    @property
    def graph_error(self) -> float:
        """Mean relative error of the replay with gaps, from the graph alone."""
        return float(np.abs(self.with_gaps_S / self.measured_S - 1).mean())


def make_tasks(graph: TraceGraph) -> TaskGraph:
    """Return the tasks of a replay without gaps."""
    table = graph.table
    return TaskGraph(
        graph.value_N,
        graph.stream_N,
        graph.before_D,
        graph.after_D,
        graph.collective_N,
        lambda at: f"{table.names[table.name_N[at]]} of rank {table.rank_N[at]} in step {table.step_N[at]}",
    )


def replay_with_gaps(graph: TraceGraph) -> Floats:
    """Return the seconds of each step, [S], with the measured delay of every operation after it was ready."""
    count = len(graph.table)
    tasks = TaskGraph(
        np.stack([graph.gap_N, graph.value_N], axis=1).reshape(-1),
        np.repeat(graph.stream_N, 2),
        2 * graph.before_D + 1,
        2 * graph.after_D,
        np.stack([np.full(count, -1), graph.collective_N], axis=1).reshape(-1),
    )
    return _Steps(graph).of(replay(tasks).end[1::2, None])[:, 0]


def what_if(graph: TraceGraph, even_N: Floats | None = None) -> WhatIf:
    """Run all analyses.

    Args:
        even_N: seconds of each operation with balanced routing (``run_spans.even_seconds``).

    Raises:
        ConfigError: the trace is empty.
        ReplayError: operations wait for each other.
    """
    if not len(graph.table):
        raise ConfigError("the trace has no operations")
    replays = _Replays(graph)
    table = graph.table
    kinds = np.array([operation_of(name) for name in table.names])[table.name_N]
    ranks, first, of_rank_N = np.unique(table.rank_N, return_index=True, return_inverse=True)
    of_rank_N = of_rank_N.reshape(-1)
    coordinates = {dimension: coordinate_N[first] for dimension, coordinate_N in table.coordinates.items()}
    # One lane for each S_x: the operations that keep their measured durations. All lanes share one replay.
    lanes: dict[tuple[str, object], Bools] = {("operation", str(kind)): kinds == kind for kind in np.unique(kinds)}
    for dimension, coordinate_N in table.coordinates.items():
        lanes |= {
            (dimension, coordinate): coordinate_N == coordinate for coordinate in range(int(coordinate_N.max()) + 1)
        }
    if len(ranks) <= MOST_RANKS:
        lanes |= {("rank", int(rank)): table.rank_N == rank for rank in ranks}
    groups = {dimension: _groups(ranks, coordinates, dimension) for dimension in _SIDES if dimension in coordinates}
    for dimension, members in groups.items():
        lanes |= {(f"{dimension} group", group): np.isin(table.rank_N, group) for group in members}
    slowdown_of = replays.slowdowns(lanes)
    by_coordinate = {
        dimension: tuple(slowdown_of[dimension, coordinate] for coordinate in range(int(coordinate_N.max()) + 1))
        for dimension, coordinate_N in table.coordinates.items()
    }
    # S of each rank. With too many ranks it is estimated from the coordinates.
    score_R = np.array([slowdown_of.get(("rank", int(rank)), np.inf) for rank in ranks])
    if not np.isfinite(score_R).all():
        score_R = _least_of_coordinates(coordinates, by_coordinate)
    worker_DP = np.minimum.outer(
        np.array(by_coordinate.get("dp", (np.inf,))), np.array(by_coordinate.get("pp", (np.inf,)))
    )
    # M_W and M_S.
    worst = _worst_ranks(ranks, score_R)
    shares = replays.recovered_shares(
        [np.isin(table.rank_N, worst)]
        + ([table.coordinates["pp"] == table.coordinates["pp"].max()] if "pp" in table.coordinates else [])
    )
    by_operation = {str(kind): value for (what, kind), value in slowdown_of.items() if what == "operation"}
    workers = (
        Worker(int(rank), {dimension: int(at[index]) for dimension, at in coordinates.items()}, float(score_R[index]))
        for index, rank in enumerate(ranks)
    )
    steps = tuple(int(step) for step in table.steps)
    return WhatIf(
        steps,
        table.measured_S(),
        replay_with_gaps(graph),
        replays.replayed_S,
        replays.ideal_S,
        dict(sorted(by_operation.items(), key=lambda item: -item[1])),
        by_coordinate,
        {
            key: {group: slowdown_of[f"{key} group", group] for group in members}
            for key, members in groups.items()
            if members
        },
        tuple(workers),
        worker_DP,
        tuple(worst),
        shares[0],
        shares[1] if len(shares) > 1 else float("nan"),
        np.full(len(steps), np.nan) if even_N is None else replays.seconds(even_N[:, None])[:, 0],
        correlation(graph),
    )


def operation_of(name: str) -> str:
    """Return the kind of operation of a name. Both ends of a transfer have the same kind."""
    if result := _TRANSFER.fullmatch(name):
        return f"{result[1]}-transfer"
    if result := _ENDS.fullmatch(name):
        return f"transfer of {result[1]}"
    return name


def correlation(graph: TraceGraph) -> float:
    """Return Pearson's correlation of the seconds of forward and backward passes, over micro-batches and ranks.

    It is NaN if there are no passes or all take the same time.
    """
    table = graph.table
    passes = []
    for names in (("forward-compute", "forward"), ("backward-compute", "backward")):
        chosen = np.isin(table.name_N, [at for at, name in enumerate(table.names) if name in names])
        chosen &= table.micro_N >= 0
        keys = np.stack([of[chosen] for of in (table.step_N, table.rank_N, table.chunk_N, table.micro_N)], axis=1)
        unique, index = np.unique(keys, axis=0, return_inverse=True)
        passes.append((unique, np.bincount(index.reshape(-1), table.seconds_N[chosen], len(unique))))
    (first, forward), (second, backward) = passes
    if len(first) < 2 or first.shape != second.shape or (first != second).any():
        return float("nan")
    if min(np.ptp(forward), np.ptp(backward)) <= 0:
        return float("nan")
    return float(np.corrcoef(forward, backward)[0, 1])


class _Steps:
    """Compute the end of each step from the ends of operations."""

    def __init__(self, graph: TraceGraph) -> None:
        step_N = graph.table.step_N
        self._order = np.argsort(step_N, kind="stable")
        self._first = np.flatnonzero(np.diff(step_N[self._order], prepend=step_N.min() - 1))

    def of(self, end_NL: Floats) -> Floats:
        """Return [S, L] from [N, L]."""
        return np.asarray(np.maximum.reduceat(end_NL[self._order], self._first, axis=0))


class _Replays:
    def __init__(self, graph: TraceGraph) -> None:
        self._graph = graph
        self._plan: ReplayPlan = prepare(make_tasks(graph))
        self._steps = _Steps(graph)
        self._ideal_N = ideal_seconds(graph)
        both = self.seconds(np.stack([graph.value_N, self._ideal_N], axis=1))
        self.replayed_S, self.ideal_S = both[:, 0], both[:, 1]
        if not self.ideal_S.sum() > 0:
            raise ConfigError("all operations of the trace have duration 0")

    def seconds(self, value_NL: Floats) -> Floats:
        """Return the seconds [S, L] of each step, given the durations [N, L] of all variants."""
        lanes = max(_CELLS // len(value_NL), 1)
        parts = [
            self._steps.of(replay(self._plan, value_NL[:, at : at + lanes]).end)
            for at in range(0, value_NL.shape[1], lanes)
        ]
        return np.concatenate(parts, axis=1)

    def slowdowns(self, lanes: Mapping[tuple[str, object], Bools]) -> dict[tuple[str, object], float]:
        """Return S_x for each set of operations [N]."""
        chosen = list(lanes.values())
        total = self._totals(chosen, self._graph.value_N, self._ideal_N)
        return dict(zip(lanes, (float(seconds) for seconds in total / self.ideal_S.sum()), strict=True))

    def recovered_shares(self, lanes: list[Bools]) -> list[float]:
        """Return M_x for each set of operations [N]."""
        lost = float(self.replayed_S.sum() - self.ideal_S.sum())
        if abs(lost) <= 1e-9 * self.ideal_S.sum():
            return [float("nan")] * len(lanes)
        total = self._totals(lanes, self._ideal_N, self._graph.value_N)
        return [float(self.replayed_S.sum() - seconds) / lost for seconds in total]

    def _totals(self, lanes: list[Bools], inside_N: Floats, outside_N: Floats) -> Floats:
        """Return the total seconds with ``inside_N`` in each set of operations and ``outside_N`` elsewhere, [L]."""
        at_once = max(_CELLS // len(inside_N), 1)
        parts = []
        for at in range(0, len(lanes), at_once):
            chosen_NL = np.stack(lanes[at : at + at_once], axis=1)
            parts.append(self.seconds(np.where(chosen_NL, inside_N[:, None], outside_N[:, None])).sum(axis=0))
        return np.concatenate(parts)


def _groups(ranks: Ints, coordinates: Mapping[str, Ints], dimension: str) -> list[tuple[int, ...]]:
    """Return the groups of ranks along ``dimension``; none if there is one group or too many."""
    others = [coordinates[other] for other in _SIDES[dimension] if other in coordinates and other != dimension]
    if not others:
        return []
    _, group_R = np.unique(np.stack(others, axis=1), axis=0, return_inverse=True)
    group_R = group_R.reshape(-1)
    count = int(group_R.max()) + 1
    if not 1 < count <= MOST_RANKS or count == len(ranks):
        return []
    return [tuple(ranks[group_R == group].tolist()) for group in range(count)]


def _least_of_coordinates(coordinates: Mapping[str, Ints], by_coordinate: Mapping[str, tuple[float, ...]]) -> Floats:
    """Return the smallest S of each rank's coordinates, in dimensions with several of them, [R]."""
    score_R = np.full(len(next(iter(coordinates.values()))), np.inf)
    for dimension, coordinate_R in coordinates.items():
        if len(by_coordinate[dimension]) > 1:
            score_R = np.minimum(score_R, np.array(by_coordinate[dimension])[coordinate_R])
    return score_R


def _worst_ranks(ranks: Ints, score_R: Floats) -> list[int]:
    count = -(-len(ranks) * int(100 * WORST) // 100)
    return [int(rank) for rank in ranks[np.lexsort((ranks, -score_R))[:count]]]
