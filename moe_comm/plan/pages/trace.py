"""A predicted step as a Perfetto trace. Pipeline positions are processes, and their streams are tracks.

position 0   compute   [forward, micro-batch 0 [norm][qkv] ...   ]        operators are nested in their pass
             dispatch                           [dispatch]
             stage                                     [send activations]──╮
position 1   compute                                                       ╰──▶[forward, micro-batch 0 ...]

If receivers wait for transfers, the arrow leads from the sending pass to the transfer.
"""

from __future__ import annotations

from pathlib import Path

from moe_comm.observe.perfetto import Slice, TraceBuilder
from moe_comm.observe.trace import Arrows
from moe_comm.plan.pages.timeline import STREAMS, StepTimeline

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
    for index, one in enumerate(timeline.slices):
        is_pass = one.stream == "pass"
        arguments = {"stage": one.stage, "micro-batch": one.micro_batch}
        builder.add(
            Slice(
                tracks[one.rank, "compute" if is_pass else one.stream],
                f"{one.name}, micro-batch {one.micro_batch}" if is_pass else one.name,
                one.stream,
                round(one.begin * _NS),
                round(one.end * _NS),
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
    data = build(timeline)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _arrows(timeline: StepTimeline) -> Arrows:
    """Return the arrows between positions, by index in ``timeline.slices``."""
    passes = {
        (one.name != "forward", one.stage, one.micro_batch): index
        for index, one in enumerate(timeline.slices)
        if one.stream == "pass" and one.name != "weight"
    }
    arrows = Arrows()
    for index, one in enumerate(timeline.slices):
        if one.stream in ("stage", "stage back"):
            back = one.stream == "stage back"
            step = (-1 if back else 1) * (-1 if one.name.startswith("receive") else 1)
            other = passes[back, one.stage + step, one.micro_batch]
            arrows.draw(*((other, index) if one.name.startswith("receive") else (index, other)))
    return arrows
