"""A run's spans as a Perfetto trace: ranks are processes, arrows show who waited for whom.

rank 0 (host a)   compute                  [step [forward [attention]          [experts]          ]]
                  dispatch and combine                    [dispatch           ]           ▶[combine]
                                                                ▶[rank 1 came ] │          ╷
                                                                ╷               ╰──────────╯ the same rows
rank 1 (host a)   dispatch and combine                          [dispatch    ]               come home
                                      the rank that came last lets the others go on
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

TRACKS = (
    "compute",
    "dispatch and combine",
    "collectives",
    "transfers",
    "data and checkpoint",
    "beside the main thread",
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
_HOME = {"dispatch": "combine", "combine backward": "dispatch backward"}
"""By what rows come home that an operation has sent out."""
SAME_NS = 10_000
"""Two dumps read the clocks anew, and give the same span times that differ by less."""
_SEND, _RECEIVE = "send ", "receive "


@dataclass(frozen=True)
class Release:
    """The part of the span at ``place`` from when another rank was there too; an arrow reaches it."""

    place: int
    begin_ns: int
    name: str
    arrow: int


class Arrows:
    """Numbers of the arrows that leave and reach spans, by the spans' places in a list."""

    def __init__(self) -> None:
        self.out: dict[int, list[int]] = defaultdict(list)
        self.into: dict[int, list[int]] = defaultdict(list)
        self.releases: list[Release] = []
        self._last = 0

    def draw(self, source: int, target: int) -> None:
        """From a span to one that begins later."""
        self._last += 1
        self.out[source].append(self._last)
        self.into[target].append(self._last)

    def release(self, source: int, target: int, spans: Sequence[SpanLine], name: str) -> None:
        """From a span to one that had begun before and waited, if it did."""
        begin_ns = _begin(spans[source]) + 1  # or which one is first would be left open
        if _begin(spans[target]) >= begin_ns:
            self.draw(source, target)
        elif begin_ns < _end(spans[target]):
            self._last += 1
            self.out[source].append(self._last)
            self.releases.append(Release(target, begin_ns, name, self._last))


def arrows(spans: list[SpanLine]) -> Arrows:
    """Those between ``spans``, which are in order of their beginning on one clock.

    From a dispatch to its combine, on each rank; from the last rank that entered a group's call to all that were in it
    already; from a pipeline stage that sends to the one that receives.
    """
    found = Arrows()
    _draw_home(spans, found)
    _draw_calls(spans, found)
    _draw_transfers(spans, found)
    return found


def _draw_home(spans: list[SpanLine], found: Arrows) -> None:
    away: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, span in enumerate(spans):
        if span.kind == "compute" or span.group:  # the one span of an operation, not one of waits that belong to it
            key = (span.rank, span.step, span.micro, span.layer)
            if span.name in _HOME:
                away[(*key, _HOME[span.name])].append(place)
            elif waiting := away.get((*key, span.name)):
                found.draw(waiting.pop(0), place)


def _draw_calls(spans: list[SpanLine], found: Arrows) -> None:
    calls: dict[tuple[object, ...], dict[int, int]] = defaultdict(dict)
    for place, span in enumerate(spans):
        if span.call:
            calls[span.kind, tuple(span.group), span.call, span.step][span.rank] = place
    for members in calls.values():
        last = max(members.values())  # in order of beginning
        for place in members.values():
            if place != last:
                found.release(last, place, spans, f"rank {spans[last].rank} came")


def _draw_transfers(spans: list[SpanLine], found: Arrows) -> None:
    sent: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for place, span in enumerate(spans):
        if span.kind == "transfer" and span.name.startswith(_SEND):
            sent[span.step, span.micro, span.layer, span.name.removeprefix(_SEND), span.rank, span.peer].append(place)
    for place, span in enumerate(spans):
        if span.kind == "transfer" and span.name.startswith(_RECEIVE):
            what = span.name.removeprefix(_RECEIVE)
            if waiting := sent.get((span.step, span.micro, span.layer, what, span.peer, span.rank)):
                found.release(waiting.pop(0), place, spans, f"rank {span.peer} sent")


def build(lines: Iterable[SpanLine], hosts: Mapping[int, str]) -> bytes:
    """The trace of ``lines``, in any order. hosts: by rank, of those that are known."""
    builder = TraceBuilder()
    spans = sorted(lines, key=lambda line: (_begin(line), -_end(line)))
    drawn = arrows(spans)
    tracks: dict[tuple[int, str], int] = {}
    for rank in sorted({span.rank for span in spans}):
        host = hosts.get(rank, "")
        process = builder.process(rank + 1, f"rank {rank}" + (f" ({host})" if host else ""), host)
        tracks.update({(rank, name): builder.track(process, name, order) for order, name in enumerate(TRACKS)})
    for place, span in enumerate(spans):
        builder.add(
            Slice(
                tracks[span.rank, _track(span)],
                span.name,
                span.kind,
                _begin(span),
                _end(span),
                _args(span),
                tuple(drawn.out[place]),
                tuple(drawn.into[place]),
            )
        )
    for part in drawn.releases:
        span = spans[part.place]
        track = tracks[span.rank, _track(span)]
        builder.add(Slice(track, part.name, span.kind, part.begin_ns, _end(span), arrows_in=(part.arrow,)))
    return builder.data()


def write_trace(run: Path, out: Path, steps: tuple[int, int] | None = None, *, faults: bool = False) -> int:
    """The spans of a run's folder as a Perfetto trace at ``out``; returns how many.

    Args:
        steps: only those from the first to the last of these. faults: the spans that were dumped at faults, in place of
            those that are written every ``observe.every`` steps.

    Raises:
        ConfigError: there are none. CorruptFile: a file of the run is damaged. MissingDependency: no ``perfetto``.
    """
    check_package()
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run's folder")
    lines = _dumped(run) if faults else read_folder(run / SPANS, SpanLine)
    found = [line for line in lines if steps is None or steps[0] <= line.step <= steps[1]]
    if not found:
        which = "" if steps is None else f" of steps {steps[0]} to {steps[1]}"
        cure = (
            "no fault was noticed there" if faults else "set observe.every to less than run.steps, or look at --faults"
        )
        raise ConfigError(f"{run} has no spans{which}; {cure}")
    data = build(found, _hosts(run))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(data)
    return len(found)


def parse_steps(text: str) -> tuple[int, int]:
    """ "20" or "20:40", both ends included.

    Raises:
        ConfigError: it is neither.
    """
    first, colon, last = text.partition(":")
    try:
        found = int(first), int(last if colon else first)
    except ValueError:
        found = (1, 0)
    if found[0] > found[1]:
        raise ConfigError(f"steps are one, such as 20, or first and last, such as 20:40; got {text!r}")
    return found


def _dumped(run: Path) -> Iterator[SpanLine]:
    """A dump has the spans of several steps, and later dumps may have them again; what was open ends with its dump."""
    seen: dict[tuple[object, ...], SpanLine] = {}
    for path in sorted((run / DUMPS).glob("step-*/rank-*.jsonl")):
        now = 0
        for line in read_lines(path, SpanLine):
            if line.kind == "mark":
                now = line.begin_ns
            what = (line.rank, line.kind, line.name, line.layer, line.step, line.micro, line.call, line.thread)
            at = line.begin_ns // SAME_NS
            key = next((key for near in (at, at - 1, at + 1) if (key := (*what, near)) in seen), (*what, at))
            if not line.end_ns:
                line = replace(line, name=f"{line.name} (not ended)", end_ns=max(now, line.begin_ns))
            seen[key] = line
    yield from seen.values()


def _hosts(run: Path) -> dict[int, str]:
    found = {}
    for path in (run / RANKS).glob("rank-*.jsonl"):
        for line in islice(read_lines(path, RankStep), 1):
            found[line.rank] = line.host
    return found


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
