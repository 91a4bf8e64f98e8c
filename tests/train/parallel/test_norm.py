"""The global gradient norm on all mappings: each element counts exactly once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from moe_comm.topology import ParallelConfig, ParallelMesh, Sharding, Split
from moe_comm.train.parallel import DataParallel, DataParallelOptions, clip_, global_norm
from moe_comm.train.parallel.norm import squared_norm
from tests.train.toy import SHARDINGS, backward, make, whole


def scalars(rank: int, world: int, strategy: str) -> float:
    """Megatron-LM issue 6470: one dense scalar, the same on both ranks, and one expert scalar on each."""
    mesh = ParallelMesh(ParallelConfig(tp=2, ep=2, etp=1))
    model = nn.Module()
    model.dense, model.experts = nn.Module(), nn.Module()
    model.dense.weight = nn.Parameter(torch.zeros(1))
    model.experts.weight = nn.Parameter(torch.zeros(1))
    shardings = {"experts.weight": Sharding((2,), (Split(0, "ep"),), expert=True)}
    data_parallel = DataParallel(model, shardings, mesh, DataParallelOptions(sharding=strategy))
    for owned in data_parallel.owned():
        owned.value.grad = torch.ones_like(owned.value)
    return global_norm(data_parallel.owned(), mesh)


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_a_dense_scalar_counts_once_and_each_expert_separately(pool2, strategy):
    assert pool2.run(scalars, strategy) == [math.sqrt(3)] * 2  # sqrt(2) would mean that one expert was not counted


MAPPINGS = {
    4: [ParallelConfig(tp=2, dp=2, ep=2, etp=2), ParallelConfig(pp=2, tp=2, ep=2), ParallelConfig(cp=2, dp=2, ep=2)],
    8: [
        ParallelConfig(tp=2, cp=2, dp=2, ep=2, etp=2),
        ParallelConfig(pp=2, tp=2, dp=2, ep=2),
    ],
}


def stage_of(name: str) -> int:
    return 1 if name.startswith(("layers.1", "head")) else 0


def norms(rank: int, world: int, config: ParallelConfig) -> dict[str, tuple[float, float, float]]:
    """Return the norms before clipping, as returned by clip_, and after clipping, by strategy."""
    mesh = ParallelMesh(config)
    own_shardings = {n: s for n, s in SHARDINGS.items() if config.pp == 1 or stage_of(n) == mesh.place["pp"]}
    results = {}
    for strategy in ("replicate", "zero1", "fsdp"):
        _, data_parallel = make(mesh, DataParallelOptions(sharding=strategy), own_shardings)
        owned = data_parallel.owned()
        for item in owned:
            gradient = whole(item.name, "gradient", item.sharding.shape)
            item.value.grad = torch.full_like(item.value, torch.nan)
            for box in item.boxes(mesh):
                item.value.grad[box.local] = gradient[box.full]
        before = global_norm(owned, mesh)
        results[strategy] = before, clip_(owned, 0.5, mesh), global_norm(owned, mesh)
    return results


@pytest.mark.parametrize("world", MAPPINGS)
def test_the_norm_is_that_of_the_whole_model_on_any_mapping(world, request):
    pool = request.getfixturevalue(f"pool{world}")
    squares = sum(whole(n, "gradient", s.shape).double().square().sum() for n, s in SHARDINGS.items())
    for config in MAPPINGS[world]:
        for result in pool.run(norms, config, timeout=200):
            for strategy, (before, returned, after) in result.items():
                assert before == pytest.approx(math.sqrt(squares), rel=1e-7), f"{config}, {strategy}"
                assert returned == before
                assert after == pytest.approx(0.5, rel=1e-6)


def tied_norm(rank: int, world: int, _: None) -> float:
    mesh = ParallelMesh(ParallelConfig(pp=2))
    model = nn.Module()
    model.register_parameter("embed" if rank == 0 else "head", nn.Parameter(torch.zeros(2, 2)))
    data_parallel = DataParallel(model, {}, mesh, tied=("embed", "head"))
    for owned in data_parallel.owned():
        owned.value.grad = torch.ones(2, 2)
    return global_norm(data_parallel.owned(), mesh)


def test_a_tied_embedding_on_two_stages_counts_once(pool2):
    assert pool2.run(tied_norm) == [2.0, 2.0]


def not_finite(rank: int, world: int, value: float) -> Any:
    """Make one gradient element of one rank non-finite."""
    mesh = ParallelMesh(ParallelConfig(dp=2, ep=2))
    model, data_parallel = make(mesh, DataParallelOptions())
    backward(model, data_parallel)
    owned = data_parallel.owned()
    if rank == 1:
        next(o for o in owned if "experts.w13" in o.name).value.grad[0, 0, 0] = value
    first = owned[1].value.grad.clone()
    norm = clip_(owned, 0.1, mesh)
    return norm, torch.equal(first, owned[1].value.grad)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_non_finite_element_gives_a_non_finite_norm_on_all_ranks_without_scaling(pool2, value):
    for norm, untouched in pool2.run(not_finite, value):
        assert not math.isfinite(norm)
        assert untouched


def test_clipping_does_not_change_small_gradients_and_0_disables_it():
    mesh = ParallelMesh(ParallelConfig())
    model = nn.Linear(2, 1, bias=False)
    data_parallel = DataParallel(model, {}, mesh)
    (owned,) = data_parallel.owned()
    owned.value.grad = torch.tensor([[3.0, 4.0]])
    assert clip_([owned], 5.0, mesh) == 5.0
    assert clip_([owned], 0.0, mesh) == 5.0
    assert torch.equal(owned.value.grad, torch.tensor([[3.0, 4.0]]))
    assert clip_([owned], 1.0, mesh) == 5.0
    torch.testing.assert_close(owned.value.grad, torch.tensor([[0.6, 0.8]]))


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 1_000_003])
def test_the_squared_norm_of_long_tensors_is_as_exact_as_in_float64(numel):
    values = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) + 0.5
    expected = values.double().square().sum()
    torch.testing.assert_close(squared_norm(values), expected, rtol=1e-7, atol=0)
