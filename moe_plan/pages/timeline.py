"""A predicted step as slices on each pipeline position: passes, their operators on streams, and the tail.

A pass is the forward or backward of one stage for one micro-batch. The tail is what runs after the last pass: gradient
sums, the optimizer and weight collectives.

    position 0   pass       [ forward 0                    ][ forward 1 ...
                 compute    [norm][qkv]       [router] [up] ...
                 gather           [gather]
                 dispatch                            [dispatch]           parallel to compute if they overlap
                 stage                                      [ send activations ]

Passes and transfers between positions have the times of the replay. A pass is divided into its operators, in order. An
overlapping transfer adds less to a pass than its duration, and its slice is parallel to those of "compute".

In a Perfetto trace, positions are processes, and their streams are tracks:

    position 0   compute   [forward, micro-batch 0 [norm][qkv] ...   ]        operators are nested in their pass
                 dispatch                           [dispatch]
                 stage                                     [send activations]──╮
    position 1   compute                                                       ╰──▶[forward, micro-batch 0 ...]

If receivers wait for transfers, a transfer is on the receiver, and the arrow leads from the sending pass to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moe_comm.observe.perfetto import Slice, TraceBuilder
from moe_comm.observe.trace import Arrows
from moe_comm.runtime.safe_files import write_file
from moe_plan.orders import PassKind
from moe_plan.step.operators import Operation
from moe_plan.step.simulate import StepDetails, step_details
from moe_plan.step.step import StepModel

MAX_SLICES = 200_000
STREAMS = (
    "pass",
    "compute",
    "dispatch",
    "combine",
    "gather",
    "scatter",
    "swap",
    "transfer",
    "stage",
    "stage back",
    "gradients",
    "weights",
)
"""Streams in display order. "transfer": transfers of no other stream. "stage", "stage back": activations and gradients
between positions, on the sender, or on the receiver if it waits for them."""
_MOVES = ("dispatch", "combine", "gather", "scatter", "swap")


@dataclass(frozen=True, slots=True)
class TimelineSlice:
    """An operation on a stream of a pipeline position (``rank``).

    begin, end: seconds after the step began. stage, micro_batch: -1 if it belongs to none.
    """

    rank: int
    stream: str
    name: str
    begin: float
    end: float
    stage: int = -1
    micro_batch: int = -1

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class StepTimeline:
    """A step of ``ranks`` pipeline positions. omitted: description of omitted slices, or ""."""

    slices: tuple[TimelineSlice, ...]
    seconds: float
    ranks: int
    omitted: str = ""

    def of(self, rank: int, stream: str | None = None) -> tuple[TimelineSlice, ...]:
        """Return the slices of a position, on one stream or on all."""
        return tuple(slice_ for slice_ in self.slices if slice_.rank == rank and stream in (None, slice_.stream))


@dataclass(frozen=True, slots=True)
class _OperatorSlice:
    """An operator in its pass. begin, end: seconds after the pass began."""

    stream: str
    name: str
    begin: float
    end: float


def timeline(model: StepModel, most: int = MAX_SLICES) -> StepTimeline:
    """Return the step that ``model.predict()`` predicts, in slices.

    ``most``: approximate limit of slices. Beyond it, only the first micro-batches are divided into operators.
    """
    details = step_details(model)
    operators = _operators(model, details)
    micro_batches = details.order.micro_batches
    stages = zip(details.order.stage, details.order.kind, strict=True)
    slices_per_pass = np.array([len(operators[stage, kind]) for stage, kind in stages])
    per_micro = np.bincount(details.order.micro, slices_per_pass, minlength=micro_batches)
    fixed = len(details.tasks) + len(details.tail) * details.order.pp
    detailed = int(np.searchsorted(np.cumsum(per_micro), max(most - fixed, 0), side="right"))
    slices = [*_passes(details, operators, detailed), *_hops(details), *_tail(details)]
    omitted = ""
    if detailed < micro_batches:
        omitted = f"operators are shown for the first {detailed} of {micro_batches} micro-batches"
    return StepTimeline(tuple(slices), max(one.end for one in slices), details.order.pp, omitted)


def _passes(
    details: StepDetails, operators: dict[tuple[int, int], list[_OperatorSlice]], detailed: int
) -> list[TimelineSlice]:
    order, times = details.order, details.times
    columns = (order.rank, order.kind, order.stage, order.micro, times.begin, times.end)
    rows = zip(*(column[: len(order)].tolist() for column in columns), strict=True)
    names = {int(kind): kind.name.lower() for kind in PassKind}
    result = []
    for rank, kind, stage, micro, begin, end in rows:
        result.append(TimelineSlice(rank, "pass", names[kind], begin, end, stage, micro))
        if micro < detailed:
            for operator in operators[stage, kind]:
                span = begin + operator.begin, min(begin + operator.end, end)
                result.append(TimelineSlice(rank, operator.stream, operator.name, *span, stage, micro))
    return result


def _hops(details: StepDetails) -> list[TimelineSlice]:
    """Return the slices of transfers between positions: on the sender, or on the receiver if it waits for them."""
    order, first = details.order, len(details.order)
    verb, ends = ("receive", details.receiver) if details.exposed else ("send", details.sender)
    result = []
    for at, (sender, end) in enumerate(zip(details.sender.tolist(), ends.tolist(), strict=True)):
        forward = order.kind[sender] == PassKind.FORWARD
        name, stream = ("activations", "stage") if forward else ("gradients", "stage back")
        span = float(details.times.begin[first + at]), float(details.times.end[first + at])
        rank, stage, micro = int(order.rank[end]), int(order.stage[end]), int(order.micro[end])
        result.append(TimelineSlice(rank, stream, f"{verb} {name}", *span, stage, micro))
    return result


def _tail(details: StepDetails) -> list[TimelineSlice]:
    """Return the gradient sums, the optimizer and the weight collectives.

    The hidden part of gradient sums precedes the end of the last pass. The hidden part of weight collectives belongs to
    the previous step and is shown at the first passes.
    """
    gradients, optimizer, weights = (
        [operation for operation in details.tail if operation.kind == kind]
        for kind in ("gradients", "optimizer", "weights")
    )
    result = []
    for rank, clock in enumerate(details.last.tolist()):
        start = 0.0
        for operation in weights:
            end = start + operation.total_seconds - operation.seconds
            result.append(TimelineSlice(rank, "weights", operation.name, start, end))
            start = end
        start = max(clock - sum(operation.total_seconds - operation.seconds for operation in gradients), 0.0)
        clock += sum(operation.seconds for operation in gradients)
        for operation in gradients:
            end = min(start + operation.total_seconds, clock)
            result.append(TimelineSlice(rank, "gradients", operation.name, start, end))
            start = end
        for stream, operations in (("compute", optimizer), ("weights", weights)):
            for operation in operations:
                result.append(TimelineSlice(rank, stream, operation.name, clock, clock + operation.seconds))
                clock = result[-1].end
    return [slice_ for slice_ in result if slice_.end > slice_.begin]


# ---- operators of a pass


def _operators(model: StepModel, details: StepDetails) -> dict[tuple[int, int], list[_OperatorSlice]]:
    seconds_of_pass: dict[tuple[int, int], float] = {}
    order = details.order
    for stage, kind, seconds in zip(order.stage.tolist(), order.kind.tolist(), details.seconds.tolist(), strict=False):
        seconds_of_pass[stage, kind] = max(seconds, seconds_of_pass.get((stage, kind), 0.0))
    slices_of_pass: dict[tuple[tuple[Operation, ...], float, float], list[_OperatorSlice]] = {}
    result = {}
    for (stage, kind), seconds in seconds_of_pass.items():
        key = model.stage_passes[stage].kinds[kind], seconds, float(details.weight_transfers[stage, kind])
        if key not in slices_of_pass:
            slices_of_pass[key] = _operator_slices(*key)
        result[stage, kind] = slices_of_pass[key]
    return result


def _operator_slices(operations: tuple[Operation, ...], seconds: float, weights: float) -> list[_OperatorSlice]:
    """Return the operators of a pass in sequence. A transfer begins earlier by its hidden time.

    weights: seconds of collectives of sharded weights at the begin of the pass, which waits for their exposed part.
    """
    result = [_OperatorSlice("weights", "weights and gradients", 0.0, min(weights, seconds))] if weights else []
    clock = max(seconds - sum(operation.exposed for operation in operations), 0.0)
    free: dict[str, float] = {}
    for operation in operations:
        if operation.kind != "transfer":
            result.append(_OperatorSlice("compute", operation.name, clock, clock + operation.seconds))
        else:
            stream = stream_of(operation)
            begin = max(clock - operation.hidden, free.get(stream, 0.0))
            end = min(begin + operation.seconds, seconds)
            result.append(_OperatorSlice(stream, operation.name, min(begin, end), end))
            free[stream] = end
        clock += operation.exposed
    return result


def stream_of(operation: Operation) -> str:
    """Return the stream of a transfer."""
    words = operation.name.split()
    return next((move for move in _MOVES if move in words), "transfer")


_NS = 1e9
_TRACKS = ("compute", *(stream for stream in STREAMS if stream not in ("pass", "compute")))


def build(timeline: StepTimeline) -> bytes:
    """Return the trace of a step that begins at 0. Raises MissingDependency without the package ``perfetto``."""
    builder = TraceBuilder()
    processes = {
        rank: builder.process(rank + 1, f"position {rank}", timeline.omitted if not rank else "")
        for rank in range(timeline.ranks)
    }
    tracks = {
        (rank, stream): builder.track(process, stream, order)
        for rank, process in processes.items()
        for order, stream in enumerate(_TRACKS)
    }
    arrows = _arrows(timeline)
    for index, slice_ in enumerate(timeline.slices):
        is_pass = slice_.stream == "pass"
        arguments = {"stage": slice_.stage, "micro-batch": slice_.micro_batch}
        builder.add(
            Slice(
                tracks[slice_.rank, "compute" if is_pass else slice_.stream],
                f"{slice_.name}, micro-batch {slice_.micro_batch}" if is_pass else slice_.name,
                slice_.stream,
                round(slice_.begin * _NS),
                round(slice_.end * _NS),
                {name: value for name, value in arguments.items() if value >= 0},
                arrows_out=tuple(arrows.out[index]) if index in arrows.out else (),
                arrows_in=tuple(arrows.into[index]) if index in arrows.into else (),
            )
        )
    return builder.data()


def write_trace(timeline: StepTimeline, path: Path) -> None:
    """Write ``build(timeline)`` to ``path``, for Perfetto (https://ui.perfetto.dev)."""
    write_file(path, build(timeline))


def _arrows(timeline: StepTimeline) -> Arrows:
    """Return the arrows between positions, by index in ``timeline.slices``."""
    passes = {
        (slice_.name != "forward", slice_.stage, slice_.micro_batch): index
        for index, slice_ in enumerate(timeline.slices)
        if slice_.stream == "pass" and slice_.name != "weight"
    }
    arrows = Arrows()
    for index, slice_ in enumerate(timeline.slices):
        if slice_.stream in ("stage", "stage back"):
            backward = slice_.stream == "stage back"
            step = (-1 if backward else 1) * (-1 if slice_.name.startswith("receive") else 1)
            other = passes[backward, slice_.stage + step, slice_.micro_batch]
            arrows.draw(*((other, index) if slice_.name.startswith("receive") else (index, other)))
    return arrows
