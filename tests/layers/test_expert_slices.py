"""Experts split over etp: slices of the same weights, gradients of complete experts, errors on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.dispatch import make_dispatcher
from moe_comm.dispatch.slots.capacity import Capacity
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
    load_state_dict,
)
from moe_comm.layers.moe.config import MoEGroups
from moe_comm.layers.moe.experts import ExpertSlice
from tests.layers.moe_configs import BALANCED, HIDDEN, RICH
from tests.layers.reference import draw
from tests.pool import RankPool


def check_layer(rank: int, world: int, arg: tuple[MoEConfig, int, str, torch.dtype]) -> tuple[bool, str]:
    config, etp, backend, dtype = arg
    layer = MoELayer.build(config, MoEGroups(dist.group.WORLD, etp), backend=backend, seed=4, dtype=dtype)
    report = check_grads(layer, tokens=13)
    layer.dispatcher.close()
    return report.ok, str(report)


UNEVEN = replace(
    RICH,
    router=replace(RICH.router, num_experts=7, zero_experts=ZeroExperts()),
    activation="clamped_swiglu",
    experts_per_rank=(5, 2),
    recompute=True,
)


@pytest.mark.parametrize(
    ("config", "backend"), [(RICH, "shared_memory"), (UNEVEN, "all_to_all"), (RICH, "all_gather")], ids=str
)
def test_all_gradients_of_experts_in_slices_are_correct(pool4: RankPool, config: MoEConfig, backend: str) -> None:
    dtype = torch.float32 if backend == "shared_memory" else torch.float64
    for ok, text in pool4.run(check_layer, (config, 2, backend, dtype), timeout=120):
        assert ok, text


def test_slices_in_bf16_are_as_accurate_as_complete_experts(pool2: RankPool) -> None:
    for ok, text in pool2.run(check_layer, (RICH, 2, "auto", torch.bfloat16), timeout=120):
        assert ok, text


def state_of(rank: int, world: int, arg: tuple[MoEConfig, int]) -> dict[str, Any]:
    config, etp = arg
    layer = MoELayer.build(config, MoEGroups(dist.group.WORLD, etp), seed=4)
    state = gather_state_dict(layer)
    local = {name: p.detach().clone() for name, p in layer.named_parameters()}
    moved = MoELayer.build(config, MoEGroups(dist.group.WORLD, etp), seed=5)
    load_state_dict(moved, state)
    assert all(torch.equal(p, local[name]) for name, p in moved.named_parameters())
    for name, sharding in layer.shardings().items():
        assert torch.equal(sharding.take(state[name], layer.place, layer.sizes), local[name]), name
    result = {"state": state, "range": layer.local_experts, "shapes": {n: tuple(p.shape) for n, p in local.items()}}
    layer.dispatcher.close()
    moved.dispatcher.close()
    return result


@pytest.mark.parametrize(("config", "etp"), [(RICH, 1), (RICH, 2), (UNEVEN, 2), (RICH, 4)])
def test_every_etp_size_holds_slices_of_the_same_global_weights(pool4: RankPool, config: MoEConfig, etp: int) -> None:
    alone = MoELayer.build(replace(config, experts_per_rank=None), seed=4).state_dict()
    ranks = pool4.run(state_of, (config, etp), timeout=60)
    for rank, result in enumerate(ranks):
        assert all(torch.equal(result["state"][name], value) for name, value in alone.items())
        num_local = len(result["range"])
        assert result["shapes"]["experts.w13"] == (num_local, 24 // etp, HIDDEN)
        assert result["shapes"]["experts.w2"] == (num_local, HIDDEN, 12 // etp)
        assert result["range"] == ranks[rank - rank % etp]["range"], (
            "the ranks of an etp group must hold slices of the same experts"
        )
    assert [e for result in ranks[::etp] for e in result["range"]] == list(range(config.num_experts))


@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu", "gelu"])
@pytest.mark.parametrize("transposed", [False, True])
def test_outputs_of_the_slices_add_up_to_the_experts(activation: str, transposed: bool) -> None:
    options: dict[str, Any] = {"bias": True, "transposed": transposed, "dtype": torch.float64}
    whole = Experts(3, 9, 12, activation, **options)
    whole.reset_parameters(7)
    for bias in (whole.b13, whole.b2):
        assert bias is not None
        bias.data.copy_(draw(*bias.shape, seed=2, dtype=torch.float64))
    rows = draw(9, 9, dtype=torch.float64)
    total = torch.zeros_like(rows)
    for index in range(3):
        part = Experts(3, 9, 12, activation, part=ExpertSlice(index, 3), **options)
        part.reset_parameters(7)
        for name, p in part.named_parameters():
            sharding = whole.sharding_of_one(name)
            slices = [sharding.take(w, {"etp": index}, {"etp": 3}) for w in whole.get_parameter(name).detach()]
            if name.startswith("w"):
                assert torch.equal(p, torch.stack(slices)), name
            p.data.copy_(torch.stack(slices))
        out = part(rows, (4, 0, 5))
        total += out.detach()
    torch.testing.assert_close(total, whole(rows, (4, 0, 5)).detach())


def bad_ids(rank: int, world: int, bad: int) -> str:
    layer = MoELayer.build(replace(BALANCED, router=RouterConfig(4, 2)), MoEGroups(dist.group.WORLD, 2), seed=0)
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
def test_invalid_ids_raise_on_all_ranks(pool2: RankPool, bad: int, message: str) -> None:
    assert all(message in text for text in pool2.run(bad_ids, bad, timeout=60))


def wrong_width(rank: int, world: int, form: Any) -> str:
    """Rank 1 passes a wrong width while rank 0 is in the exchanges of the auxiliary losses and of the capacity."""
    router = replace(BALANCED.router, balance_form=form)
    config = replace(BALANCED, router=router, capacity=Capacity(0.5, "probability", "batch"))
    layer = MoELayer.build(
        config,
        MoEGroups(dist.group.WORLD, 2, sequence=dist.group.WORLD if form == "sequence" else None),
        seed=0,
    )
    index = torch.arange(6).view(2, 3) + 6 * rank
    with pytest.raises(InputError) as caught:
        layer(draw(2, 3, HIDDEN + rank), token_index=index)
    assert layer(draw(2, 3, HIDDEN), token_index=index).isfinite().all()
    layer.dispatcher.close()
    return str(caught.value)


@pytest.mark.parametrize("form", ["batch", "sequence"])
def test_a_wrong_width_on_one_rank_raises_on_all_for_each_exchange(pool2: RankPool, form: str) -> None:
    texts = pool2.run(wrong_width, form, timeout=60)
    assert all("hidden size is 16; got x (2, 3, 17)" in text for text in texts), texts


def wrong_sizes(rank: int, world: int, _: None) -> list[str]:
    messages = []
    for etp, ffn in ((2, 13), (3, 12), (0, 12), (8, 16)):
        with pytest.raises(ConfigError) as caught:
            MoELayer.build(replace(BALANCED, ffn=ffn), MoEGroups(dist.group.WORLD, etp))
        messages.append(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        MoELayer.build(replace(BALANCED, experts_per_rank=(3, 2, 0, 0)), MoEGroups(dist.group.WORLD, 2))
    return [*messages, str(caught.value)]


def test_invalid_sizes_raise_with_both_numbers(pool4: RankPool) -> None:
    expected = ("ffn = 13 must be a multiple of etp = 2", "etp = 3 must divide the 4", "etp = 0", "etp = 8", "2 counts")
    for messages in pool4.run(wrong_sizes, timeout=60):
        assert all(text in message for text, message in zip(expected, messages, strict=True)), messages


def test_slices_that_do_not_match_the_dispatcher_raise() -> None:
    with pytest.raises(ConfigError, match="slice 1 of 2 of the experts"):
        MoELayer(Router(8, RouterConfig(2, 1)), Experts(4, 8, 4, part=ExpertSlice(1, 2)), make_dispatcher(4))
    with pytest.raises(ConfigError, match="ffn = 5 must be a multiple of etp = 2"):
        Experts(4, 8, 5, part=ExpertSlice(0, 2))
    with pytest.raises(ConfigError, match="hidden = 9 must be a multiple of etp = 2"):
        Experts(4, 9, 4, bias=True, part=ExpertSlice(0, 2))
    with pytest.raises(ConfigError, match=r"must be in 0\.\.1; got 2"):
        ExpertSlice(2, 2)
