"""Read the spans of a run of this library as operations for what-if analysis.

Each rank's time in a step is divided where spans begin and end, without gaps:

    rank 0  [batch][attention][forward][dispatch         ][experts][combine][forward]...     one stream per rank
    rank 1  [batch][attention, slow      ][forward][dispatch][experts][combine]...           calls synchronize

A slice (a time interval of a rank) is named after its innermost span. It counts as computation unless a span waits for
other ranks: then the slice covers the outermost such span. The calls of a collective begin together. A receive waits
for a send. If the receiver waited, the transfer is an additional operation with its own stream, whose duration is
known. A rank can also wait for an asynchronous call that began earlier (for rows, while experts compute). Such a wait
depends on the last operation that each other rank had completed when the wait ended. The same applies to a rank that
left a call before another rank entered it.

The operations of a rank keep their recorded order. Work on other GPU streams or threads is not moved.
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
from moe_comm.topology import ParallelConfig
from moe_plan.arrays import Floats
from moe_plan.whatif.run_spans import (
    BETWEEN,
    SEND,
    UNKNOWN,
    WAITS,
    Call,
    SliceId,
    SpanSlice,
    begun_of,
    call_of,
    cut_step,
    even_seconds,
    messages_of,
    name_of,
    routed_rows,
)
from moe_plan.whatif.trace_table import TraceGraph, TraceTable

LATE = "between steps"
"""Name of the time of a rank between the first rank's begin of the step and its own."""
MOST_SPANS = 1 << 21
"""Largest number of spans in memory: about 1.5 GB."""
_PASS_OF_MESSAGE = {"activations": "forward", "gradients": "backward"}
_BETWEEN = re.compile(r"stages ([0-9]{1,6})-([0-9]{1,6})")


@dataclass(frozen=True)
class RunTrace:
    """A run as a graph of operations.

    graph: the steps that all ranks recorded. even_N: seconds of each operation if all expert ranks had the same number
    of rows. mapping: of the run. skipped: steps that some rank did not record completely.
    """

    graph: TraceGraph
    even_N: Floats
    mapping: dict[str, int]
    skipped: tuple[int, ...]


def read_run_trace(run: Path, steps: tuple[int, int] | None = None) -> RunTrace:
    """Read the spans in a run's folder. If the run was restarted, only the spans since the last start are read.

    Args:
        steps: first and last step to read; None: all.

    Raises:
        ConfigError: there are no spans of complete steps, or too many spans.
        CorruptFile: a file is damaged.
    """
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run folder")
    attempts = list(read_lines(run / ATTEMPTS, Attempt))
    if not attempts:
        raise ConfigError(f"{run} lacks {ATTEMPTS}, which contains the mapping of its ranks")
    last = max(attempts, key=lambda attempt: attempt.number)
    spans: list[SpanLine] = []
    for line in read_folder(run / SPANS, SpanLine):
        if (steps is None or steps[0] <= line.step <= steps[1]) and line.begin_ns >= last.started_s * 1e9:
            spans.append(line)
            if len(spans) > MOST_SPANS:
                raise ConfigError(f"{run} has more than {MOST_SPANS} spans; select fewer steps")
    if not spans:
        raise ConfigError(f"{run} has no spans; set observe.every to less than run.steps, or select other steps")
    return make_run_trace(spans, last.world, last.mapping)


def make_run_trace(spans: Iterable[SpanLine], world: int, mapping: dict[str, int]) -> RunTrace:
    """Build the graph of a run, see ``read_run_trace``.

    Args:
        spans: of all ranks, in any order.
        mapping: sizes by dimension; missing ones are 1.

    Raises:
        ConfigError: no step was recorded by all ranks.
        CorruptFile: the mapping does not match the number of ranks.
    """
    builder, skipped = _Builder(_mapping(world, mapping)), []
    by_step: dict[int, dict[int, list[SpanLine]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.rank >= world:
            raise CorruptFile(f"a span has rank {span.rank}, but the run has {world} ranks")
        if not span.thread and span.kind != "mark" and span.end_ns >= span.begin_ns:
            by_step[span.step][span.rank].append(span)
    for step, ranks in sorted(by_step.items()):
        cut = {rank: slices for rank, spans_of in ranks.items() if (slices := cut_step(spans_of))}
        if len(cut) == world:
            builder.add_step(step, [cut[rank] for rank in range(world)])
        else:
            skipped.append(step)
    if not builder.rows:
        raise ConfigError(
            f"none of {len(skipped)} steps was recorded completely by all {world} ranks; train with "
            "observe.events=true and observe.every less than run.steps"
        )
    graph = builder.graph()
    moving = [name for name in builder.names if name.startswith(WAITS[:2])]
    even_N = even_seconds(graph, np.array(builder.routed), moving)
    return RunTrace(graph, even_N, dict(mapping), tuple(skipped))


def _mapping(world: int, mapping: dict[str, int]) -> ParallelConfig:
    sizes = {name: mapping.get(name, 1) for name in ("tp", "cp", "dp", "pp", "ep", "etp")}
    try:
        config = ParallelConfig(**sizes)
    except ConfigError as error:
        raise CorruptFile(f"the run's mapping is invalid: {error}") from error
    if config.world != world:
        raise CorruptFile(f"the run's mapping, {config}, has {config.world} ranks, but the run has {world}")
    return config


@dataclass
class _Builder:
    """Collects the operations of successive steps, and their dependencies.

    rows: the columns of ``TraceTable`` except coordinates, with times in seconds after the step began. The following
    lists have one entry per row, as in ``TraceGraph``. phase: of ``SpanSlice``. routed: rows of experts, or
    ``UNKNOWN``.
    """

    mapping: ParallelConfig
    rows: list[tuple[int, int, int, int, int, float, float, bool, int]] = field(default_factory=list)
    op_class: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    collective: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    phase: list[int] = field(default_factory=list)
    routed: list[int] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    _classes: dict[tuple[object, ...], int] = field(default_factory=dict)
    _slices: Sequence[list[SpanSlice]] = ()
    _first: list[int] = field(default_factory=list)
    _collectives: int = 0
    _streams: int = 0

    def add_step(self, step: int, ranks: Sequence[list[SpanSlice]]) -> None:
        zero = min(slices[0].begin for slices in ranks)
        self._slices, self._first = ranks, []
        for rank, slices in enumerate(ranks):
            if (late := slices[0].begin) > zero:
                span = SpanLine(rank, "step", LATE, zero, late, step)
                slices.insert(0, SpanSlice(span, zero, late, -1, False))
        messages = messages_of(ranks)
        for rank, slices in enumerate(ranks):
            for index, item in enumerate(slices):
                if item.span.kind == "transfer" and not item.span.name.startswith(SEND):
                    slices[index] = item._replace(waits=(rank, index) in messages)
            self._first.append(len(self.rows))
            self._add_rank(step, rank, slices, zero)
        begun = begun_of(ranks)
        early = {call for call, when in begun.items() if any(early for _, early in when.values())}
        self._join_calls(early)
        for receiver, sender in messages.items():
            self._transfer(sender, receiver)
        self._receive()
        self._wait_for_receivers(messages)
        self._wait_for_early_calls({call: begun[call] for call in early})
        self._wait_for_unnamed_calls(early)

    def graph(self) -> TraceGraph:
        name, step, micro, chunk, rank, begin, end, moves, nbytes = (
            np.array(column) for column in zip(*self.rows, strict=True)
        )
        edges = np.array(self.edges, dtype=np.int64).reshape(-1, 2)
        of_rank = [self.mapping.place(one) for one in range(self.mapping.world)]
        coordinates = {
            dimension: np.array([index[dimension] for index in of_rank])[rank]
            for dimension in ("pp", "dp", "tp", "cp", "ep", "etp", "edp")
            if dimension in ("pp", "dp") or self.mapping.sizes[dimension] > 1
        }
        table = TraceTable(tuple(self.names), name, step, micro, chunk, rank, begin, end, moves, nbytes, coordinates)
        balanced = self.mapping.pp > 1
        return TraceGraph.make(
            table,
            np.array(self.stream),
            np.array(self.collective),
            edges[:, 0],
            edges[:, 1],
            np.array(self.op_class),
            np.array(self.value),
            np.where(~moves, np.array(self.phase), -1) if balanced else None,
        )

    def _add_rank(self, step: int, rank: int, slices: list[SpanSlice], zero: int) -> None:
        stage = rank // self.mapping.stage
        occurrences: dict[tuple[object, ...], int] = defaultdict(int)
        for item in slices:
            span, name = item.span, name_of(item)
            key = (name, span.layer, span.micro, item.phase)
            op_class = (name, span.layer, item.phase, stage, occurrences[key])
            occurrences[key] += 1
            begin, end = (item.begin - zero) / 1e9, (item.end - zero) / 1e9
            self._add((name, step, span.micro, rank, begin, end, item.waits, span.nbytes), op_class, item.phase)
        self.routed += routed_rows(slices)
        self._streams += 1

    def _add(
        self, row: tuple[str, int, int, int, float, float, bool, int], op_class: tuple[object, ...], phase: int
    ) -> None:
        """Add an operation to the current stream.

        row: name, step, micro-batch, rank, begin, end, whether it transfers data, and bytes.
        """
        name, step, micro, rank, begin, end, moves, nbytes = row
        number = self.names.setdefault(name, len(self.names))
        self.rows.append((number, step, micro, -1, rank, begin, end, moves, nbytes))
        self.op_class.append(self._classes.setdefault(op_class, len(self._classes)))
        self.stream.append(self._streams)
        self.collective.append(-1)
        self.value.append(float("nan"))
        self.phase.append(phase)

    def _join_calls(self, early: Collection[Call]) -> None:
        """Join the slices of each call to a collective, except calls in ``early``.

        If a rank left a call before another rank entered it, its slice depends on what the other ranks did before it.
        """
        calls: dict[Call, list[SliceId]] = defaultdict(list)
        for rank, slices in enumerate(self._slices):
            for index, item in enumerate(slices):
                if item.waits and item.span.call and call_of(item.span) not in early:
                    calls[call_of(item.span)].append((rank, index))
        for members in calls.values():
            latest = max(self._slices[rank][index].begin for rank, index in members)
            for rank, index in members:
                item = self._slices[rank][index]
                if item.end >= latest:
                    self.collective[self._first[rank] + index] = self._collectives
                    continue
                before = [
                    (other, at - 1)
                    for other, at in members
                    if other != rank and at and self._slices[other][at].begin < item.end
                ]
                self._release((rank, index), before)
            self._collectives += 1

    def _transfer(self, sender: tuple[int, int], receiver: tuple[int, int]) -> None:
        """Add the edge from a send to a receive, or the transfer as an operation if the receiver waited."""
        sent, received = (self._slices[rank][index] for rank, index in (sender, receiver))
        source, target = self._first[sender[0]] + sender[1], self._first[receiver[0]] + receiver[1]
        if sent.end < received.begin:
            self.edges.append((source, target))
            return
        transfer, row = len(self.rows), self.rows[source]
        name = f"transfer of {sent.span.name.removeprefix(SEND)}"
        moved = (name, row[1], row[2], row[4], row[6], self.rows[target][6], True, 0)
        self._add(moved, (name, sent.span.layer), -1)
        self._streams += 1
        self.routed.append(UNKNOWN)
        self.value[target] = 0.0
        self.edges += [(source, transfer), (transfer, target)]

    def _receive(self) -> None:
        """Let each pass wait for the send of its input, even if the receiver did not wait."""
        passes: dict[tuple[object, ...], int] = {}
        for rank, slices in enumerate(self._slices):
            for index, item in enumerate(slices):
                if item.span.kind == "compute" and item.span.name in _PASS_OF_MESSAGE.values():
                    passes.setdefault((rank, item.span.name, item.span.layer, item.span.micro), index)
        connected: set[tuple[object, ...]] = set()
        for rank, slices in enumerate(self._slices):
            for at, item in enumerate(slices):
                receiving_pass = _receiving_pass(item.span)
                if receiving_pass is None or receiving_pass in connected or receiving_pass not in passes:
                    continue
                connected.add(receiving_pass)
                peer, pass_index = item.span.peer, passes[receiving_pass]
                if item.end <= self._slices[peer][pass_index].begin:
                    self.edges.append((self._first[rank] + at, self._first[peer] + pass_index))

    def _wait_for_receivers(self, messages: Mapping[SliceId, SliceId]) -> None:
        """Let a rank's wait after its last pass depend on the receivers of its messages.

        The wait ends when each receiver has requested its message. It does so in the gap (slice between passes) before
        the pass that uses the message.
        """
        requested: dict[tuple[object, ...], int] = {}
        for rank, slices in enumerate(self._slices):
            gap = 0
            for index, item in enumerate(slices):
                if item.span.kind == "transfer":
                    if item.span is not slices[gap].span and not item.span.name.startswith(SEND):
                        gap = index
                elif item.span.kind == "compute" and item.span.name in _PASS_OF_MESSAGE.values():
                    requested.setdefault((rank, item.span.name, item.span.layer, item.span.micro), gap)
        for rank, slices in enumerate(self._slices):
            last = max((at for at, item in enumerate(slices) if item.span.name == BETWEEN), default=-1)
            if last < 0 or (rank, last) in messages:
                continue
            before = []
            for item in slices[:last]:
                receiving_pass = _receiving_pass(item.span)
                gap = requested.get(receiving_pass, 0) if receiving_pass is not None else 0
                peer = item.span.peer
                if (
                    gap
                    and 0 <= peer < len(self._slices)
                    and slices[last].begin < self._slices[peer][gap].begin < slices[last].end
                ):
                    before.append((peer, gap - 1))
            if before:
                self._release((rank, last), before)

    def _wait_for_early_calls(self, begun: Mapping[Call, Mapping[int, tuple[int, bool]]]) -> None:
        """Let waits for calls that some rank began earlier depend on the begin of the call on all ranks."""
        ends = [[item.end for item in slices] for slices in self._slices]
        for rank, slices in enumerate(self._slices):
            for index, item in enumerate(slices):
                calls = [call for span in item.calls if (call := call_of(span)) in begun] if item.waits else []
                before = []
                for call in calls:
                    for other, (when, _) in begun[call].items():
                        at = bisect_right(ends[other], when) - 1
                        while at >= 0 and self._slices[other][at].begin == when:
                            at -= 1  # a slice without length at that time may be a wait for this one
                        if other != rank and at >= 0 and when <= item.end:
                            before.append((other, at))
                if before:
                    self._release((rank, index), before)

    def _wait_for_unnamed_calls(self, early: Collection[Call]) -> None:
        """Handle waits for earlier calls of the same layer and kind whose spans do not identify the call."""
        ends = [[item.end for item in slices] for slices in self._slices]
        begun: list[dict[tuple[str, str], dict[int, int]]] = []
        for slices in self._slices:
            calls: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
            for index, item in enumerate(slices):
                if item.waits and item.span.call:
                    calls[item.span.kind, item.span.layer][item.span.call] = index
            begun.append(calls)
        for rank, slices in enumerate(self._slices):
            latest: dict[tuple[str, str], SpanLine] = {}
            for index, item in enumerate(slices):
                span = item.span
                if not item.waits or span.kind not in WAITS:
                    continue
                if span.call:
                    latest[span.kind, span.layer] = span
                elif any(call_of(inner) in early for inner in item.inner):
                    continue
                elif (call := latest.get((span.kind, span.layer))) is not None:
                    before = []
                    for other in call.group:
                        at = begun[other][span.kind, span.layer].get(call.call) if other < len(self._slices) else None
                        completed = bisect_left(ends[other], item.end) - 1 if at is not None else -1
                        if other != rank and at is not None and completed >= max(at - 1, 0):
                            before.append((other, completed))
                    self._release((rank, index), before)

    def _release(self, waiting: tuple[int, int], before: Sequence[tuple[int, int]]) -> None:
        """Let a wait depend on these slices, and measure its value from when they ended.

        The value of a slice of a collective is measured from when the last rank entered it, which is later.
        """
        item = self._slices[waiting[0]][waiting[1]]
        index = self._first[waiting[0]] + waiting[1]
        begin = max([item.begin, *(min(self._slices[rank][at].end, item.end) for rank, at in before)])
        if self.collective[index] < 0:
            self.value[index] = (item.end - begin) / 1e9
        self.edges += [(self._first[rank] + at, index) for rank, at in before]


def _receiving_pass(span: SpanLine) -> tuple[object, ...] | None:
    """Return the pass that receives what a span sends: rank, name, stage and micro-batch; None if it sends nothing."""
    if span.kind != "transfer" or not span.name.startswith(SEND):
        return None
    stages, name = _BETWEEN.fullmatch(span.layer), _PASS_OF_MESSAGE.get(span.name.removeprefix(SEND))
    if stages is None or name is None:
        return None
    return span.peer, name, f"stage {int(stages[2] if name == 'forward' else stages[1])}", span.micro
