"""Spans of a synthetic step in which ranks wait for each other as in a real one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_comm.observe.records import SpanLine
from moe_comm.topology import ParallelConfig

MOVING_SHARE = 0.01


@dataclass(frozen=True)
class Step:
    """One step, done once; begin_s since 1970. parts: seconds by rank, [R], as in ``RankStep``."""

    step: int
    begin_s: float
    total_s: float
    parts: Mapping[str, NDArray[np.float64]]


def spans_of(mapping: ParallelConfig, layers: int, done: Step, calls: dict[tuple[int, ...], int]) -> Iterator[SpanLine]:
    """Batch, then in each layer of a rank's stage compute, dispatch, compute, combine; then gradients over all.

    Dispatch and combine end, for a whole group, when its last rank has come and the rows have moved.

    Args:
        calls: of each group so far; counted on.
    """
    world = mapping.world
    begin = np.full(world, done.begin_s)
    here = begin + done.parts["data"]
    for rank in range(world):
        yield _span(rank, "data", "batch", begin[rank], here[rank], done.step)
    per_stage = max(layers // mapping.pp, 1)
    part_R = done.parts["compute"] / (2 * per_stage + 1)
    for number in range(per_stage):
        for kind in ("dispatch", "combine"):
            before, here = here, here + part_R
            for rank in range(world):
                yield _span(rank, "compute", "forward and backward", before[rank], here[rank], done.step)
            for group in mapping.groups("ep"):
                members = list(group)
                calls[group] = call = calls.get(group, 0) + 1
                end_s = float(here[members].max()) + MOVING_SHARE * done.total_s / per_stage
                layer = f"layers.{mapping.place(members[0])['pp'] * per_stage + number}.moe"
                for rank in members:
                    yield _span(rank, kind, kind, here[rank], end_s, done.step, layer, members, (call + 1) // 2)
                here[members] = end_s
    before, here = here, here + part_R
    everyone = list(range(world))
    end_s = max(float(here.max()), done.begin_s + done.total_s - float(done.parts["checkpoint"].max()))
    for rank in everyone:
        yield _span(rank, "compute", "forward and backward", before[rank], here[rank], done.step)
        yield _span(rank, "collective", "gradients", here[rank], end_s, done.step, "", everyone, done.step)
        yield _span(rank, "step", "step", done.begin_s, done.begin_s + done.total_s, done.step)


def _span(
    rank: int,
    kind: str,
    name: str,
    begin_s: float,
    end_s: float,
    step: int,
    layer: str = "",
    group: list[int] | None = None,
    call: int = 0,
) -> SpanLine:
    begin_ns, end_ns = int(begin_s * 1e9), int(end_s * 1e9)
    return SpanLine(rank, kind, name, begin_ns, end_ns, step, layer=layer, group=group or [], call=call)
