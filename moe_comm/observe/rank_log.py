"""What one rank writes down of its steps: a line each, and of some steps every span; and, at a fault, its last ones.

runs/<name>-<date>/
    ranks/rank-00000.jsonl              a RankStep for each step
    spans/rank-00000.jsonl              a SpanLine for each span of the steps that are written out
    dumps/step-00000057/rank-00000.jsonl    the last spans before a fault that was noticed in step 57; the first
                                        line is a mark whose name is the reason
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path

from moe_comm.observe.records import RANKS, SPANS, LineWriter, RankStep, SpanLine, cut_after, open_to_append
from moe_comm.runtime.event_layout import Kind, Span, Totals, ranks_of
from moe_comm.runtime.event_reader import read_spans, read_state
from moe_comm.runtime.events import EVENTS, Recorder

DUMPS = "dumps"
DUMPED = 200
"""Spans that a dump holds."""
_skews_ns: dict[int, int] = {}
"""By rank, of those whose log this process writes: dumps are made where the log is not at hand."""


@dataclass(frozen=True)
class StepParts:
    """What is known of a step from elsewhere; as in ``RankStep``, in seconds and bytes."""

    begin_s: float
    total: float
    compute: float
    communication: float
    data: float
    checkpoint: float
    memory_bytes: int
    links: Mapping[int, float] = field(default_factory=dict)


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
        self._host = socket.gethostname()
        self._wall_ns = wall_minus_monotonic()
        steps, self._spans = (folder / part / f"rank-{rank:05d}.jsonl" for part in (RANKS, SPANS))
        for path in (steps, self._spans):
            cut_after(path, done)
        self._steps = LineWriter(steps)
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
        totals = self._recorder.take()
        self._steps.write(
            RankStep(
                step=step,
                rank=self._rank,
                host=self._host,
                begin_s=parts.begin_s,
                total=parts.total,
                compute=parts.compute,
                communication=parts.communication,
                data=parts.data,
                checkpoint=parts.checkpoint,
                memory_bytes=parts.memory_bytes,
                waits={kind.name.lower(): ns * 1e-9 for kind, ns in totals.ns.items()},
                sent={kind.name.lower(): nbytes for kind, nbytes in totals.nbytes.items()},
                peers=self._peers(totals),
                rows=totals.rows,
                links={str(rank): seconds for rank, seconds in parts.links.items()},
            )
        )
        if self._every and step % self._every == 0:
            self._waiting = (step, self._first)

    def close(self) -> None:
        """Write what is left."""
        if self._recorder.device is not None:
            self._recorder.device.poll()
        self._write_waiting()
        self._steps.close()

    def _write_waiting(self) -> None:
        if self._waiting is None:
            return
        step, first = self._waiting
        self._waiting = None
        room = self._recorder.records
        every = read_spans(self._recorder.region, room, first)
        found = [span for span in every if span.step == step and span.end_ns]
        lines = [SpanLine.of(span, self._wall_ns, self._skew_ns) for span in found]
        if (lost := self._head() - room - first) > 0:
            at = lines[0].begin_ns if lines else time.time_ns()
            name = f"{lost} earlier spans of this step did not fit; set observe.records to more than {room}"
            mark = Kind.MARK.name.lower()
            lines.insert(0, SpanLine(self._rank, mark, name, at, at, step, skew_ns=self._skew_ns))
        _append(self._spans, lines)

    def _head(self) -> int:
        state = read_state(self._recorder.region)
        return 0 if state is None else state.head

    def _peers(self, totals: Totals) -> dict[str, int]:
        """Bytes to single ranks; what goes to a group of two goes to the other one."""
        found = dict(totals.peers)
        for group, nbytes in totals.groups.items():
            others = [rank for rank in ranks_of(self._recorder.text(group)) if rank != self._rank]
            if len(others) == 1:
                found[others[0]] = found.get(others[0], 0) + nbytes
        return {str(rank): nbytes for rank, nbytes in sorted(found.items())}


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
        _append(path, [replace(line, skew_ns=_skews_ns.get(state.rank, 0)) for line in lines])
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


def _open_first(spans: list[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: not span.open)


_DEFAULTS = {
    one.name: one.default if one.default is not MISSING else []
    for one in fields(SpanLine)
    if one.default is not MISSING or one.default_factory is not MISSING
}


def _append(path: Path, lines: Iterable[SpanLine]) -> None:
    """In one piece, without what is as it is by default: there are many of them."""
    texts = []
    for line in lines:
        values = {k: v for k, v in vars(line).items() if k not in _DEFAULTS or v != _DEFAULTS[k]}
        texts.append(json.dumps(values, separators=(",", ":")) + "\n")
    with open_to_append(path) as file:
        file.write("".join(texts).encode())
