"""Operations of a run's ranks as arrays, with their dependencies: the input of what-if analysis.

``run_trace`` reads them from runs of this library, ``straggler_trace`` from the traces published with the study of
stragglers (arXiv 2505.05713).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from moe_comm.errors import CorruptFile
from moe_plan.arrays import Bools, Floats, Ints

MOST_OPERATIONS = 1 << 24
"""Largest number of operations in a trace: about 2 GB of arrays."""


@dataclass(frozen=True)
class TraceTable:
    """N operations of ranks, in any order.

    names: kinds of operations. name_N: index in ``names``. micro_N: micro-batch or -1. chunk_N: model chunk (virtual
    stage) of the rank or -1. rank_N: the worker. begin_N, end_N: seconds on one clock; each step may have its own zero.
    moves_N: whether the operation transfers data between ranks. nbytes_N: bytes sent to other ranks, 0 if unknown.
    coordinates: [N] coordinates of the rank by dimension ("pp", "dp", "tp", "ep", ...).
    """

    names: tuple[str, ...]
    name_N: Ints
    step_N: Ints
    micro_N: Ints
    chunk_N: Ints
    rank_N: Ints
    begin_N: Floats
    end_N: Floats
    moves_N: Bools
    nbytes_N: Ints
    coordinates: Mapping[str, Ints]

    def __len__(self) -> int:
        return len(self.name_N)

    @property
    def seconds_N(self) -> Floats:
        return self.end_N - self.begin_N

    @property
    def steps(self) -> Ints:
        """The steps in order, [S]."""
        return np.unique(self.step_N)

    def take(self, chosen: Ints) -> TraceTable:
        """Return the operations with these indices, in this order."""
        columns = [column.name for column in fields(self) if column.name not in ("names", "coordinates")]
        arrays = {name: getattr(self, name)[chosen] for name in columns}
        return TraceTable(
            self.names,
            coordinates={key: coordinate_N[chosen] for key, coordinate_N in self.coordinates.items()},
            **arrays,
        )

    def measured_S(self) -> Floats:
        """Return the seconds of each step, from the first begin to the last end on any rank."""
        _, group_N = np.unique(self.step_N, return_inverse=True)
        return _extreme(np.maximum, self.end_N, group_N, -np.inf) - _extreme(np.minimum, self.begin_N, group_N, np.inf)


@dataclass(frozen=True)
class TraceGraph:
    """The operations of a table with their dependencies.

    Operations of a stream run in the table's order. after_D waits for before_D. Operations of a collective (-1: none)
    begin when the last of them is ready.

    value_N: seconds of an operation itself: the duration of a computation, or the time of a transfer after its last
    participant began (arXiv 2505.05713, section 3). gap_N: seconds between when it was ready and when it began.
    class_N: operations of a class would take the same time without stragglers. balance_N: kind of work that could be
    balanced over pipeline stages, or -1; all -1 if ``class_N`` contains this information.
    """

    table: TraceTable
    stream_N: Ints
    collective_N: Ints
    before_D: Ints
    after_D: Ints
    class_N: Ints
    value_N: Floats = field(repr=False)
    gap_N: Floats = field(repr=False)
    balance_N: Ints

    @classmethod
    def make(
        cls,
        table: TraceTable,
        stream_N: Ints,
        collective_N: Ints,
        before_D: Ints,
        after_D: Ints,
        class_N: Ints,
        value_N: Floats | None = None,
        balance_N: Ints | None = None,
    ) -> TraceGraph:
        """Compute gaps, and the values that ``value_N`` does not give (NaN), from the times in the table.

        Raises:
            CorruptFile: an operation waits for one of another step.
        """
        if len(before_D) and np.any(table.step_N[before_D] != table.step_N[after_D]):
            raise CorruptFile("an operation waits for one of another step")
        duration_N = operation_seconds(table, collective_N)
        if value_N is not None:
            duration_N = np.where(np.isnan(value_N), duration_N, np.maximum(value_N, 0.0))
        if balance_N is None:
            balance_N = np.full(len(table), -1)
        gap_N = _gaps(table, stream_N, before_D, after_D)
        return cls(table, stream_N, collective_N, before_D, after_D, class_N, duration_N, gap_N, balance_N)


def operation_seconds(table: TraceTable, collective_N: Ints) -> Floats:
    """Return durations, [N]. In collectives they are measured from the latest begin, and are at least 0."""
    begin_N = table.begin_N.copy()
    joined = collective_N >= 0
    if joined.any():
        count = int(collective_N.max()) + 1
        latest = _extreme(np.maximum, table.begin_N[joined], collective_N[joined], -np.inf, count)
        begin_N[joined] = latest[collective_N[joined]]
    return np.maximum(table.end_N - begin_N, 0.0)


def ideal_seconds(graph: TraceGraph) -> Floats:
    """Return the durations without stragglers, [N], from the operations of each class.

    Computations take the mean, because work could be balanced. Transfers take the median, because temporary failures of
    links are outliers.
    """
    table = graph.table
    _, class_N = np.unique(graph.class_N, return_inverse=True)
    count_L = np.bincount(class_N)
    mean_L = np.bincount(class_N, graph.value_N) / count_L
    ideal_N = np.where(table.moves_N, _medians(graph.value_N, class_N, count_L)[class_N], mean_L[class_N])
    kinds = graph.balance_N
    if (kinds < 0).all():
        return ideal_N
    stages = int(table.coordinates["pp"].max()) + 1
    for kind in np.unique(kinds[kinds >= 0]):
        of_kind = kinds == kind
        work_P = np.bincount(table.coordinates["pp"][of_kind], ideal_N[of_kind], stages)
        with np.errstate(divide="ignore"):
            factor_P = np.where(work_P > 0, work_P.mean() / work_P, 1.0)
        ideal_N[of_kind] *= factor_P[table.coordinates["pp"][of_kind]]
    return ideal_N


def _medians(value_N: Floats, class_N: Ints, count_L: Ints) -> Floats:
    order = np.lexsort((value_N, class_N))
    first_L = np.cumsum(count_L) - count_L
    sorted_N = value_N[order]
    return np.asarray((sorted_N[first_L + (count_L - 1) // 2] + sorted_N[first_L + count_L // 2]) / 2)


def _gaps(table: TraceTable, stream_N: Ints, before_D: Ints, after_D: Ints) -> Floats:
    _, group_N = np.unique(table.step_N, return_inverse=True)
    ready_N = _extreme(np.minimum, table.begin_N, group_N, np.inf)[group_N]
    order = np.argsort(stream_N, kind="stable")
    same = stream_N[order][1:] == stream_N[order][:-1]
    later, earlier = order[1:][same], order[:-1][same]
    ready_N[later] = table.end_N[earlier]
    np.maximum.at(ready_N, after_D, table.end_N[before_D])
    return np.maximum(table.begin_N - ready_N, 0.0)


def _extreme(extremum: np.ufunc, value_N: Floats, group_N: Ints, start: float, count: int | None = None) -> Floats:
    result = np.full(int(group_N.max()) + 1 if count is None else count, start)
    extremum.at(result, group_N, value_N)
    return result
