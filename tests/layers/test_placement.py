"""MoE layers with any placement of experts, compared bit for bit with consecutive experts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.dispatch import Dispatcher, DispatchOptions, make_dispatcher
from moe_comm.dispatch.hierarchical.dispatcher import HierarchicalDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.errors import ConfigError, InputError, PeerDied, RankMismatch, RoutingError
from moe_comm.layers import MoEConfig, MoELayer, RouterConfig, ZeroExperts, gather_state_dict, load_state_dict
from moe_comm.layers.data_parallel import expert_modules, optimizer_state_dict
from moe_comm.layers.data_parallel.expert_shard import ExpertShard, plain
from moe_comm.layers.moe.config import MoEGroups
from moe_comm.layers.moe.experts import Experts, ExpertSlice
from moe_comm.layers.moe.router import Router
from moe_comm.overlap.options import Overlap
from moe_comm.topology import ExpertPlacement, Placement, Sharding
from tests.layers.reference import draw
from tests.pool import RankPool, on_ranks

HIDDEN, FFN, EXPERTS = 24, 8, 8
CONFIG = MoEConfig(
    HIDDEN,
    FFN,
    RouterConfig(EXPERTS, 3, zero_experts=ZeroExperts(1, 1), balance_loss=0.1),
    expert_bias=True,
    shared_ffn=12,
)
PERMUTATIONS = {
    2: ((1, 0, 0, 1, 1, 0, 1, 0), (1, 1, 1, 1, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1, 0, 0)),
    4: ((3, 1, 0, 2, 2, 3, 0, 1), (2, 2, 2, 0, 0, 0, 3, 3)),
}


def placed(homes: tuple[int, ...], world: int, version: int = 0) -> Placement:
    return Placement(tuple((home,) for home in homes), world, version)


@dataclass(frozen=True)
class Run:
    """A layer to build, and how to run it. homes: of each expert, on ``world // etp`` ranks; None: consecutive."""

    homes: tuple[int, ...] | None
    counts: tuple[int, ...]
    backend: str = "all_to_all"
    etp: int = 1
    overlap: Overlap | None = None
    dtype: torch.dtype = torch.float32


def build(run: Run, rank: int, world: int) -> MoELayer:
    """Build a layer. ``hierarchical`` runs as if the ranks were on two hosts."""
    placement = Placement.contiguous(EXPERTS, world // run.etp, run.counts)
    if run.homes is not None:
        placement = placed(run.homes, world // run.etp)
    config, group = replace(CONFIG, placement=placement), dist.group.WORLD
    options = DispatchOptions(timeout_s=60, peer_to_peer=PeerToPeerOptions(emulate=run.backend == "peer_to_peer"))
    if run.backend != "hierarchical":
        return MoELayer.build(
            config,
            MoEGroups(group, run.etp),
            backend=run.backend,
            options=options,
            overlap=run.overlap,
            seed=3,
            dtype=run.dtype,
        )
    slots = placement.layout.sliced(run.etp)
    dispatcher: Dispatcher = HierarchicalDispatcher(slots, group, rank, options, [2 * r // world for r in range(world)])
    part = ExpertSlice(rank % run.etp, run.etp)
    experts = Experts(slots.experts_per_rank[rank], HIDDEN, FFN, bias=True, part=part, dtype=run.dtype)
    router = Router(HIDDEN, config.router, group, dtype=run.dtype)
    dispatcher.expert_placement = placement
    layer = MoELayer(router, experts, dispatcher, overlap=run.overlap)
    layer.reset_parameters(3)
    return layer


def run_layer(rank: int, world: int, run: Run) -> dict[str, Any]:
    """Return output and gradients of this rank; gradients of experts with their sharding."""
    layer = build(run, rank, world)
    with torch.no_grad():
        for bias in (layer.experts.b13, layer.experts.b2):
            assert bias is not None
            bias.fill_(0.1)
    x = draw(5 + 6 * rank, HIDDEN, seed=rank, dtype=run.dtype).requires_grad_()
    routing = layer.router(x, 1)
    weights = routing.weights_TK.detach().requires_grad_()
    y = layer(x, routing._replace(weights_TK=weights))
    y.backward(draw(*y.shape, seed=50 + rank, dtype=run.dtype))
    assert x.grad is not None and weights.grad is not None
    local = {name: plain(p.grad) for name, p in layer.experts.named_parameters() if p.grad is not None}
    full = {name: layer.experts.expert_gradients.shards.gather(name, grad) for name, grad in local.items()}
    result = {"y": y.detach(), "x": x.grad, "weights": weights.grad} | full
    result["state"] = gather_state_dict(layer)
    layer.dispatcher.close()
    return result


CASES = [
    (2, "all_to_all", 2, None),
    (2, "all_gather", 1, None),
    (2, "shared_memory", 1, Overlap(2, 1, executor="pipelined")),
    (2, "all_to_all", 1, Overlap(3, 1, executor="pipelined")),
    (2, "peer_to_peer", 1, Overlap(2, 1, executor="pipelined")),
    (4, "shared_memory", 2, None),
    (4, "all_to_all", 2, Overlap(2, 1, executor="pipelined")),
    (4, "hierarchical", 1, None),
]


@pytest.mark.parametrize(("world", "backend", "etp", "overlap"), CASES)
def test_every_permutation_gives_the_bits_of_consecutive_experts(
    pools: dict[int, RankPool], world: int, backend: str, etp: int, overlap: Overlap | None
) -> None:
    if backend in ("shared_memory", "peer_to_peer"):
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    for homes in PERMUTATIONS.get(world // etp, ((0,) * EXPERTS,))[::2]:
        counts = placed(homes, world // etp).slots_per_rank
        dtype = torch.bfloat16 if backend == "all_gather" else torch.float32
        expected, results = (
            pools[world].run(run_layer, Run(wanted, counts, backend, etp, overlap, dtype), timeout=120)
            for wanted in (None, homes)
        )
        for rank, (wanted, got) in enumerate(zip(expected, results, strict=True)):
            for name, value in wanted.pop("state").items():
                assert torch.equal(got["state"][name], value), f"{name} of rank {rank} with {homes}"
            for name, value in wanted.items():
                assert torch.equal(got[name], value), f"{name} of rank {rank} with {homes}"


@on_ranks(2)
@pytest.mark.parametrize("homes", PERMUTATIONS[2][:2])
def test_state_dicts_list_experts_by_global_id(rank: int, world: int, homes: tuple[int, ...]) -> None:
    source = build(Run(None, (4, 4)), rank, world)
    target = build(Run(homes, (4, 4)), rank, world)
    with torch.no_grad():
        source.experts.w13.mul_(2)
    full = gather_state_dict(source)
    load_state_dict(target, full)
    for name, value in gather_state_dict(target).items():
        assert torch.equal(value, full[name]), name
    ids = [expert for expert, home in enumerate(homes) if home == rank]
    assert target.local_experts == tuple(ids) == target.placement.experts_of(rank)
    assert torch.equal(target.experts.w13, full["experts.w13"][ids])
    shard = target.state_dict()["experts.w2"]
    assert isinstance(shard, ExpertShard)
    chunks = [(chunk.offsets[0], chunk.sizes[0]) for chunk in shard.__create_chunk_list__()]
    assert [expert for start, size in chunks for expert in range(start, start + size)] == ids
    with pytest.raises(InputError, match="other experts"):
        load_state_dict(target, source.state_dict())
    source.dispatcher.close()
    target.dispatcher.close()


def test_boxes_of_scattered_experts_are_runs_of_consecutive_ids() -> None:
    experts = Experts(3, HIDDEN, FFN)
    sharding = experts.shardings_over(placed((1, 0, 0, 1, 1, 0), 2))["w2"]
    sizes = {"ep": 2, "etp": 1}
    starts = [
        [(box.full[0].start, box.full[0].stop) for box in sharding.boxes({"ep": ep, "etp": 0}, sizes)] for ep in (0, 1)
    ]
    assert starts == [[(1, 3), (5, 6)], [(0, 1), (3, 5)]]
    full = torch.arange(6 * HIDDEN * FFN).view(6, HIDDEN, FFN)
    assert torch.equal(sharding.take(full, {"ep": 1, "etp": 0}, sizes), full[[0, 3, 4]])
    with pytest.raises(ConfigError, match="do not split 5 over ep 2"):
        Sharding((5, HIDDEN, FFN), sharding.splits, expert=True).boxes({"ep": 0, "etp": 0}, sizes)


# --- errors ---


def errors_of(rank: int, world: int, case: str) -> str:
    homes = PERMUTATIONS[2][rank] if case == "owners" else PERMUTATIONS[2][0]
    placement = placed(homes[: 5 if case == "experts" and rank else None], 3 if case == "world" and rank else world)
    if case == "owners":
        placement = placed(homes, world)
    elif case == "copies" and rank:
        placement = Placement(((0, 1), *((home,) for home in homes[1:])), world)
    try:
        MoELayer.build(replace(CONFIG, placement=placement), dist.group.WORLD, backend="all_to_all", seed=1)
    except (ConfigError, RankMismatch) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("owners", "RankMismatch: ranks disagree on placement of experts"),
        ("experts", "5 experts on 2 ranks"),
        ("world", "8 experts on 3 ranks"),
        ("copies", "RankMismatch: ranks disagree on number of experts"),
    ],
)
def test_a_wrong_placement_on_one_rank_is_refused_on_every_rank(pool2: RankPool, case: str, expected: str) -> None:
    for text in pool2.run(errors_of, case, timeout=60):
        assert expected in text


def test_placement_and_experts_per_rank_are_alternatives() -> None:
    with pytest.raises(ConfigError, match="do not set experts_per_rank"):
        replace(CONFIG, placement=placed(PERMUTATIONS[2][0], 2), experts_per_rank=(4, 4))


def test_a_layer_and_its_dispatcher_must_have_equal_counts() -> None:
    dispatcher = make_dispatcher(EXPERTS, expert_placement=placed((0, 1, 0, 1, 0, 1, 1, 1), 2))
    router = Router(HIDDEN, RouterConfig(EXPERTS, 2))
    with pytest.raises(ConfigError, match=r"\(3, 5\) experts on each rank, but the dispatcher has \(8,\)"):
        MoELayer(router, Experts(8, HIDDEN, FFN), dispatcher)


def dispatch_stale(rank: int, world: int, backend: str) -> list[str]:
    """Dispatch while rank 1 has an older placement, then with equal ones."""
    layer = build(Run(PERMUTATIONS[2][0], (4, 4), backend), rank, world)
    x, texts = draw(4, HIDDEN, seed=rank), []
    layer.dispatcher.expert_placement = placed(PERMUTATIONS[2][0], world, version=2 - rank)
    try:
        layer(x)
    except RankMismatch as error:
        texts.append(str(error))
    layer.dispatcher.expert_placement = layer.placement
    layer(x)
    layer.dispatcher.close()
    return texts


@pytest.mark.parametrize("backend", ["all_to_all", "shared_memory", "all_gather", "peer_to_peer"])
def test_a_stale_placement_raises_on_every_rank_and_names_the_versions(pool2: RankPool, backend: str) -> None:
    if backend in ("shared_memory", "peer_to_peer"):
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    for (text,) in pool2.run(dispatch_stale, backend, timeout=60):
        assert "ranks disagree on the placement of experts or their balance in dispatch" in text
        assert "rank 0: version 2 (" in text and "rank 1: version 1 (" in text


@torch.no_grad()
def route_out_of_range(rank: int, world: int, arg: tuple[Placement, int]) -> str:
    placement, wrong = arg
    config = MoEConfig(HIDDEN, FFN, RouterConfig(EXPERTS, 2), placement=placement)
    layer = MoELayer.build(config, dist.group.WORLD, backend="all_to_all", seed=3)
    x = draw(4, HIDDEN, seed=rank)
    routing = layer.router(x, 1)
    ids: Tensor = routing.ids_TK.to(torch.int32)
    ids[0, 0] = wrong if rank else -1
    try:
        layer(x, routing._replace(ids_TK=ids))
    except RoutingError as error:
        return str(error)
    finally:
        layer.dispatcher.close()
    return "nothing raised"


@pytest.mark.parametrize("wrong", [EXPERTS + 2, 2**31 - 1])
def test_ids_out_of_range_are_refused_with_a_placement_as_well(pool2: RankPool, wrong: int) -> None:
    with_slots = Placement.contiguous(EXPERTS, 2, slots=2)
    for placement, past in ((placed(PERMUTATIONS[2][0], 2), 0), (with_slots, 4)):
        for text in pool2.run(route_out_of_range, (placement, wrong), timeout=60):
            assert str(wrong + past) in text, text


# --- one expert-parallel rank ---


def gradients_of(layer: MoELayer, x: Tensor) -> dict[str, Tensor]:
    """Return output and all gradients of a layer that holds all experts."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(draw(*y.shape, seed=9, dtype=x.dtype))
    assert x.grad is not None
    grads = {name: param.grad for name, param in layer.named_parameters() if param.grad is not None}
    layer.zero_grad()
    return {"y": y.detach(), "x": x.grad} | grads


@pytest.mark.parametrize(
    ("dtype", "overlap"),
    [(torch.float32, None), (torch.bfloat16, Overlap("auto")), (torch.float64, Overlap(2))],
    ids=str,
)
def test_one_rank_has_the_same_bits_with_any_version_of_its_only_placement(
    dtype: torch.dtype, overlap: Overlap | None
) -> None:
    """float64 rows do not use the native core."""
    placement = Placement(((0,),) * EXPERTS, 1, version=3)
    expected = MoELayer.build(CONFIG, seed=3, dtype=dtype)
    layer = MoELayer.build(replace(CONFIG, placement=placement), seed=3, dtype=dtype, overlap=overlap)
    assert layer.dispatcher.name == "local" and layer.dispatcher.placement == ExpertPlacement((EXPERTS,))
    x = draw(9, HIDDEN, seed=1, dtype=dtype)
    for version in (3, 4):
        got, wanted = gradients_of(layer, x), gradients_of(expected, x)
        assert got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)
        assert layer.relocate(replace(placement, version=version + 1)) == 0
    with pytest.raises(ConfigError, match="2 ranks; this layer has 8 experts on 1"):
        layer.relocate(Placement.contiguous(EXPERTS, 2))


# --- relocation ---


def expected_bytes(layer: MoELayer, old: Placement, new: Placement, copies: int) -> int:
    """Return the bytes that one ep rank sends: ``copies`` fp32 tensors of each expert that leaves it."""
    ep = layer.place["ep"]
    leaving = [e for e, (a, b) in enumerate(zip(old.homes, new.homes, strict=True)) if a == ep != b]
    return len(leaving) * copies * sum(p[0].numel() * 4 for p in layer.experts.parameters())


def relocate_and_run(rank: int, world: int, arg: tuple[str, int, tuple[int, ...], Overlap | None]) -> None:
    """Train three steps; relocate after the first and after the second one. Compare with consecutive experts."""
    backend, etp, homes, overlap = arg
    old, new = Placement.contiguous(EXPERTS, world // etp), placed(homes, world // etp, 1)
    first = Placement(old.owners, old.world, 2)
    runs = (Run(None, old.slots_per_rank, backend, etp), Run(None, old.slots_per_rank, backend, etp, overlap))
    layers = [build(run, rank, world) for run in runs]
    optimizers = [torch.optim.AdamW(layer.parameters(), lr=0.01) for layer in layers]
    for step, placement in enumerate((new, first, None)):
        outputs = []
        for layer, optimizer in zip(layers, optimizers, strict=True):
            x = draw(9, HIDDEN, seed=10 * step + rank).requires_grad_()
            y = layer(x)
            y.backward(draw(*y.shape, seed=70 + step))
            assert x.grad is not None
            outputs.append((y.detach(), x.grad))
            for name, param in layer.named_parameters():
                if not name.startswith("experts.") and param.grad is not None:
                    dist.all_reduce(param.grad)
            for _, _, gradients in expert_modules(layer):
                gradients.stop_checking()
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True)), step
        if placement is not None:
            before = layers[1].placement
            sent = layers[1].relocate(placement, optimizers[1])
            assert sent == expected_bytes(layers[1], before, placement, 3) and layers[1].placement == placement
    for got, wanted in zip(*(gather_state_dict(layer).items() for layer in layers), strict=True):
        assert got[0] == wanted[0] and torch.equal(got[1], wanted[1]), got[0]
    states = [optimizer_state_dict(layer, o)["state"] for layer, o in zip(layers, optimizers, strict=True)]
    for index, values in states[0].items():
        assert all(torch.equal(states[1][index][key], value) for key, value in values.items())
    assert all(layer.local_experts == layers[0].local_experts for layer in layers)
    for layer in layers:
        layer.dispatcher.close()


@pytest.mark.parametrize(
    ("world", "backend", "etp", "homes", "overlap"),
    [
        (2, "all_to_all", 1, PERMUTATIONS[2][0], Overlap(2, 1, executor="pipelined")),
        (2, "shared_memory", 1, PERMUTATIONS[2][1], None),
        (2, "all_gather", 1, PERMUTATIONS[2][0], None),
        (2, "hierarchical", 1, PERMUTATIONS[2][0], None),
        (4, "all_to_all", 2, PERMUTATIONS[2][0], None),
        (4, "all_to_all", 1, (3, 1, 0, 2, 2, 3, 0, 1), None),
    ],
)
def test_relocation_moves_weights_and_state_of_moved_experts_only_and_changes_no_bit(
    pools: dict[int, RankPool], world: int, backend: str, etp: int, homes: tuple[int, ...], overlap: Overlap | None
) -> None:
    pools[world].run(relocate_and_run, (backend, etp, homes, overlap), timeout=120)


def refuse_relocation(rank: int, world: int, case: str) -> tuple[str, bool, bool]:
    layer = build(Run(None, (4, 4)), rank, world)
    homes = {"counts": (0, 0, 0, 1, 1, 1, 1, 1), "owners": PERMUTATIONS[2][rank]}.get(case, PERMUTATIONS[2][0])
    weights, placement, text = layer.experts.w13.detach().clone(), layer.placement, "nothing raised"
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    if case == "state" and rank:
        layer.experts.w13.grad = torch.ones_like(layer.experts.w13)
        layer.experts.expert_gradients.stop_checking()
        optimizer.step()
        weights = layer.experts.w13.detach().clone()
    if case == "factored" and rank:  # as of Adafactor, which keeps a mean of each row
        optimizer.state[layer.experts.w2] = {"exp_avg_sq_row": torch.zeros(4, HIDDEN), "step": torch.tensor(1)}
    try:
        layer.relocate(placed(homes, world, 1 + (case == "version" and rank)), optimizer)
    except (ConfigError, RankMismatch) as error:
        text = f"{type(error).__name__}: {error}"
    unchanged = torch.equal(layer.experts.w13, weights)
    layer(draw(3, HIDDEN, seed=rank))
    layer.dispatcher.close()
    return text, layer.placement is placement, unchanged


@pytest.mark.parametrize(
    ("case", "kind", "key"),
    [
        ("counts", "ConfigError", "(3, 5)"),
        ("owners", "RankMismatch", "placement"),
        ("version", "RankMismatch", "placement"),
        ("state", "RankMismatch", "optimizer state"),
        ("factored", "ConfigError", "exp_avg_sq_row"),
    ],
)
def test_a_relocation_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(
    pool2: RankPool, case: str, kind: str, key: str
) -> None:
    for text, same_placement, same_weights in pool2.run(refuse_relocation, case, timeout=60):
        assert text.startswith(kind) and key in text, text
        assert same_placement and same_weights


class Ending(Tensor):
    """A tensor that ends its process when its rows are read, which is after the ranks have compared placements."""

    def __getitem__(self, index: Any) -> Tensor:
        os._exit(9)


def relocate_while_a_rank_exits(rank: int, world: int, arg: None) -> tuple[str, bool]:
    layer = build(Run(None, (4, 4)), rank, world)
    weights, placement = layer.experts.w13.detach().clone(), layer.placement
    optimizer = torch.optim.SGD(layer.parameters())
    state = torch.zeros_like(layer.experts.w2, requires_grad=False)
    optimizer.state[layer.experts.w2] = {"state": state.as_subclass(Ending) if rank else state}
    try:
        layer.relocate(placed(PERMUTATIONS[2][0], world, 1), optimizer)
    except PeerDied as error:
        return str(error), layer.placement is placement and torch.equal(layer.experts.w13, weights)
    return "nothing raised", False


def test_a_rank_that_ends_during_a_relocation_is_reported_and_the_old_placement_stays(pool2: RankPool) -> None:
    text, unchanged = pool2.run(relocate_while_a_rank_exits, None, timeout=60, expect_dead={1})[0]
    assert "relocating the experts" in text and "rank 1" in text and unchanged
