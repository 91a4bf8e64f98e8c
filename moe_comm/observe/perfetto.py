"""Write traces as Perfetto TrackEvent protobuf (https://ui.perfetto.dev opens them): slices on tracks, and arrows.

    process "rank 0"    track "compute"      [ forward            ][ backward ... ]
                                               [ attention ][ ... ]                    nested slices
                        track "dispatch"            [ dispatch ]──╮
                                                                  ╰──▶[ combine ]      an arrow

Slices of one track that overlap without nesting are placed on additional tracks of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import util
from typing import Any

from moe_comm.errors import MissingDependency, pip_install

Value = int | float | str | list[int]
_SEQUENCE = 1


def check_package(extra: str = "observe") -> None:
    """Raise ``MissingDependency`` if ``perfetto`` is not installed."""
    if util.find_spec("perfetto") is None:
        raise MissingDependency(f"perfetto is not installed; run: {pip_install(extra)}")


@dataclass(frozen=True)
class Slice:
    """A slice of a track, with the ids of outgoing and incoming arrows.

    Perfetto draws an arrow from the slice that begins first.
    """

    track: int
    name: str
    category: str
    begin_ns: int
    end_ns: int
    args: Mapping[str, Value] = field(default_factory=dict)
    arrows_out: tuple[int, ...] = ()
    arrows_in: tuple[int, ...] = ()


@dataclass
class _Track:
    parent: int
    name: str
    order: int
    lanes: list[tuple[int, list[int]]] = field(default_factory=list)
    """uuid and ends of the open slices of each lane, the innermost last."""


class TraceBuilder:
    """Collect slices and serialize them. Raises ``MissingDependency`` if ``perfetto`` is not installed."""

    def __init__(self) -> None:
        check_package()
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder

        self._builder = TraceProtoBuilder()
        self._uuid = 0
        self._tracks: list[_Track] = []
        self._slices: list[Slice] = []

    def process(self, pid: int, name: str, label: str = "") -> int:
        """Add a group of tracks and return its id. ``pid`` must be above 0, the id of the idle process."""
        descriptor = self._descriptor()
        descriptor.process.pid = pid
        descriptor.process.process_name = name
        if label:
            descriptor.process.process_labels.append(label)
        return int(descriptor.uuid)

    def track(self, process: int, name: str, order: int) -> int:
        """Add a track and return its index for ``Slice.track``. A track without slices is not written."""
        self._tracks.append(_Track(process, name, order))
        return len(self._tracks) - 1

    def add(self, one: Slice) -> None:
        """Add a slice, in any order."""
        self._slices.append(one)

    def data(self) -> bytes:
        """Serialize the trace. Call it once."""
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

        # (time, order, ...): ends before beginnings, an outer slice before its inner ones.
        events: list[tuple[int, int, int, int, int, Slice]] = []
        for slice_ in sorted(self._slices, key=lambda slice_: (slice_.begin_ns, -slice_.end_ns)):
            end_ns = max(slice_.end_ns, slice_.begin_ns + 1)  # otherwise the end would sort before the beginning
            uuid = self._lane(self._tracks[slice_.track], slice_.begin_ns, end_ns)
            length = end_ns - slice_.begin_ns
            events.append((slice_.begin_ns, 1, -length, len(events), uuid, slice_))
            events.append((end_ns, 0, length, -len(events), uuid, slice_))
        for at_ns, begins, _, _, uuid, slice_ in sorted(events, key=lambda event: event[:4]):
            packet = self._builder.add_packet()
            packet.timestamp = at_ns
            packet.trusted_packet_sequence_id = _SEQUENCE
            event = packet.track_event
            event.track_uuid = uuid
            event.type = TrackEvent.TYPE_SLICE_BEGIN if begins else TrackEvent.TYPE_SLICE_END
            if begins:
                event.name = slice_.name
                event.categories.append(slice_.category)
                event.flow_ids.extend(slice_.arrows_out)
                event.terminating_flow_ids.extend(slice_.arrows_in)
                for key, value in slice_.args.items():
                    _annotate(event.debug_annotations.add(), key, value)
        return bytes(self._builder.serialize())

    def _descriptor(self) -> Any:
        self._uuid += 1
        descriptor = self._builder.add_packet().track_descriptor
        descriptor.uuid = self._uuid
        return descriptor

    def _lane(self, track: _Track, begin_ns: int, end_ns: int) -> int:
        """Return the uuid of the first lane (Perfetto track) in whose open slices the slice nests.

        Slices must be passed in the order in which they begin.
        """
        for uuid, open_ends in track.lanes:
            while open_ends and open_ends[-1] <= begin_ns:
                open_ends.pop()
            if not open_ends or end_ns <= open_ends[-1]:
                open_ends.append(end_ns)
                return uuid
        descriptor = self._descriptor()
        descriptor.parent_uuid, descriptor.name, descriptor.sibling_order_rank = track.parent, track.name, track.order
        track.lanes.append((int(descriptor.uuid), [end_ns]))
        return int(descriptor.uuid)


def _annotate(annotation: Any, key: str, value: Value) -> None:
    annotation.name = key
    if isinstance(value, list):
        for item in value:
            annotation.array_values.add().int_value = item
    elif isinstance(value, str):
        annotation.string_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.int_value = value
