"""pytest-benchmark of forward and backward of an MoE layer on one rank:

    pytest benchmarks/bench_layer.py --benchmark-only

``moe-comm bench layer`` compares layers on several ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm.bench.common.settings import LAYER_PRESETS, LayerBench
from moe_comm.bench.layer.benchmark import KINDS, ContestantRun


@pytest.mark.parametrize("name", ["moe_comm_ep1", "hf_grouped_mm"])
@pytest.mark.parametrize("preset", LAYER_PRESETS)
def test_layer(benchmark: Any, preset: str, name: str) -> None:
    settings = LayerBench(ranks=1, **LAYER_PRESETS[preset])
    if reason := KINDS[name].unavailable_reason(settings):
        pytest.skip(reason)
    x_TD = torch.randn(settings.tokens, settings.hidden, generator=torch.Generator().manual_seed(0))
    runner = ContestantRun(KINDS[name](settings, 0), x_TD, x_TD)

    def step() -> None:
        runner.forward()
        runner.backward()
        runner.free()

    benchmark.pedantic(step, rounds=3, warmup_rounds=1)
    benchmark.extra_info["gflops"] = settings.flops * 1e-9 / benchmark.stats.stats.median
