"""Properties of every plan: better hardware is not slower, parts add up, and the printed mapping reproduces it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from moe_comm.layers.transformer.shape import Latent, ModelShape
from moe_plan.machine.hardware_table import cluster_named
from moe_plan.model.load import Workload
from moe_plan.model.mapping import OverlapMode
from moe_plan.search.plan_json import plan_json
from moe_plan.search.request import PlanRequest
from moe_plan.search.search import SearchResult, search
from moe_plan.search.space import PartialMapping, SearchSpace

ODD = ModelShape("odd", 15, 960, 15, 5, 64, 5001, 12, 3, 352, shared_ffn=176)
DENSE = ModelShape("dense", 12, 1024, 16, 4, 64, 32000, 0, 0, 0, dense_layers=12, dense_ffn=4096)
WINDOWED = ModelShape("windowed", 8, 512, 8, 8, 64, 999, 8, 2, 256, 128, window=100, full_layers=2, shared_gate=True)
LATENT = ModelShape(
    "latent", 9, 768, 12, 12, 1, 8000, 16, 4, 128, dense_layers=2, dense_ffn=512, latent=Latent(96, 64, 32, 16, 48)
)
ZERO = replace(ODD, name="zero", zero_experts=6, shared_ffn=0)
CASES: list[tuple[ModelShape, str, int, int, Workload, int, OverlapMode]] = [
    (ODD, "h100", 24, 8, Workload(960), 48, "none"),
    (ODD, "l20", 20, 4, Workload(960, "fp8", imbalance=1.5), 40, "all"),
    (DENSE, "a100", 16, 8, Workload(512), 32, "none"),
    (WINDOWED, "mi300x", 8, 1, Workload(4096, "fp32"), 7, "inter"),
    (LATENT, "b200", 18, 72, Workload(2048, "fp8", capacity=1.0), 36, "none"),
    (ZERO, "h800", 1, 8, Workload(128), 1, "none"),
]


def request(case: tuple[Any, ...]) -> PlanRequest:
    shape, hardware, gpus, host, load, batch, _ = case
    return PlanRequest(shape, cluster_named(hardware, gpus, host), load, batch)


@cache
def found(case: tuple[Any, ...]) -> SearchResult:
    return search(request(case), SearchSpace.of(overlap=case[-1]), keep=3)


def flops_a_token(shape: ModelShape, seq: int) -> float:
    """Return the training FLOPs per token: 6 per parameter in a GEMM, and 6 per attended position and head width."""
    h, heads, latent = shape.hidden, shape.heads, shape.latent
    if latent is None:
        widths = 2 * shape.head_dim
        attention = 2 * h * heads * shape.head_dim + 2 * h * shape.kv_heads * shape.head_dim
    else:
        widths = latent.nope_dim + latent.rope_dim + latent.v_dim
        q = latent.q_rank or 0
        attention = h * q + q * heads * (latent.nope_dim + latent.rope_dim) + h * (latent.kv_rank + latent.rope_dim)
        attention += latent.kv_rank * heads * (latent.nope_dim + latent.v_dim) + heads * latent.v_dim * h
    every = shape.experts + shape.zero_experts
    real = shape.top_k * shape.experts / every if every else 0
    moe = h * every + 3 * h * (real * shape.ffn + shape.shared_ffn) + h * shape.shared_gate
    blocks = shape.dense_layers * 3 * h * shape.dense_ffn + (shape.layers - shape.dense_layers) * moe
    attended_by_window = [sum(min(at + 1, window) for at in range(seq)) / seq for window in (shape.window or seq, seq)]
    full = shape.full_layers if shape.window else shape.layers
    attended = attended_by_window[0] * (shape.layers - full) + attended_by_window[1] * full
    return 6 * (shape.layers * attention + blocks + h * shape.vocab) + 6 * attended * heads * widths


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name)
def test_a_prediction_is_consistent_and_reproduced_by_its_mapping_option(case: tuple[Any, ...]) -> None:
    plan_request, result = request(case), found(case)
    for one in result.best:
        output = plan_json(plan_request, one, result)
        json.dumps(output, allow_nan=False)
        assert sum(output["breakdown"].values()) == pytest.approx(output["step_s"], rel=1e-12)
        tokens = plan_request.load.seq_len * plan_request.global_batch
        assert output["tokens_per_s"] * output["step_s"] == pytest.approx(tokens)
        peak = plan_request.cluster.accelerator.flops[plan_request.load.dtype] * plan_request.cluster.gpus
        expected = flops_a_token(plan_request.shape, plan_request.load.seq_len) * tokens / peak / output["step_s"]
        assert output["mfu"] == pytest.approx(expected)
        mapping = output["mapping"]
        explicit_settings = {
            name: mapping[name] for name in ("micro_batch", "recompute", "sharding", "overlap", "schedule")
        }
        repeated = PartialMapping(mapping["option"], **explicit_settings).candidate(plan_request)
        assert (repeated.step.seconds, repeated.fit) == (one.step.seconds, one.fit)
    assert result.best


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name)
def test_better_hardware_is_never_slower(case: tuple[Any, ...]) -> None:
    plan_request, space = request(case), SearchSpace.of(overlap=case[-1])
    cluster = plan_request.cluster
    gpu, inside, between = cluster.accelerator, cluster.inside, cluster.between
    faster = {name: 1.7 * rate for name, rate in gpu.flops.items()}
    before = found(case).best[0].step.seconds
    improved = (
        replace(cluster, accelerator=replace(gpu, memory_bytes=2 * gpu.memory_bytes)),
        replace(cluster, accelerator=replace(gpu, memory_bytes_per_s=1.5 * gpu.memory_bytes_per_s)),
        replace(cluster, accelerator=replace(gpu, flops=faster)),
        replace(cluster, inside=replace(inside, bytes_per_s=2 * inside.bytes_per_s)),
        replace(cluster, between=replace(between, bytes_per_s=1.3 * between.bytes_per_s)),
        replace(cluster, inside=replace(inside, latency_s=0), between=replace(between, latency_s=0)),
    )
    for better in improved[CASES.index(case) % 2 :: 2]:  # each for half of the cases
        assert search(replace(plan_request, cluster=better), space, keep=1).best[0].step.seconds <= before * (1 + 1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name)
def test_folded_mappings_are_never_slower_than_coupled_ones(case: tuple[Any, ...]) -> None:
    plan_request, overlap = request(case), case[-1]
    folded = search(plan_request, SearchSpace.of(overlap=overlap, folded=True), keep=1).best[0].step.seconds
    coupled = search(plan_request, SearchSpace.of(overlap=overlap, folded=False), keep=1).best[0].step.seconds
    assert folded == found(case).best[0].step.seconds <= coupled
