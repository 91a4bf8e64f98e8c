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
    """One execution of a step. begin_s: since 1970. parts: seconds of each rank, [R], as in ``RankStep``."""

    step: int
    begin_s: float
    total_s: float
    parts: Mapping[str, NDArray[np.float64]]


def spans_of(mapping: ParallelConfig, layers: int, done: Step, calls: dict[tuple[int, ...], int]) -> Iterator[SpanLine]:
    """Yield the spans of a step: batch; compute, dispatch, compute, combine for each layer of a stage; gradients.

    Dispatch and combine end on all ranks of a group when its last rank has started them and the rows have moved.

    Args:
        calls: number of calls of each group so far; updated.
    """
    world = mapping.world
    begin_R = np.full(world, done.begin_s)
    now_R = begin_R + done.parts["data"]
    for rank in range(world):
        yield _span(rank, "data", "batch", begin_R[rank], now_R[rank], done.step)
    per_stage = max(layers // mapping.pp, 1)
    part_R = done.parts["compute"] / (2 * per_stage + 1)
    for number in range(per_stage):
        for kind in ("dispatch", "combine"):
            previous_R, now_R = now_R, now_R + part_R
            for rank in range(world):
                yield _span(rank, "compute", "forward and backward", previous_R[rank], now_R[rank], done.step)
            for group in mapping.groups("ep"):
                members = list(group)
                calls[group] = call = calls.get(group, 0) + 1
                end_s = float(now_R[members].max()) + MOVING_SHARE * done.total_s / per_stage
                layer = f"layers.{mapping.place(members[0])['pp'] * per_stage + number}.moe"
                for rank in members:
                    yield _span(rank, kind, kind, now_R[rank], end_s, done.step, layer, members, (call + 1) // 2)
                now_R[members] = end_s
    previous_R, now_R = now_R, now_R + part_R
    all_ranks = list(range(world))
    end_s = max(float(now_R.max()), done.begin_s + done.total_s - float(done.parts["checkpoint"].max()))
    for rank in all_ranks:
        yield _span(rank, "compute", "forward and backward", previous_R[rank], now_R[rank], done.step)
        yield _span(rank, "collective", "gradients", now_R[rank], end_s, done.step, "", all_ranks, done.step)
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
