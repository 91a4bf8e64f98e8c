"""pytest-benchmark of single operations on one rank, to compare two versions on one machine:

    pytest benchmarks/bench_dispatch.py --benchmark-only

``moe-comm bench dispatch`` compares with other libraries on several ranks; it also runs once here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm.bench.common.inputs import RankInputs, make_inputs
from moe_comm.bench.common.settings import DispatchBench
from moe_comm.bench.dispatch.benchmark import MoeCommDispatch, measure_all
from moe_comm.dispatch import make_dispatcher

SHAPES = {
    "small": DispatchBench(ranks=1, tokens=16, hidden=1024, peers=()),
    "large": DispatchBench(ranks=1, tokens=4096, hidden=1024, peers=()),
}


@pytest.fixture(params=list(SHAPES))
def settings(request: pytest.FixtureRequest) -> DispatchBench:
    return SHAPES[request.param]


@pytest.fixture
def inputs(settings: DispatchBench) -> RankInputs:
    return make_inputs(settings, 0)


@pytest.mark.parametrize("phase", ["dispatch", "combine", "combine_backward", "dispatch_backward"])
def test_phase(benchmark: Any, settings: DispatchBench, inputs: RankInputs, phase: str) -> None:
    steps = MoeCommDispatch(make_dispatcher(settings.experts), settings, inputs).steps()
    names = [name for name, _ in steps]

    def prepare() -> None:
        steps[-1][1]()
        for _, work in steps[: names.index(phase)]:
            work()

    benchmark.pedantic(dict(step for step in steps if step[0])[phase], setup=prepare, rounds=10, warmup_rounds=2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_peers(benchmark: Any, ranks: int) -> None:
    settings = DispatchBench(ranks=ranks, tokens=1024, iterations=5)
    result = benchmark.pedantic(measure_all, args=([settings],), rounds=1)[0]
    benchmark.extra_info.update({key: result[key] for key in ("dispatch_ms", "combine_ms", "limit_ratio", "peers")})
    assert torch.tensor([result["dispatch_ms"], result["combine_ms"]]).gt(0).all()
