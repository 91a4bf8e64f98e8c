"""Per-rank records: one line per step, the spans of selected steps, and a dump of the last spans after a fault.

runs/<name>-<date>/
    ranks/rank-00000.jsonl              a RankStep for each step
    spans/rank-00000.jsonl              a SpanLine for each span of the selected steps
    dumps/step-00000057/rank-00000.jsonl    the last spans before a fault that was detected in step 57; the first
                                        line is a mark whose name is the reason
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from moe_comm.observe.records import RANKS, SPANS, LineWriter, SpanLine, cut_after, to_json
from moe_comm.runtime.event_layout import HEAD_AT, LONG, Kind, Totals, ranks_of
from moe_comm.runtime.event_reader import read_header, read_name, read_records, read_rows, read_spans
from moe_comm.runtime.events import EVENTS, EventRecorder
from moe_comm.runtime.safe_files import make_folders

DUMPS = "dumps"
DUMPED = 200
"""Default maximum number of spans in a dump."""
_quoted = lru_cache(maxsize=4096)(json.dumps)
_KINDS = {int(kind): kind.name.lower() for kind in Kind}


class StepParts(NamedTuple):
    """Fields of a ``RankStep`` that the training loop measures, in seconds and bytes."""

    begin_s: float
    total: float
    compute: float
    communication: float
    data: float
    checkpoint: float
    memory_bytes: int
    links: Mapping[int, float] = MappingProxyType({})


class RankLog:
    """Write the step lines and spans of ``rank`` to the run folder.

    Args:
        folder: the run folder.
        done: completed steps when the run resumes; lines of later steps are removed.
        every: write the spans of every ``every``-th step; 0: write no spans.
        skew_ns: offset from this host's wall clock to the wall clock of rank 0's host. ``dump`` uses it, too.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        *,
        done: int = 0,
        every: int = 0,
        skew_ns: int = 0,
        recorder: EventRecorder = EVENTS,
    ) -> None:
        self._rank, self._every, self._skew_ns, self._recorder = rank, every, skew_ns, recorder
        recorder.skew_ns = skew_ns
        self._rank_json = to_json({"rank": rank, "host": socket.gethostname()})[1:-1]
        self._others: dict[int, tuple[int, ...]] = {}
        self._wall_ns = wall_minus_monotonic()
        self._folder, self._name = folder, f"rank-{rank:05d}.jsonl"
        for part in (RANKS, SPANS):
            if os.path.lexists(folder / part):
                cut_after(make_folders(folder, part) / self._name, done)
        self._steps = LineWriter(make_folders(folder, RANKS) / self._name)
        self._spans: LineWriter | None = None  # opened when spans are written
        self._pending: tuple[int, int] | None = None

    def begin(self, step: int) -> None:
        """Begin ``step``. On the CPU, write the pending spans of the previous step first."""
        if self._recorder.device is None:
            self._write_pending()
        self._recorder.take()
        self._first = self._head()

    def end(self, step: int, parts: StepParts) -> None:
        """End ``step`` and write its line.

        The spans of the step are written when the next step begins, so that they include checkpointing and evaluation
        after the step. On a GPU, they are written at the end of the next step, when the GPU times are available.
        """
        self._write_pending()
        self._steps.write_text(self._line(step, parts, self._recorder.take()))
        if self._every and step % self._every == 0:
            self._pending = (step, self._first)

    def close(self) -> None:
        """Write pending spans and close the files."""
        if self._recorder.device is not None:
            self._recorder.device.poll()
        self._write_pending()
        self._steps.close()
        if self._spans is not None:
            self._spans.close()

    def _write_pending(self) -> None:
        if self._pending is None:
            return
        step, first = self._pending
        self._pending = None
        records, region = self._recorder.records, self._recorder.region
        lines = span_lines(region, self._rank, records, first, step, self._wall_ns, self._skew_ns)
        if (lost := self._head() - records - first) > 0:
            at = json.loads(lines[0])["begin_ns"] if lines else time.time_ns()
            name = f"{lost} earlier spans of this step did not fit; set observe.records to more than {records}"
            mark = Kind.MARK.name.lower()
            lines.insert(
                0, _span_line(*vars(SpanLine(self._rank, mark, name, at, at, step, skew_ns=self._skew_ns)).values())
            )
        if self._spans is None:
            self._spans = LineWriter(make_folders(self._folder, SPANS) / self._name)
        self._spans.write_text("".join(lines))

    def _head(self) -> int:
        return int(LONG.unpack_from(self._recorder.region, HEAD_AT)[0])

    def _line(self, step: int, parts: StepParts, totals: Totals) -> str:
        """Return a ``RankStep`` as a JSON line. It is formatted without ``json``, because each step writes one."""
        waits_json = ",".join([f'"{_KINDS[kind]}":{_decimal(ns)}' for kind, ns in totals.ns.items()])
        sent_json = ",".join([f'"{_KINDS[kind]}":{nbytes}' for kind, nbytes in totals.nbytes.items()])
        peers_json = ",".join([f'"{rank}":{nbytes}' for rank, nbytes in self._peers(totals)])
        links_json = to_json({str(rank): seconds for rank, seconds in parts.links.items()}) if parts.links else "{}"
        return (
            f'{{"step":{step},{self._rank_json},"begin_s":{_seconds(parts.begin_s)},"total":{_seconds(parts.total)},'
            f'"compute":{_seconds(parts.compute)},"communication":{_seconds(parts.communication)},'
            f'"data":{_seconds(parts.data)},"checkpoint":{_seconds(parts.checkpoint)},'
            f'"memory_bytes":{parts.memory_bytes},"waits":{{{waits_json}}},"sent":{{{sent_json}}},'
            f'"peers":{{{peers_json}}},"rows":{totals.rows},"links":{links_json}}}\n'
        )

    def _peers(self, totals: Totals) -> list[tuple[int, int]]:
        """Return the bytes sent to each peer. Group traffic is attributed to a peer only in groups of two."""
        peers = dict(totals.peers)
        for group, nbytes in totals.groups.items():
            others = self._others.get(group)
            if others is None:
                ranks = ranks_of(self._recorder.text(group))
                others = self._others[group] = tuple(rank for rank in ranks if rank != self._rank)
            if len(others) == 1:
                peers[others[0]] = peers.get(others[0], 0) + nbytes
        return sorted(peers.items())


def span_lines(
    region: memoryview, rank: int, last: int, since: int, step: int, wall_minus_monotonic_ns: int, skew_ns: int = 0
) -> list[str]:
    """Return the completed spans of ``step`` as JSON lines of ``SpanLine`` without default values.

    ``last`` and ``since`` are as in ``read_spans``.
    """
    text_of, group_of = cache(lambda at: read_name(region, at)), cache(lambda at: ranks_of(read_name(region, at)))
    shift, lines = wall_minus_monotonic_ns, []
    for record in read_records(region, last, since):
        _, begin, end, gpu_begin, gpu_end, call, nbytes, rows_at, at, micro = record[:10]
        kind, thread, name, layer, group, peer, experts = record[10:]
        if at != step or not end:
            continue
        begin, end = (gpu_begin, gpu_end) if gpu_end else (begin, end)
        rows = read_rows(region, rows_at, experts) if experts else ()
        begun = gpu_begin + shift if gpu_begin and not gpu_end else 0
        line = _span_line(
            rank, _KINDS[kind], text_of(name), begin + shift, end + shift, step, micro, text_of(layer),
            group_of(group), call, peer, nbytes, rows, thread, skew_ns, begun,
        )  # fmt: skip
        lines.append(line)
    return lines


def _span_line(
    rank: int, kind: str, name: str, begin_ns: int, end_ns: int, step: int, micro: int, layer: str,
    group: Sequence[int], call: int, peer: int, nbytes: int, rows: Sequence[int], thread: int, skew_ns: int,
    begun_ns: int,
) -> str:  # fmt: skip
    """Return a ``SpanLine`` as a JSON line without default values. Its arguments are the fields in order.

    Formatting the line directly is faster than ``json``: training is blocked while spans are written.
    """
    line = (
        f'{{"rank":{rank},"kind":"{kind}","name":{_quoted(name)},"begin_ns":{begin_ns},"end_ns":{end_ns},"step":{step}'
    )
    if micro:
        line += f',"micro":{micro}'
    if layer:
        line += f',"layer":{_quoted(layer)}'
    if group:
        line += f',"group":{_listed(group)}'
    if call:
        line += f',"call":{call}'
    if peer != -1:
        line += f',"peer":{peer}'
    if nbytes:
        line += f',"nbytes":{nbytes}'
    if rows:
        line += f',"rows":{_listed(rows)}'
    if thread:
        line += f',"thread":{thread}'
    if skew_ns:
        line += f',"skew_ns":{skew_ns}'
    if begun_ns:
        line += f',"begun_ns":{begun_ns}'
    return line + "}\n"


def dump(folder: Path, reason: str, recorder: EventRecorder = EVENTS, *, last: int = DUMPED) -> Path | None:
    """Write the last spans of ``recorder``, open spans first, to the run folder after a fault.

    The first line is a mark with the name ``reason``. At most ``last`` spans follow. Return the path of the dump, or
    None if it could not be written. I/O errors are not raised.
    """
    try:
        state = read_header(recorder.region)
        if state is None:
            return None
        wall_ns, now = wall_minus_monotonic(), time.monotonic_ns()
        path = make_folders(folder, DUMPS, f"step-{state.step:08d}") / f"rank-{state.rank:05d}.jsonl"
        reason_line = SpanLine(state.rank, Kind.MARK.name.lower(), reason, now + wall_ns, now + wall_ns, state.step)
        open_first = sorted(read_spans(recorder.region, last), key=lambda span: not span.open)
        lines = [reason_line, *(SpanLine.of(span, wall_ns) for span in open_first)]
        writer = LineWriter(path)
        writer.write_text(
            "".join(_span_line(*vars(replace(line, skew_ns=recorder.skew_ns)).values()) for line in lines)
        )
        writer.close()
    except (OSError, ValueError):
        return None
    return path


def wall_minus_monotonic() -> int:
    """Return the current offset from CLOCK_MONOTONIC to the wall clock in ns."""
    samples = []
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        samples.append((after - before, wall - (before + after) // 2))
    return min(samples)[1]  # the sample with the least delay between the clocks


def _seconds(value: float) -> str:
    """Format seconds with 9 decimals. Formatting integers is several times faster than formatting floats."""
    if not 0 <= value < math.inf:
        return repr(value) if math.isfinite(value) else "null"
    return _decimal(round(value * 1e9))


def _decimal(ns: int) -> str:
    return f"{ns // 10**9}.{ns % 10**9:09d}"


def _listed(numbers: Sequence[int]) -> str:
    return f"[{','.join(map(str, numbers))}]"
