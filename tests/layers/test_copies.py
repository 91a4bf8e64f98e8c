"""MoE layers for inference whose experts have copies on other ranks, compared with the same layers without copies."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe_comm
from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.hierarchical.dispatcher import HierarchicalDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.errors import ConfigError, PeerDied, RankMismatch
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig, gather_state_dict, load_state_dict
from moe_comm.layers.check import check_grads
from moe_comm.layers.moe.config import MoEGroups
from moe_comm.layers.moe.experts import Experts, ExpertSlice
from moe_comm.layers.moe.router import Router
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Placement
from moe_comm.topology.rebalance import rows_per_rank
from tests.layers.reference import draw
from tests.pool import RankPool, on_ranks

HIDDEN, FFN, EXPERTS, TOP_K = 24, 8, 8, 3
CONFIG = MoEConfig(HIDDEN, FFN, RouterConfig(EXPERTS, TOP_K), expert_bias=True)


def random_placement(world: int, seed: int, slots: int | None = None, version: int = 0) -> Placement:
    """Return a placement with equal numbers of homes, in which about half of the experts have copies."""
    rng = random.Random(seed)
    homes = [rank for rank in range(world) for _ in range(EXPERTS // world)]
    rng.shuffle(homes)
    left = [EXPERTS if slots is None else slots] * world
    owners = []
    for home in homes:
        others = [rank for rank in range(world) if rank != home and left[rank]]
        chosen = rng.sample(others, rng.randint(0, len(others)))
        for rank in chosen:
            left[rank] -= 1
        owners.append((home, *chosen))
    return Placement(tuple(owners), world, version, slots)


@dataclass(frozen=True)
class Run:
    """A layer to build, and its tokens. placement: None: consecutive experts without copies."""

    placement: Placement | None
    backend: str = "all_to_all"
    etp: int = 1
    overlap: Overlap | None = None
    dtype: torch.dtype = torch.float32
    tokens: str = "uneven"


def build(run: Run, rank: int, world: int) -> MoELayer:
    """Build a layer with biases of 0.1. ``hierarchical`` runs as if the ranks were on two hosts."""
    placement = run.placement or Placement.contiguous(EXPERTS, world // run.etp)
    config, group = replace(CONFIG, placement=placement), dist.group.WORLD
    options = DispatchOptions(timeout_s=60, peer_to_peer=PeerToPeerOptions(emulate=run.backend == "peer_to_peer"))
    if run.backend == "hierarchical":
        slots = placement.layout
        dispatcher = HierarchicalDispatcher(slots, group, rank, options, [2 * r // world for r in range(world)])
        dispatcher.expert_placement = placement
        experts = Experts(placement.homes_per_rank[rank], HIDDEN, FFN, bias=True, part=ExpertSlice())
        layer = MoELayer(Router(HIDDEN, config.router, group), experts, dispatcher)
        layer.reset_parameters(3)
    else:
        groups = MoEGroups(group, run.etp)
        layer = MoELayer.build(
            config, groups, backend=run.backend, options=options, overlap=run.overlap, seed=3, dtype=run.dtype
        )
    with torch.no_grad():
        for bias in (layer.experts.b13, layer.experts.b2):
            assert bias is not None
            bias.fill_(0.1)
    return layer


def tokens_of(layer: MoELayer, run: Run, rank: int) -> tuple[Tensor, Any]:
    """Return tokens and their routing."""
    count = 0 if run.tokens == "none on rank 1" and rank == 1 else 9 + 6 * rank
    x = draw(count, HIDDEN, seed=rank, dtype=run.dtype).requires_grad_()
    routing = layer.router(x, 1)
    ids = routing.ids_TK
    if run.tokens == "all to one expert":
        ids = torch.full_like(ids[:, :1], 5)
        routing = routing._replace(weights_TK=routing.weights_TK[:, :1])
    elif run.tokens == "dropped":
        ids = ids.masked_fill(torch.arange(count).unsqueeze(1) % 3 == 0, -1)
    weights = routing.weights_TK.detach().requires_grad_()
    return x, routing._replace(ids_TK=ids, weights_TK=weights)


def run_layer(rank: int, world: int, run: Run) -> Tensor:
    layer = build(run, rank, world)
    x, routing = tokens_of(layer, run, rank)
    with torch.no_grad():
        y = layer(x, routing)
    layer.dispatcher.close()
    return y


CASES = [
    (2, "all_to_all", 1, Overlap(3, 1, executor="pipelined"), "none on rank 1"),
    (2, "all_gather", 1, None, "dropped"),
    (2, "shared_memory", 1, None, "all to one expert"),
    (2, "shared_memory", 1, Overlap(2, 1, executor="pipelined"), "uneven"),
    (2, "peer_to_peer", 1, None, "uneven"),
    (2, "hierarchical", 1, None, "uneven"),
    (4, "all_to_all", 2, None, "uneven"),
    (4, "shared_memory", 1, None, "none on rank 1"),
]


@pytest.mark.parametrize(("world", "backend", "etp", "overlap", "tokens"), CASES)
def test_copies_keep_the_bits_of_outputs(
    pools: dict[int, RankPool], world: int, backend: str, etp: int, overlap: Overlap | None, tokens: str
) -> None:
    if backend in ("shared_memory", "peer_to_peer"):
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    expected = pools[world].run(run_layer, Run(None, backend, etp, overlap, tokens=tokens), timeout=120)
    for seed in (1, 2):
        placement = random_placement(world // etp, seed, slots=None if seed == 1 else 3)
        assert placement.has_copies
        results = pools[world].run(run_layer, Run(placement, backend, etp, overlap, tokens=tokens), timeout=120)
        for rank, (wanted, got) in enumerate(zip(expected, results, strict=True)):
            assert torch.equal(got, wanted), f"rank {rank} with {placement.owners}"


def run_few_experts(rank: int, world: int, placement: Placement | None) -> Tensor:
    config = replace(CONFIG, router=RouterConfig(3, 2), expert_bias=False, placement=placement)
    layer = MoELayer.build(config, dist.group.WORLD, seed=3)
    with torch.no_grad():
        y = layer(draw(8 + rank, HIDDEN, seed=rank))
    layer.dispatcher.close()
    return y


def test_a_rank_without_experts_of_its_own_can_hold_copies(pool4: RankPool) -> None:
    expected = pool4.run(run_few_experts, None, timeout=60)
    results = pool4.run(run_few_experts, Placement(((0, 3), (1, 3, 2), (2,)), 4), timeout=60)
    assert all(map(torch.equal, results, expected))


@on_ranks(2)
@pytest.mark.parametrize(
    ("backend", "overlap"), [("all_to_all", Overlap(2, 1, executor="pipelined")), ("shared_memory", None)]
)
def test_slots_are_empty_then_filled_then_empty_again(
    rank: int, world: int, backend: str, overlap: Overlap | None
) -> None:
    if backend == "shared_memory":
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    homes = Placement.contiguous(EXPERTS, world, slots=3)
    run = Run(None, backend, overlap=overlap)
    fixed, layer = (build(replace(run, placement=one), rank, world) for one in (None, homes))
    x, routing = tokens_of(layer, run, rank)
    with torch.no_grad():
        expected = fixed(x, routing)
        for placement in (homes, replace(random_placement(world, 4, slots=3), version=1), replace(homes, version=2)):
            if placement.version:
                layer.relocate(placement)
            assert torch.equal(layer(x, routing), expected)
    for one in (layer, fixed):
        one.dispatcher.close()


@on_ranks(2)
def test_frozen_experts_pass_gradients_to_their_inputs(rank: int, world: int) -> None:
    results = []
    for placement in (None, random_placement(world, 1)):
        layer = build(Run(placement), rank, world)
        layer.experts.requires_grad_(False)
        x, routing = tokens_of(layer, Run(placement), rank)
        y = layer(x, routing)
        y.backward(draw(*y.shape, seed=50 + rank))
        results.append((y.detach(), x.grad, routing.weights_TK.grad))
        layer.dispatcher.close()
    for got, wanted in zip(*results, strict=True):
        assert got is not None and wanted is not None and torch.equal(got, wanted)


def rows_of_ranks(rank: int, world: int, run: Run) -> tuple[int, list[int], list[int]]:
    """Return the rows that this rank received, and the loads that it sent and that all ranks sent."""
    layer = build(run, rank, world)
    x, routing = tokens_of(layer, run, rank)
    with torch.no_grad():
        layer(x, routing)
    assert layer.dispatch_stats is not None
    loads = torch.bincount(routing.ids_TK.flatten(), minlength=EXPERTS)
    total = loads.clone()
    dist.all_reduce(total)
    layer.dispatcher.close()
    return layer.dispatch_stats.received, loads.tolist(), total.tolist()


def test_each_rank_divides_its_rows_over_the_owners_by_its_own_counts(pool4: RankPool) -> None:
    placement = Placement(((0, 1, 2, 3), (0,), (1,), (1,), (2,), (2, 0), (3,), (3,)), 4)
    for tokens in ("uneven", "all to one expert"):
        results = pool4.run(rows_of_ranks, Run(placement, tokens=tokens), timeout=60)
        by_source = [rows_per_rank(loads, placement) for _, loads, _ in results]
        assert [received for received, _, _ in results] == [sum(rows) for rows in zip(*by_source, strict=True)]
    one = [received for received, _, _ in results]  # expert 5 on ranks 2 and 0
    assert one[1] == one[3] == 0 and abs(one[0] - one[2]) <= 4


def count_bytes(rank: int, world: int, arg: tuple[str, int]) -> None:
    backend, etp = arg
    placement = random_placement(world // etp, 2, slots=3)
    layer = build(Run(placement, backend, etp), rank, world)
    ep = layer.place["ep"]
    per_expert = 4 * sum(param[0].numel() for param in layer.experts.parameters())
    copies = [len(ranks) - 1 for ranks in placement.owners]
    published = per_expert * sum(n for n, ranks in zip(copies, placement.owners, strict=True) if ranks[0] == ep)
    assert layer.publish_copies() == published
    assert layer.copies is not None
    with torch.no_grad():
        for _ in range(2):
            layer(draw(9, HIDDEN, seed=rank))
    assert layer.copies.published_bytes == published  # once for all calls
    copied = layer.copies.stacked()
    held, full = placement.experts_of(ep), gather_state_dict(layer)
    for name, param in layer.experts.named_parameters():
        expected = full[f"experts.{name}"][list(held)]
        if etp == 1:
            assert torch.equal(copied[name][: len(held)], expected)
        assert param.shape[0] == placement.homes_per_rank[ep] and copied[name].shape[0] == placement.slots_per_rank[ep]
    layer.dispatcher.close()


@pytest.mark.parametrize(("world", "backend", "etp"), [(2, "shared_memory", 1), (4, "all_to_all", 2)])
def test_published_bytes_are_those_of_the_copies(
    pools: dict[int, RankPool], world: int, backend: str, etp: int
) -> None:
    pools[world].run(count_bytes, (backend, etp), timeout=60)


@on_ranks(2)
def test_copies_follow_state_dicts_deep_copies_and_casts(rank: int, world: int) -> None:
    layer, other = build(Run(random_placement(world, 2)), rank, world), build(Run(None), rank, world)
    assert not any("cop" in name for name in layer.state_dict())
    x = draw(7, HIDDEN, seed=rank)
    with torch.inference_mode():
        assert torch.equal(layer(x), other(x))
    with torch.no_grad():
        other.experts.w2.mul_(2)
        load_state_dict(layer, gather_state_dict(other))
        assert torch.equal(layer(x), other(x))
        copied = copy.deepcopy(layer)
        copied.experts.w2.zero_()
        assert torch.equal(layer(x), other(x))
        copied.publish_copies()
        assert not torch.equal(copied(x), other(x))
        half = layer.to(torch.bfloat16)(x.bfloat16())
        assert torch.equal(half, other.to(torch.bfloat16)(x.bfloat16()))
    for one in (layer, other):
        one.dispatcher.close()


# --- errors ---


def misuse(rank: int, world: int, case: str) -> str:
    layer = build(Run(random_placement(world, 2, slots=2)), rank, world)
    x, text = draw(4, HIDDEN, seed=rank), "nothing raised"
    try:
        if case == "train":
            layer(x)
        elif case == "train on one rank":
            with torch.set_grad_enabled(rank == 1):
                layer(x)
        elif case == "check":
            check_grads(layer, tokens=5)
        elif case == "slots":
            layer.relocate(random_placement(world, 2, slots=3))
        elif case == "stale":
            with torch.no_grad():
                layer(x)
                if rank:
                    layer.experts.w13.mul_(2)
                layer(x)
        elif case == "fsdp":
            moe_comm.prepare_fsdp(layer)
        elif case == "ddp":
            torch.nn.parallel.DistributedDataParallel(moe_comm.prepare_ddp(layer))(x)
    except (ConfigError, RankMismatch) as error:
        text = f"{type(error).__name__}: {error}"
    layer.dispatcher.close()
    return text


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("train", "DispatchOptions(balance=Balance())"),
        ("train on one rank", "[placement] balance"),
        ("check", "for inference"),
        ("slots", "(7, 7)"),
        ("stale", "publish_copies"),
        ("fsdp", "FSDP"),
        ("ddp", "for inference"),
    ],
)
def test_misuse_of_copies_raises_on_every_rank(pool2: RankPool, case: str, key: str) -> None:
    for text in pool2.run(misuse, case, timeout=60):
        assert text.startswith("ConfigError") and key in text, text


def publish_while_a_rank_exits(rank: int, world: int, backend: str) -> str:
    layer = build(Run(random_placement(world, 2), backend), rank, world)
    with torch.no_grad():
        layer(draw(4, HIDDEN, seed=rank))
    if rank:
        os._exit(9)
    try:
        layer.publish_copies()
    except PeerDied as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("backend", ["all_to_all", "shared_memory"])
def test_a_rank_that_ends_before_copies_are_published_is_reported(pool2: RankPool, backend: str) -> None:
    text = pool2.run(publish_while_a_rank_exits, backend, timeout=60, expect_dead={1})[0]
    assert "publishing the copies of experts" in text and "rank 1" in text


def test_slots_on_one_rank_are_refused() -> None:
    with pytest.raises(ConfigError, match="slots"):
        MoELayer.build(replace(CONFIG, placement=Placement.contiguous(EXPERTS, 1, slots=1)), seed=3)
