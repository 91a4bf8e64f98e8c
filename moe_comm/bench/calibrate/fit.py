"""Fit the numbers of a cluster description to the measurements of the ranks.

Errors are logarithmic, so that short and long measurements have the same weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean, median

from moe_comm.bench.calibrate.ranks import (
    EXPERT_ROWS,
    HEAD_DIM,
    HEADS,
    MODELS,
    UPDATED,
    MeasuredPass,
    RankMeasurements,
)
from moe_comm.layers.transformer.shape import ModelShape
from moe_comm.topology import ParallelConfig
from moe_comm.train.auto.rates import WIDTH
from moe_plan.machine.collectives import Link
from moe_plan.machine.hardware import BYTES, Accelerator, Cluster, GemmTile
from moe_plan.machine.link_fit import nearest
from moe_plan.model.load import Workload
from moe_plan.model.mapping import Mapping, PlacedMapping
from moe_plan.step.step import StepModel
from moe_plan.step.weights import STATE_BYTES

NAME = "this-machine"
ROWS, FILLS = (1, 2, 4, 8, 16, 32), (0, 2, 4, 8, 16, 32, 64)
"""Candidates for the size of a GEMM tile, and for the additional K that models the overhead of a tile."""
LEAST_S = 1e-9


def accelerator_of(by_rank: Sequence[RankMeasurements], ranks_per_core: float) -> Accelerator:
    """Return the rates of one rank.

    If ranks share cores, all rates are divided by the measured ratio of wall time to CPU time, which includes waiting
    for the slowest rank.

    Args:
        ranks_per_core: number of ranks per core, at least 1.
    """
    slowdowns = [sample.together / sample.seconds for rank in by_rank for sample in rank.passes if sample.together]
    share = max(ranks_per_core, median(slowdowns)) if slowdowns else ranks_per_core
    rates = {name: _best(by_rank, name) for name in by_rank[0].products}
    tile, fill = _tile(by_rank, rates["fp32"])
    memory = STATE_BYTES * UPDATED / _mean(sample.update for sample in by_rank)
    forward, backward = _attention(by_rank, rates["fp32"])
    accelerator = Accelerator(
        NAME,
        flops=rates,
        efficiency=dict.fromkeys(rates, 1.0),
        memory_bytes=min(sample.memory_bytes for sample in by_rank),
        memory_bytes_per_s=memory,
        units=1,
        tiles=(GemmTile(tile, tile),),
        fill_k=fill,
        memory_reach=1.0,
        launch_s=1e-5,
        attention_forward=forward,
        attention_backward=backward,
    )
    accelerator = _with_passes(replace(accelerator, grouped=_grouped(accelerator, by_rank)), by_rank)
    return replace(
        accelerator,
        flops={name: rate / share for name, rate in accelerator.flops.items()},
        memory_bytes_per_s=accelerator.memory_bytes_per_s / share,
        launch_s=accelerator.launch_s * share,
        shared=ranks_per_core,
    )


def shape_of(sizes: dict[str, int]) -> ModelShape:
    """Return the shape of a Qwen3-MoE model from sizes with the names of ``moe_comm.train``."""
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


def pass_seconds(accelerator: Accelerator, sample: MeasuredPass) -> float:
    """Return the predicted seconds of forward and backward of a micro-batch on one rank."""
    single = Cluster(accelerator, 1, 1, Link("none", 1e9, 0.0, 1.0), Link("none", 1e9, 0.0, 1.0))
    mapping = Mapping(ParallelConfig(), micro_batch=sample.sequences, sharding="replicate")
    load = Workload(sample.seq_len, "fp32")
    step = StepModel(shape_of(MODELS[sample.model]), PlacedMapping(mapping, single), load, sample.sequences).predict()
    return step.seconds - step.breakdown["optimizer"]


def _best(by_rank: Sequence[RankMeasurements], name: str) -> float:
    """Return the FLOP/s of the fastest GEMM, averaged over ranks."""
    return fmean(max(2 * m * k * n / seconds for m, k, n, seconds in sample.products[name]) for sample in by_rank)


def _tile(by_rank: Sequence[RankMeasurements], rate: float) -> tuple[int, int]:
    """Return tile size and additional K per tile with which the GEMM times are predicted best."""
    gemms = [sample for rank in by_rank for sample in rank.products["fp32"]]

    def error(rows: int, fill: int) -> float:
        total = 0.0
        for m, k, n, seconds in gemms:
            predicted = 2 * math.ceil(m / rows) * math.ceil(n / rows) * rows**2 * (k + fill) / rate
            total += abs(math.log(predicted / seconds))
        return total

    rows, fill = min(product(ROWS, FILLS), key=lambda pair: error(*pair))
    return rows, fill


def _attention(by_rank: Sequence[RankMeasurements], rate: float) -> tuple[float, float]:
    forward, backward = [], []
    for sample in by_rank:
        for length, forward_s, backward_s in sample.attention:
            flops = 4 * HEADS * HEAD_DIM * length * (length + 1) / 2
            forward.append(flops / forward_s / rate)
            backward.append(2.5 * flops / backward_s / rate)
    return min(median(forward), 1.0), min(median(backward), 1.0)


def _grouped(accelerator: Accelerator, by_rank: Sequence[RankMeasurements]) -> float:
    """Return the rate of the grouped GEMM over that of dense GEMMs. The activation counts as passes over memory."""
    rows, groups = sum(EXPERT_ROWS), len(EXPERT_ROWS)
    each, dense = rows / groups, 0.0
    for k, n in ((WIDTH, 2 * WIDTH), (WIDTH, WIDTH)):
        for m, width, inner in ((each, n, k), (each, k, n), (k, n, each)):
            dense += accelerator.gemm_seconds(m, width, inner, "fp32", groups) - accelerator.launch_s
    passes = accelerator.memory_seconds(8 * rows * WIDTH * BYTES["fp32"])
    return min(dense / max(_mean(sample.experts for sample in by_rank) - passes, LEAST_S), 1.0)


def _with_passes(accelerator: Accelerator, by_rank: Sequence[RankMeasurements]) -> Accelerator:
    """Return ``accelerator`` with the launch time and the cost of gradient accumulation fitted to model passes."""
    passes = [
        replace(first, seconds=_mean(sample.passes[index].seconds for sample in by_rank))
        for index, first in enumerate(by_rank[0].passes)
    ]

    def seconds(launch: float, accumulate: float) -> list[float]:
        candidate = replace(accelerator, launch_s=launch, accumulate=accumulate)
        return [pass_seconds(candidate, sample) for sample in passes]

    # A prediction is linear in both numbers, so three predictions determine all others.
    base, with_launch, with_accumulate = seconds(LEAST_S, 0.0), seconds(1.0, 0.0), seconds(LEAST_S, 1.0)

    def errors(launch: float, accumulate: float) -> list[float]:
        return [
            math.log((base_s + launch * (launch_s - base_s) + accumulate * (accumulate_s - base_s)) / sample.seconds)
            for base_s, launch_s, accumulate_s, sample in zip(base, with_launch, with_accumulate, passes, strict=True)
        ]

    launch, accumulate = nearest(errors, (accelerator.launch_s, 3.0))
    return replace(accelerator, launch_s=launch, accumulate=accumulate)


def _mean(values: Iterable[float]) -> float:
    return max(fmean(values), LEAST_S)
