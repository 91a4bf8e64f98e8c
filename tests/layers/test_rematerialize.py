"""Layers that share the memory for copies of experts, compared with layers that each keep their copies."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moe_comm
from moe_comm.errors import ConfigError, RankMismatch
from moe_comm.layers import MoELayer, gather_state_dict, load_state_dict
from moe_comm.layers.data_parallel import expert_modules
from moe_comm.layers.data_parallel.expert_shard import plain
from moe_comm.layers.parallel.recompute import run_layer
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Placement
from tests.layers.reference import draw
from tests.layers.test_copies import EXPERTS, HIDDEN, Run, build, random_placement
from tests.pool import RankPool

SLOTS, MICRO_BATCHES = 3, 2


@dataclass(frozen=True)
class Case:
    """recompute: as in ``run_layer``, or "all": activation checkpointing of all layers together. in_flight: another
    layer runs while the gradients of one are in flight."""

    backend: str = "all_to_all"
    etp: int = 1
    overlap: Overlap | None = None
    recompute: str = "none"
    rematerialize: bool = False
    dtype: torch.dtype = torch.float32
    in_flight: bool = False


def placements(ep: int) -> list[Placement]:
    """Return the placements of the layers. The second one has no copies."""
    return [
        Placement.contiguous(EXPERTS, ep, slots=SLOTS) if seed is None else random_placement(ep, seed, SLOTS)
        for seed in (1, None, 2, 4)
    ]


def build_layers(case: Case, rank: int, world: int) -> nn.ModuleList:
    runs = [Run(one, case.backend, case.etp, case.overlap, case.dtype) for one in placements(world // case.etp)]
    layers = nn.ModuleList(build(run, rank, world) for run in runs)
    if case.rematerialize:
        moe_comm.rematerialize_copies(layers)
    if case.in_flight:

        @torch.no_grad()
        def run_another_layer() -> None:
            layers[0](draw(3, HIDDEN, seed=rank))

        layers[2].in_flight_hook = run_another_layer
    return layers


def forward(layers: nn.ModuleList, x: Tensor, recompute: str = "none") -> Tensor:
    if recompute == "all" and torch.is_grad_enabled():
        y: Tensor = checkpoint(forward, layers, x, use_reentrant=False)
        return y
    for layer in layers:
        x = x + run_layer(recompute, layer, x)
    return x


def backward_twice(layers: nn.ModuleList, case: Case, rank: int) -> dict[str, Any]:
    """Return outputs and input gradients of micro-batches with other tokens."""
    results = {}
    for micro in range(MICRO_BATCHES):
        x = draw(9 + 6 * rank, HIDDEN, seed=2 * rank + micro, dtype=case.dtype).requires_grad_()
        y = forward(layers, x, case.recompute)
        y.backward(draw(*y.shape, seed=50 + rank, dtype=case.dtype))
        results |= {f"y {micro}": y.detach(), f"x {micro}": x.grad}
    return results


def train(rank: int, world: int, case: Case) -> dict[str, Any]:
    """Return outputs and gradients of a step, and those after the weights and the placements have changed."""
    layers = build_layers(case, rank, world)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    results: dict[str, Any] = {}
    for step in range(2):
        results |= {f"{name} of {step}": value for name, value in backward_twice(layers, case, rank).items()}
        moe_comm.sync_gradients(layers, dist.group.WORLD)
        for name, param in layers.named_parameters():
            assert param.grad is not None
            results[f"grad {name} of {step}"] = plain(param.grad).clone()
        optimizer.step()
        optimizer.zero_grad()
        if not step:
            layers[1].relocate(random_placement(world // case.etp, 7, SLOTS, version=1))
            layers[3].relocate(Placement.contiguous(EXPERTS, world // case.etp, slots=SLOTS))
    with torch.no_grad():
        results["after"] = forward(layers, draw(5, HIDDEN, seed=rank, dtype=case.dtype))
    for layer in layers:
        layer.dispatcher.close()
    return results


PIPELINED = Overlap(2, 1, executor="pipelined")


def compare(rank: int, world: int, case: Case) -> list[str]:
    """Return the names of the results that differ between layers that share their stack, and layers that do not."""
    kept, shared = (train(rank, world, replace(case, rematerialize=one)) for one in (False, True))
    assert shared.keys() == kept.keys()
    return [name for name, value in kept.items() if not torch.equal(shared[name], value)]


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, Case(dtype=torch.bfloat16, recompute="full")),
        (2, Case(overlap=PIPELINED, recompute="selective", in_flight=True)),
        (2, Case("shared_memory", overlap=PIPELINED, recompute="all")),
        (2, Case("shared_memory", overlap=PIPELINED, in_flight=True)),
        (2, Case("peer_to_peer")),
        pytest.param(2, Case("hierarchical", recompute="all"), marks=pytest.mark.slow),
        (4, Case(etp=2, overlap=PIPELINED, recompute="full")),
        (4, Case("shared_memory", recompute="selective")),
    ],
    ids=str,
)
def test_outputs_and_gradients_have_the_bits_of_layers_that_keep_their_copies(
    pools: dict[int, RankPool], world: int, case: Case
) -> None:
    if case.backend in ("shared_memory", "peer_to_peer"):
        pytest.importorskip("moe_comm._C", reason="the native core is not built")
    assert pools[world].run(compare, case, timeout=120) == [[]] * world


def count_bytes(rank: int, world: int, case: Case) -> None:
    """Compare memory and published bytes with their formulas."""
    layers = build_layers(case, rank, world)
    backward_twice(layers, case, rank)
    published = [layer.copies.published_bytes for layer in layers]
    first: MoELayer = layers[0]
    sizes = {name: param[0].nbytes for name, param in first.experts.named_parameters()}
    expert, ep = sum(sizes.values()), first.place["ep"]
    sent = [expert * sum(len(ranks) - 1 for ranks in layer.placement.owners if ranks[0] == ep) for layer in layers]
    # The last layer still has its weights in backward, as the first has in the forward pass of the next micro-batch.
    often = (MICRO_BATCHES + 1, 0, 2 * MICRO_BATCHES, MICRO_BATCHES) if case.rematerialize else (1, 1, 1, 1)
    assert published == [times * size for times, size in zip(often, sent, strict=True)]
    reduced = [layer.copies.reduce() for layer in layers]
    assert reduced == [expert * layer.placement.copies_per_rank[ep] for layer in layers]
    storages = {}
    for layer in layers:
        for tensor in (*layer.experts.parameters(), *layer.copies.stacked().values()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    homes = first.placement.homes_per_rank[ep]
    of_copies = homes + SLOTS if case.rematerialize else len(layers) * SLOTS
    assert sum(storages.values()) == expert * (len(layers) * homes + of_copies)
    assert homes + SLOTS < len(layers) * SLOTS
    for layer in layers:
        layer.dispatcher.close()


@pytest.mark.parametrize("rematerialize", [False, True])
@pytest.mark.parametrize(("world", "etp", "recompute"), [(2, 1, "none"), (4, 2, "full")])
def test_memory_and_published_bytes_are_those_of_the_formulas(
    pools: dict[int, RankPool], world: int, etp: int, recompute: str, rematerialize: bool
) -> None:
    pools[world].run(count_bytes, Case(etp=etp, recompute=recompute, rematerialize=rematerialize), timeout=60)


def load_copy_and_cast(rank: int, world: int, arg: None) -> None:
    """Weights that change after rematerialization, deep copies, and casts reach the copies of experts."""
    others, layers = (build_layers(Case(rematerialize=one), rank, world) for one in (False, True))
    x = draw(7, HIDDEN, seed=rank)
    forward(layers, x)
    with torch.no_grad():
        for layer in others:
            layer.experts.w2.mul_(2)
            layer.publish_copies()
    for layer, other in zip(layers, others, strict=True):
        load_state_dict(layer, gather_state_dict(other))
    assert torch.equal(forward(layers, x), forward(others, x))
    copied = copy.deepcopy(layers)
    with torch.no_grad():
        for layer in copied:
            layer.experts.w2.zero_()
            layer.publish_copies()
    changed = forward(copied, x)
    assert torch.equal(forward(layers, x), forward(others, x)) and not torch.equal(forward(layers, x), changed)
    y = forward(layers, x)
    forward(copied, x).sum().backward()  # has memory of its own
    y.sum().backward()
    forward(others, x).sum().backward()
    for ours, wanted in zip(layers.parameters(), others.parameters(), strict=True):
        assert ours.grad is not None and wanted.grad is not None and torch.equal(plain(ours.grad), plain(wanted.grad))
    for one in (layers, others, copied):
        one.zero_grad()
    half = forward(layers.to(torch.bfloat16), x.bfloat16())
    assert torch.equal(half, forward(others.to(torch.bfloat16), x.bfloat16()))
    for layer in (*layers, *others):
        layer.dispatcher.close()


def test_shared_copies_follow_state_dicts_deep_copies_and_casts(pools: dict[int, RankPool]) -> None:
    pools[2].run(load_copy_and_cast, None, timeout=60)


def misuse(rank: int, world: int, case: str) -> tuple[str, str]:
    """Change the weights, or train with parameters that have replaced those of the first forward pass."""
    layers = build_layers(Case(rematerialize=True), rank, world)
    x = draw(4, HIDDEN, seed=rank)
    y = forward(layers, x)
    trained = copy.deepcopy(layers) if case == "deep copy" else layers
    if case == "assigned":
        trained.load_state_dict({name: value.clone() for name, value in layers.state_dict().items()}, assign=True)
    for _, _, gradients in expert_modules(trained):
        gradients.stop_checking()
    try:
        if case == "changed before backward":
            layers[2].experts.w2.detach().mul_(2)
            y.sum().backward()
        elif case == "changed on one rank":
            if rank:
                layers[3].experts.w2.detach().mul_(2)
            layers[3](x)
        else:
            forward(trained, x).sum().backward()
            torch.optim.SGD(trained.parameters(), lr=0.1).step()
    except (ConfigError, RankMismatch, RuntimeError) as error:
        return type(error).__name__, str(error)
    finally:
        for layer in layers:
            layer.dispatcher.close()
    return "nothing raised", ""


@pytest.mark.parametrize(
    ("case", "kind", "key"),
    [
        ("changed before backward", "RuntimeError", "inplace operation"),
        ("changed on one rank", "ConfigError", "publish_copies"),
        ("deep copy", "ConfigError", "sync_gradients"),
        ("assigned", "ConfigError", "sync_gradients"),
    ],
)
def test_misuse_raises_on_every_rank(pools: dict[int, RankPool], case: str, kind: str, key: str) -> None:
    for raised, text in pools[2].run(misuse, case, timeout=60):
        assert raised == kind and key in text, text
