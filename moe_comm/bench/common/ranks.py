"""Start the ranks of a benchmark: a gloo process group over loopback, each rank pinned to its own cores."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.table import Table

from moe_comm.bench.common import report
from moe_comm.bench.common.clock import gather
from moe_comm.bench.common.machine import machine_info
from moe_comm.bench.hosts.namespaces import Hosts
from moe_comm.bench.hosts.ranks import measure_links, run_on_hosts
from moe_comm.errors import ConfigError
from moe_comm.runtime.launch import init_ranks, launch
from moe_comm.topology import ParallelConfig, ParallelMesh

T = TypeVar("T")
R = TypeVar("R")
TIMEOUT_S = 1800.0
LINK_BYTES = 32 << 20
"""Bytes that measure the rate of each link, far more than its burst; fewer if they take longer than a second."""
HOSTS_TIMEOUT_S = 3600.0
CGROUP_PREFIX = "moe_comm-rank-"
CPU_SLICE_US = 1000
"""Length of a CPU time slice, the shortest that Linux accepts."""


def run_benchmark(
    measure: Callable[[], dict[str, Any] | None],
    tables: Callable[[dict[str, Any]], list[Table]],
    json_out: str | None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Run a benchmark command: measure, describe the machine, write JSON, print tables.

    Args:
        measure: starts the ranks and returns the result; None or {} on ranks of torchrun other than 0.
        json_out: file for the JSON object; ``-`` is standard output.
        device: "cuda" to describe the GPU, too.

    Returns:
        The JSON object; {} on ranks of torchrun other than 0.
    """
    report.check_writable(json_out)
    info = machine_info(device)
    result = measure()
    if not result:
        return {}
    result |= {"machine": info}
    report.write_json(result, json_out)
    report.show(tables(result), json_out)
    return result


def say(text: str) -> None:
    """Print the next phase on standard error. Ranks other than the first print nothing."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def cores_of_rank(rank: int, ranks: int, cores: list[int]) -> list[int]:
    """Return the cores of one rank: an equal contiguous share of ``cores``, at least one.

    2 cores:   2 ranks: [0] [1]     1 rank: [0, 1]     4 ranks: [0] [0] [1] [1]
    """
    first = rank * len(cores) // ranks
    stop = max(first + 1, (rank + 1) * len(cores) // ranks)
    return cores[first:stop]


def threads_per_rank(ranks: int) -> int:
    """Return the number of cores per rank, at least one. More threads than cores slow down CPU ranks many times."""
    return len(cores_of_rank(0, ranks, sorted(os.sched_getaffinity(0))))


@contextmanager
def pinned(rank: int, ranks: int) -> Iterator[int]:
    """Pin this process to the cores of ``rank``. Yields the number of threads."""
    cores = set(cores_of_rank(rank, ranks, sorted(os.sched_getaffinity(0))))
    with pinned_to(cores):
        yield len(cores)


@contextmanager
def pinned_to(cores: set[int]) -> Iterator[None]:
    """Pin all threads of this process to ``cores``, and give torch one thread per core."""
    before, threads_before = os.sched_getaffinity(0), torch.get_num_threads()
    _set_affinity(cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        torch.set_num_threads(threads_before)
        _set_affinity(before)


def cores_of_group() -> set[int]:
    """Return the union of the cores of all ranks of the default group. Collective."""
    return set().union(*gather(os.sched_getaffinity(0)))


def _set_affinity(cores: set[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:  # the thread ended
            continue


class SingleRankMesh(ParallelMesh):
    """The mesh of a process that trains without other ranks, although it belongs to a process group."""

    def __init__(self) -> None:
        self.config, self.device, self.rank = ParallelConfig(), "cpu", 0
        self.place, self.sizes = self.config.place(0), self.config.sizes
        self.attention = self.expert = None
        self._groups, self._tied = {}, None


def on_ranks(
    work: Callable[[T, int], R], argument: T, ranks: int, device: str, cores_per_rank: float | None = None
) -> R | None:
    """Run ``work(argument, threads)`` on every rank of a process group and return the result of rank 0.

    Starts the ranks. Under torchrun, uses the ranks of torchrun instead, and returns None on ranks other than 0.

    Args:
        work: function at the top level of a module.
        cores_per_rank: processor time of each rank in cores, see ``processor_quota``. None: no limit.

    Raises:
        ConfigError: as ``launch``, or processor time cannot be limited.
        RankFailed: a rank raised an exception or was killed.
    """
    arguments = (work, argument, device, cores_per_rank)
    return launch(_rank, arguments, ranks, preload=("torch", work.__module__))[0]  # type: ignore[no-any-return]


def _rank(work: Callable[[T, int], R], argument: T, device: str, cores_per_rank: float | None) -> R | None:
    with (
        init_ranks(device, TIMEOUT_S) as env,
        pinned(env.rank, env.world) as threads,
        processor_quota(cores_per_rank),
    ):
        result = work(argument, threads)
    return result if env.rank == 0 else None


def on_hosts(
    work: Callable[[T, int], R],
    argument: T | Callable[[list[float]], T],
    hosts: int,
    ranks_per_host: int,
    link_gbit: float,
    cores_per_rank: float | None = None,
) -> tuple[R, list[float]]:
    """Run ``work`` as ``on_ranks`` does, with ``ranks_per_host`` ranks on each of ``hosts`` simulated hosts.

    Args:
        argument: argument of ``work``, or a function that returns it for the measured rates of the links.

    Returns:
        The result of rank 0, and the measured rates of the links by host, in Gbit/s.

    Raises:
        ConfigError: the hosts cannot be created (not root, or no iproute2), or processor time cannot be limited.
        RankFailed: a rank raised an exception that is no ``MoeCommError``, was killed, or exceeded the time limit.
    """
    say(f"creating {hosts} hosts and measuring their links")
    with Hosts(hosts, link_gbit) as namespaces:
        links = measure_links(namespaces, min(LINK_BYTES, round(link_gbit * 1e9 / 8)))
        value = argument(links) if callable(argument) else argument
        args = (work, value, hosts * ranks_per_host, "cpu", cores_per_rank)
        return run_on_hosts(on_ranks, args, namespaces, ranks_per_host, HOSTS_TIMEOUT_S)[0], links


def launch_ranks(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    ranks: int,
    hosts: int,
    link_gbit: float,
    timeout_s: float,
    preload: tuple[str, ...] = ("torch",),
) -> list[Any]:
    """Run ``function(*arguments)`` on ranks of this host, or of simulated hosts, and return the results by rank."""
    if hosts == 1:
        return launch(function, arguments, ranks, preload=preload)
    with Hosts(hosts, link_gbit) as namespaces:
        return run_on_hosts(function, arguments, namespaces, ranks // hosts, timeout_s)


@contextmanager
def processor_quota(cores: float | None) -> Iterator[None]:
    """Limit all threads of this process to ``cores`` seconds of CPU time per second. None: no limit.

    4 ranks on 2 cores   without a quota: a rank that waits gives its core to another one, so waiting costs little
                         0.5 cores each:  a rank that waits leaves half a core idle, as on a machine with 4 cores

    Raises:
        ConfigError: the limit cannot be set: not root, or no cgroup controller of CPU time.
    """
    if cores is None:
        yield
        return
    period = max(CPU_SLICE_US, round(CPU_SLICE_US / cores))
    quota = round(period * cores)
    files = (
        {"cpu.cfs_period_us": str(period), "cpu.cfs_quota_us": str(quota)},
        {"cpu.max": f"{quota} {period}"},
    )
    with _cgroup("cpu", files, f"{cores:g} cores"):
        yield


@contextmanager
def memory_limit(mib: float) -> Iterator[None]:
    """Limit the memory that this process allocates from now on, with the pages of files that it reads. 0: no limit.

    Pages of files are evicted and read again. A process that exceeds the limit otherwise is killed.

    Raises:
        ConfigError: the limit cannot be set: not root, or no cgroup controller of memory.
    """
    if not mib:
        yield
        return
    limit = str(round(mib * 2**20))
    with _cgroup("memory", ({"memory.limit_in_bytes": limit}, {"memory.max": limit}), f"{mib:g} MiB"):
        yield


@contextmanager
def _cgroup(controller: str, files: tuple[dict[str, str], dict[str, str]], limit: str) -> Iterator[None]:
    """Run this process in a new cgroup with these files, of the versions 1 and 2."""
    root, version, before = _controller(controller)
    _remove_unused(root)
    group = root / f"{CGROUP_PREFIX}{os.getpid()}"
    try:
        group.mkdir()
        for name, text in files[version - 1].items():
            (group / name).write_text(text)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        raise ConfigError(f"cannot limit this process to {limit} by a cgroup in {root}: {error}") from error
    try:
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        with suppress(OSError):  # a child process is still in the cgroup; a later call removes the cgroup
            group.rmdir()


def _controller(name: str) -> tuple[Path, int, Path]:
    """Return the root of the cgroups with a controller, their version, and the cgroup of this process."""
    cgroups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        root = Path(mount)
        if kind == "cgroup" and name in options.split(","):
            path = next((path for _, names, path in cgroups if name in names.split(",")), "/")
            return root, 1, root / path.lstrip("/")
        if kind == "cgroup2" and name in (root / "cgroup.subtree_control").read_text().split():
            return root, 2, root / next((path for _, names, path in cgroups if not names), "/").lstrip("/")
    raise ConfigError(f"cannot limit ranks: no cgroup controller {name!r} is mounted")


def _remove_unused(root: Path) -> None:
    """Remove the cgroups of ranks that were killed."""
    for group in root.glob(f"{CGROUP_PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(CGROUP_PREFIX)).exists():
            with suppress(OSError):  # another rank removed it
                group.rmdir()
