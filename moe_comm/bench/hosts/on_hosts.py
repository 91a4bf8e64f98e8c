"""Run a benchmark on the ranks of simulated hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from moe_comm.bench.common.ranks import on_ranks, say
from moe_comm.bench.hosts.namespaces import Hosts
from moe_comm.bench.hosts.ranks import measure_links, run_on_hosts

T = TypeVar("T")
R = TypeVar("R")
LINK_BYTES = 32 << 20
"""Bytes that measure the rate of each link, far more than its burst; fewer if they take longer than a second."""
TIMEOUT_S = 3600.0


def on_hosts(
    work: Callable[[T, int], R],
    argument: T,
    hosts: int,
    ranks_per_host: int,
    link_gbit: float,
    cores_per_rank: float | None = None,
) -> tuple[R, list[float]]:
    """Run ``work`` as ``on_ranks`` does, with ``ranks_per_host`` ranks on each of ``hosts`` simulated hosts.

    Returns:
        The result of rank 0, and the measured rates of the links by host, in Gbit/s.

    Raises:
        ConfigError: the hosts cannot be created (not root, or no iproute2), or processor time cannot be limited.
        RankFailed: a rank raised an exception that is no ``MoeCommError``, was killed, or exceeded the time limit.
    """
    say(f"creating {hosts} hosts and measuring their links")
    with Hosts(hosts, link_gbit) as namespaces:
        links = measure_links(namespaces, min(LINK_BYTES, round(link_gbit * 1e9 / 8)))
        args = (work, argument, hosts * ranks_per_host, "cpu", cores_per_rank)
        return run_on_hosts(on_ranks, args, namespaces, ranks_per_host, TIMEOUT_S)[0], links
