"""What ranks did in some steps of a run, as arrays, and how it hangs together: what what-if analysis starts from.

Two readers make these: ``run_trace`` reads traces of this library's own runs, ``straggler_trace`` the traces that the
study of stragglers published (arXiv 2505.05713).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from moe_comm.errors import CorruptFile
from moe_comm.plan.arrays import Bools, Floats, Ints

MOST_OPERATIONS = 1 << 24
"""More than a trace is read of: about 2 GB of arrays."""


@dataclass(frozen=True)
class TraceTable:
    """N operations of the ranks, in any order.

    names: of kinds of operations. name_N: their places in it. micro_N: -1 where it belongs to no micro-batch. chunk_N:
    which of its rank's model chunks (virtual stages), -1 for none. rank_N: of the worker. begin_N, end_N: seconds on
    one clock; steps may each have their own zero. moves_N: whether it moves data between ranks. nbytes_N: that it sends
    to others, 0 where not known. places: by dimension ("pp", "dp", "tp", "ep", ...), [N], the rank's place in it.
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
    places: Mapping[str, Ints]

    def __len__(self) -> int:
        return len(self.name_N)

    @property
    def seconds_N(self) -> Floats:
        return self.end_N - self.begin_N

    @property
    def steps(self) -> Ints:
        """[S] those it has, in order."""
        return np.unique(self.step_N)

    def take(self, chosen: Ints) -> TraceTable:
        """The operations in these places, in this order."""
        arrays = {
            one.name: getattr(self, one.name)[chosen] for one in fields(self) if one.name not in ("names", "places")
        }
        return TraceTable(self.names, places={key: at[chosen] for key, at in self.places.items()}, **arrays)

    def measured_S(self) -> Floats:
        """Seconds of each step, from the first beginning to the last end on any rank."""
        _, place_N = np.unique(self.step_N, return_inverse=True)
        return _extreme(np.maximum, self.end_N, place_N, -np.inf) - _extreme(np.minimum, self.begin_N, place_N, np.inf)


@dataclass(frozen=True)
class TraceGraph:
    """A table's operations, and what each waits for.

    Operations of one stream run one after the other, in the table's order; after_D waits for before_D; those of one
    meeting (-1: none) begin when the last of them could.

    value_N: seconds, what an operation takes by itself: the duration of one that computes, and of one that waits for
    others the time from when the last of them had begun (arXiv 2505.05713, section 3). gap_N: seconds between when it
    could have begun and when it did. like_N: operations that would take the same time if nothing were slow.
    balance_N: work which could be shared out between pipeline stages, by kind of work, -1 for what cannot; where
    ``like_N`` says that already, all -1.
    """

    table: TraceTable
    stream_N: Ints
    meeting_N: Ints
    before_D: Ints
    after_D: Ints
    like_N: Ints
    value_N: Floats = field(repr=False)
    gap_N: Floats = field(repr=False)
    balance_N: Ints

    @classmethod
    def make(
        cls,
        table: TraceTable,
        stream_N: Ints,
        meeting_N: Ints,
        before_D: Ints,
        after_D: Ints,
        like_N: Ints,
        value_N: Floats | None = None,
        balance_N: Ints | None = None,
    ) -> TraceGraph:
        """With values (but for those in ``value_N`` that are not NaN) and gaps as the table's times have them.

        Raises:
            CorruptFile: an operation is after another of a later step or, by far, ends before it begins.
        """
        if len(before_D) and np.any(table.step_N[before_D] != table.step_N[after_D]):
            raise CorruptFile("an operation waits for one of another step")
        own_N = own_seconds(table, meeting_N)
        if value_N is not None:
            own_N = np.where(np.isnan(value_N), own_N, np.maximum(value_N, 0.0))
        if balance_N is None:
            balance_N = np.full(len(table), -1)
        gap_N = _gaps(table, stream_N, before_D, after_D)
        return cls(table, stream_N, meeting_N, before_D, after_D, like_N, own_N, gap_N, balance_N)


def own_seconds(table: TraceTable, meeting_N: Ints) -> Floats:
    """[N] durations, in meetings from the latest beginning of any; 0 for one that had ended by then."""
    begin_N = table.begin_N.copy()
    met = meeting_N >= 0
    if met.any():
        count = int(meeting_N.max()) + 1
        latest = _extreme(np.maximum, table.begin_N[met], meeting_N[met], -np.inf, count)
        begin_N[met] = latest[meeting_N[met]]
    return np.maximum(table.end_N - begin_N, 0.0)


def ideal_seconds(graph: TraceGraph) -> Floats:
    """[N] what operations would take if all that are alike were: computing ones the mean, since work could be shared
    out, moving ones the median, since a link that fails for a moment is no measure."""
    table = graph.table
    _, like_N = np.unique(graph.like_N, return_inverse=True)
    count_L = np.bincount(like_N)
    mean_L = np.bincount(like_N, graph.value_N) / count_L
    ideal_N = np.where(table.moves_N, _medians(graph.value_N, like_N, count_L)[like_N], mean_L[like_N])
    kinds = graph.balance_N
    if (kinds < 0).all():
        return ideal_N
    stages = int(table.places["pp"].max()) + 1
    for kind in np.unique(kinds[kinds >= 0]):
        of_kind = kinds == kind
        work_P = np.bincount(table.places["pp"][of_kind], ideal_N[of_kind], stages)
        with np.errstate(divide="ignore"):
            factor_P = np.where(work_P > 0, work_P.mean() / work_P, 1.0)
        ideal_N[of_kind] *= factor_P[table.places["pp"][of_kind]]
    return ideal_N


def _medians(value_N: Floats, like_N: Ints, count_L: Ints) -> Floats:
    order = np.lexsort((value_N, like_N))
    first_L = np.cumsum(count_L) - count_L
    sorted_N = value_N[order]
    return np.asarray((sorted_N[first_L + (count_L - 1) // 2] + sorted_N[first_L + count_L // 2]) / 2)


def _gaps(table: TraceTable, stream_N: Ints, before_D: Ints, after_D: Ints) -> Floats:
    _, place_N = np.unique(table.step_N, return_inverse=True)
    ready_N = _extreme(np.minimum, table.begin_N, place_N, np.inf)[place_N]
    order = np.argsort(stream_N, kind="stable")
    same = stream_N[order][1:] == stream_N[order][:-1]
    later, earlier = order[1:][same], order[:-1][same]
    ready_N[later] = table.end_N[earlier]
    np.maximum.at(ready_N, after_D, table.end_N[before_D])
    return np.maximum(table.begin_N - ready_N, 0.0)


def _extreme(which: np.ufunc, value_N: Floats, place_N: Ints, start: float, count: int | None = None) -> Floats:
    found = np.full(int(place_N.max()) + 1 if count is None else count, start)
    which.at(found, place_N, value_N)
    return found
