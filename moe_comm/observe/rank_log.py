"""What one rank writes down of its steps: a line each, and of some steps every span; and, at a fault, its last ones.

runs/<name>-<date>/
    ranks/rank-00000.jsonl              a RankStep for each step
    spans/rank-00000.jsonl              a SpanLine for each span of the steps that are written out
    dumps/step-00000057/rank-00000.jsonl    the last spans before a fault that was noticed in step 57; the first
                                        line is a mark whose name is the reason
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from moe_comm.observe.records import RANKS, SPANS, LineWriter, SpanLine, cut_after, to_json
from moe_comm.runtime.event_layout import HEAD_AT, LONG, Kind, Span, Totals, ranks_of
from moe_comm.runtime.event_reader import read_name, read_records, read_rows, read_spans, read_state
from moe_comm.runtime.events import EVENTS, Recorder

DUMPS = "dumps"
DUMPED = 200
"""Spans that a dump holds."""
_KINDS = {int(kind): kind.name.lower() for kind in Kind}
_skews_ns: dict[int, int] = {}
"""By rank, of those whose log this process writes: dumps are made where the log is not at hand."""


class StepParts(NamedTuple):
    """What is known of a step from elsewhere; as in ``RankStep``, in seconds and bytes."""

    begin_s: float
    total: float
    compute: float
    communication: float
    data: float
    checkpoint: float
    memory_bytes: int
    links: Mapping[int, float] = MappingProxyType({})


class RankLog:
    """Writes the lines of rank ``rank``.

    Args:
        folder: the run's. done: steps after which the run goes on; lines of later ones, from before it was started
            again, are taken out. every: steps between those whose spans are written; 0: none.
        skew_ns: what added to this host's wall clock gives that of rank 0's host.
    """

    def __init__(
        self, folder: Path, rank: int, *, done: int = 0, every: int = 0, skew_ns: int = 0, recorder: Recorder = EVENTS
    ) -> None:
        self._rank, self._every, self._skew_ns, self._recorder = rank, every, skew_ns, recorder
        _skews_ns[rank] = skew_ns
        self._who = to_json({"rank": rank, "host": socket.gethostname()})[1:-1]
        self._others: dict[int, tuple[int, ...]] = {}
        self._wall_ns = wall_minus_monotonic()
        steps, self._spans_at = (folder / part / f"rank-{rank:05d}.jsonl" for part in (RANKS, SPANS))
        for path in (steps, self._spans_at):
            cut_after(path, done)
        self._steps = LineWriter(steps)
        self._spans: LineWriter | None = None  # from the first ones on
        self._waiting: tuple[int, int] | None = None

    def begin(self, step: int) -> None:
        """Before anything of ``step``."""
        if self._recorder.device is None:
            self._write_waiting()
        self._recorder.take()
        self._first = self._head()

    def end(self, step: int, parts: StepParts) -> None:
        """``step`` is over. Its spans are written when the next one begins: saving and evaluation belong to it. Where
        there is a GPU, a step later: until then its times are not known."""
        self._write_waiting()
        self._steps.write_text(self._line(step, parts, self._recorder.take()))
        if self._every and step % self._every == 0:
            self._waiting = (step, self._first)

    def close(self) -> None:
        """Write what is left."""
        if self._recorder.device is not None:
            self._recorder.device.poll()
        self._write_waiting()
        self._steps.close()
        if self._spans is not None:
            self._spans.close()

    def _write_waiting(self) -> None:
        if self._waiting is None:
            return
        step, first = self._waiting
        self._waiting = None
        room, region = self._recorder.records, self._recorder.region
        lines = span_lines(region, self._rank, room, first, step, self._wall_ns, self._skew_ns)
        if (lost := self._head() - room - first) > 0:
            at = json.loads(lines[0])["begin_ns"] if lines else time.time_ns()
            name = f"{lost} earlier spans of this step did not fit; set observe.records to more than {room}"
            mark = Kind.MARK.name.lower()
            lines.insert(0, _text(SpanLine(self._rank, mark, name, at, at, step, skew_ns=self._skew_ns)))
        if self._spans is None:
            self._spans = LineWriter(self._spans_at)
        self._spans.write_text("".join(lines))

    def _head(self) -> int:
        return int(LONG.unpack_from(self._recorder.region, HEAD_AT)[0])

    def _line(self, step: int, parts: StepParts, totals: Totals) -> str:
        """A ``RankStep``, with its end. Every step has one, so it is put together from what is ready."""
        waits = ",".join([f'"{_KINDS[kind]}":{_decimal(ns)}' for kind, ns in totals.ns.items()])
        sent = ",".join([f'"{_KINDS[kind]}":{nbytes}' for kind, nbytes in totals.nbytes.items()])
        peers = ",".join([f'"{rank}":{nbytes}' for rank, nbytes in self._peers(totals)])
        links = to_json({str(rank): seconds for rank, seconds in parts.links.items()}) if parts.links else "{}"
        return (
            f'{{"step":{step},{self._who},"begin_s":{_seconds(parts.begin_s)},"total":{_seconds(parts.total)},'
            f'"compute":{_seconds(parts.compute)},"communication":{_seconds(parts.communication)},'
            f'"data":{_seconds(parts.data)},"checkpoint":{_seconds(parts.checkpoint)},'
            f'"memory_bytes":{parts.memory_bytes},"waits":{{{waits}}},"sent":{{{sent}}},"peers":{{{peers}}},'
            f'"rows":{totals.rows},"links":{links}}}\n'
        )

    def _peers(self, totals: Totals) -> list[tuple[int, int]]:
        """Bytes to single ranks; what goes to a group of two goes to the other one."""
        found = dict(totals.peers)
        for group, nbytes in totals.groups.items():
            others = self._others.get(group)
            if others is None:
                every = ranks_of(self._recorder.text(group))
                others = self._others[group] = tuple(rank for rank in every if rank != self._rank)
            if len(others) == 1:
                found[others[0]] = found.get(others[0], 0) + nbytes
        return sorted(found.items())


def span_lines(
    region: memoryview, rank: int, last: int, since: int, step: int, wall_minus_monotonic_ns: int, skew_ns: int = 0
) -> list[str]:
    """The lines of the spans of ``step`` that are over, as ``SpanLine`` has them, without what is as it is by default;
    put together from the records as they stand, since training waits meanwhile. Otherwise as ``read_spans``."""
    named = cache(lambda at: json.dumps(read_name(region, at)))
    layered = cache(lambda at: f',"layer":{named(at)}' if read_name(region, at) else "")
    grouped = cache(lambda at: f',"group":{_listed(ranks)}' if (ranks := ranks_of(read_name(region, at))) else "")
    start, shift = f'{{"rank":{rank},"kind":"', wall_minus_monotonic_ns
    end_of_line = f',"skew_ns":{skew_ns}}}\n' if skew_ns else "}\n"
    lines = []
    for record in read_records(region, last, since):
        _, begin, end, on, off, call, nbytes, rows_at, at, micro, kind, thread, name, layer, group, peer, experts = (
            record
        )
        if at != step or not end:
            continue
        begin, end = (on, off) if off else (begin, end)
        line = (
            f'{start}{_KINDS[kind]}","name":{named(name)},"begin_ns":{begin + shift},"end_ns":{end + shift},'
            f'"step":{step}'
        )
        if micro:
            line += f',"micro":{micro}'
        line += layered(layer) + grouped(group)
        if call:
            line += f',"call":{call}'
        if peer != -1:
            line += f',"peer":{peer}'
        if nbytes:
            line += f',"nbytes":{nbytes}'
        if experts and (rows := read_rows(region, rows_at, experts)):
            line += f',"rows":{_listed(rows)}'
        if thread:
            line += f',"thread":{thread}'
        if on and not off:
            line += f',"begun_ns":{on + shift}'
        lines.append(line + end_of_line)
    return lines


def dump(folder: Path, reason: str, region: memoryview | None = None, *, last: int = DUMPED) -> Path | None:
    """Write the last spans of a region, those open first of all, into ``folder``, a run's; where, or None.

    For when something has gone wrong already: it never raises, and says with None that nothing could be written.

    Args:
        region: of any rank that this process can read; None: this process's own.
    """
    try:
        region = EVENTS.region if region is None else region
        state = read_state(region)
        if state is None:
            return None
        wall_ns, now = wall_minus_monotonic(), time.monotonic_ns()
        path = folder / DUMPS / f"step-{state.step:08d}" / f"rank-{state.rank:05d}.jsonl"
        why = SpanLine(state.rank, Kind.MARK.name.lower(), reason, now + wall_ns, now + wall_ns, state.step)
        lines = [why, *(SpanLine.of(span, wall_ns) for span in _open_first(read_spans(region, last)))]
        skew_ns = _skews_ns.get(state.rank, 0)
        writer = LineWriter(path)
        writer.write_text("".join(_text(replace(line, skew_ns=skew_ns)) for line in lines))
        writer.close()
    except (OSError, ValueError):
        return None
    return path


def wall_minus_monotonic() -> int:
    """What added to CLOCK_MONOTONIC gives ns since 1970, on this host now."""
    found = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        found.append((after - before, wall - (before + after) // 2))
    return min(found)[1]  # of which nothing came between


def _seconds(value: float) -> str:
    """To the nanosecond: whole numbers are written several times as fast as a float's digits."""
    if not 0 <= value < math.inf:
        return repr(value) if math.isfinite(value) else "null"
    return _decimal(round(value * 1e9))


def _decimal(ns: int) -> str:
    return f"{ns // 10**9}.{ns % 10**9:09d}"


def _listed(numbers: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, numbers))}]"


def _open_first(spans: list[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: not span.open)


_DEFAULTS = {
    one.name: one.default if one.default is not MISSING else []
    for one in fields(SpanLine)
    if one.default is not MISSING or one.default_factory is not MISSING
}


def _text(line: SpanLine) -> str:
    """Without what is as it is by default: there are many of them."""
    values = {k: v for k, v in vars(line).items() if k not in _DEFAULTS or v != _DEFAULTS[k]}
    return json.dumps(values, separators=(",", ":")) + "\n"
