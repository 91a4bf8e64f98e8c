"""Write timelines as a Perfetto trace (open it at https://ui.perfetto.dev) and as a picture.

rank 0  step       [ step 1 ] pause [ step 2 ]
        processor  [ product ][ rows ][ wait ] ...
        network    [ transfer ] ...
rank 1  ...
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import util
from pathlib import Path
from typing import Any

from moe_comm.bench.overlap.timeline import PRODUCT, ROWS, TRANSFER, WAIT, TimelineSpan, TimelineStep, lanes
from moe_comm.errors import MissingDependency, pip_install
from moe_comm.observe.perfetto import Slice, TraceBuilder, check_package
from moe_comm.runtime.safe_files import replacing, write_file

PAUSE_NS = 5_000_000
"""Gap between two steps of a trace."""
COLORS = {PRODUCT: "#1b6ca8", ROWS: "#edae49", WAIT: "#dddddd", TRANSFER: "#66a182"}
TRACKS = ("step", "processor", "network")


def check_packages(trace: str | None, png: str | None) -> None:
    """Raise ``MissingDependency`` if the package that writes one of the files is not installed."""
    if trace is not None:
        check_package("bench")
    if png is not None and util.find_spec("matplotlib") is None:
        raise MissingDependency(f"matplotlib is not installed; run: {pip_install('bench')}")


def perfetto(steps: Sequence[TimelineStep]) -> bytes:
    """Return a trace with one process per rank, which has the tracks ``TRACKS``. Steps are in sequence.

    Each of several overlapping transfers gets its own track. Perfetto merges tracks with the same name.
    """
    builder = TraceBuilder()
    tracks: dict[tuple[int, str], int] = {}

    def add(rank: int, name: str, span: TimelineSpan) -> None:
        if (rank, TRACKS[0]) not in tracks:
            process = builder.process(rank + 1, f"rank {rank}")
            tracks.update({(rank, name): builder.track(process, name, TRACKS.index(name)) for name in TRACKS})
        builder.add(Slice(tracks[rank, name], span.name, span.kind, begun + span.start_ns, begun + span.end_ns))

    begun = 0
    for step in steps:
        for rank, spans in enumerate(step.ranks):
            end_ns = max((span.end_ns for span in spans), default=0)
            add(rank, "step", TimelineSpan("step", f"{step.title}, {step.variant}", 0, end_ns))
            for span in spans:
                add(rank, "network" if span.kind == TRANSFER else "processor", span)
        begun += step.end_ns + PAUSE_NS
    return builder.data()


def picture(steps: Sequence[TimelineStep], path: Path) -> None:
    """Write a PNG with one row of panels per title and one panel per variant, on the same time scale."""
    # matplotlib is an optional dependency.
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
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)


def _panel(axes: Any, step: TimelineStep) -> None:
    """Draw two rows per rank: processor and network. Overlapping transfers share the height of the row."""
    positions, labels = [], []
    for rank, spans in enumerate(step.ranks):
        processor, network = -2.4 * rank, -2.4 * rank - 1
        positions += [processor, network]
        labels += [f"rank {rank} processor", "network"]
        for kind in (ROWS, PRODUCT, WAIT):  # a ROWS span may contain a WAIT span, which must be drawn later
            bars = [(s.start_ns * 1e-6, (s.end_ns - s.start_ns) * 1e-6) for s in spans if s.kind == kind]
            axes.broken_barh(bars, (processor - 0.4, 0.8), color=COLORS[kind], linewidth=0)
        transfers = lanes(span for span in spans if span.kind == TRANSFER)
        height = 0.8 / (1 + max((lane for lane, _ in transfers), default=0))
        for lane, span in transfers:
            bar = [(span.start_ns * 1e-6, (span.end_ns - span.start_ns) * 1e-6)]
            bottom = network + 0.4 - (lane + 1) * height
            axes.broken_barh(bar, (bottom, height * 0.9), color=COLORS[TRANSFER], linewidth=0)
    axes.set_yticks(positions, labels, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)


def write(steps: Sequence[TimelineStep], trace: str | None, png: str | None) -> None:
    """Write the trace and the picture; None skips a file."""
    for path in (trace, png):
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    if trace is not None:
        write_file(Path(trace), perfetto(steps))
    if png is not None:
        picture(steps, Path(png))
