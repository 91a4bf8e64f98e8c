"""From what ranks measured to numbers of a description: each is the one that comes nearest to all measurements of it.

Errors are taken in logarithms, so that short measurements count as much as long ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean, median

from moe_comm.bench.calibrate.ranks import (
    EXPERT_ROWS,
    HEAD_DIM,
    HEADS,
    MODELS,
    UPDATED,
    WIDTH,
    Found,
    Moving,
    Passed,
)
from moe_comm.plan.machine.collectives import Link
from moe_comm.plan.machine.hardware import BYTES, Accelerator, Cluster, Tile
from moe_comm.plan.model.load import Load
from moe_comm.plan.model.mapping import Mapping, Place
from moe_comm.plan.model.shape import ModelShape
from moe_comm.plan.step.step import StepModel
from moe_comm.plan.step.weights import STATE_BYTES
from moe_comm.topology import ParallelConfig

NAME = "this-machine"
ROWS, FILLS = (1, 2, 4, 8, 16, 32), (0, 2, 4, 8, 16, 32, 64)
LEAST_S = 1e-9


def accelerator_of(found: Sequence[Found], share: float) -> Accelerator:
    """What one rank has of a host's cores. found: of every rank. share: ranks to a core.

    Ranks that share cores, and then wait for the last of them, take longer than their processor seconds: all rates are
    lower by what that was measured to be.
    """
    slower = [one.together / one.seconds for each in found for one in each.passes if one.together]
    ranks_to_core, share = share, max([share, median(slower)] if slower else [share])
    rates = {name: _best(found, name) for name in found[0].products}
    tile, fill = _tile(found, rates["fp32"])
    memory = STATE_BYTES * UPDATED / _mean(one.update for one in found)
    forward, backward = _attention(found, rates["fp32"])
    alone = Accelerator(
        NAME,
        flops=rates,
        efficiency=dict.fromkeys(rates, 1.0),
        memory_bytes=min(one.memory_bytes for one in found),
        memory_bytes_per_s=memory,
        units=1,
        tiles=(Tile(tile, tile),),
        fill_k=fill,
        memory_reach=1.0,
        launch_s=1e-5,
        attention_forward=forward,
        attention_backward=backward,
    )
    alone = _with_passes(replace(alone, grouped=_grouped(alone, found)), found)
    return replace(
        alone,
        flops={name: rate / share for name, rate in alone.flops.items()},
        memory_bytes_per_s=alone.memory_bytes_per_s / share,
        launch_s=alone.launch_s * share,
        shared=ranks_to_core,
    )


def inside_of(cluster: Cluster, moves: Sequence[Moving]) -> Cluster:
    """``cluster`` with the links of a host, and what a collective takes to begin, that come nearest to ``moves``."""

    def made(start: float, latency: float, rate: float) -> Cluster:
        return replace(cluster, start_s=start, inside=Link("shared memory", rate, latency, 1.0))

    values = nearest(
        lambda *given: [math.log(_moved(made(*given), one) / one.seconds) for one in moves], (1e-4, 1e-5, 2e9)
    )
    return made(*values)


def between_of(cluster: Cluster, moves: Sequence[Moving], name: str) -> Link:
    """The link between hosts that comes nearest to ``moves``, each of ranks on hosts of their own."""

    def made(latency: float, rate: float) -> Cluster:
        return replace(cluster, host_size=1, between=Link(name, rate, latency, 1.0))

    values = nearest(lambda *given: [math.log(_moved(made(*given), one) / one.seconds) for one in moves], (1e-4, 1e8))
    return made(*values).between


def nearest(
    errors: Callable[..., Sequence[float]], start: Sequence[float], rounds: int = 200, power: int = 1
) -> tuple[float, ...]:
    """Positive numbers from which ``errors`` are least, by the sum of powers of their absolute values: from ``start``,
    one at a time up and down by a factor that shrinks (a pattern search)."""

    def size(given: Sequence[float]) -> float:
        return sum(abs(one) ** power for one in errors(*given))

    best = list(start)
    least, step = size(best), math.log(4)
    for _ in range(rounds):
        before = least
        for place, sign in product(range(len(best)), (1, -1)):
            tried = list(best)
            tried[place] *= math.exp(sign * step)
            total = size(tried)
            if total < least:
                best, least = tried, total
        if least == before:
            step /= 2
            if step < 1e-3:
                break
    return tuple(best)


def shape_of(sizes: dict[str, int]) -> ModelShape:
    """Of a model of Qwen3-MoE's architecture, from ``moe_comm.train``'s names of its sizes."""
    return ModelShape(
        name="calibration",
        layers=sizes["layers"],
        hidden=sizes["hidden"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        head_dim=sizes["hidden"] // sizes["heads"],
        vocab=sizes["vocab"],
        experts=sizes["experts"],
        top_k=sizes["top_k"],
        ffn=sizes["ffn"],
        qk_norm="head",
    )


def pass_seconds(accelerator: Accelerator, one: Passed) -> float:
    """Forward and backward of a micro-batch of a calibration's model, on one rank, as a step is predicted."""
    alone = Cluster(accelerator, 1, 1, Link("none", 1e9, 0.0, 1.0), Link("none", 1e9, 0.0, 1.0))
    mapping = Mapping(ParallelConfig(), micro_batch=one.sequences, sharding="replicate")
    load = Load(one.seq_len, "fp32")
    step = StepModel(shape_of(MODELS[one.model]), Place(mapping, alone), load, one.sequences).predict()
    return step.seconds - step.breakdown["optimizer"]


def _best(found: Sequence[Found], name: str) -> float:
    """Operations a second of the best product, the mean over ranks."""
    return fmean(max(2 * m * k * n / seconds for m, k, n, seconds in one.products[name]) for one in found)


def _tile(found: Sequence[Found], rate: float) -> tuple[int, int]:
    """Rows and columns of a block, and how much longer than its K one takes."""
    every = [one for each in found for one in each.products["fp32"]]

    def error(rows: int, fill: int) -> float:
        total = 0.0
        for m, k, n, seconds in every:
            predicted = 2 * math.ceil(m / rows) * math.ceil(n / rows) * rows**2 * (k + fill) / rate
            total += abs(math.log(predicted / seconds))
        return total

    rows, fill = min(product(ROWS, FILLS), key=lambda pair: error(*pair))
    return rows, fill


def _attention(found: Sequence[Found], rate: float) -> tuple[float, float]:
    forward, backward = [], []
    for one in found:
        for length, there, back in one.attention:
            flops = 4 * HEADS * HEAD_DIM * length * (length + 1) / 2
            forward.append(flops / there / rate)
            backward.append(2.5 * flops / back / rate)
    return min(median(forward), 1.0), min(median(backward), 1.0)


def _grouped(accelerator: Accelerator, found: Sequence[Found]) -> float:
    """Share of a dense product's rate that experts reach, their activation counted as passes over memory."""
    rows, groups = sum(EXPERT_ROWS), len(EXPERT_ROWS)
    each, dense = rows / groups, 0.0
    for k, n in ((WIDTH, 2 * WIDTH), (WIDTH, WIDTH)):
        for m, width, inner in ((each, n, k), (each, k, n), (k, n, each)):
            dense += accelerator.gemm_seconds(m, width, inner, "fp32", groups) - accelerator.launch_s
    passes = accelerator.memory_seconds(8 * rows * WIDTH * BYTES["fp32"])
    return min(dense / max(_mean(one.experts for one in found) - passes, LEAST_S), 1.0)


def _with_passes(accelerator: Accelerator, found: Sequence[Found]) -> Accelerator:
    """What an operator takes to begin, and what adding up gradients does, from whole models' passes."""
    passes = [
        replace(first, seconds=_mean(one.passes[place].seconds for one in found))
        for place, first in enumerate(found[0].passes)
    ]

    def seconds(launch: float, accumulate: float) -> list[float]:
        made = replace(accelerator, launch_s=launch, accumulate=accumulate)
        return [pass_seconds(made, one) for one in passes]

    # A prediction is linear in both numbers, so three say what all others would.
    none, by_launch, by_byte = seconds(LEAST_S, 0.0), seconds(1.0, 0.0), seconds(LEAST_S, 1.0)

    def errors(launch: float, accumulate: float) -> list[float]:
        return [
            math.log((at + launch * (more - at) + accumulate * (per_byte - at)) / one.seconds)
            for at, more, per_byte, one in zip(none, by_launch, by_byte, passes, strict=True)
        ]

    launch, accumulate = nearest(errors, (accelerator.launch_s, 3.0))
    return replace(accelerator, launch_s=launch, accumulate=accumulate)


def _moved(cluster: Cluster, one: Moving) -> float:
    group = range(one.ranks)
    seconds: float = getattr(cluster, one.kind)(one.num_bytes, group).seconds
    if one.kind == "all_to_all":  # a dispatch or a combine, whose pass over rows is an operator by itself
        seconds += cluster.accelerator.memory_seconds(2 * one.num_bytes)
    return seconds


def _mean(values: Iterable[float]) -> float:
    return max(fmean(values), LEAST_S)
