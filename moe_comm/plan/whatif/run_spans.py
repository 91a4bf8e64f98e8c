"""One rank's spans of a step, cut into pieces without gaps, and which sends its waits between passes were for."""

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
"""Pieces, between a wait and the pass behind it, of what is around both."""
_PHASES = {"forward": 0, "loss": 0, "backward": 1}
_NAMES = {"step": OTHER, "forward and backward": OTHER}
_KINDS = {"optimizer": "optimizer", "data": "data", "checkpoint": "checkpoint", "pause": "garbage collection"}
Place = tuple[int, int]
"""A rank, and the place among its pieces."""
Call = tuple[str, tuple[int, ...], int]
"""Of a group: its kind, the ranks, and which of their calls of that kind."""


class Piece(NamedTuple):
    """Part of a rank's step. span: the one it is called after. begin, end: nanoseconds on the clock of rank 0's host.
    phase: 0 in a forward pass, 1 in a backward pass, else -1. waits: for other ranks. inner: calls of groups that are
    parts of one wait."""

    span: SpanLine
    begin: int
    end: int
    phase: int
    waits: bool
    inner: tuple[SpanLine, ...] = ()

    @property
    def calls(self) -> tuple[SpanLine, ...]:
        """Those that this is a wait for, itself first."""
        return (self.span, *self.inner) if self.span.call else self.inner


def cut_step(spans: Sequence[SpanLine]) -> list[Piece]:
    """One rank's time in one step, in pieces without gaps; [] without the step's own span. Of a step that was done
    again the last time counts. Nanoseconds on the clock of rank 0's host."""
    wholes = [span for span in spans if span.kind == "step"]
    if not wholes:
        return []
    whole = max(wholes, key=lambda span: span.begin_ns)
    inside = [span for span in spans if whole.begin_ns <= span.begin_ns <= span.end_ns <= whole.end_ns]
    inside.sort(key=lambda span: (span.begin_ns, -span.end_ns, span is not whole))
    pieces: list[Piece] = []
    open_: list[tuple[SpanLine, int]] = []  # and the phase it is in
    at = whole.begin_ns
    inner: list[SpanLine] = []
    starts = sorted((span.begun_ns for span in inside if span.begun_ns), reverse=True)  # of what is waited for later

    def cut(until: int, always: bool = False) -> None:
        nonlocal at
        span, phase = open_[-1]
        until, shift = max(until, at), span.skew_ns
        while starts and starts[-1] < until:
            if (start := starts.pop()) > at and span.kind not in WAITS:
                pieces.append(Piece(span, at + shift, start + shift, phase, False))
                at = start
        if until > at or always:
            pieces.append(Piece(span, at + shift, until + shift, phase, span.kind in WAITS, tuple(inner)))
            inner.clear()
        at = until

    def close(until: int) -> None:
        while open_ and open_[-1][0].end_ns <= until:
            span = open_[-1][0]
            cut(span.end_ns, span.kind in WAITS or span.name.startswith(SEND))
            open_.pop()

    for span in inside:
        close(span.begin_ns if span is not whole else -1)
        if open_ and open_[-1][0].kind in WAITS:
            if span.call:
                inner.append(span)
            continue  # a part of what is one wait
        if open_:
            cut(span.begin_ns)
        phase = open_[-1][1] if open_ else -1
        open_.append((span, _PHASES.get(span.name, phase) if span.kind == "compute" else phase))
    close(whole.end_ns)
    return _receives(pieces)


def _receives(pieces: list[Piece]) -> list[Piece]:
    """Of the time between two passes only what comes after everything was sent can be a wait: ``waits`` says so."""
    last = {id(piece.span): place for place, piece in enumerate(pieces) if piece.span.kind == "transfer"}
    return [
        piece._replace(waits=last[id(piece.span)] == place) if id(piece.span) in last else piece
        for place, piece in enumerate(pieces)
    ]


def messages_of(ranks: Sequence[list[Piece]]) -> dict[Place, Place]:
    """What each wait between two passes was for: the send of what the next pass takes."""
    taken: dict[tuple[object, ...], Place] = {}
    for rank, pieces in enumerate(ranks):
        for place, piece in enumerate(pieces):
            span = piece.span
            if span.kind == "transfer" and span.name.startswith(SEND) and 0 <= span.peer < len(ranks):
                taken[span.peer, span.layer, span.name.removeprefix(SEND), span.micro] = rank, place
    found: dict[Place, Place] = {}
    for rank, pieces in enumerate(ranks):
        for place, piece in enumerate(pieces):
            if piece.span.kind != "transfer" or not piece.waits or piece.span.name.startswith(SEND):
                continue
            at = taken.get(_needed(rank, pieces[place + 1 :]))
            if at is not None and ranks[at[0]][at[1]].end < piece.end:  # else clocks are wrong
                found[rank, place] = at
    return found


def _needed(rank: int, following: Sequence[Piece]) -> tuple[object, ...]:
    """What the next pass takes, as ``messages_of`` has it."""
    for piece in islice(following, _SOON):
        span = piece.span
        if span.kind == "transfer" or not (stage := span.layer.removeprefix("stage ")).isdecimal():
            continue
        if span.name == "forward":
            return rank, f"stages {int(stage) - 1}-{int(stage)}", "activations", span.micro
        return rank, f"stages {int(stage)}-{int(stage) + 1}", "gradients" if span.name == "backward" else "", span.micro
    return ()


def call_of(span: SpanLine) -> Call:
    return span.kind, tuple(span.group), span.call


def begun_of(ranks: Sequence[list[Piece]]) -> dict[Call, dict[int, tuple[int, bool]]]:
    """When each rank began each call of a group, and whether that was well before it waited. Calls that are parts of
    others are among them."""
    found: dict[Call, dict[int, tuple[int, bool]]] = defaultdict(dict)
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            for span in piece.calls if piece.waits else ():
                when = span.begun_ns or span.begin_ns
                found[call_of(span)][rank] = when + span.skew_ns, bool(span.begun_ns)
    return found


def routed_rows(pieces: Sequence[Piece]) -> list[int]:
    """Of each piece in which experts compute, the rows that their dispatch brought; ``UNKNOWN`` for all others.

    Of dispatches of one layer and micro-batch the first are those of the first experts. Where two micro-batches take
    turns, and which one's experts a backward pass is at is not said, it is the mean of both.
    """
    brought: dict[tuple[str, int], list[int]] = defaultdict(list)
    begun: dict[tuple[str, str, int], list[SpanLine]] = defaultdict(list)
    found = []
    for piece in pieces:
        span = piece.span
        layer = span.layer, span.micro
        if span.kind == "dispatch" and span.rows:
            brought[layer].append(sum(span.rows))
        rows = UNKNOWN
        if span.kind == "compute" and span.name in EXPERTS and brought[layer]:
            calls = begun[span.name, *layer]
            if not calls or calls[-1] is not span:
                calls.append(span)
            known = brought[layer]
            rows = known[min(len(calls), len(known)) - 1] if span.name == EXPERTS[0] else sum(known) // len(known)
        found.append(rows)
    return found


def name_of(piece: Piece) -> str:
    span = piece.span
    if span.kind == "transfer" and not span.name.startswith(SEND):
        return RECEIVE if piece.waits else BETWEEN
    if span.kind == "compute" and span.name in WAITS:
        return f"{span.name} within the rank"
    return _KINDS.get(span.kind, _NAMES.get(span.name, span.name))
