"""Timelines for people: a Perfetto trace (https://ui.perfetto.dev opens it) and a picture.

rank 0  step       [ step 1 ] pause [ step 2 ]
        processor  [ products ][ rows ][ wait ] ...
        network    [ transfer ] ...
rank 1  ...
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

from moe_comm.bench.timeline import PRODUCT, ROWS, TRANSFER, WAIT, Span, Step, lanes
from moe_comm.errors import MissingDependency

PAUSE_NS = 5_000_000
"""Between two steps of a trace."""
COLORS = {PRODUCT: "#1b6ca8", ROWS: "#edae49", WAIT: "#dddddd", TRANSFER: "#66a182"}
TRACKS = ("step", "processor", "network")
_SEQUENCE = 1


def check_packages(trace: str | None, png: str | None) -> None:
    """Before a measurement of minutes: raise ``MissingDependency`` where a file could not be written after it."""
    for wanted, package in ((trace, "perfetto"), (png, "matplotlib")):
        if wanted is not None and util.find_spec(package) is None:
            raise MissingDependency(f"{package} is not installed; run: pip install 'moe_comm[bench]'")


def perfetto(steps: Sequence[Step]) -> bytes:
    """A trace: ranks are processes, each with the tracks ``TRACKS``; steps follow each other.

    Tracks of one name are shown as one, so transfers that overlap have a track each.
    """
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    builder = TraceProtoBuilder()
    tracks: dict[tuple[int, str, int], int] = {}

    def process(rank: int) -> int:
        key = (rank, "", 0)
        if key not in tracks:
            tracks[key] = len(tracks) + 1
            described = builder.add_packet().track_descriptor
            described.uuid = tracks[key]
            described.process.pid = rank + 1  # 0 is the idle process
            described.process.process_name = f"rank {rank}"
        return tracks[key]

    def track(rank: int, name: str, lane: int) -> int:
        key = (rank, name, lane)
        if key not in tracks:
            parent = process(rank)
            tracks[key] = len(tracks) + 1
            described = builder.add_packet().track_descriptor
            described.uuid, described.parent_uuid, described.name = tracks[key], parent, name
            described.sibling_order_rank = TRACKS.index(name)
        return tracks[key]

    def event(kind: Any, at_ns: int, uuid: int, span: Span | None) -> None:
        packet = builder.add_packet()
        packet.timestamp = at_ns
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_event.type, packet.track_event.track_uuid = kind, uuid
        if span is not None:
            packet.track_event.name = span.name
            packet.track_event.categories.append(span.kind)

    begun = 0
    for step in steps:
        # (time, order, ...): what ends goes before what begins, an outer span before its inner ones.
        events: list[tuple[int, int, int, int, Span | None]] = []
        for rank, spans in enumerate(step.ranks):
            whole = Span("step", f"{step.title}, {step.variant}", 0, max((s.end_ns for s in spans), default=0))
            placed = [(track(rank, "step", 0), whole)]
            placed += [(track(rank, "processor", 0), span) for span in spans if span.kind != TRANSFER]
            away = lanes(span for span in spans if span.kind == TRANSFER)
            placed += [(track(rank, "network", lane), span) for lane, span in away]
            for uuid, span in placed:
                length = max(span.end_ns - span.start_ns, 1)  # or it would end before it begins
                events.append((begun + span.start_ns, 1, -length, uuid, span))
                events.append((begun + span.start_ns + length, 0, length, uuid, None))
        for at_ns, begins, _, uuid, shown in sorted(events, key=lambda one: one[:3]):
            event(TrackEvent.TYPE_SLICE_BEGIN if begins else TrackEvent.TYPE_SLICE_END, at_ns, uuid, shown)
        begun += step.end_ns + PAUSE_NS
    return bytes(builder.serialize())


def picture(steps: Sequence[Step], path: Path) -> None:
    """A PNG: one row of panels for each title, its variants beside each other on the same scale of time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    titles, variants = (list(dict.fromkeys(getattr(step, key) for step in steps)) for key in ("title", "variant"))
    ranks = max((len(step.ranks) for step in steps), default=1)
    figure = Figure(figsize=(7 * len(variants), 0.6 + len(titles) * (0.7 + 0.5 * ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(titles), len(variants), squeeze=False)
    for axes in panels.flat:
        axes.set_axis_off()
    for row, title in enumerate(titles):
        same = [step for step in steps if step.title == title]
        longest = max(step.end_ns for step in same) * 1e-6
        for step in same:
            axes = panels[row][variants.index(step.variant)]
            axes.set_axis_on()
            _panel(axes, step)
            axes.set_xlim(0, longest * 1.02 or 1)
            axes.set_title(f"{title}, {step.variant}: {step.end_ns * 1e-6:.0f} ms", fontsize=9, loc="left")
    for axes in panels[-1]:
        axes.set_xlabel("ms", fontsize=8)
    figure.legend(
        handles=[Patch(color=color, label=kind) for kind, color in COLORS.items()],
        ncols=len(COLORS),
        loc="outside upper right",
        fontsize=8,
    )
    figure.savefig(path, format="png", dpi=110)


def _panel(axes: Any, step: Step) -> None:
    """Two rows a rank: processor above, network below, where transfers that overlap share the height."""
    places, labels = [], []
    for rank, spans in enumerate(step.ranks):
        processor, network = -2.4 * rank, -2.4 * rank - 1
        places += [processor, network]
        labels += [f"rank {rank} processor", "network"]
        for kind in (ROWS, PRODUCT, WAIT):  # rows land around the wait for them
            bars = [(s.start_ns * 1e-6, (s.end_ns - s.start_ns) * 1e-6) for s in spans if s.kind == kind]
            axes.broken_barh(bars, (processor - 0.4, 0.8), color=COLORS[kind], linewidth=0)
        away = lanes(span for span in spans if span.kind == TRANSFER)
        height = 0.8 / (1 + max((lane for lane, _ in away), default=0))
        for lane, span in away:
            bar = [(span.start_ns * 1e-6, (span.end_ns - span.start_ns) * 1e-6)]
            bottom = network + 0.4 - (lane + 1) * height
            axes.broken_barh(bar, (bottom, height * 0.9), color=COLORS[TRANSFER], linewidth=0)
    axes.set_yticks(places, labels, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)


def write(steps: Sequence[Step], trace: str | None, png: str | None) -> None:
    """Write the files that are wanted."""
    for wanted in (trace, png):
        if wanted is not None:
            Path(wanted).parent.mkdir(parents=True, exist_ok=True)
    if trace is not None:
        Path(trace).write_bytes(perfetto(steps))
    if png is not None:
        picture(steps, Path(png))
