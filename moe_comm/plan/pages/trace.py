"""A predicted step as a Perfetto trace: pipeline positions are processes, their streams are tracks.

position 0   compute   [forward, micro-batch 0 [norm][qkv] ...   ]        operators stand inside their pass
             dispatch                           [dispatch]
             stage                                     [send activations]──╮
position 1   compute                                                       ╰──▶[forward, micro-batch 0 ...]

Where a position waits for what it receives, the arrow leads from the pass that sends to that transfer.
"""

from __future__ import annotations

from pathlib import Path

from moe_comm.observe.perfetto import Slice, TraceBuilder
from moe_comm.observe.trace import Arrows
from moe_comm.plan.pages.timeline import STREAMS, Timeline

_NS = 1e9
_TRACKS = ("compute", *(stream for stream in STREAMS if stream not in ("pass", "compute")))


def build(timeline: Timeline) -> bytes:
    """The trace of a step that begins at 0.

    Raises:
        MissingDependency: the package ``perfetto`` is not there.
    """
    builder = TraceBuilder()
    processes = {
        rank: builder.process(rank + 1, f"position {rank}", timeline.cut if not rank else "")
        for rank in range(timeline.ranks)
    }
    tracks = {
        (rank, stream): builder.track(process, stream, order)
        for rank, process in processes.items()
        for order, stream in enumerate(_TRACKS)
    }
    arrows = _arrows(timeline)
    for place, one in enumerate(timeline.pieces):
        whole = one.stream == "pass"
        places = {"stage": one.stage, "micro-batch": one.micro_batch}
        builder.add(
            Slice(
                tracks[one.rank, "compute" if whole else one.stream],
                f"{one.name}, micro-batch {one.micro_batch}" if whole else one.name,
                one.stream,
                round(one.begin * _NS),
                round(one.end * _NS),
                {name: value for name, value in places.items() if value >= 0},
                arrows_out=tuple(arrows.out[place]) if place in arrows.out else (),
                arrows_in=tuple(arrows.into[place]) if place in arrows.into else (),
            )
        )
    return builder.data()


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write ``build(timeline)`` into the file ``path``, which Perfetto (https://ui.perfetto.dev) opens.

    Raises:
        MissingDependency: the package ``perfetto`` is not there.
        OSError: the file cannot be written.
    """
    data = build(timeline)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _arrows(timeline: Timeline) -> Arrows:
    """Between positions, by places in ``timeline.pieces``."""
    passes = {
        (one.name != "forward", one.stage, one.micro_batch): place
        for place, one in enumerate(timeline.pieces)
        if one.stream == "pass" and one.name != "weight"
    }
    found = Arrows()
    for place, one in enumerate(timeline.pieces):
        if one.stream in ("stage", "stage back"):
            back = one.stream == "stage back"
            step = (-1 if back else 1) * (-1 if one.name.startswith("receive") else 1)
            other = passes[back, one.stage + step, one.micro_batch]
            found.draw(*((other, place) if one.name.startswith("receive") else (place, other)))
    return found
