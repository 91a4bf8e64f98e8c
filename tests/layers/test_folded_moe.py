"""MoE layers folded onto tp, cp and dp ranks, experts cut over etp: all against one process that holds everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_comm.dispatch import make_dispatcher
from moe_comm.dispatch.capacity import Capacity
from moe_comm.errors import ConfigError, InputError, RoutingError
from moe_comm.layers import (
    Experts,
    MoEConfig,
    MoELayer,
    Router,
    RouterConfig,
    Routing,
    ZeroExperts,
    check_grads,
    gather_state_dict,
    load_full_state_dict,
)
from moe_comm.layers.experts import Part
from moe_comm.layers.load import take_loads, update_biases
from moe_comm.layers.state import gather_experts
from moe_comm.topology import FoldedMesh, ParallelConfig, Sharding
from tests.layers.reference import draw
from tests.pool import RankPool

HIDDEN, SEQUENCES, LENGTH = 16, 4, 8
BALANCED = MoEConfig(
    HIDDEN,
    12,
    RouterConfig(5, 2, score="sigmoid", correction_bias=True, balance_loss=0.3, z_loss=0.1),
    shared_ffn=8,
    shared_gate=True,
)
RICH = replace(
    BALANCED, router=replace(BALANCED.router, num_experts=7), zero_experts=ZeroExperts(1, 1), expert_bias=True
)

MAPPINGS = [
    ParallelConfig(cp=2, dp=2, ep=4),
    ParallelConfig(tp=2, dp=2, ep=2, etp=2),
    ParallelConfig(tp=2, cp=2, ep=2),
    ParallelConfig(dp=4, etp=4),
    ParallelConfig(tp=2, cp=2, etp=2),
]


@pytest.fixture(scope="module")
def pool2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


# --- one training step, on one process or folded ---


@dataclass(frozen=True)
class Step:
    """``micro_batches`` of SEQUENCES sequences each. form: of the balance loss."""

    config: MoEConfig
    mapping: ParallelConfig
    micro_batches: int = 1
    recompute: bool = False


def own_tokens(mapping: ParallelConfig, place: Any) -> tuple[Tensor, int]:
    """Global places [b, s] of a rank's tokens in a micro-batch: dp cuts sequences, cp zig-zag, then tp contiguously."""
    places = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH).chunk(mapping.dp)[place["dp"]]
    pieces = places.chunk(2 * mapping.cp, 1)
    places = torch.cat([pieces[place["cp"]], pieces[2 * mapping.cp - 1 - place["cp"]]], 1)
    places = places.chunk(mapping.tp, 1)[place["tp"]]
    return places, places.shape[0]


def train_step(layer: MoELayer, step: Step, places_BS: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Outputs and gradients of this rank: main loss sum(y * g) over all micro-batches, auxiliary losses scaled."""
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
        flows.append(layer.flow)
    return {"y": ys, "x": xs, "dropped": dropped, "aux": aux, "flow": flows}


def run_alone(step: Step, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], dict[str, Tensor], MoELayer]:
    layer = MoELayer.build(step.config, seed=3, dtype=dtype)
    places = torch.arange(SEQUENCES * LENGTH).view(SEQUENCES, LENGTH)
    found = train_step(layer, step, places, dtype)
    return found, {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}, layer


def run_folded(rank: int, world: int, step: Step) -> dict[str, Any]:
    """The same step on this rank; parameters' gradients summed and put together as the shardings say."""
    mesh = FoldedMesh(step.mapping)
    layer = MoELayer.build(
        step.config,
        mesh.group("etp", "ep"),
        "all_to_all",  # shared memory moves no float64
        etp=step.mapping.etp,
        tokens_group=mesh.group("tp", "cp", "dp"),
        sequence_group=mesh.group("tp", "cp"),
        seed=3,
        dtype=torch.float64,
    )
    places, _ = own_tokens(step.mapping, mesh.place)
    found = train_step(layer, step, places, torch.float64)
    shardings, grads = layer.shardings(), {}
    for name, p in layer.named_parameters():
        sharding = shardings.get(name, Sharding(tuple(p.shape)))
        assert p.grad is not None and tuple(p.shape) == sharding.local_shape(mesh.place, mesh.sizes)
        group = mesh.sum_group(sharding)
        if group is not None:
            dist.all_reduce(p.grad, group=group)
        short = name.removeprefix("experts.")
        grads[name] = gather_experts(short, p.grad, layer) if name in shardings else p.grad
    loads = take_loads(layer, mesh.group("tp", "cp", "dp"))
    update_biases(layer, loads, 0.1)
    bias = layer.router.correction_bias
    layer.dispatcher.close()
    return {**found, "places": places, "grads": grads, "loads": loads, "bias": bias}


def compare(pool: RankPool, step: Step) -> list[dict[str, Any]]:
    """Everything of ``step`` against one process."""
    alone, grads, layer = run_alone(step)
    ranks: list[dict[str, Any]] = pool.run(run_folded, step, timeout=120)
    for m in range(step.micro_batches):
        for key in ("y", "x"):
            for found in ranks:
                want = alone[key][m].flatten(0, 1)[found["places"]]
                torch.testing.assert_close(found[key][m], want, rtol=1e-9, atol=1e-11)
        for name, value in alone["aux"][m].items():
            torch.testing.assert_close(sum(found["aux"][m][name] for found in ranks), value, rtol=1e-10, atol=0)
    for name, want in grads.items():
        for found in ranks:
            difference = (found["grads"][name] - want).abs().max()
            assert difference <= 1e-10 * want.abs().max(), (name, difference)
    want_loads = take_loads(layer)
    update_biases(layer, want_loads, 0.1)
    for found in ranks:
        assert torch.equal(found["loads"][""].load_E, want_loads[""].load_E)
        if layer.router.correction_bias is not None:
            assert torch.equal(found["bias"], layer.router.correction_bias)
    return ranks


@pytest.mark.parametrize("form", ["batch", "sequence"])
@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_a_folded_step_is_that_of_one_process(pool4: RankPool, mapping: ParallelConfig, form: Any) -> None:
    router = replace(RICH.router, balance_form=form)
    compare(pool4, Step(replace(RICH, router=router), mapping, micro_batches=2))


def test_recomputation_changes_no_count_and_no_gradient(pool4: RankPool) -> None:
    config = replace(
        RICH, router=replace(RICH.router, balance_form="sequence"), capacity=Capacity(0.6, "probability", "batch")
    )
    plain = compare(pool4, Step(config, MAPPINGS[1]))
    again = compare(pool4, Step(config, MAPPINGS[1], recompute=True))
    for one, two in zip(plain, again, strict=True):
        assert int(one["loads"][""].dropped) == int(two["loads"][""].dropped) > 0
        assert all(torch.equal(one["grads"][name], two["grads"][name]) for name in one["grads"])


@pytest.mark.parametrize("policy", ["position", "probability"])
@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_capacity_over_the_whole_batch_drops_the_same_slots_at_every_mapping(
    pool4: RankPool, mapping: ParallelConfig, policy: Any
) -> None:
    step = Step(replace(RICH, capacity=Capacity(0.5, policy, "batch")), mapping)
    alone, _, layer = run_alone(step)
    ranks = compare(pool4, step)
    assert sum(int(found["dropped"][0]) for found in ranks) == int(alone["dropped"][0]) > 0
    assert all(int(found["loads"][""].dropped) == int(layer.dropped_total) for found in ranks)
    assert ranks[0]["loads"][""].drop_rate == int(alone["dropped"][0]) / (SEQUENCES * LENGTH * 2)


def test_capacity_per_rank_depends_on_the_mapping(pool4: RankPool) -> None:
    step = Step(replace(BALANCED, capacity=Capacity(0.5)), MAPPINGS[0])
    alone, _, _ = run_alone(step)
    ranks = pool4.run(run_folded, step, timeout=120)
    got = torch.zeros_like(alone["y"][0]).flatten(0, 1)
    for found in ranks:
        got[found["places"]] = found["y"][0]
    assert not torch.allclose(got, alone["y"][0].flatten(0, 1)), "scope batch would be tested by nothing"


@pytest.mark.parametrize("capacity", [None, Capacity(0.6), Capacity(0.6, scope="batch")])
@pytest.mark.parametrize("mapping", [MAPPINGS[1], MAPPINGS[2]], ids=str)
def test_tokens_are_conserved(pool4: RankPool, mapping: ParallelConfig, capacity: Capacity | None) -> None:
    ranks = pool4.run(run_folded, Step(replace(BALANCED, capacity=capacity), mapping), timeout=120)
    flows = [found["flow"][0] for found in ranks]
    slots = SEQUENCES * LENGTH * BALANCED.router.top_k
    dropped = sum(0 if flow.dropped is None else int(flow.dropped) for flow in flows)
    assert sum(flow.slots for flow in flows) == slots
    assert sum(flow.sent for flow in flows) == slots - dropped
    assert sum(flow.received for flow in flows) == mapping.etp * (slots - dropped)
    assert (dropped > 0) == (capacity is not None)
    assert sum(int(found["loads"][""].load_E.sum()) for found in ranks) == len(ranks) * slots


# --- experts cut over etp ---


def check_layer(rank: int, world: int, arg: tuple[MoEConfig, int, str, torch.dtype]) -> tuple[bool, str]:
    config, etp, backend, dtype = arg
    layer = MoELayer.build(config, dist.group.WORLD, backend, etp=etp, seed=4, dtype=dtype)
    report = check_grads(layer, tokens=13)
    layer.dispatcher.close()
    return report.ok, str(report)


UNEVEN = replace(RICH, activation="clamped_swiglu", zero_experts=ZeroExperts(), experts_per_rank=(5, 2), recompute=True)


@pytest.mark.parametrize("backend", ["shared_memory", "all_to_all", "all_gather"])
@pytest.mark.parametrize("config", [RICH, UNEVEN], ids=["balanced", "uneven"])
def test_every_gradient_of_experts_in_parts(pool4: RankPool, config: MoEConfig, backend: str) -> None:
    dtype = torch.float32 if backend == "shared_memory" else torch.float64
    for ok, text in pool4.run(check_layer, (config, 2, backend, dtype), timeout=120):
        assert ok, text


def test_parts_in_bf16_stay_as_close_as_whole_experts(pool2: RankPool) -> None:
    for ok, text in pool2.run(check_layer, (RICH, 2, "auto", torch.bfloat16), timeout=120):
        assert ok, text


def state_of(rank: int, world: int, arg: tuple[MoEConfig, int]) -> dict[str, Any]:
    config, etp = arg
    layer = MoELayer.build(config, dist.group.WORLD, etp=etp, seed=4)
    state = gather_state_dict(layer)
    local = {name: p.detach().clone() for name, p in layer.named_parameters()}
    moved = MoELayer.build(config, dist.group.WORLD, etp=etp, seed=5)
    load_full_state_dict(moved, state)
    assert all(torch.equal(p, local[name]) for name, p in moved.named_parameters())
    for name, sharding in layer.shardings().items():
        assert torch.equal(sharding.take(state[name], layer.place, layer.sizes), local[name]), name
    found = {"state": state, "range": layer.local_experts, "shapes": {n: tuple(p.shape) for n, p in local.items()}}
    layer.dispatcher.close()
    moved.dispatcher.close()
    return found


@pytest.mark.parametrize(("config", "etp"), [(RICH, 1), (RICH, 2), (UNEVEN, 2), (RICH, 4)])
def test_parts_are_those_of_the_same_global_weights(pool4: RankPool, config: MoEConfig, etp: int) -> None:
    alone = MoELayer.build(replace(config, experts_per_rank=None), seed=4).state_dict()
    ranks = pool4.run(state_of, (config, etp), timeout=60)
    for rank, found in enumerate(ranks):
        assert all(torch.equal(found["state"][name], value) for name, value in alone.items())
        held = len(found["range"])
        assert found["shapes"]["experts.w13"] == (held, 24 // etp, HIDDEN)
        assert found["shapes"]["experts.w2"] == (held, HIDDEN, 12 // etp)
        assert found["range"] == ranks[rank - rank % etp]["range"], "the ranks of one expert hold the same ones"
    assert [e for found in ranks[::etp] for e in found["range"]] == list(range(config.num_experts))


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "gelu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_outputs_of_the_parts_add_up_to_the_experts(activation: str, transposed: bool) -> None:
    options: dict[str, Any] = {"bias": True, "transposed": transposed, "dtype": torch.float64}
    whole = Experts(3, 9, 12, activation, **options)
    whole.reset_parameters(7)
    for bias in (whole.b13, whole.b2):
        assert bias is not None
        bias.data.copy_(draw(*bias.shape, seed=2, dtype=torch.float64))
    rows = draw(9, 9, dtype=torch.float64)
    total = torch.zeros_like(rows)
    for index in range(3):
        part = Experts(3, 9, 12, activation, part=Part(index, 3), **options)
        part.reset_parameters(7)
        for name, p in part.named_parameters():
            sharding = whole.sharding_of_one(name)
            taken = [sharding.take(w, {"etp": index}, {"etp": 3}) for w in whole.get_parameter(name).detach()]
            if name.startswith("w"):
                assert torch.equal(p, torch.stack(taken)), name
            p.data.copy_(torch.stack(taken))
        out = part(rows, (4, 0, 5))
        total += out.detach()
    torch.testing.assert_close(total, whole(rows, (4, 0, 5)).detach())


def bad_ids(rank: int, world: int, bad: int) -> str:
    layer = MoELayer.build(replace(BALANCED, router=RouterConfig(4, 2)), dist.group.WORLD, etp=2, seed=0)
    ids = torch.tensor([[0, 1], [2, -1], [3, 0]])
    if rank == 1:
        ids[2, 1] = bad
    routing = Routing(ids, torch.full((3, 2), 0.5))
    with pytest.raises(RoutingError) as caught:
        layer(draw(3, HIDDEN), routing)
    good = Routing(ids.clamp(max=3).where(ids != -2, torch.tensor(0)), routing.weights_TK)
    assert layer(draw(3, HIDDEN), good).isfinite().all()
    layer.dispatcher.close()
    return str(caught.value)


@pytest.mark.parametrize(("bad", "message"), [(4, "expert id 8 of token 2"), (-2, "logits of token 2 are NaN")])
def test_bad_ids_are_refused_on_every_rank(pool2: RankPool, bad: int, message: str) -> None:
    assert all(message in text for text in pool2.run(bad_ids, bad, timeout=60))


def wrong_width(rank: int, world: int, form: Any) -> str:
    """The other rank is by then in the exchanges of the auxiliary losses and of the capacity."""
    router = replace(BALANCED.router, balance_form=form)
    config = replace(BALANCED, router=router, capacity=Capacity(0.5, "probability", "batch"))
    layer = MoELayer.build(
        config, dist.group.WORLD, etp=2, sequence_group=dist.group.WORLD if form == "sequence" else None, seed=0
    )
    index = torch.arange(6).view(2, 3) + 6 * rank
    with pytest.raises(InputError) as caught:
        layer(draw(2, 3, HIDDEN + rank), token_index=index)
    assert layer(draw(2, 3, HIDDEN), token_index=index).isfinite().all()
    layer.dispatcher.close()
    return str(caught.value)


@pytest.mark.parametrize("form", ["batch", "sequence"])
def test_a_wrong_width_on_one_rank_is_refused_on_all_whatever_they_exchange(pool2: RankPool, form: str) -> None:
    assert all("hidden size is 16; got x (2, 3, 17)" in text for text in pool2.run(wrong_width, form, timeout=60))


def wrong_sizes(rank: int, world: int, _: None) -> list[str]:
    messages = []
    for etp, ffn in ((2, 13), (3, 12), (0, 12), (8, 16)):
        with pytest.raises(ConfigError) as caught:
            MoELayer.build(replace(BALANCED, ffn=ffn), dist.group.WORLD, etp=etp)
        messages.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        MoELayer.build(replace(BALANCED, experts_per_rank=(3, 2, 0, 0)), dist.group.WORLD, etp=2)
    return [*messages, str(caught.value)]


def test_sizes_that_do_not_fit_are_refused_with_both_numbers(pool4: RankPool) -> None:
    wanted = ("ffn = 13 must be a multiple of etp = 2", "etp = 3 must divide the 4", "etp = 0", "etp = 8", "2 counts")
    for messages in pool4.run(wrong_sizes, timeout=60):
        assert all(want in message for want, message in zip(wanted, messages, strict=True)), messages


def test_parts_that_do_not_fit_the_dispatcher_are_refused() -> None:
    with pytest.raises(ConfigError, match="holds part 1 of 2"):
        MoELayer(Router(8, RouterConfig(2, 1)), Experts(4, 8, 4, part=Part(1, 2)), make_dispatcher(4))
    with pytest.raises(ConfigError, match="ffn = 5 must be a multiple of etp = 2"):
        Experts(4, 8, 5, part=Part(0, 2))
    with pytest.raises(ConfigError, match="hidden = 9 must be a multiple of etp = 2"):
        Experts(4, 9, 4, bias=True, part=Part(0, 2))
    with pytest.raises(ConfigError, match="part 2 of"):
        Part(2, 2)


# --- counters and groups ---


def test_loads_of_all_layers_are_taken_at_once_and_never_counted_in_evaluation() -> None:
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


def a_stage_without_layers(rank: int, world: int, _: None) -> int:
    """Rank 0's stage has an MoE layer, rank 1's has none: it must not wait for anybody."""
    mesh = FoldedMesh(ParallelConfig(pp=2))
    stage = nn.Sequential(MoELayer.build(BALANCED, seed=0)) if rank == 0 else nn.Sequential(nn.Linear(HIDDEN, HIDDEN))
    stage(draw(5, HIDDEN))
    return len(take_loads(stage, mesh.group("tp", "cp", "dp") if rank == 0 else dist.group.WORLD))


def test_a_pipeline_stage_without_moe_layers_sends_nothing(pool2: RankPool) -> None:
    assert pool2.run(a_stage_without_layers, timeout=60) == [1, 0]


def unequal_sequences(rank: int, world: int, _: None) -> str:
    config = RouterConfig(4, 2, balance_loss=0.1, balance_form="sequence")
    router = Router(HIDDEN, config, dist.group.WORLD, sequence_group=dist.group.WORLD)
    with pytest.raises(InputError) as caught:
        router(draw(12, HIDDEN), 3 + rank)
    return str(caught.value)


def test_pieces_of_unequal_numbers_of_sequences_are_refused_on_every_rank(pool2: RankPool) -> None:
    assert all("[3, 4] sequences" in text for text in pool2.run(unequal_sequences, timeout=60))


def seedless(rank: int, world: int, _: None) -> Tensor:
    """Two copies of the experts (edp 2): a seed drawn by each would make two different models."""
    torch.manual_seed(rank)
    layer = MoELayer.build(BALANCED, None, tokens_group=dist.group.WORLD)
    return torch.cat([p.detach().flatten() for p in layer.parameters()])


def test_copies_of_experts_start_alike_without_a_seed(pool2: RankPool) -> None:
    one, two = pool2.run(seedless, timeout=60)
    assert torch.equal(one, two)
