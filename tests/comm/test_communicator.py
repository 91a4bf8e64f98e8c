"""One communicator per process group: any order of creation, two threads, and its end with the group."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm import MoEConfig, MoELayer, RouterConfig, make_dispatcher
from moe_comm.comm.group_setup import channel_of, communicator_of
from moe_comm.dispatch import Dispatcher, DispatchOptions
from moe_comm.errors import ConfigError
from moe_comm.layers.parallel.collectives import sum_over
from moe_comm.runtime.memory import native_is_built
from tests.pool import RankPool

EXPERTS, HIDDEN = 8, 16
BACKENDS = ["auto", "all_to_all", "all_gather"] + ["shared_memory"] * native_is_built()
OPTIONS = DispatchOptions(timeout_s=60.0)


@pytest.fixture(scope="module")
def pool4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def routed(dispatcher: Dispatcher, scale: float) -> Tensor:
    """Dispatch this rank's tokens to experts that multiply by ``scale``, and combine."""
    g = torch.Generator().manual_seed(dispatcher.rank)
    x_TD = torch.randn(5, HIDDEN, generator=g)
    ids_TK = torch.randint(EXPERTS, (5, 2), generator=g)
    sent = dispatcher.dispatch(x_TD, ids_TK)
    return dispatcher.combine(sent.rows_RD * scale, torch.full((5, 2), 0.5), sent.handle) - x_TD * scale


def use(made: Any, group: Any, rank: int) -> None:
    """Call the object once, over the ranks of ``group``."""
    if isinstance(made, MoELayer):
        x = torch.randn(3, HIDDEN, requires_grad=True)
        made(x).sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()
    elif isinstance(made, Dispatcher):
        assert routed(made, 2.0).abs().max() < 1e-5
    else:
        assert sum_over(torch.ones(4), group).tolist() == [float(group.size())] * 4


def make(what: str, group: Any) -> Any:
    if what == "layer":
        config = MoEConfig(hidden=HIDDEN, ffn=32, router=RouterConfig(num_experts=EXPERTS, top_k=2))
        return MoELayer.build(config, group, seed=0, options=OPTIONS)
    return "collectives" if what == "collectives" else make_dispatcher(EXPERTS, group, backend=what, options=OPTIONS)


def end(group: Any) -> None:
    dist.barrier(group)  # a rank that is still connecting would report an ended peer as dead
    dist.destroy_process_group(group)


def program(rank: int, world: int, seed: int) -> int:
    """Create, use and destroy groups and objects over them in a random order, equal for ranks of a group."""
    order = random.Random(seed)
    groups: dict[int, Any] = {}
    made: list[tuple[int, Any]] = []
    used = 0
    for step in range(16):
        kind = order.choice(["group", "make", "make", "use", "use", "use", "destroy"])
        if kind == "group" or not groups:
            ranks = sorted(order.sample(range(world), order.choice([2, 2, 3, world])))
            groups[step] = ranks, dist.new_group(ranks)
        elif kind == "destroy" and len(groups) > 1:
            number = order.choice(list(groups))
            ranks, group = groups.pop(number)
            made = [(at, thing) for at, thing in made if at != number]
            if rank in ranks:
                end(group)
        elif kind == "make":
            number, what = order.choice(list(groups)), order.choice(["layer", "collectives", *BACKENDS])
            ranks, group = groups[number]
            made.append((number, make(what, group) if rank in ranks else None))
        elif made:
            number, thing = order.choice(made)
            ranks, group = groups[number]
            if rank in ranks:
                use(thing, group, rank)
                used += 1
    for ranks, group in groups.values():
        if rank in ranks:
            end(group)
    return used


@pytest.mark.parametrize("seed", range(12))
def test_groups_layers_dispatchers_and_collectives_in_random_orders(seed: int, pool4: RankPool) -> None:
    pool4.run(program, seed)


def ends_with_its_group(rank: int, world: int, _: object) -> None:
    group = dist.new_group()
    comm = communicator_of(group)
    dispatchers = [make_dispatcher(EXPERTS, group, backend=backend, options=OPTIONS) for backend in BACKENDS]
    assert all(dispatcher.comm is comm for dispatcher in dispatchers) and channel_of(group).comm is comm
    for dispatcher in dispatchers:
        routed(dispatcher, 1.0)
    maps = Path("/proc/self/maps")
    mine = [line.split()[-2] for line in maps.read_text().splitlines() if "moe_comm." in line]
    assert bool(mine) == native_is_built() and not comm.closed
    dist.destroy_process_group(group)
    assert comm.closed
    for dispatcher in dispatchers:
        with pytest.raises(ConfigError, match="this process group was destroyed"):
            dispatcher.dispatch(torch.ones(1, HIDDEN), torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ConfigError, match="was destroyed"):
        communicator_of(group)
    left = [line.split()[-2] for line in maps.read_text().splitlines() if "moe_comm." in line]
    assert len(left) < len(mine) or not mine


def test_destroying_a_group_closes_its_communicator_and_frees_its_memory() -> None:
    with RankPool(2) as pool:
        pool.run(ends_with_its_group)


def meets_once(rank: int, world: int, _: object) -> int:
    """Return the exchanges per additional dispatcher, including the one that compares settings."""
    group = dist.new_group()
    make_dispatcher(EXPERTS, group, backend="all_to_all", options=OPTIONS)
    comm = communicator_of(group)
    before = comm.num_operations
    for _ in range(3):
        make_dispatcher(EXPERTS, group, backend="all_to_all", options=OPTIONS)
    return (comm.num_operations - before) // 3


def test_a_group_is_set_up_once_and_settings_are_compared_in_one_exchange(pool4: RankPool) -> None:
    assert pool4.run(meets_once) == [1] * 4


def in_two_threads(rank: int, world: int, _: object) -> None:
    """Each thread uses its own group, with a dispatcher of each kind."""
    groups = [dist.new_group() for _ in range(2)]
    found: list[float] = []
    errors: list[BaseException] = []

    def work(group: Any, scale: float) -> None:
        try:
            dispatchers = [make_dispatcher(EXPERTS, group, backend=backend, options=OPTIONS) for backend in BACKENDS]
            for _ in range(10):
                found.extend(float(routed(dispatcher, scale).abs().max()) for dispatcher in dispatchers)
                assert sum_over(torch.ones(4), group).tolist() == [float(world)] * 4
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(group, i + 1.0)) for i, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(found) == 2 * 10 * len(BACKENDS) and max(found) < 1e-5


def test_two_threads_use_two_groups_at_once() -> None:
    with RankPool(2) as pool:
        pool.run(in_two_threads)
