"""What one rank does in one step, as spans of time: products, rows being moved in memory, waits, and transfers.

``recording()`` replaces the functions that do these things by ones that also look at the clock, in every module that
has them, and puts them back: the library itself knows nothing of it, and costs nothing where it is not used.

    processor   [ products ][ rows ][ products ][ wait ][ products ]       what the rank's thread does
    network        [ transfer ─ ─ ─ ─ ─ ─ ─ ]                              from its start until it has arrived
                   [ transfer ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ]                transfers queue: all may be under way at once
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.bench.common.clock import LEAD_NS, sync_group
from moe_comm.comm.channel import Channel
from moe_comm.dispatch import plain, wire_dtype
from moe_comm.dispatch.backends.all_to_all import AllToAllDispatcher
from moe_comm.kernels import row_invariant, wide
from moe_comm.kernels.activations import Activation, SwiGLU
from moe_comm.overlap import chunked
from moe_comm.overlap.executors import chunked_rows

PRODUCT, ROWS, WAIT, TRANSFER = "product", "rows", "wait", "transfer"
KINDS = (PRODUCT, ROWS, WAIT, TRANSFER)
TAKES = 5
LANDED_S = 1.0
"""For the last transfer's callback, which may come a little after who waited for it goes on."""


@dataclass(frozen=True)
class Span:
    """kind: of ``KINDS``. Nanoseconds since the step began on all ranks."""

    kind: str
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Step:
    """One step of ``title``, done as ``variant`` says; spans of each rank."""

    title: str
    variant: str
    ranks: tuple[tuple[Span, ...], ...]

    @property
    def end_ns(self) -> int:
        return max((span.end_ns for spans in self.ranks for span in spans), default=0)


class Recorder:
    """Takes down spans. Of one kind only the outermost: a product that is made of another is one."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.started = 0
        self._origin = 0
        self._open: set[str] = set()

    def begin(self, at_ns: int) -> None:
        """Forget what has been, and count from ``at_ns``."""
        self.spans.clear()
        self.started, self._origin = 0, at_ns

    def under_way(self) -> int:
        """Transfers that have been started and not arrived."""
        return self.started - sum(span.kind == TRANSFER for span in list(self.spans))

    def now(self) -> int:
        return time.monotonic_ns() - self._origin

    def add(self, kind: str, name: str, start_ns: int) -> None:
        """A span that ends now."""
        self.spans.append(Span(kind, name, start_ns, self.now()))

    def timed(self, kind: str, name: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, each call of which is a span."""

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
def recording() -> Iterator[Recorder]:
    """Inside, whatever this process's main thread does is taken down. Not to be nested."""
    recorder = Recorder()
    undo: list[tuple[Any, str, Any]] = []

    def put(owner: Any, attribute: str, changed: Any) -> None:
        undo.append((owner, attribute, owner.__dict__[attribute]))
        setattr(owner, attribute, changed)

    try:
        for kind, name, functions in _FUNCTIONS:
            for function in functions:
                changed = recorder.timed(kind, name or _named(function.__name__), function)
                for module in [m for key, m in sys.modules.items() if key.partition(".")[0] == "moe_comm"]:
                    for attribute, value in list(vars(module).items()):
                        if value is function:
                            put(module, attribute, changed)
        for kind, owner, attribute, name in _METHODS:
            whole = owner.__dict__[attribute]
            if isinstance(whole, staticmethod):
                put(owner, attribute, staticmethod(recorder.timed(kind, name, whole.__func__)))
            else:
                put(owner, attribute, recorder.timed(kind, name, whole))
        put(Channel, "_start", _watched(recorder, Channel._start))
        yield recorder
    finally:
        for owner, attribute, value in reversed(undo):
            setattr(owner, attribute, value)


def record(title: str, variant: str, work: Callable[[], Any]) -> Step:
    """What every rank does in ``work``, begun by all at one moment: of a few times the one of median length. The same
    on every rank. Collective."""
    taken = []
    with recording() as recorder:
        work()  # what is done once is done
        _landed(recorder)
        for _ in range(TAKES):
            start = sync_group(time.monotonic_ns()) + LEAD_NS
            while time.monotonic_ns() < start:
                os.sched_yield()
            recorder.begin(start)
            work()
            _landed(recorder)
            taken.append(tuple(sorted(recorder.spans, key=lambda span: (span.start_ns, -span.end_ns))))
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, taken)
    steps = sorted((Step(title, variant, ranks) for ranks in zip(*every, strict=True)), key=lambda step: step.end_ns)
    return steps[len(steps) // 2]


def lanes(spans: Iterable[Span]) -> list[tuple[int, Span]]:
    """Spans with the first lane that is free when each starts: none overlap in one lane."""
    free: list[int] = []
    found = []
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        lane = next((index for index, end in enumerate(free) if end <= span.start_ns), len(free))
        if lane == len(free):
            free.append(0)
        free[lane] = span.end_ns
        found.append((lane, span))
    return found


def _watched(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """``Channel._start`` whose transfers are spans from their start until the backend says that they are done."""

    @wraps(original)
    def start(channel: Channel, begin: Callable[[], Any], device: torch.device, description: str, nbytes: int) -> Any:
        started = recorder.now()
        recorder.started += 1

        def ended(_: object) -> None:  # in a thread of the backend
            recorder.add(TRANSFER, description, started)

        def watched() -> Any:
            work = begin()
            work.get_future().add_done_callback(ended)
            return work

        begun = original(channel, watched, device, description, nbytes)
        wait = recorder.timed(WAIT, lambda: description, begun.wait)
        return replace(begun, wait=wait)

    return start


def _landed(recorder: Recorder) -> None:
    end = time.monotonic() + LANDED_S
    while recorder.under_way() and time.monotonic() < end:
        time.sleep(0.0002)


def _named(name: str) -> Callable[..., str]:
    return lambda *args, **kwargs: name


def _sizes(a_MK: Tensor, b_KN: Tensor, *rest: Any, **more: Any) -> str:
    return f"{a_MK.shape[0]} x {a_MK.shape[1]} x {b_KN.shape[1]}"


_FUNCTIONS: Sequence[tuple[str, Callable[..., str] | None, Sequence[Callable[..., Any]]]] = (
    (
        PRODUCT,
        _sizes,
        (row_invariant.expert_mm, row_invariant.product_into, row_invariant.row_invariant_mm, chunked.exact_mm),
    ),
    (
        ROWS,
        None,
        (plain.weighted_sum, plain.scale, plain.lane_dot, wide.added_in_order, wire_dtype.pack, wire_dtype.unpack),
    ),
)
_METHODS: Sequence[tuple[str, type, str, Callable[..., str]]] = (
    (PRODUCT, Activation, "forward", _named("activation")),
    (PRODUCT, Activation, "backward", _named("activation backward")),
    (PRODUCT, SwiGLU, "forward", _named("activation")),
    (PRODUCT, SwiGLU, "backward", _named("activation backward")),
    (ROWS, AllToAllDispatcher, "_rows_out", _named("rows out")),
    (ROWS, AllToAllDispatcher, "_rows_back", _named("rows back")),
    (ROWS, chunked_rows.ChunkedSend, "__init__", _named("rows leave")),
    (ROWS, chunked_rows.ChunkedSend, "land", lambda self, chunk: f"chunk {chunk} lands"),
    (ROWS, chunked_rows.ChunkedReturn, "computed", lambda self, part: f"chunk {part} leaves"),
    (ROWS, chunked_rows.ChunkedReturn, "result", _named("sums")),
)
