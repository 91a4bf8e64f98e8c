"""One rank's spans of a step, cut into pieces without gaps, and which sends its waits between passes were for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from moe_comm.observe.records import SpanLine

WAITS = ("dispatch", "combine", "collective")
OTHER, BETWEEN = "other", "between passes"
RECEIVE = "receive from stages"
SEND = "send "
_SOON = 4
"""Pieces, between a wait and the pass behind it, of what is around both."""
_PHASES = {"forward": 0, "loss": 0, "backward": 1}
_NAMES = {"step": OTHER, "forward and backward": OTHER}
_KINDS = {"optimizer": "optimizer", "data": "data", "checkpoint": "checkpoint", "pause": "garbage collection"}
Place = tuple[int, int]
"""A rank, and the place among its pieces."""


class Piece(NamedTuple):
    """Part of a rank's step. span: the one it is called after. begin, end: nanoseconds on the clock of rank 0's host.
    phase: 0 in a forward pass, 1 in a backward pass, else -1. waits: for other ranks."""

    span: SpanLine
    begin: int
    end: int
    phase: int
    waits: bool


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

    def cut(until: int, always: bool = False) -> None:
        nonlocal at
        span, phase = open_[-1]
        until = max(until, at)
        if until > at or always:
            shift = span.skew_ns
            pieces.append(Piece(span, at + shift, until + shift, phase, span.kind in WAITS))
        at = until

    def close(until: int) -> None:
        while open_ and open_[-1][0].end_ns <= until:
            span = open_[-1][0]
            cut(span.end_ns, span.kind in WAITS or span.name.startswith(SEND))
            open_.pop()

    for span in inside:
        close(span.begin_ns if span is not whole else -1)
        if open_ and open_[-1][0].kind in WAITS:
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


def messages_of(ranks: Sequence[list[Piece]]) -> dict[Place, list[Place]]:
    """What each wait between two passes was for: sends, in order of their time.

    A rank with one stage waits for what the next pass takes. One with several waits in each turn for what its peers
    send in theirs, whenever it is used: so for all that was sent before the wait ended, and after the last one had.
    """
    taken: dict[tuple[object, ...], Place] = {}
    coming: dict[int, list[Place]] = defaultdict(list)
    for rank, pieces in enumerate(ranks):
        for place, piece in enumerate(pieces):
            span = piece.span
            if span.kind == "transfer" and span.name.startswith(SEND) and 0 <= span.peer < len(ranks):
                taken[span.peer, span.layer, span.name.removeprefix(SEND), span.micro] = rank, place
                coming[span.peer].append((rank, place))
    found: dict[Place, list[Place]] = {}
    for rank, sent in coming.items():
        sent.sort(key=lambda at: ranks[at[0]][at[1]].end)
        pieces = ranks[rank]
        stages = {piece.span.layer for piece in pieces if piece.span.layer.startswith("stage ")}
        done = 0
        for place, piece in enumerate(pieces):
            if piece.span.kind != "transfer" or not piece.waits or piece.span.name.startswith(SEND):
                continue
            if len(stages) > 1:
                first = done
                while done < len(sent) and ranks[sent[done][0]][sent[done][1]].end < piece.end:
                    done += 1
                found[rank, place] = sent[first:done]
                continue
            at = taken.get(_needed(rank, pieces[place + 1 :]))
            if at is not None and ranks[at[0]][at[1]].end < piece.end:  # else clocks are wrong
                found[rank, place] = [at]
    return {at: sends for at, sends in found.items() if sends}


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


def name_of(piece: Piece) -> str:
    span = piece.span
    if span.kind == "transfer" and not span.name.startswith(SEND):
        return RECEIVE if piece.waits else BETWEEN
    if span.kind == "compute" and span.name in WAITS:
        return f"{span.name} within the rank"
    return _KINDS.get(span.kind, _NAMES.get(span.name, span.name))
