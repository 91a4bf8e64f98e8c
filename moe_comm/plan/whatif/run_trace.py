"""The spans of a run of ours as operations for what-if analysis.

Each rank's time in a step, from the span of the step, is cut where spans begin and end, so that nothing is left out:

    rank 0  [batch][attention][forward][dispatch         ][experts][combine][forward]...     one stream a rank
    rank 1  [batch][attention, slow      ][forward][dispatch][experts][combine]...           calls of a group meet

A piece is called after the innermost span around it, and counts as computing unless that waits for others: then it is
the whole outermost such span. Calls of a group meet. A receive waits for what was sent, which is on its way by itself:
an operation more, beside the ranks' own, where a receiver waited and so knows how long. A wait that belongs to a call
which began before (rows that are awaited while experts compute) is for whatever each of the others had done last when
it ended. So is that of a rank that left a call before another came: it cannot have waited for that one.

A rank's operations follow each other as they were recorded, so what a GPU's streams or other threads did meanwhile is
not moved about.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moe_comm.errors import ConfigError, CorruptFile
from moe_comm.observe.records import ATTEMPTS, SPANS, Attempt, SpanLine, read_folder, read_lines
from moe_comm.plan.arrays import Floats
from moe_comm.plan.whatif.even_routing import UNKNOWN, even_seconds
from moe_comm.plan.whatif.run_spans import (
    BETWEEN,
    SEND,
    WAITS,
    Call,
    Piece,
    Place,
    begun_of,
    call_of,
    cut_step,
    messages_of,
    name_of,
    routed_rows,
)
from moe_comm.plan.whatif.trace_table import TraceGraph, TraceTable
from moe_comm.topology import ParallelConfig

LATE = "between steps"
"""What a rank did while others had begun the step already; it has no span."""
MOST_SPANS = 1 << 21
"""That are kept at a time: about 1.5 GB."""
_TAKES = {"activations": "forward", "gradients": "backward"}
_BETWEEN = re.compile(r"stages ([0-9]{1,6})-([0-9]{1,6})")


@dataclass(frozen=True)
class RunTrace:
    """graph: of the steps that all ranks have recorded. even_N: seconds of each operation if every expert rank had as
    much to do and to send. mapping: of the run. skipped: steps that some rank has not recorded whole."""

    graph: TraceGraph
    even_N: Floats
    mapping: dict[str, int]
    skipped: tuple[int, ...]


def read_run_trace(run: Path, steps: tuple[int, int] | None = None) -> RunTrace:
    """The spans in a run's folder; of several starts, those since the last.

    Args:
        steps: only those from the first to the last of these.

    Raises:
        ConfigError: no spans of whole steps, or too many at once. CorruptFile: a file is damaged.
    """
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run's folder")
    attempts = list(read_lines(run / ATTEMPTS, Attempt))
    if not attempts:
        raise ConfigError(f"{run} does not say how its ranks were mapped: it lacks {ATTEMPTS}")
    last = max(attempts, key=lambda attempt: attempt.number)
    spans: list[SpanLine] = []
    for line in read_folder(run / SPANS, SpanLine):
        if (steps is None or steps[0] <= line.step <= steps[1]) and line.begin_ns >= last.started_s * 1e9:
            spans.append(line)
            if len(spans) > MOST_SPANS:
                raise ConfigError(f"{run} has more than {MOST_SPANS} spans; ask for fewer steps")
    if not spans:
        raise ConfigError(f"{run} has no spans; set observe.every to less than run.steps, or ask for other steps")
    return make_run_trace(spans, last.world, last.mapping)


def make_run_trace(spans: Iterable[SpanLine], world: int, mapping: dict[str, int]) -> RunTrace:
    """As ``read_run_trace``.

    Args:
        spans: of all ranks, in any order. world: how many ranks. mapping: sizes by dimension; those left out are 1.

    Raises:
        ConfigError: no step was recorded by all ranks. CorruptFile: the mapping is not one of so many ranks.
    """
    builder, skipped = _Builder(_mapping(world, mapping)), []
    by_step: dict[int, dict[int, list[SpanLine]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.rank >= world:
            raise CorruptFile(f"a span is of rank {span.rank}; the run has {world} ranks")
        if not span.thread and span.kind != "mark" and span.end_ns >= span.begin_ns:
            by_step[span.step][span.rank].append(span)
    for step, ranks in sorted(by_step.items()):
        cut = {rank: pieces for rank, found in ranks.items() if (pieces := cut_step(found))}
        if len(cut) == world:
            builder.add_step(step, [cut[rank] for rank in range(world)])
        else:
            skipped.append(step)
    if not builder.rows:
        raise ConfigError(
            f"none of {len(skipped)} steps was recorded whole by all {world} ranks; train with observe.events=true and "
            "observe.every less than run.steps"
        )
    graph = builder.graph()
    moving = [name for name in builder.names if name.startswith(WAITS[:2])]
    even_N = even_seconds(graph, np.array(builder.routed), moving)
    return RunTrace(graph, even_N, dict(mapping), tuple(skipped))


def _mapping(world: int, mapping: dict[str, int]) -> ParallelConfig:
    sizes = {name: mapping.get(name, 1) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
    try:
        made = ParallelConfig(**sizes)
    except ConfigError as error:
        raise CorruptFile(f"the run's mapping is none: {error}") from error
    if made.world != world:
        raise CorruptFile(f"the run's mapping, {made}, is of {made.world} ranks; it had {world}")
    return made


@dataclass
class _Builder:
    """Collects the pieces of step after step, as rows of the table, and what they wait for."""

    mapping: ParallelConfig
    rows: list[tuple[int, int, int, int, int, float, float, bool, int]] = field(default_factory=list)
    like: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    meeting: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    phase: list[int] = field(default_factory=list)
    routed: list[int] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    _likes: dict[tuple[object, ...], int] = field(default_factory=dict)
    _meetings: int = 0
    _streams: int = 0

    def add_step(self, step: int, ranks: Sequence[list[Piece]]) -> None:
        """``ranks``: the pieces of each."""
        zero = min(pieces[0].begin for pieces in ranks)
        first = []
        for rank, pieces in enumerate(ranks):
            if (late := pieces[0].begin) > zero:
                span = SpanLine(rank, "step", LATE, zero, late, step)
                pieces.insert(0, Piece(span, zero, late, -1, False))
        messages = messages_of(ranks)
        for rank, pieces in enumerate(ranks):
            for place, piece in enumerate(pieces):
                if piece.span.kind == "transfer" and not piece.span.name.startswith(SEND):
                    pieces[place] = piece._replace(waits=(rank, place) in messages)
            first.append(len(self.rows))
            self._add_rank(step, rank, pieces, zero)
        begun = begun_of(ranks)
        early = {call for call, when in begun.items() if any(early for _, early in when.values())}
        self._meet(ranks, first, early)
        for receiver, sender in messages.items():
            self._cross(ranks, first, sender, receiver)
        self._take(ranks, first)
        self._settle(ranks, first, messages)
        self._await(ranks, first, {call: begun[call] for call in early})
        self._wait(ranks, first, early)

    def graph(self) -> TraceGraph:
        name, step, micro, chunk, rank, begin, end, moves, nbytes = (
            np.array(column) for column in zip(*self.rows, strict=True)
        )
        edges = np.array(self.edges, dtype=np.int64).reshape(-1, 2)
        of_rank = [self.mapping.place(one) for one in range(self.mapping.world)]
        places = {
            dimension: np.array([place[dimension] for place in of_rank])[rank]
            for dimension in ("pp", "dp", "tp", "cp", "ep", "etp", "edp")
            if dimension in ("pp", "dp") or self.mapping.sizes[dimension] > 1
        }
        table = TraceTable(tuple(self.names), name, step, micro, chunk, rank, begin, end, moves, nbytes, places)
        balanced = self.mapping.pp > 1
        return TraceGraph.make(
            table,
            np.array(self.stream),
            np.array(self.meeting),
            edges[:, 0],
            edges[:, 1],
            np.array(self.like),
            np.array(self.value),
            np.where(~moves, np.array(self.phase), -1) if balanced else None,
        )

    def _add_rank(self, step: int, rank: int, pieces: list[Piece], zero: int) -> None:
        stage = rank // self.mapping.stage
        count: dict[tuple[object, ...], int] = defaultdict(int)
        for piece in pieces:
            span, name = piece.span, name_of(piece)
            key = (name, span.layer, span.micro, piece.phase)
            like = (name, span.layer, piece.phase, stage, count[key])
            count[key] += 1
            begin, end = (piece.begin - zero) / 1e9, (piece.end - zero) / 1e9
            self._add((name, step, span.micro, rank, begin, end, piece.waits, span.nbytes), like, piece.phase)
        self.routed += routed_rows(pieces)
        self._streams += 1

    def _add(
        self, row: tuple[str, int, int, int, float, float, bool, int], like: tuple[object, ...], phase: int
    ) -> None:
        """An operation on the stream that is being made. row: name, step, micro-batch, rank, begin, end, whether it
        moves data, and bytes."""
        name, step, micro, rank, begin, end, moves, nbytes = row
        number = self.names.setdefault(name, len(self.names))
        self.rows.append((number, step, micro, -1, rank, begin, end, moves, nbytes))
        self.like.append(self._likes.setdefault(like, len(self._likes)))
        self.stream.append(self._streams)
        self.meeting.append(-1)
        self.value.append(float("nan"))
        self.phase.append(phase)

    def _meet(self, ranks: Sequence[list[Piece]], first: Sequence[int], early: Collection[Call]) -> None:
        calls: dict[Call, list[Place]] = defaultdict(list)
        for rank, pieces in enumerate(ranks):
            for place, piece in enumerate(pieces):
                if piece.waits and piece.span.call and call_of(piece.span) not in early:
                    calls[call_of(piece.span)].append((rank, place))
        for members in calls.values():
            latest = max(ranks[rank][place].begin for rank, place in members)
            for rank, place in members:
                piece = ranks[rank][place]
                if piece.end >= latest:
                    self.meeting[first[rank] + place] = self._meetings
                    continue
                before = [
                    (other, at - 1)
                    for other, at in members
                    if other != rank and at and ranks[other][at].begin < piece.end
                ]
                self._release(ranks, first, (rank, place), before)
            self._meetings += 1

    def _cross(
        self, ranks: Sequence[list[Piece]], first: Sequence[int], sender: tuple[int, int], receiver: tuple[int, int]
    ) -> None:
        """What was sent is on its way by itself: for how long is known where the receiver waited."""
        sent, received = (ranks[rank][place] for rank, place in (sender, receiver))
        source, target = first[sender[0]] + sender[1], first[receiver[0]] + receiver[1]
        if sent.end < received.begin:
            self.edges.append((source, target))
            return
        way, row = len(self.rows), self.rows[source]
        name = f"transfer of {sent.span.name.removeprefix(SEND)}"
        moved = (name, row[1], row[2], row[4], row[6], self.rows[target][6], True, 0)
        self._add(moved, (name, sent.span.layer), -1)
        self._streams += 1
        self.routed.append(UNKNOWN)
        self.value[target] = 0.0
        self.edges += [(source, way), (way, target)]

    def _take(self, ranks: Sequence[list[Piece]], first: Sequence[int]) -> None:
        """A pass comes after what it takes was sent, also where nobody waited for it."""
        passes: dict[tuple[object, ...], int] = {}
        for rank, pieces in enumerate(ranks):
            for place, piece in enumerate(pieces):
                if piece.span.kind == "compute" and piece.span.name in _TAKES.values():
                    passes.setdefault((rank, piece.span.name, piece.span.layer, piece.span.micro), place)
        done: set[tuple[object, ...]] = set()
        for rank, pieces in enumerate(ranks):
            for at, piece in enumerate(pieces):
                taken = _taken(piece.span)
                if taken is None or taken in done or taken not in passes:
                    continue
                done.add(taken)
                peer, into = piece.span.peer, passes[taken]
                if piece.end <= ranks[peer][into].begin:
                    self.edges.append((first[rank] + at, first[peer] + into))

    def _settle(self, ranks: Sequence[list[Piece]], first: Sequence[int], messages: Mapping[Place, Place]) -> None:
        """After its last pass a rank waits until all that it sent was taken: until those who receive it asked for it,
        before the pass that takes it."""
        asked: dict[tuple[object, ...], int] = {}
        for rank, pieces in enumerate(ranks):
            gap = 0
            for place, piece in enumerate(pieces):
                if piece.span.kind == "transfer":
                    if piece.span is not pieces[gap].span and not piece.span.name.startswith(SEND):
                        gap = place
                elif piece.span.kind == "compute" and piece.span.name in _TAKES.values():
                    asked.setdefault((rank, piece.span.name, piece.span.layer, piece.span.micro), gap)
        for rank, pieces in enumerate(ranks):
            last = max((at for at, piece in enumerate(pieces) if piece.span.name == BETWEEN), default=-1)
            if last < 0 or (rank, last) in messages:
                continue
            before = []
            for piece in pieces[:last]:
                taken = _taken(piece.span)
                gap = asked.get(taken, 0) if taken is not None else 0
                peer = piece.span.peer
                if gap and 0 <= peer < len(ranks) and pieces[last].begin < ranks[peer][gap].begin < pieces[last].end:
                    before.append((peer, gap - 1))
            if before:
                self._release(ranks, first, (rank, last), before)

    def _await(
        self, ranks: Sequence[list[Piece]], first: Sequence[int], begun: Mapping[Call, Mapping[int, tuple[int, bool]]]
    ) -> None:
        """Of calls that were begun before, on some rank, a wait is over once all have begun."""
        ends = [[piece.end for piece in pieces] for pieces in ranks]
        for rank, pieces in enumerate(ranks):
            for place, piece in enumerate(pieces):
                calls = [call for span in piece.calls if (call := call_of(span)) in begun] if piece.waits else []
                before = []
                for call in calls:
                    for other, (when, _) in begun[call].items():
                        at = bisect_right(ends[other], when) - 1
                        if other != rank and at >= 0 and when < piece.end:
                            before.append((other, at))
                if before:
                    self._release(ranks, first, (rank, place), before)

    def _wait(self, ranks: Sequence[list[Piece]], first: Sequence[int], early: Collection[Call]) -> None:
        """For calls that began before, of the same layer and kind, where it is not said which and when."""
        ends = [[piece.end for piece in pieces] for pieces in ranks]
        begun: list[dict[tuple[str, str], dict[int, int]]] = []
        for pieces in ranks:
            calls: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
            for place, piece in enumerate(pieces):
                if piece.waits and piece.span.call:
                    calls[piece.span.kind, piece.span.layer][piece.span.call] = place
            begun.append(calls)
        for rank, pieces in enumerate(ranks):
            latest: dict[tuple[str, str], SpanLine] = {}
            for place, piece in enumerate(pieces):
                span = piece.span
                if not piece.waits or span.kind not in WAITS:
                    continue
                if span.call:
                    latest[span.kind, span.layer] = span
                elif any(call_of(inner) in early for inner in piece.inner):
                    continue
                elif (call := latest.get((span.kind, span.layer))) is not None:
                    before = []
                    for other in call.group:
                        at = begun[other][span.kind, span.layer].get(call.call) if other < len(ranks) else None
                        done = bisect_left(ends[other], piece.end) - 1 if at is not None else -1
                        if other != rank and at is not None and done >= max(at - 1, 0):
                            before.append((other, done))
                    self._release(ranks, first, (rank, place), before)

    def _release(
        self,
        ranks: Sequence[list[Piece]],
        first: Sequence[int],
        waiting: tuple[int, int],
        before: Sequence[tuple[int, int]],
    ) -> None:
        """A wait begins anew when these are done: from then on it takes what it took."""
        piece = ranks[waiting[0]][waiting[1]]
        place = first[waiting[0]] + waiting[1]
        begin = max([piece.begin, *(min(ranks[rank][at].end, piece.end) for rank, at in before)])
        self.value[place] = (piece.end - begin) / 1e9
        self.edges += [(first[rank] + at, place) for rank, at in before]


def _taken(span: SpanLine) -> tuple[object, ...] | None:
    """The pass that takes what a span sends: rank, name, stage and micro-batch; None of a span that sends nothing."""
    if span.kind != "transfer" or not span.name.startswith(SEND):
        return None
    found, name = _BETWEEN.fullmatch(span.layer), _TAKES.get(span.name.removeprefix(SEND))
    if found is None or name is None:
        return None
    return span.peer, name, f"stage {int(found[2] if name == 'forward' else found[1])}", span.micro
