"""A predicted step as a Perfetto trace. Pipeline positions are processes, and their streams are tracks.

position 0   compute   [forward, micro-batch 0 [norm][qkv] ...   ]        operators are nested in their pass
             dispatch                           [dispatch]
             stage                                     [send activations]──╮
position 1   compute                                                       ╰──▶[forward, micro-batch 0 ...]

If receivers wait for transfers, a transfer is on the receiver, and the arrow leads from the sending pass to it.
"""

from __future__ import annotations

from pathlib import Path

from moe_comm.observe.perfetto import Slice, TraceBuilder
from moe_comm.observe.trace import Arrows
from moe_comm.runtime.safe_files import write_file
from moe_plan.pages.timeline import STREAMS, StepTimeline

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
    """Write ``build(timeline)`` to ``path``, for Perfetto (https://ui.perfetto.dev).

    Raises:
        MissingDependency: the package ``perfetto`` is not installed.
        OSError: the file cannot be written.
    """
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
