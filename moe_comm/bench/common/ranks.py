"""The ranks of a measurement: joined by gloo on loopback, each pinned to its own cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe_comm.errors import ConfigError
from moe_comm.runtime.launch import init_ranks, launch

T = TypeVar("T")
R = TypeVar("R")
TIMEOUT_S = 1800.0


def cores_of_rank(rank: int, ranks: int, cores: list[int]) -> list[int]:
    """The cores of one rank: an equal run of ``cores`` each; with more ranks than cores, one core, shared.

    2 cores:   2 ranks: [0] [1]     1 rank: [0, 1]     4 ranks: [0] [0] [1] [1]
    """
    first = rank * len(cores) // ranks
    stop = max(first + 1, (rank + 1) * len(cores) // ranks)
    return cores[first:stop]


def threads_per_rank(ranks: int) -> int:
    """Cores over ranks, at least one: more threads than cores slow CPU ranks many times over."""
    return len(cores_of_rank(0, ranks, sorted(os.sched_getaffinity(0))))


@contextmanager
def pinned(rank: int, ranks: int) -> Iterator[int]:
    """Bind this process, with the threads it already has, to its cores, and torch to as many threads.

    Yields that number.
    """
    before, threads_before = os.sched_getaffinity(0), torch.get_num_threads()
    mine = cores_of_rank(rank, ranks, sorted(before))
    _bind(set(mine))
    torch.set_num_threads(len(mine))
    try:
        yield len(mine)
    finally:
        torch.set_num_threads(threads_before)
        _bind(before)


@contextmanager
def all_cores(cores: set[int]) -> Iterator[None]:
    """Inside: this process, and torch with a thread for each, on ``cores`` instead of its own."""
    before, threads_before = os.sched_getaffinity(0), torch.get_num_threads()
    _bind(cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        _bind(before)


def cores_of_group() -> set[int]:
    """The cores of all ranks of the default group together. Collective."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, os.sched_getaffinity(0))
    return set().union(*every)


def _bind(cores: set[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # that thread has just ended
            continue


def on_ranks(work: Callable[[T, int], R], argument: T, ranks: int, device: str) -> R | None:
    """Rank 0's result of ``work(argument, threads of this rank)``, run by every rank inside a process group.

    Starts the ranks; under torchrun takes part with this process, and returns None unless it is rank 0.

    Args:
        work: at the top level of a module.

    Raises:
        ConfigError: torchrun started another number of ranks than ``ranks``.
        RankFailed: a rank raised or was killed.
    """
    return launch(_rank, (work, argument, ranks, device), ranks)[0]  # type: ignore[no-any-return]


def _rank(work: Callable[[T, int], R], argument: T, ranks: int, device: str) -> R | None:
    with init_ranks(device, TIMEOUT_S) as here:
        if here.world != ranks:
            raise ConfigError(f"there are {here.world} ranks but the settings say {ranks}: pass --ranks {here.world}")
        with pinned(here.rank, here.world) as threads:
            found = work(argument, threads)
    return found if here.rank == 0 else None
