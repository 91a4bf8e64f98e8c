"""Divide a rank's step into contiguous slices, and match waits between pipeline passes with sends of other ranks.

``even_seconds`` returns the durations of operations if the router had balanced the experts. The time of experts is
modelled as linear in their rows. Balanced routing changes the rows of each rank to the mean of the ranks that share the
experts. The time changes along this line only, so a rank on a slow machine remains slower than the others. The time of
dispatch and combine changes in the same way with the bytes of the rank that sends most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from moe_comm.observe.records import SpanLine
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
    group_N = table.coordinates["pp"] * (int(table.rank_N.max()) + 1) + table.coordinates.get("edp", 0)
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


WAITS = ("dispatch", "combine", "collective")
OTHER, BETWEEN = "other", "between passes"
RECEIVE = "wait for stages"
SEND = "send "
_SOON = 4
"""Number of slices after a wait in which the next pass is searched. Slices of enclosing spans can come first."""
_PHASES = {"forward": 0, "loss": 0, "backward": 1}
_NAMES = {"step": OTHER, "forward and backward": OTHER}
_KINDS = {"optimizer": "optimizer", "data": "data", "checkpoint": "checkpoint", "pause": "garbage collection"}
SliceId = tuple[int, int]
"""A rank, and the index of a slice in the rank's list of slices."""
Call = tuple[str, tuple[int, ...], int]
"""A collective call: its kind, the ranks of the group, and the number of the call."""


class SpanSlice(NamedTuple):
    """A time interval of a rank's step.

    span: the innermost span that covers the interval, but the outermost one if the rank waits for other ranks. begin,
    end: nanoseconds on the clock of rank 0's host. phase: 0 in a forward pass, 1 in a backward pass, else -1. waits:
    whether the rank waits for other ranks. inner: spans of collective calls within the wait.
    """

    span: SpanLine
    begin: int
    end: int
    phase: int
    waits: bool
    inner: tuple[SpanLine, ...] = ()

    @property
    def calls(self) -> tuple[SpanLine, ...]:
        """Spans of the collective calls that the rank waits for. The first is ``span``, if it is a call."""
        return (self.span, *self.inner) if self.span.call else self.inner


def cut_step(spans: Sequence[SpanLine]) -> list[SpanSlice]:
    """Return contiguous slices that cover one step of one rank, or [] if the step itself has no span.

    If the step was executed several times, the last execution is used.
    """
    steps = [span for span in spans if span.kind == "step"]
    if not steps:
        return []
    step = max(steps, key=lambda span: span.begin_ns)
    inside = [span for span in spans if step.begin_ns <= span.begin_ns <= span.end_ns <= step.end_ns]
    inside.sort(key=lambda span: (span.begin_ns, -span.end_ns, span is not step))
    slices: list[SpanSlice] = []
    open_: list[tuple[SpanLine, int]] = []  # open spans, each with its phase
    cursor = step.begin_ns
    inner: list[SpanLine] = []
    # Starts of asynchronous calls, the latest first.
    async_starts = sorted((span.begun_ns for span in inside if span.begun_ns), reverse=True)

    def cut(until: int, even_if_empty: bool = False) -> None:
        nonlocal cursor
        span, phase = open_[-1]
        until, skew = max(until, cursor), span.skew_ns
        while async_starts and async_starts[-1] < until:
            if (async_start := async_starts.pop()) > cursor and span.kind not in WAITS:
                slices.append(SpanSlice(span, cursor + skew, async_start + skew, phase, False))
                cursor = async_start
        if until > cursor or even_if_empty:
            slices.append(SpanSlice(span, cursor + skew, until + skew, phase, span.kind in WAITS, tuple(inner)))
            inner.clear()
        cursor = until

    def close(until: int) -> None:
        while open_ and open_[-1][0].end_ns <= until:
            span = open_[-1][0]
            cut(span.end_ns, span.kind in WAITS or span.name.startswith(SEND))
            open_.pop()

    for span in inside:
        close(span.begin_ns if span is not step else -1)
        if open_ and open_[-1][0].kind in WAITS:
            if span.call:
                inner.append(span)
            continue  # the enclosing wait covers this span
        if open_:
            cut(span.begin_ns)
        phase = open_[-1][1] if open_ else -1
        open_.append((span, _PHASES.get(span.name, phase) if span.kind == "compute" else phase))
    close(step.end_ns)
    return _mark_receive_waits(slices)


def _mark_receive_waits(slices: list[SpanSlice]) -> list[SpanSlice]:
    """Set ``waits`` of the slices of transfer spans.

    Between two pipeline passes, a rank first sends and then waits to receive. So only the last slice of each transfer
    span is a wait.
    """
    last = {id(item.span): index for index, item in enumerate(slices) if item.span.kind == "transfer"}
    return [
        item._replace(waits=last[id(item.span)] == index) if id(item.span) in last else item
        for index, item in enumerate(slices)
    ]


def messages_of(ranks: Sequence[list[SpanSlice]]) -> dict[SliceId, SliceId]:
    """Return, for each wait between two passes, the slice in which another rank sent the input of the next pass."""
    sends: dict[tuple[object, ...], SliceId] = {}
    for rank, slices in enumerate(ranks):
        for index, item in enumerate(slices):
            span = item.span
            if span.kind == "transfer" and span.name.startswith(SEND) and 0 <= span.peer < len(ranks):
                sends[span.peer, span.layer, span.name.removeprefix(SEND), span.micro] = rank, index
    messages: dict[SliceId, SliceId] = {}
    for rank, slices in enumerate(ranks):
        for index, item in enumerate(slices):
            if item.span.kind != "transfer" or not item.waits or item.span.name.startswith(SEND):
                continue
            sender = sends.get(_input_key(rank, slices[index + 1 :]))
            if sender is not None and ranks[sender[0]][sender[1]].end < item.end:  # else clocks are inaccurate
                messages[rank, index] = sender
    return messages


def _input_key(rank: int, following: Sequence[SpanSlice]) -> tuple[object, ...]:
    """Return the key of the input of the next pass: receiver, stages, activations or gradients, micro-batch.

    ``messages_of`` uses the same key for the sends. Return () if there is no next pass.
    """
    for item in islice(following, _SOON):
        span = item.span
        if span.kind == "transfer" or not (stage := span.layer.removeprefix("stage ")).isdecimal():
            continue
        if span.name == "forward":
            return rank, f"stages {int(stage) - 1}-{int(stage)}", "activations", span.micro
        return rank, f"stages {int(stage)}-{int(stage) + 1}", "gradients" if span.name == "backward" else "", span.micro
    return ()


def call_of(span: SpanLine) -> Call:
    return span.kind, tuple(span.group), span.call


def begun_of(ranks: Sequence[list[SpanSlice]]) -> dict[Call, dict[int, tuple[int, bool]]]:
    """Return for each collective call and rank when the call started, and whether it started before the rank waited."""
    starts: dict[Call, dict[int, tuple[int, bool]]] = defaultdict(dict)
    for rank, slices in enumerate(ranks):
        for item in slices:
            for span in item.calls if item.waits else ():
                when = span.begun_ns or span.begin_ns
                starts[call_of(span)][rank] = when + span.skew_ns, bool(span.begun_ns)
    return starts


def routed_rows(slices: Sequence[SpanSlice]) -> list[int]:
    """Return the number of rows that the experts compute in each slice, and ``UNKNOWN`` for slices without experts.

    Within a layer and micro-batch, the n-th expert computation uses the rows of the n-th dispatch. If two micro-batches
    are interleaved, the spans do not show which of them a backward pass belongs to, so the mean of both is used.
    """
    received: dict[tuple[str, int], list[int]] = defaultdict(list)
    computations: dict[tuple[str, str, int], list[SpanLine]] = defaultdict(list)
    rows_of_slices = []
    for item in slices:
        span = item.span
        layer = span.layer, span.micro
        if span.kind == "dispatch" and span.rows:
            received[layer].append(sum(span.rows))
        rows = UNKNOWN
        if span.kind == "compute" and span.name in EXPERTS and received[layer]:
            calls = computations[span.name, *layer]
            if not calls or calls[-1] is not span:
                calls.append(span)
            dispatches = received[layer]
            nth = dispatches[min(len(calls), len(dispatches)) - 1]
            rows = nth if span.name == EXPERTS[0] else sum(dispatches) // len(dispatches)
        rows_of_slices.append(rows)
    return rows_of_slices


def name_of(item: SpanSlice) -> str:
    span = item.span
    if span.kind == "transfer" and not span.name.startswith(SEND):
        return RECEIVE if item.waits else BETWEEN
    if span.kind == "compute" and span.name in WAITS:
        return f"{span.name} within the rank"
    return _KINDS.get(span.kind, _NAMES.get(span.name, span.name))
