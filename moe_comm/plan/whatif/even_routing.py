"""How long a run's operations would have taken if its router had given every expert rank as much to do.

What experts take is a line over their rows: what they take anyway, and so much a row. Even routing moves each rank
along that line to the mean of the ranks that share the experts, and no further: a rank whose machine is slow stays as
much slower than the others. The same for rows that travel, over the bytes of the rank that sends most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_comm.plan.arrays import Floats, Ints
from moe_comm.plan.whatif.trace_table import TraceGraph

EXPERTS = ("experts", "backward of experts")
UNKNOWN = -1
"""Rows, where no span says how many came."""


def even_seconds(graph: TraceGraph, rows_N: Ints, moving: Sequence[str]) -> Floats:
    """[N] seconds of each operation with even routing.

    Args:
        rows_N: that an operation of ``EXPERTS`` works on, ``UNKNOWN`` where that is not known: such operations take the
            mean of those of their group.
        moving: the names of what moves rows.
    """
    table = graph.table
    even_N = graph.value_N.copy()
    names = np.array(table.names)[table.name_N]
    group_N = table.places["pp"] * (int(table.rank_N.max()) + 1) + table.places.get("edp", 0)
    experts = np.isin(names, EXPERTS)
    if experts.any():
        keys = np.stack([graph.like_N, table.step_N, table.micro_N, group_N], axis=1)[experts]
        group = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
        count = np.bincount(group)
        value, rows = graph.value_N[experts], rows_N[experts].astype(np.float64)
        known = np.bincount(group, rows_N[experts] == UNKNOWN)[group] == 0
        mean = (np.bincount(group, value) / count)[group]
        rows_mean = (np.bincount(group, rows) / count)[group]
        of_rank = graph.like_N[experts] * (int(table.rank_N.max()) + 1) + table.rank_N[experts]
        slope = _slopes(np.where(known, rows, 0.0), value, graph.like_N[experts], of_rank)
        even_N[experts] = np.where(known, np.maximum(value - slope * (rows - rows_mean), 0.0), mean)
    moved = (graph.meeting_N >= 0) & np.isin(names, moving)
    if moved.any():
        call = np.unique(graph.meeting_N[moved], return_inverse=True)[1].reshape(-1)
        nbytes, value = table.nbytes_N[moved].astype(np.float64), graph.value_N[moved]
        most = np.zeros(int(call.max()) + 1)
        np.maximum.at(most, call, nbytes)
        mean = (np.bincount(call, nbytes) / np.bincount(call))[call]
        slope = _slopes(most[call], value, graph.like_N[moved], graph.like_N[moved])
        even_N[moved] = np.maximum(value - slope * (most[call] - mean), 0.0)
    return even_N


def _slopes(x_M: Floats, y_M: Floats, kind_M: Ints, own_M: Ints) -> Floats:
    """[M] seconds for one more of what is in ``x_M``, alike for all of a kind.

    The median of the slopes between pairs that are far apart (Theil's incomplete method), so that a few which waited
    for a processor do not matter. Not below 0, nor above what any of ``own_M`` takes for each of its x on the whole:
    else a slow rank that has a little more to do would seem to be slow because of it. Just that where x never varies.
    """
    found = np.zeros(len(x_M))
    for kind in np.unique(kind_M):
        chosen = np.flatnonzero(kind_M == kind)
        x, y = x_M[chosen], y_M[chosen]
        own = np.unique(own_M[chosen], return_inverse=True)[1].reshape(-1)
        work = np.bincount(own, x)
        if not work.any():
            continue
        order = np.argsort(x, kind="stable")
        half = len(order) // 2
        low, high = order[:half], order[len(order) - half :]
        apart = x[high] > x[low]
        most = (np.bincount(own, y)[work > 0] / work[work > 0]).min()
        found[chosen] = most
        if apart.any():
            slope = float(np.median((y[high] - y[low])[apart] / (x[high] - x[low])[apart]))
            found[chosen] = min(max(slope, 0.0), float(most))
    return found
