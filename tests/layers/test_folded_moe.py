"""MoE layers folded onto tp, cp and dp ranks, with experts split over etp, compared with one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_comm.dispatch.slots.capacity import Capacity
from moe_comm.errors import ConfigError, InputError
from moe_comm.layers import MoEConfig, MoELayer, Router, RouterConfig
from moe_comm.layers.data_parallel import ExpertShards
from moe_comm.layers.moe.config import MoEGroups
from moe_comm.layers.moe.load import take_loads, update_biases
from moe_comm.topology import ParallelConfig, ParallelMesh, Sharding
from tests.layers.moe_configs import BALANCED, HIDDEN, RICH
from tests.layers.reference import draw
from tests.pool import RankPool

SEQUENCES, LENGTH = 4, 8
MAPPINGS = [
    ParallelConfig(cp=2, dp=2, ep=4),
    ParallelConfig(tp=2, dp=2, ep=2, etp=2),
    ParallelConfig(tp=2, cp=2, ep=2),
    ParallelConfig(dp=4, etp=4),
    ParallelConfig(tp=2, cp=2, etp=2),
]


# --- one training step, on one process or folded ---


@dataclass(frozen=True)
class TrainStep:
    """``micro_batches`` of SEQUENCES sequences each. form: form of the balance loss."""

    config: MoEConfig
    mapping: ParallelConfig
    micro_batches: int = 1
    recompute: bool = False


def own_tokens(mapping: ParallelConfig, place: Any) -> tuple[Tensor, int]:
    """Return the positions [b, s] of a rank's tokens in the global batch, and b.

    dp splits the sequences, cp each sequence in zig-zag order, and tp the result contiguously.
    """
    places = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH).chunk(mapping.dp)[place["dp"]]
    chunks = places.chunk(2 * mapping.cp, 1)
    places = torch.cat([chunks[place["cp"]], chunks[2 * mapping.cp - 1 - place["cp"]]], 1)
    places = places.chunk(mapping.tp, 1)[place["tp"]]
    return places, places.shape[0]


def train_step(layer: MoELayer, step: TrainStep, places_BS: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Return this rank's outputs and gradients: main loss sum(y * g), and scaled auxiliary losses."""
    layer.aux_scale = 1 / step.micro_batches
    ys, xs, dropped, aux, flows = [], [], [], [], []
    for m in range(step.micro_batches):
        x = draw(SEQUENCES * LENGTH, HIDDEN, seed=10 + m, dtype=dtype)[places_BS].clone().requires_grad_()
        grad = draw(SEQUENCES * LENGTH, HIDDEN, seed=20 + m, dtype=dtype)[places_BS]
        if step.recompute:
            y = checkpoint(layer, x, None, places_BS, use_reentrant=False)
        else:
            y = layer(x, token_index=places_BS)
        aux.append({name: value.clone() for name, value in layer.router.losses.items()})
        y.backward(grad)
        ys.append(y.detach())
        xs.append(x.grad)
        dropped.append(layer.num_dropped)
        flows.append(layer.dispatch_stats)
    return {"y": ys, "x": xs, "dropped": dropped, "aux": aux, "flow": flows}


def run_single(
    step: TrainStep, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Any], dict[str, Tensor], MoELayer]:
    layer = MoELayer.build(step.config, seed=3, dtype=dtype)
    places = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH)
    results = train_step(layer, step, places, dtype)
    return results, {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}, layer


def run_folded(rank: int, world: int, step: TrainStep) -> dict[str, Any]:
    """Run the same step on this rank; sum and assemble parameter gradients by their shardings."""
    mesh = ParallelMesh(step.mapping)
    layer = MoELayer.build(
        step.config,
        MoEGroups(mesh.group("etp", "ep"), step.mapping.etp, mesh.group("tp", "cp", "dp"), mesh.group("tp", "cp")),
        backend="all_to_all",  # the shared-memory backend does not support float64
        seed=3,
        dtype=torch.float64,
    )
    places, _ = own_tokens(step.mapping, mesh.place)
    results = train_step(layer, step, places, torch.float64)
    shardings, grads = layer.shardings(), {}
    for name, p in layer.named_parameters():
        sharding = shardings.get(name, Sharding(tuple(p.shape)))
        assert p.grad is not None and tuple(p.shape) == sharding.local_shape(mesh.place, mesh.sizes)
        group = mesh.sum_group(sharding)
        if group is not None:
            dist.all_reduce(p.grad, group=group)
        if name in shardings and layer.dispatcher.group is not None:
            shards = ExpertShards(layer.dispatcher.group, shardings, layer.place, layer.sizes)
            grads[name] = shards.gather(name, p.grad)
        else:
            grads[name] = p.grad
    loads = take_loads(layer, mesh.group("tp", "cp", "dp"))
    update_biases(layer, loads, 0.1)
    bias = layer.router.correction_bias
    layer.dispatcher.close()
    return {**results, "places": places, "grads": grads, "loads": loads, "bias": bias}


def compare(pool: RankPool, step: TrainStep) -> list[dict[str, Any]]:
    """Compare all results of ``step`` with those of one process."""
    alone, grads, layer = run_single(step)
    ranks: list[dict[str, Any]] = pool.run(run_folded, step, timeout=120)
    for m in range(step.micro_batches):
        for key in ("y", "x"):
            for rank_results in ranks:
                expected = alone[key][m].flatten(0, 1)[rank_results["places"]]
                torch.testing.assert_close(rank_results[key][m], expected, rtol=1e-9, atol=1e-11)
        for name, value in alone["aux"][m].items():
            torch.testing.assert_close(
                sum(rank_results["aux"][m][name] for rank_results in ranks), value, rtol=1e-10, atol=0
            )
    for name, expected in grads.items():
        for rank_results in ranks:
            difference = (rank_results["grads"][name] - expected).abs().max()
            assert difference <= 1e-10 * expected.abs().max(), (name, difference)
    expected_loads = take_loads(layer)
    update_biases(layer, expected_loads, 0.1)
    for rank_results in ranks:
        assert torch.equal(rank_results["loads"][""].load_E, expected_loads[""].load_E)
        if layer.router.correction_bias is not None:
            assert torch.equal(rank_results["bias"], layer.router.correction_bias)
    return ranks


@pytest.mark.parametrize("form", ["batch", "sequence"])
@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_a_folded_step_equals_that_of_one_process(pool4: RankPool, mapping: ParallelConfig, form: Any) -> None:
    router = replace(RICH.router, balance_form=form)
    compare(pool4, TrainStep(replace(RICH, router=router), mapping, micro_batches=2))


def test_recomputation_changes_no_counter_and_no_gradient(pool4: RankPool) -> None:
    config = replace(
        RICH, router=replace(RICH.router, balance_form="sequence"), capacity=Capacity(0.6, "probability", "batch")
    )
    plain = compare(pool4, TrainStep(config, MAPPINGS[1]))
    recomputed = compare(pool4, TrainStep(config, MAPPINGS[1], recompute=True))
    for expected, actual in zip(plain, recomputed, strict=True):
        assert int(expected["loads"][""].dropped) == int(actual["loads"][""].dropped) > 0
        assert all(torch.equal(expected["grads"][name], actual["grads"][name]) for name in expected["grads"])


@pytest.mark.parametrize(
    ("mapping", "policy"), [*zip(MAPPINGS, cycle(["position", "probability"]), strict=False)], ids=str
)
def test_capacity_over_the_global_batch_drops_the_same_slots_for_all_mappings(
    pool4: RankPool, mapping: ParallelConfig, policy: Any
) -> None:
    step = TrainStep(replace(RICH, capacity=Capacity(0.5, policy, "batch")), mapping)
    alone, _, layer = run_single(step)
    ranks = compare(pool4, step)
    assert sum(int(rank_results["dropped"][0]) for rank_results in ranks) == int(alone["dropped"][0]) > 0
    assert all(int(rank_results["loads"][""].dropped) == int(layer.dropped_total) for rank_results in ranks)
    assert ranks[0]["loads"][""].drop_rate == int(alone["dropped"][0]) / (SEQUENCES * LENGTH * 2)


def test_capacity_per_rank_depends_on_the_mapping(pool4: RankPool) -> None:
    step = TrainStep(replace(BALANCED, capacity=Capacity(0.5)), MAPPINGS[0])
    alone, _, _ = run_single(step)
    ranks = pool4.run(run_folded, step, timeout=120)
    folded = torch.zeros_like(alone["y"][0]).flatten(0, 1)
    for rank_results in ranks:
        folded[rank_results["places"]] = rank_results["y"][0]
    # Otherwise the tests of scope "batch" would pass with a capacity per rank as well.
    assert not torch.allclose(folded, alone["y"][0].flatten(0, 1))


@pytest.mark.parametrize(
    ("mapping", "capacity"),
    [(MAPPINGS[1], None), (MAPPINGS[1], Capacity(0.6, scope="batch")), (MAPPINGS[2], Capacity(0.6))],
    ids=str,
)
def test_slot_counters_add_up(pool4: RankPool, mapping: ParallelConfig, capacity: Capacity | None) -> None:
    ranks = pool4.run(run_folded, TrainStep(replace(BALANCED, capacity=capacity), mapping), timeout=120)
    flows = [rank_results["flow"][0] for rank_results in ranks]
    slots = SEQUENCES * LENGTH * BALANCED.router.top_k
    dropped = sum(0 if flow.dropped is None else int(flow.dropped) for flow in flows)
    assert sum(flow.slots for flow in flows) == slots
    assert sum(flow.sent for flow in flows) == slots - dropped
    assert sum(flow.received for flow in flows) == mapping.etp * (slots - dropped)
    assert (dropped > 0) == (capacity is not None)
    assert sum(int(rank_results["loads"][""].load_E.sum()) for rank_results in ranks) == len(ranks) * slots


# --- counters and groups ---


def test_take_loads_returns_all_layers_and_evaluation_counts_nothing() -> None:
    model = nn.Sequential(*(MoELayer.build(replace(BALANCED, capacity=Capacity(0.5)), seed=s) for s in (0, 1)))
    x = draw(30, HIDDEN)
    model(x)
    model.eval()(x)
    loads = take_loads(model)
    assert list(loads) == ["0", "1"] and all(int(load.load_E.sum()) == 60 for load in loads.values())
    assert all(0 < int(load.dropped) < 60 and load.imbalance >= 1 for load in loads.values())
    assert take_loads(model)["1"].load_E.sum() == 0 and take_loads(model)["0"].imbalance == 1
    update_biases(model, loads, 0.5)
    bias: Any = model[0].router.correction_bias  # type: ignore[union-attr]
    load_E = loads["0"].load_E.double()
    assert torch.equal(bias, 0.5 * torch.sign(load_E.mean() - load_E).float())
    with pytest.raises(ConfigError, match="'1'"):
        update_biases(model, {"0": loads["0"]}, 0.1)


def stage_without_layers(rank: int, world: int, _: None) -> int:
    """Rank 0's stage has an MoE layer. Rank 1's stage has none, so ``take_loads`` must not communicate there."""
    mesh = ParallelMesh(ParallelConfig(pp=2))
    stage = nn.Sequential(MoELayer.build(BALANCED, seed=0)) if rank == 0 else nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
    stage(draw(5, HIDDEN))
    return len(take_loads(stage, mesh.group("tp", "cp", "dp") if rank == 0 else dist.group.WORLD))


def test_a_pipeline_stage_without_moe_layers_sends_no_message(pool2: RankPool) -> None:
    assert pool2.run(stage_without_layers, timeout=60) == [1, 0]


def unequal_sequences(rank: int, world: int, _: None) -> str:
    config = RouterConfig(4, 2, balance_loss=0.1, balance_form="sequence")
    router = Router(HIDDEN, config, dist.group.WORLD, sequence_group=dist.group.WORLD)
    with pytest.raises(InputError) as caught:
        router(draw(12, HIDDEN), 3 + rank)
    return str(caught.value)


def test_unequal_numbers_of_sequences_raise_on_all_ranks(pool2: RankPool) -> None:
    assert all("got [3, 4] by rank" in text for text in pool2.run(unequal_sequences, timeout=60))


def build_without_seed(rank: int, world: int, _: None) -> Tensor:
    """With two replicas of the experts (edp 2), a separate seed on each would create different models."""
    torch.manual_seed(rank)
    layer = MoELayer.build(BALANCED, MoEGroups(tokens=dist.group.WORLD))
    return torch.cat([p.detach().flatten() for p in layer.parameters()])


def test_replicas_of_experts_have_equal_weights_without_a_seed(pool2: RankPool) -> None:
    first, second = pool2.run(build_without_seed, timeout=60)
    assert torch.equal(first, second)
