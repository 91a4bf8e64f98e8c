"""Durations of a run's operations if its router had balanced the experts.

The time of experts is modelled as linear in their rows. Balanced routing changes the rows of each rank to the mean of
the ranks that share the experts. The time changes along this line only, so a rank on a slow machine remains slower than
the others. The time of dispatch and combine changes in the same way with the bytes of the rank that sends most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_plan.arrays import Floats, Ints
from moe_plan.whatif.trace_table import TraceGraph

EXPERTS = ("experts", "backward of experts")
UNKNOWN = -1
"""Number of rows if no span records it."""


def even_seconds(graph: TraceGraph, rows_N: Ints, moving: Sequence[str]) -> Floats:
    """Return the seconds of each operation with balanced routing, [N].

    Args:
        graph: the trace.
        rows_N: rows of operations in ``EXPERTS``, or ``UNKNOWN``. Operations with unknown rows take the mean time of
            their group.
        moving: names of operations that transfer rows.
    """
    table = graph.table
    even_N = graph.value_N.copy()
    names = np.array(table.names)[table.name_N]
    group_N = table.places["pp"] * (int(table.rank_N.max()) + 1) + table.places.get("edp", 0)
    experts = np.isin(names, EXPERTS)
    if experts.any():
        keys = np.stack([graph.class_N, table.step_N, table.micro_N, group_N], axis=1)[experts]
        group = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
        count = np.bincount(group)
        value, rows = graph.value_N[experts], rows_N[experts].astype(np.float64)
        has_rows = np.bincount(group, rows_N[experts] == UNKNOWN)[group] == 0
        mean = (np.bincount(group, value) / count)[group]
        rows_mean = (np.bincount(group, rows) / count)[group]
        of_rank = graph.class_N[experts] * (int(table.rank_N.max()) + 1) + table.rank_N[experts]
        slope = _slopes(np.where(has_rows, rows, 0.0), value, graph.class_N[experts], of_rank)
        even_N[experts] = np.where(has_rows, np.maximum(value - slope * (rows - rows_mean), 0.0), mean)
    moved = (graph.collective_N >= 0) & np.isin(names, moving)
    if moved.any():
        call = np.unique(graph.collective_N[moved], return_inverse=True)[1].reshape(-1)
        nbytes, value = table.nbytes_N[moved].astype(np.float64), graph.value_N[moved]
        most_bytes = np.zeros(int(call.max()) + 1)
        np.maximum.at(most_bytes, call, nbytes)
        mean = (np.bincount(call, nbytes) / np.bincount(call))[call]
        slope = _slopes(most_bytes[call], value, graph.class_N[moved], graph.class_N[moved])
        even_N[moved] = np.maximum(value - slope * (most_bytes[call] - mean), 0.0)
    return even_N


def _slopes(x_M: Floats, y_M: Floats, kind_M: Ints, group_M: Ints) -> Floats:
    """Return the seconds per unit of ``x_M``, [M], which are equal for all operations of a kind.

    This is the median of the slopes between pairs that are far apart (Theil's incomplete method), which is robust
    against outliers. It is at least 0 and at most the smallest mean time per unit of any ``group_M``. Otherwise the
    slowness of a rank with slightly more work would be attributed to its work. If x is constant, it is this maximum.
    """
    slopes_M = np.zeros(len(x_M))
    for kind in np.unique(kind_M):
        chosen = np.flatnonzero(kind_M == kind)
        x, y = x_M[chosen], y_M[chosen]
        group = np.unique(group_M[chosen], return_inverse=True)[1].reshape(-1)
        work = np.bincount(group, x)
        if not work.any():
            continue
        order = np.argsort(x, kind="stable")
        half = len(order) // 2
        low, high = order[:half], order[len(order) - half :]
        apart = x[high] > x[low]
        most = (np.bincount(group, y)[work > 0] / work[work > 0]).min()
        slopes_M[chosen] = most
        if apart.any():
            slope = float(np.median((y[high] - y[low])[apart] / (x[high] - x[low])[apart]))
            slopes_M[chosen] = min(max(slope, 0.0), float(most))
    return slopes_M
