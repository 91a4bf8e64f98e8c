"""Timelines of one step on each rank: GEMMs, copies of rows, waits, and transfers.

``recording()`` replaces the functions that do these operations by timed ones in every module that has them, and
restores them on exit. The library therefore has no overhead when nothing is recorded.

    processor   [ product ][ rows ][ product ][ wait ][ product ]          the main thread of the rank
    network        [ transfer ─ ─ ─ ─ ─ ─ ─ ]                              from start to completion
                   [ transfer ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ]                transfers queue; several may be in flight
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from importlib import util
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from moe_comm.bench.common.clock import LEAD_NS, sync_group
from moe_comm.comm.channel import Channel
from moe_comm.dispatch import wire_dtype
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.slots import plain
from moe_comm.errors import MissingDependency, pip_install
from moe_comm.kernels import autograd, cpu_gemm, row_weights
from moe_comm.kernels.activations import Activation, SwiGLU
from moe_comm.observe.perfetto import Slice, TraceBuilder, check_package
from moe_comm.overlap import chunked
from moe_comm.overlap.executors import chunked_rows
from moe_comm.runtime.safe_files import replacing, write_file

PRODUCT, ROWS, WAIT, TRANSFER = "product", "rows", "wait", "transfer"
KINDS = (PRODUCT, ROWS, WAIT, TRANSFER)
"""Kinds of spans: a GEMM or activation, a copy or sum of rows, a wait for a transfer, and a transfer."""
REPEATS = 5
CALLBACK_TIMEOUT_S = 1.0
"""Time to wait for the callback of the last transfer, which may run after the wait for the transfer returns."""


@dataclass(frozen=True)
class TimelineSpan:
    """One operation of a kind in ``KINDS``. Times are in nanoseconds since the common start of the step."""

    kind: str
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class TimelineStep:
    """One step of ``title`` in the form ``variant``, with the spans of each rank."""

    title: str
    variant: str
    ranks: tuple[tuple[TimelineSpan, ...], ...]

    @property
    def end_ns(self) -> int:
        return max((span.end_ns for spans in self.ranks for span in spans), default=0)


class SpanRecorder:
    """Records spans. If spans of one kind are nested, only the outermost is recorded."""

    def __init__(self) -> None:
        self.spans: list[TimelineSpan] = []
        self.started = 0
        self._origin = 0
        self._open: set[str] = set()

    def begin(self, at_ns: int) -> None:
        """Discard all spans and set the origin of time to ``at_ns``."""
        self.spans.clear()
        self.started, self._origin = 0, at_ns

    def pending(self) -> int:
        """Return the number of transfers that are not completed."""
        return self.started - sum(span.kind == TRANSFER for span in list(self.spans))

    def now(self) -> int:
        return time.monotonic_ns() - self._origin

    def add(self, kind: str, name: str, start_ns: int) -> None:
        """Record a span that ends now."""
        self.spans.append(TimelineSpan(kind, name, start_ns, self.now()))

    def timed(self, kind: str, name: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with each call recorded as a span."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kind in self._open:
                return function(*args, **kwargs)
            self._open.add(kind)
            start = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self._open.discard(kind)
                self.add(kind, name(*args, **kwargs), start)

        return call


@contextmanager
def recording() -> Iterator[SpanRecorder]:
    """Record the operations of the main thread. Must not be nested."""
    recorder = SpanRecorder()
    undo: list[tuple[Any, str, Any]] = []

    def replace_attribute(owner: Any, attribute: str, timed: Any) -> None:
        undo.append((owner, attribute, owner.__dict__[attribute]))
        setattr(owner, attribute, timed)

    try:
        for kind, name, functions in _FUNCTIONS:
            for function in functions:
                timed = recorder.timed(kind, name or _named(function.__name__), function)
                for module in [m for key, m in sys.modules.items() if key.partition(".")[0] == "moe_comm"]:
                    for attribute, value in list(vars(module).items()):
                        if value is function:
                            replace_attribute(module, attribute, timed)
        for kind, owner, attribute, name in _METHODS:
            method = owner.__dict__[attribute]
            if isinstance(method, staticmethod):
                replace_attribute(owner, attribute, staticmethod(recorder.timed(kind, name, method.__func__)))
            else:
                replace_attribute(owner, attribute, recorder.timed(kind, name, method))
        replace_attribute(Channel, "_start", _timed_transfers(recorder, Channel._start))
        yield recorder
    finally:
        for owner, attribute, value in reversed(undo):
            setattr(owner, attribute, value)


def record(title: str, variant: str, work: Callable[[], Any]) -> TimelineStep:
    """Record ``work`` several times from a common start and return the step of median length. Collective."""
    records = []
    with recording() as recorder:
        work()  # warm-up
        _wait_for_transfers(recorder)
        for _ in range(REPEATS):
            start = sync_group(time.monotonic_ns()) + LEAD_NS
            while time.monotonic_ns() < start:
                os.sched_yield()
            recorder.begin(start)
            work()
            _wait_for_transfers(recorder)
            records.append(tuple(sorted(recorder.spans, key=lambda span: (span.start_ns, -span.end_ns))))
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, records)
    steps = sorted(
        (TimelineStep(title, variant, ranks) for ranks in zip(*by_rank, strict=True)), key=lambda step: step.end_ns
    )
    return steps[len(steps) // 2]


def lanes(spans: Iterable[TimelineSpan]) -> list[tuple[int, TimelineSpan]]:
    """Assign each span the first free lane, so that spans in a lane do not overlap."""
    free: list[int] = []
    result = []
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        lane = next((index for index, end in enumerate(free) if end <= span.start_ns), len(free))
        if lane == len(free):
            free.append(0)
        free[lane] = span.end_ns
        result.append((lane, span))
    return result


def _timed_transfers(recorder: SpanRecorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Channel._start`` with each transfer recorded as a span until the backend completes it."""

    @wraps(original)
    def start(channel: Channel, out: Tensor, begin: Callable[[], Any], description: str, nbytes: int) -> Any:
        started = recorder.now()
        recorder.started += 1

        def on_completed(_: object) -> None:  # in a thread of the backend
            recorder.add(TRANSFER, description, started)

        def begin_timed() -> Any:
            work = begin()
            work.get_future().add_done_callback(on_completed)
            return work

        pending = original(channel, out, begin_timed, description, nbytes)
        return replace(pending, wait=recorder.timed(WAIT, lambda: description, pending.wait))

    return start


def _wait_for_transfers(recorder: SpanRecorder) -> None:
    end = time.monotonic() + CALLBACK_TIMEOUT_S
    while recorder.pending() and time.monotonic() < end:
        time.sleep(0.0002)


def _named(name: str) -> Callable[..., str]:
    return lambda *args, **kwargs: name


def _sizes(a_MK: Tensor, b_KN: Tensor, *rest: Any, **more: Any) -> str:
    return f"{a_MK.shape[0]} x {a_MK.shape[1]} x {b_KN.shape[1]}"


def _weight_sizes(y_RN: Tensor, x_RK: Tensor, *rest: Any, **more: Any) -> str:
    return f"{y_RN.shape[1]} x {y_RN.shape[0]} x {x_RK.shape[1]}"


def _row_sizes(weights: cpu_gemm.ExpertWeights, x_RK: Tensor, out_RN: Tensor, *rest: Any) -> str:
    return f"{x_RK.shape[0]} x {x_RK.shape[1]} x {out_RN.shape[1]}"


_FUNCTIONS: Sequence[tuple[str, Callable[..., str] | None, Sequence[Callable[..., Any]]]] = (
    (PRODUCT, _sizes, (chunked.exact_mm,)),
    (PRODUCT, _weight_sizes, (cpu_gemm.weight_gradients,)),
    (
        ROWS,
        None,
        (
            plain.weighted_sum,
            row_weights.scale,
            row_weights.lane_dot,
            autograd.sum_in_rank_order,
            wire_dtype.pack,
            wire_dtype.unpack,
        ),
    ),
)
_METHODS: Sequence[tuple[str, type, str, Callable[..., str]]] = (
    (PRODUCT, cpu_gemm.ExpertWeights, "multiply", _row_sizes),
    (PRODUCT, cpu_gemm.ExpertWeights, "add", _row_sizes),
    (PRODUCT, cpu_gemm.SwigluExperts, "forward", _named("experts")),
    (PRODUCT, cpu_gemm.SwigluExperts, "backward", _named("experts backward")),
    (PRODUCT, Activation, "forward", _named("activation")),
    (PRODUCT, Activation, "backward", _named("activation backward")),
    (PRODUCT, SwiGLU, "forward", _named("activation")),
    (PRODUCT, SwiGLU, "backward", _named("activation backward")),
    (ROWS, AllToAllDispatcher, "_send_rows", _named("send rows")),
    (ROWS, AllToAllDispatcher, "_return_rows", _named("return rows")),
    (ROWS, chunked_rows.ChunkedSend, "__init__", _named("start sending rows")),
    (ROWS, chunked_rows.ChunkedSend, "receive_chunk", lambda self, chunk: f"receive chunk {chunk}"),
    (ROWS, chunked_rows.ChunkedReturn, "mark_computed", lambda self, chunk: f"return chunk {chunk}"),
    (ROWS, chunked_rows.ChunkedReturn, "result", _named("sums")),
)


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


def write_timelines(steps: Sequence[TimelineStep], trace: str | None, png: str | None) -> None:
    """Write the trace and the picture; None skips a file."""
    for path in (trace, png):
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
    if trace is not None:
        write_file(Path(trace), perfetto(steps))
    if png is not None:
        picture(steps, Path(png))
