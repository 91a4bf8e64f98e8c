"""Convert the spans of a run to a Perfetto trace: ranks are processes, and arrows show which rank others waited for.

rank 0 (host a)   compute                  [step [forward [attention]          [experts]          ]]
                  dispatch and combine                    [dispatch           ]           ▶[combine]
                                                            ▶[rank 1 arrived  ] │          ╷
                                                            ╷                   ╰──────────╯ the same rows
rank 1 (host a)   dispatch and combine                      [dispatch        ]
                                      an arrow starts at the rank that arrived last
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from moe_comm.errors import ConfigError
from moe_comm.observe.perfetto import Slice, TraceBuilder, Value, check_package
from moe_comm.observe.rank_log import DUMPS
from moe_comm.observe.records import RANKS, SPANS, RankStep, SpanLine, read_folder, read_lines
from moe_comm.runtime.safe_files import write_file

TRACKS = (
    "compute",
    "dispatch and combine",
    "collectives",
    "transfers",
    "data and checkpoint",
    "other threads",
)
_TRACK_OF = {
    "step": "compute",
    "compute": "compute",
    "optimizer": "compute",
    "dispatch": "dispatch and combine",
    "combine": "dispatch and combine",
    "collective": "collectives",
    "transfer": "transfers",
    "data": "data and checkpoint",
    "checkpoint": "data and checkpoint",
    "pause": "data and checkpoint",
    "mark": "data and checkpoint",
}
_RETURN_OF = {"dispatch": "combine", "combine backward": "dispatch backward"}
"""The operation that sends back the rows of another one."""
SAME_NS = 10_000
"""Maximum difference of the times of one span in two dumps, which read the clocks separately."""
_SEND, _RECEIVE = "send ", "receive "


@dataclass(frozen=True)
class Release:
    """A slice drawn within the span at index ``place``: its part after another rank arrived. An arrow points to it."""

    index: int
    begin_ns: int
    name: str
    arrow: int


class Arrows:
    """Ids of outgoing and incoming arrows by span index."""

    def __init__(self) -> None:
        self.out: dict[int, list[int]] = defaultdict(list)
        self.into: dict[int, list[int]] = defaultdict(list)
        self.releases: list[Release] = []
        self._last = 0

    def draw(self, source: int, target: int) -> None:
        """Add an arrow from a span to one that begins later."""
        self._last += 1
        self.out[source].append(self._last)
        self.into[target].append(self._last)

    def release(self, source: int, target: int, spans: Sequence[SpanLine], name: str) -> None:
        """Add an arrow from a span to one that waited for it."""
        begin_ns = _begin(spans[source]) + 1  # so that the source begins first
        if _begin(spans[target]) >= begin_ns:
            self.draw(source, target)
        elif begin_ns < _end(spans[target]):
            self._last += 1
            self.out[source].append(self._last)
            self.releases.append(Release(target, begin_ns, name, self._last))


def arrows(spans: list[SpanLine]) -> Arrows:
    """Return the arrows between ``spans``, which are sorted by their beginning on one clock.

    Arrows connect a dispatch and its combine on each rank, the last rank that entered a collective and the ranks that
    waited for it, and the send and receive of pipeline stages.
    """
    result = Arrows()
    _draw_returns(spans, result)
    _draw_calls(spans, result)
    _draw_transfers(spans, result)
    return result


def _draw_returns(spans: list[SpanLine], result: Arrows) -> None:
    pending: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        if span.kind == "compute" or span.group:  # the span of the operation itself, not of its waits
            key = (span.rank, span.step, span.micro, span.layer)
            if span.name in _RETURN_OF:
                pending[(*key, _RETURN_OF[span.name])].append(index)
            elif sources := pending.get((*key, span.name)):
                result.draw(sources.pop(0), index)


def _draw_calls(spans: list[SpanLine], result: Arrows) -> None:
    calls: dict[tuple[object, ...], dict[int, int]] = defaultdict(dict)
    for index, span in enumerate(spans):
        if span.call:
            calls[span.kind, tuple(span.group), span.call, span.step][span.rank] = index
    for members in calls.values():
        last = max(members.values())  # in order of beginning
        for index in members.values():
            if index != last:
                result.release(last, index, spans, f"rank {spans[last].rank} arrived")


def _draw_transfers(spans: list[SpanLine], result: Arrows) -> None:
    sent: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, span in enumerate(spans):
        if span.kind == "transfer" and span.name.startswith(_SEND):
            sent[span.step, span.micro, span.layer, span.name.removeprefix(_SEND), span.rank, span.peer].append(index)
    for index, span in enumerate(spans):
        if span.kind == "transfer" and span.name.startswith(_RECEIVE):
            message = span.name.removeprefix(_RECEIVE)
            if sources := sent.get((span.step, span.micro, span.layer, message, span.peer, span.rank)):
                result.release(sources.pop(0), index, spans, f"rank {span.peer} sent")


def build(lines: Iterable[SpanLine], hosts: Mapping[int, str]) -> bytes:
    """Return the trace of ``lines``, in any order. ``hosts`` contains the known hosts by rank."""
    builder = TraceBuilder()
    spans = sorted(lines, key=lambda line: (_begin(line), -_end(line)))
    drawn = arrows(spans)
    tracks: dict[tuple[int, str], int] = {}
    for rank in sorted({span.rank for span in spans}):
        host = hosts.get(rank, "")
        process = builder.process(rank + 1, f"rank {rank}" + (f" ({host})" if host else ""), host)
        tracks.update({(rank, name): builder.track(process, name, order) for order, name in enumerate(TRACKS)})
    for index, span in enumerate(spans):
        builder.add(
            Slice(
                tracks[span.rank, _track(span)],
                span.name,
                span.kind,
                _begin(span),
                _end(span),
                _args(span),
                tuple(drawn.out[index]),
                tuple(drawn.into[index]),
            )
        )
    for release in drawn.releases:
        span = spans[release.index]
        track = tracks[span.rank, _track(span)]
        builder.add(Slice(track, release.name, span.kind, release.begin_ns, _end(span), arrows_in=(release.arrow,)))
    return builder.data()


def write_trace(run: Path, out: Path, steps: tuple[int, int] | None = None, *, faults: bool = False) -> int:
    """Write the spans of a run as a Perfetto trace.

    Args:
        run: the run folder.
        out: the trace file.
        steps: first and last step to include; None: all.
        faults: use the spans dumped after faults instead of those written every ``observe.every`` steps.

    Returns:
        The number of spans.
    """
    check_package()
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run folder")
    lines = _read_dumps(run) if faults else read_folder(run / SPANS, SpanLine)
    spans = [line for line in lines if steps is None or steps[0] <= line.step <= steps[1]]
    if not spans:
        which = "" if steps is None else f" of steps {steps[0]} to {steps[1]}"
        advice = "no fault was detected" if faults else "set observe.every to less than run.steps, or use --faults"
        raise ConfigError(f"{run} has no spans{which}; {advice}")
    data = build(spans, _hosts(run))
    write_file(out, data)
    return len(spans)


def parse_steps(text: str) -> tuple[int, int]:
    """Parse "20" or "20:40" (both ends included). Raises ``ConfigError`` for other text."""
    first, colon, last = text.partition(":")
    try:
        steps = int(first), int(last if colon else first)
    except ValueError:
        steps = (1, 0)
    if steps[0] > steps[1]:
        raise ConfigError(f"steps must be a step, such as 20, or first and last, such as 20:40; got {text!r}")
    return steps


def _read_dumps(run: Path) -> Iterator[SpanLine]:
    """Yield the spans of all dumps without duplicates; a span that was open ends at the time of its dump."""
    spans: dict[tuple[object, ...], SpanLine] = {}
    for path in sorted((run / DUMPS).glob("step-*/rank-*.jsonl")):
        dumped_ns = 0
        for line in read_lines(path, SpanLine):
            if line.kind == "mark":
                dumped_ns = line.begin_ns
            identity = (line.rank, line.kind, line.name, line.layer, line.step, line.micro, line.call, line.thread)
            at = line.begin_ns // SAME_NS
            keys = [(*identity, rounded) for rounded in (at, at - 1, at + 1)]
            key = next((key for key in keys if key in spans), keys[0])
            if not line.end_ns:
                line = replace(line, name=f"{line.name} (not ended)", end_ns=max(dumped_ns, line.begin_ns))
            spans[key] = line
    yield from spans.values()


def _hosts(run: Path) -> dict[int, str]:
    files = (run / RANKS).glob("rank-*.jsonl")
    return {line.rank: line.host for path in files for line in islice(read_lines(path, RankStep), 1)}


def _track(span: SpanLine) -> str:
    return TRACKS[-1] if span.thread else _TRACK_OF.get(span.kind, TRACKS[0])


def _begin(span: SpanLine) -> int:
    return max(span.begin_ns + span.skew_ns, 0)


def _end(span: SpanLine) -> int:
    return max(span.end_ns + span.skew_ns, 0)


def _args(span: SpanLine) -> dict[str, Value]:
    args: dict[str, Value] = {"step": span.step, "micro-batch": span.micro}
    if span.layer:
        args["layer"] = span.layer
    if span.group:
        args |= {"ranks": span.group, "call": span.call}
    if span.peer >= 0:
        args["peer"] = span.peer
    if span.nbytes:
        args["bytes"] = span.nbytes
    if span.rows:
        args["rows per expert"] = span.rows
    return args
