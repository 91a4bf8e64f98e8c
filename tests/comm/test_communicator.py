"""One communicator per process group: any order of creation, two threads, and closing with the group."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm import MoEConfig, MoELayer, RouterConfig, make_dispatcher
from moe_comm.comm.group_setup import channel_of, communicator_of
from moe_comm.dispatch import Dispatcher, DispatchOptions
from moe_comm.errors import ConfigError, RankMismatch
from moe_comm.layers.parallel.collectives import sum_over
from moe_comm.runtime.native_core import native_is_built
from tests.pool import on_ranks

EXPERTS, HIDDEN = 8, 16
BACKENDS = ["auto", "all_to_all", "all_gather"] + ["shared_memory"] * native_is_built()
OPTIONS = DispatchOptions(timeout_s=60.0)
CALLS: Any = (("a tensor", torch.zeros(1)), ((1, 2), "values of ranks"))


def dispatch_error(dispatcher: Dispatcher, scale: float) -> Tensor:
    """Dispatch to experts that multiply by ``scale`` and combine. Return the difference to ``scale * x``."""
    g = torch.Generator().manual_seed(dispatcher.rank)
    x_TD = torch.randn(5, HIDDEN, generator=g)
    ids_TK = torch.randint(EXPERTS, (5, 2), generator=g)
    sent = dispatcher.dispatch(x_TD, ids_TK)
    return dispatcher.combine(sent.rows_RD * scale, torch.full((5, 2), 0.5), sent.handle) - x_TD * scale


def call_once(target: Any, group: Any, rank: int) -> None:
    """Call the object once, over the ranks of ``group``."""
    if isinstance(target, MoELayer):
        x = torch.randn(3, HIDDEN, requires_grad=True)
        target(x).sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()
    elif isinstance(target, Dispatcher):
        assert dispatch_error(target, 2.0).abs().max() < 1e-5
    else:
        assert sum_over(torch.ones(4), group).tolist() == [float(group.size())] * 4


def build(kind: str, group: Any) -> Any:
    if kind == "layer":
        config = MoEConfig(hidden=HIDDEN, ffn=32, router=RouterConfig(num_experts=EXPERTS, top_k=2))
        return MoELayer.build(config, group, seed=0, options=OPTIONS)
    return "collectives" if kind == "collectives" else make_dispatcher(EXPERTS, group, backend=kind, options=OPTIONS)


def destroy_group(group: Any) -> None:
    dist.barrier(group)  # a rank that is still connecting reports a peer that has exited as dead
    dist.destroy_process_group(group)


@on_ranks(4)
@pytest.mark.parametrize("seed", range(8))
def test_groups_and_their_objects_work_in_any_order_of_creation_and_use(rank: int, world: int, seed: int) -> None:
    """Create, use and destroy groups and objects over them in a random order, equal for ranks of a group."""
    order = random.Random(seed)
    groups: dict[int, Any] = {}
    objects: list[tuple[int, Any]] = []
    for step in range(16):
        kind = order.choice(["group", "make", "make", "use", "use", "use", "destroy"])
        if kind == "group" or not groups:
            ranks = sorted(order.sample(range(world), order.choice([2, 2, 3, world])))
            groups[step] = ranks, dist.new_group(ranks)
        elif kind == "destroy" and len(groups) > 1:
            number = order.choice(list(groups))
            ranks, group = groups.pop(number)
            objects = [(owner, target) for owner, target in objects if owner != number]
            if rank in ranks:
                destroy_group(group)
        elif kind == "make":
            number, object_kind = order.choice(list(groups)), order.choice(["layer", "collectives", *BACKENDS])
            ranks, group = groups[number]
            objects.append((number, build(object_kind, group) if rank in ranks else None))
        elif objects:
            number, target = order.choice(objects)
            ranks, group = groups[number]
            if rank in ranks:
                call_once(target, group, rank)
    for ranks, group in groups.values():
        if rank in ranks:
            destroy_group(group)


@on_ranks(2)
def test_destroying_a_group_closes_its_communicator_and_frees_its_memory() -> None:
    group = dist.new_group()
    comm = communicator_of(group)
    dispatchers = [make_dispatcher(EXPERTS, group, backend=backend, options=OPTIONS) for backend in BACKENDS]
    assert all(dispatcher.comm is comm for dispatcher in dispatchers) and channel_of(group).comm is comm
    for dispatcher in dispatchers:
        dispatch_error(dispatcher, 1.0)
    maps = Path("/proc/self/maps")
    mapped = [line.split()[-2] for line in maps.read_text().splitlines() if "moe_comm." in line]
    assert bool(mapped) == native_is_built() and not comm.closed
    dist.destroy_process_group(group)
    assert comm.closed
    for dispatcher in dispatchers:
        with pytest.raises(ConfigError, match="this process group was destroyed"):
            dispatcher.dispatch(torch.ones(1, HIDDEN), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ConfigError, match="was destroyed"):
        communicator_of(group)
    still_mapped = [line.split()[-2] for line in maps.read_text().splitlines() if "moe_comm." in line]
    assert len(still_mapped) < len(mapped) or not mapped


@on_ranks(4)
def test_a_group_is_set_up_once_and_settings_are_compared_in_one_exchange() -> None:
    group = dist.new_group()
    make_dispatcher(EXPERTS, group, backend="all_to_all", options=OPTIONS)
    comm = communicator_of(group)
    before = comm.num_operations
    for _ in range(3):
        make_dispatcher(EXPERTS, group, backend="all_to_all", options=OPTIONS)
    assert comm.num_operations == before + 3


@on_ranks(4)
@pytest.mark.parametrize("backend", ["all_to_all"] + ["shared_memory"] * native_is_built())
def test_ranks_get_the_values_of_all_ranks_between_other_calls(rank: int, world: int, backend: str) -> None:
    group = dist.new_group()
    dispatcher, channel = make_dispatcher(EXPERTS, group, backend=backend, options=OPTIONS), channel_of(group)
    for number in range(6):
        rows = channel.gather_values((rank, -number), "values")
        assert rows == [[other, -number] for other in range(world)]
        if number % 2:
            assert dispatch_error(dispatcher, 2.0).abs().max() < 1e-5
    if backend == "shared_memory":
        with pytest.raises(RankMismatch, match="values of ranks"):
            (channel.gather_values if rank else channel.compare_before_transfer)(*CALLS[min(rank, 1)])
        assert channel.gather_values((rank, 7), "values") == [[other, 7] for other in range(world)]
    destroy_group(group)


@on_ranks(2)
def test_two_threads_use_two_groups_at_once(world: int) -> None:
    """Each thread uses its own group, with a dispatcher of each kind."""
    groups = [dist.new_group() for _ in range(2)]
    differences: list[float] = []
    errors: list[BaseException] = []

    def work(group: Any, scale: float) -> None:
        try:
            dispatchers = [make_dispatcher(EXPERTS, group, backend=backend, options=OPTIONS) for backend in BACKENDS]
            for _ in range(10):
                differences.extend(float(dispatch_error(dispatcher, scale).abs().max()) for dispatcher in dispatchers)
                assert sum_over(torch.ones(4), group).tolist() == [float(world)] * 4
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(group, i + 1.0)) for i, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(differences) == 2 * 10 * len(BACKENDS) and max(differences) < 1e-5
