"""One rank's spans of a step as contiguous slices, and the sends that its waits between passes depend on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from moe_comm.observe.records import SpanLine
from moe_comm.plan.whatif.even_routing import EXPERTS, UNKNOWN

WAITS = ("dispatch", "combine", "collective")
OTHER, BETWEEN = "other", "between passes"
RECEIVE = "wait for stages"
SEND = "send "
_SOON = 4
"""Number of slices between a wait and the following pass that can belong to enclosing spans."""
_PHASES = {"forward": 0, "loss": 0, "backward": 1}
_NAMES = {"step": OTHER, "forward and backward": OTHER}
_KINDS = {"optimizer": "optimizer", "data": "data", "checkpoint": "checkpoint", "pause": "garbage collection"}
SliceId = tuple[int, int]
"""A rank, and the index among its slices."""
Call = tuple[str, tuple[int, ...], int]
"""A collective call: its kind, the ranks of the group, and the number of the call."""


class SpanSlice(NamedTuple):
    """A part of a rank's step.

    span: the innermost span. begin, end: nanoseconds on the clock of rank 0's host. phase: 0 in a forward pass, 1 in a
    backward pass, else -1. waits: whether the rank waits for other ranks. inner: collective calls within one wait.
    """

    span: SpanLine
    begin: int
    end: int
    phase: int
    waits: bool
    inner: tuple[SpanLine, ...] = ()

    @property
    def calls(self) -> tuple[SpanLine, ...]:
        """The collective calls that the rank waits for, beginning with the span itself."""
        return (self.span, *self.inner) if self.span.call else self.inner


def cut_step(spans: Sequence[SpanLine]) -> list[SpanSlice]:
    """Return one rank's time in one step as contiguous slices, or [] without a span of the step.

    If a step was repeated, the last repetition counts. Times are nanoseconds on the clock of rank 0's host.
    """
    steps = [span for span in spans if span.kind == "step"]
    if not steps:
        return []
    step = max(steps, key=lambda span: span.begin_ns)
    inside = [span for span in spans if step.begin_ns <= span.begin_ns <= span.end_ns <= step.end_ns]
    inside.sort(key=lambda span: (span.begin_ns, -span.end_ns, span is not step))
    slices: list[SpanSlice] = []
    open_: list[tuple[SpanLine, int]] = []  # open spans, each with its phase
    at = step.begin_ns
    inner: list[SpanLine] = []
    starts = sorted((span.begun_ns for span in inside if span.begun_ns), reverse=True)  # begins of asynchronous calls

    def cut(until: int, always: bool = False) -> None:
        nonlocal at
        span, phase = open_[-1]
        until, shift = max(until, at), span.skew_ns
        while starts and starts[-1] < until:
            if (start := starts.pop()) > at and span.kind not in WAITS:
                slices.append(SpanSlice(span, at + shift, start + shift, phase, False))
                at = start
        if until > at or always:
            slices.append(SpanSlice(span, at + shift, until + shift, phase, span.kind in WAITS, tuple(inner)))
            inner.clear()
        at = until

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
            continue  # part of the enclosing wait
        if open_:
            cut(span.begin_ns)
        phase = open_[-1][1] if open_ else -1
        open_.append((span, _PHASES.get(span.name, phase) if span.kind == "compute" else phase))
    close(step.end_ns)
    return _receives(slices)


def _receives(slices: list[SpanSlice]) -> list[SpanSlice]:
    """Set ``waits`` for the last slice between two passes, after everything was sent."""
    last = {id(one.span): index for index, one in enumerate(slices) if one.span.kind == "transfer"}
    return [
        one._replace(waits=last[id(one.span)] == index) if id(one.span) in last else one
        for index, one in enumerate(slices)
    ]


def messages_of(ranks: Sequence[list[SpanSlice]]) -> dict[SliceId, SliceId]:
    """Return, for each wait between two passes, the send of the next pass' input."""
    sends: dict[tuple[object, ...], SliceId] = {}
    for rank, slices in enumerate(ranks):
        for index, one in enumerate(slices):
            span = one.span
            if span.kind == "transfer" and span.name.startswith(SEND) and 0 <= span.peer < len(ranks):
                sends[span.peer, span.layer, span.name.removeprefix(SEND), span.micro] = rank, index
    messages: dict[SliceId, SliceId] = {}
    for rank, slices in enumerate(ranks):
        for index, one in enumerate(slices):
            if one.span.kind != "transfer" or not one.waits or one.span.name.startswith(SEND):
                continue
            at = sends.get(_needed(rank, slices[index + 1 :]))
            if at is not None and ranks[at[0]][at[1]].end < one.end:  # otherwise clocks are inaccurate
                messages[rank, index] = at
    return messages


def _needed(rank: int, following: Sequence[SpanSlice]) -> tuple[object, ...]:
    """Return the input of the next pass, as a key of ``messages_of``."""
    for one in islice(following, _SOON):
        span = one.span
        if span.kind == "transfer" or not (stage := span.layer.removeprefix("stage ")).isdecimal():
            continue
        if span.name == "forward":
            return rank, f"stages {int(stage) - 1}-{int(stage)}", "activations", span.micro
        return rank, f"stages {int(stage)}-{int(stage) + 1}", "gradients" if span.name == "backward" else "", span.micro
    return ()


def call_of(span: SpanLine) -> Call:
    return span.kind, tuple(span.group), span.call


def begun_of(ranks: Sequence[list[SpanSlice]]) -> dict[Call, dict[int, tuple[int, bool]]]:
    """Return when each rank began each collective call, and whether it began asynchronously, before it waited."""
    begun: dict[Call, dict[int, tuple[int, bool]]] = defaultdict(dict)
    for rank, slices in enumerate(ranks):
        for one in slices:
            for span in one.calls if one.waits else ():
                when = span.begun_ns or span.begin_ns
                begun[call_of(span)][rank] = when + span.skew_ns, bool(span.begun_ns)
    return begun


def routed_rows(slices: Sequence[SpanSlice]) -> list[int]:
    """Return the rows of each slice in which experts compute, and ``UNKNOWN`` for all other slices.

    The first dispatch of a layer and micro-batch belongs to the first experts. If two micro-batches are interleaved, it
    is unknown which one a backward pass belongs to, and the mean of both is used.
    """
    received: dict[tuple[str, int], list[int]] = defaultdict(list)
    begun: dict[tuple[str, str, int], list[SpanLine]] = defaultdict(list)
    result = []
    for one in slices:
        span = one.span
        layer = span.layer, span.micro
        if span.kind == "dispatch" and span.rows:
            received[layer].append(sum(span.rows))
        rows = UNKNOWN
        if span.kind == "compute" and span.name in EXPERTS and received[layer]:
            calls = begun[span.name, *layer]
            if not calls or calls[-1] is not span:
                calls.append(span)
            known = received[layer]
            rows = known[min(len(calls), len(known)) - 1] if span.name == EXPERTS[0] else sum(known) // len(known)
        result.append(rows)
    return result


def name_of(one: SpanSlice) -> str:
    span = one.span
    if span.kind == "transfer" and not span.name.startswith(SEND):
        return RECEIVE if one.waits else BETWEEN
    if span.kind == "compute" and span.name in WAITS:
        return f"{span.name} within the rank"
    return _KINDS.get(span.kind, _NAMES.get(span.name, span.name))
