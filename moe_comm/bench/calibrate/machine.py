"""``moe-comm plan --calibrate``: measure this machine as a cluster of CPU ranks for the planner.

    all ranks at once  ──▶ GEMMs, attention, memory, model passes   ──▶ Accelerator: rates of one rank
                       ──▶ collectives, dispatch, transfers         ──▶ Link inside
                       ──▶ training steps of small models           ──▶ sustained rates, start of collectives
    one rank per host  ──▶ transfers over a shaped link             ──▶ Link between

Ranks are started as by ``moe-comm train``, with one thread each. More ranks than cores share the cores
(``Accelerator.shared``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moe_comm.bench.calibrate.fit import accelerator_of
from moe_comm.bench.calibrate.ranks import RankMeasurements, measure
from moe_comm.bench.calibrate.steps import CalibrationStep, measure_steps, within_steps
from moe_comm.errors import ConfigError
from moe_comm.runtime.launch import available_cores, launch
from moe_plan.machine.collectives import Link
from moe_plan.machine.hardware import Cluster
from moe_plan.machine.link_fit import between_of, inside_of

LOOPBACK = Link("memory of one rank", 1e9, 0.0, 1.0)
"""Placeholder for a link that a cluster does not have."""
OnHosts = Callable[[Callable[..., Any], Sequence[Any]], list[Any]]
"""Runs a function in one rank on each host and returns the results by rank."""


def calibrate(
    ranks: int,
    *,
    on_hosts: OnHosts | None = None,
    hosts: int = 1,
    link: str = "link between hosts",
    host: Cluster | None = None,
    say: Callable[[str], None] | None = None,
) -> Cluster:
    """Measure ``ranks`` processes on this host. Takes about 15 seconds for 2 ranks and one minute for 8.

    Args:
        ranks: number of ranks, over all hosts.
        on_hosts: runs the ranks that measure the link between hosts, for example ``run_on_hosts`` with its last
            arguments bound. None: one host.
        hosts: number of hosts of the cluster. Must be 1 without ``on_hosts``.
        link: name of the link in the description.
        host: description of ``ranks`` ranks on one host that was measured before. Only the link is measured then.
        say: receives progress messages.

    Returns:
        The description of the cluster, for ``hardware_file.save``. Rates are those of one rank while all ranks work.
    """
    if ranks < 1 or hosts < 1 or ranks % hosts:
        raise ConfigError(f"ranks must be a positive multiple of hosts; got {ranks} ranks and {hosts} hosts")
    if (hosts > 1) != (on_hosts is not None):
        raise ConfigError(f"on_hosts requires hosts > 1, and hosts > 1 requires on_hosts; got {hosts} hosts")
    log = say or (lambda text: None)
    if host is not None and host.gpus != ranks:
        raise ConfigError(f"host has {host.gpus} ranks; expected {ranks}")
    cluster = host or _calibrate_host(ranks, log)
    if on_hosts is not None:
        log(f"transfers between {hosts} hosts")
        by_host: list[RankMeasurements] = on_hosts(measure, (("moves",),))
        transfers = [transfer for rank in by_host for transfer in rank.moves]
        # The hosts are on this machine and share its cores.
        between = between_of(cluster, transfers, link, spare_cores=available_cores() >= 2 * ranks)
        cluster = replace(cluster, host_size=ranks // hosts, between=between)
    return cluster


def _calibrate_host(ranks: int, log: Callable[[str], None]) -> Cluster:
    log(f"products, memory and passes of {ranks} rank(s)")
    by_rank: list[RankMeasurements] = launch(measure, (("products", "passes"),), ranks)
    ranks_per_core = max(1.0, ranks / by_rank[0].cores)
    cluster = Cluster(accelerator_of(by_rank, ranks_per_core), ranks, ranks, LOOPBACK, LOOPBACK, direct=True)
    if ranks > 1:
        log(f"transfers of {ranks} ranks")
        by_rank = launch(measure, (("moves",),), ranks)
        cluster = inside_of(cluster, [transfer for rank in by_rank for transfer in rank.moves])
        cluster = replace(cluster, between=cluster.inside)
    log(f"training steps of {ranks} rank(s)")
    steps: list[list[CalibrationStep]] = launch(measure_steps, (), ranks)
    return within_steps(cluster, steps[0])
