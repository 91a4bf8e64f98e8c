"""MoE layers whose experts have copies on other ranks, compared with the same layers without copies."""

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
from moe_comm.layers.data_parallel import expert_modules, optimizer_state_dict
from moe_comm.layers.data_parallel.expert_shard import plain
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


def run_layer(rank: int, world: int, run: Run) -> dict[str, Any]:
    """Return output, input gradients and the reduced gradients of all experts."""
    layer = build(run, rank, world)
    x, routing = tokens_of(layer, run, rank)
    y = layer(x, routing)
    y.backward(draw(*y.shape, seed=50 + rank, dtype=run.dtype))
    moe_comm.sync_gradients(layer, dist.group.WORLD)
    result = {"y": y.detach(), "x": x.grad, "weights": routing.weights_TK.grad}
    shards = layer.experts.expert_gradients.shards
    for name, param in layer.experts.named_parameters():
        assert param.grad is not None
        result[f"grad {name}"] = shards.gather(name, plain(param.grad))
    layer.dispatcher.close()
    return result


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
def test_copies_keep_the_bits_of_outputs_and_input_gradients_and_repeat_those_of_weights(
    pools: dict[int, RankPool], world: int, backend: str, etp: int, overlap: Overlap | None, tokens: str
) -> None:
    if backend in ("shared_memory", "peer_to_peer"):
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    expected = pools[world].run(run_layer, Run(None, backend, etp, overlap, tokens=tokens), timeout=120)
    for seed in (1, 2):
        placement = random_placement(world // etp, seed, slots=None if seed == 1 else 3)
        assert placement.has_copies
        run = Run(placement, backend, etp, overlap, tokens=tokens)
        results = [pools[world].run(run_layer, run, timeout=120) for _ in range(seed)]
        for rank, (wanted, got, repeated) in enumerate(zip(expected, results[0], results[-1], strict=True)):
            for name, value in wanted.items():
                if name.startswith("grad"):
                    torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
                    assert torch.equal(got[name], repeated[name]), f"{name} differs between two runs"
                else:
                    assert torch.equal(got[name], value), f"{name} of rank {rank} with {placement.owners}"


def run_few_experts(rank: int, world: int, placement: Placement | None) -> dict[str, Any]:
    config = replace(CONFIG, router=RouterConfig(3, 2), expert_bias=False, placement=placement)
    layer = MoELayer.build(config, dist.group.WORLD, seed=3)
    x = draw(8 + rank, HIDDEN, seed=rank).requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    moe_comm.sync_gradients(layer, dist.group.WORLD)
    norm = moe_comm.clip_grad_norm_(layer.experts, 1e9)
    layer.dispatcher.close()
    return {"y": y.detach(), "x": x.grad, "norm": norm}


def run_with_empty_slots(rank: int, world: int, run: Run) -> None:
    """Compare a layer with empty slots with one without, then fill the slots, and empty them again."""
    homes = Placement.contiguous(EXPERTS, world, slots=3)
    layers = [build(replace(run, placement=one), rank, world) for one in (None, homes)]
    for placement in (homes, replace(random_placement(world, 4, slots=3), version=1), replace(homes, version=2)):
        if placement.version:
            layers[1].relocate(placement)
            layers[0].relocate(replace(placement, owners=tuple((home,) for home in placement.homes), slots=None))
        results = []
        for layer in layers:
            x, routing = tokens_of(layer, run, rank)
            y = layer(x, routing)
            layer.zero_grad()
            y.backward(draw(*y.shape, seed=50 + rank))
            results.append((y.detach(), x.grad, routing.weights_TK.grad))
        for got, wanted in zip(*results, strict=True):
            assert got is not None and wanted is not None and torch.equal(got, wanted)
        copies = layers[1].copies
        assert copies is not None and copies.unreduced == placement.has_copies
        assert (copies.reduce() > 0) <= placement.has_copies
        if not placement.has_copies:
            for ours, plain_one in zip(layers[1].experts.parameters(), layers[0].experts.parameters(), strict=True):
                assert ours.grad is not None and plain_one.grad is not None
                assert torch.equal(plain(ours.grad), plain(plain_one.grad))
                assert plain(ours.grad).untyped_storage().nbytes() < ours.untyped_storage().nbytes()
    for layer in layers:
        layer.dispatcher.close()


@pytest.mark.parametrize(
    ("backend", "overlap"), [("all_to_all", Overlap(2, 1, executor="pipelined")), ("shared_memory", None)]
)
def test_slots_without_copies_have_no_gradients(pool2: RankPool, backend: str, overlap: Overlap | None) -> None:
    pool2.run(run_with_empty_slots, Run(None, backend, overlap=overlap), timeout=60)


def test_a_rank_without_experts_of_its_own_can_hold_copies(pool4: RankPool) -> None:
    expected = pool4.run(run_few_experts, None, timeout=60)
    results = pool4.run(run_few_experts, Placement(((0, 3), (1, 3, 2), (2,)), 4), timeout=60)
    for wanted, got in zip(expected, results, strict=True):
        assert torch.equal(got["y"], wanted["y"]) and torch.equal(got["x"], wanted["x"])
        torch.testing.assert_close(got["norm"], wanted["norm"], rtol=1e-6, atol=0)


def test_gradients_of_bf16_copies_are_summed_in_fp32_and_rounded_once(pool2: RankPool) -> None:
    placement = random_placement(2, 1)
    runs = [Run(wanted, dtype=torch.bfloat16) for wanted in (None, placement)]
    expected, results = (pool2.run(run_layer, run, timeout=60) for run in runs)
    for wanted, got in zip(expected, results, strict=True):
        assert all(torch.equal(got[name], wanted[name]) for name in ("y", "x", "weights"))
        torch.testing.assert_close(got["grad w2"], wanted["grad w2"], rtol=0.02, atol=1e-3)


def rows_of_ranks(rank: int, world: int, run: Run) -> tuple[int, list[int], list[int]]:
    """Return the rows that this rank received, and the loads that it sent and that all ranks sent."""
    layer = build(run, rank, world)
    x, routing = tokens_of(layer, run, rank)
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


# --- training ---


def train(layer: MoELayer, optimizer: torch.optim.Optimizer, step: int, rank: int, world: int) -> tuple[float, float]:
    """Train a step to copy other tokens. Returns the loss of all ranks and the norm of the gradients."""
    x, target = draw(20, HIDDEN, seed=100 * step + rank), draw(20, HIDDEN, seed=100 * step + rank + 50)
    loss = (layer(x) - target).square().sum() / (20 * HIDDEN * world)
    loss.backward()
    moe_comm.sync_gradients(layer, dist.group.WORLD)
    norm = moe_comm.clip_grad_norm_(layer, 0.05)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total), float(norm)


def train_with_switches(rank: int, world: int, backend: str) -> None:
    """Train 10 steps without copies, and with copies that change between steps."""
    first = Placement.contiguous(EXPERTS, world, slots=3)
    layers = [build(Run(one, backend), rank, world) for one in (None, first)]
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.01) for layer in layers]
    for step in range(10):
        results = [
            train(layer, optimizer, step, rank, world) for layer, optimizer in zip(layers, optimizers, strict=True)
        ]
        (loss, norm), (other_loss, other_norm) = results
        assert abs(loss - other_loss) <= 1e-5 * loss and abs(norm - other_norm) <= 1e-6 * max(norm, 1.0), step
        if step % 3 == 1:
            placement = random_placement(world, step, slots=3, version=step)
            layers[1].relocate(placement, optimizers[1])
            assert layers[1].local_experts == placement.experts_of(rank)
    states = [gather_state_dict(layer) for layer in layers]
    assert [(name, value.shape) for name, value in states[0].items()] == [
        (name, value.shape) for name, value in states[1].items()
    ]
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-4)
    for values in optimizer_state_dict(layers[1], optimizers[1])["state"].values():
        assert values["exp_avg"].shape[0] in (EXPERTS, *layers[1].router.weight.shape)
    for layer in layers:
        layer.dispatcher.close()


@pytest.mark.parametrize(("world", "backend"), [(2, "all_to_all"), (4, "shared_memory")])
def test_training_with_copies_that_change_has_the_losses_and_norms_of_fixed_experts(
    pools: dict[int, RankPool], world: int, backend: str
) -> None:
    pools[world].run(train_with_switches, backend, timeout=120)


@on_ranks(2)
def test_norms_count_each_expert_once(rank: int, world: int) -> None:
    """Compare norm and gradients with those of one rank that holds all experts."""
    placement = random_placement(world, 3)
    layer = build(Run(placement), rank, world)
    alone = MoELayer.build(CONFIG, seed=3)
    load_state_dict(alone, gather_state_dict(layer))
    x = torch.cat([draw(11, HIDDEN, seed=r) for r in range(world)])
    layer(x[11 * rank : 11 * rank + 11]).square().sum().backward()
    alone(x).square().sum().backward()
    moe_comm.sync_gradients(layer, dist.group.WORLD)
    norm, expected = (float(moe_comm.clip_grad_norm_(one, 1e9)) for one in (layer, alone))
    assert abs(norm - expected) <= 1e-6 * expected
    assert torch.nn.utils.clip_grad_norm_(layer.experts.parameters(), 1e9).item() == pytest.approx(
        torch.nn.utils.clip_grad_norm_(alone.experts.parameters(), 1e9).item(), rel=1e-6
    )
    layer.dispatcher.close()


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
    x = draw(9, HIDDEN, seed=rank)
    layer(x).square().sum().backward()
    assert layer.copies.unreduced and layer.copies.reduce() == per_expert * placement.copies_per_rank[ep]
    assert layer.copies.reduce() == 0 and not layer.copies.unreduced
    copied = layer.copies.stacked()
    held, full = placement.experts_of(ep), gather_state_dict(layer)
    for name, param in layer.experts.named_parameters():
        expected = full[f"experts.{name}"][list(held)]
        if etp == 1:
            assert torch.equal(copied[name][: len(held)], expected)
        assert param.shape[0] == placement.homes_per_rank[ep] and copied[name].shape[0] == placement.slots_per_rank[ep]
    layer.dispatcher.close()


@pytest.mark.parametrize(("world", "backend", "etp"), [(2, "shared_memory", 1), (4, "all_to_all", 2)])
def test_published_and_reduced_bytes_are_those_of_the_copies(
    pools: dict[int, RankPool], world: int, backend: str, etp: int
) -> None:
    pools[world].run(count_bytes, (backend, etp), timeout=60)


@on_ranks(2)
def test_check_grads_compares_the_sums_of_the_owners(world: int) -> None:
    layer = MoELayer.build(
        replace(CONFIG, shared_ffn=12, placement=random_placement(world, 2)), dist.group.WORLD, seed=3
    )
    report = check_grads(layer, tokens=17)
    assert report.ok, str(report)
    bits = {(one.tensor, one.equal_bits) for one in report.comparisons if one.against == "EP 1"}
    assert {("output", True), ("input", True)} <= bits and not {("output", False), ("input", False)} & bits
    assert all(param.grad is None for param in layer.parameters())
    layer.dispatcher.close()


# --- life of the copies ---


@on_ranks(2)
def test_copies_follow_state_dicts_deep_copies_and_casts(rank: int, world: int) -> None:
    layer, other = build(Run(random_placement(world, 2)), rank, world), build(Run(None), rank, world)
    assert not any("cop" in name for name in layer.state_dict())
    x = draw(7, HIDDEN, seed=rank)
    with torch.inference_mode():
        assert torch.equal(layer(x), other(x))
    layer(x).sum().backward()
    moe_comm.sync_gradients(layer, dist.group.WORLD)
    with torch.no_grad():
        other.experts.w2.mul_(2)
    load_state_dict(layer, gather_state_dict(other))
    assert torch.equal(layer(x), other(x))
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.experts.w2.zero_()
    assert torch.equal(layer(x), other(x))
    copied.publish_copies()
    assert not torch.equal(copied(x), other(x))
    half = layer.to(torch.bfloat16)(x.bfloat16())
    assert torch.equal(half, other.to(torch.bfloat16)(x.bfloat16()))
    for one in (layer, other):
        one.dispatcher.close()


@on_ranks(2)
def test_gradients_of_a_discarded_step_are_dropped(rank: int, world: int) -> None:
    """Two micro-batches after a discarded step give the gradients of two micro-batches."""
    placement = random_placement(world, 2)
    layers = [build(Run(placement), rank, world) for _ in range(2)]
    layers[0](draw(5, HIDDEN, seed=9)).sum().backward()
    layers[0].zero_grad()
    for layer in layers:
        for micro in range(2):
            layer(draw(5, HIDDEN, seed=2 * rank + micro)).sum().backward()
        moe_comm.sync_gradients(layer, dist.group.WORLD)
    for a, b in zip(*(layer.parameters() for layer in layers), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.equal(plain(a.grad), plain(b.grad))
    for layer in layers:
        layer.dispatcher.close()


# --- errors ---


def misuse(rank: int, world: int, case: str) -> str:
    layer = build(Run(random_placement(world, 2, slots=2)), rank, world)
    for _, _, gradients in expert_modules(layer):
        gradients.stop_checking()
    x, text = draw(4, HIDDEN, seed=rank), "nothing raised"
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    try:
        layer(x).sum().backward()
        if case == "step":
            optimizer.step()
        elif case == "clip":
            moe_comm.clip_grad_norm_(layer, 1.0)
        elif case == "slots":
            layer.relocate(random_placement(world, 2, slots=3))
        elif case == "stale":
            if rank:
                with torch.no_grad():
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
        ("step", "sync_gradients"),
        ("clip", "sync_gradients"),
        ("slots", "(7, 7)"),
        ("stale", "publish_copies"),
        ("fsdp", "FSDP"),
        ("ddp", "DistributedDataParallel"),
    ],
)
def test_misuse_of_copies_raises_on_every_rank(pool2: RankPool, case: str, key: str) -> None:
    for text in pool2.run(misuse, case, timeout=60):
        assert text.startswith("ConfigError") and key in text, text


def publish_while_a_rank_exits(rank: int, world: int, backend: str) -> str:
    layer = build(Run(random_placement(world, 2), backend), rank, world)
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
