"""``moe-comm plan --calibrate``: measure this machine as a cluster of CPU ranks for the planner.

    all ranks at once  ──▶ GEMMs, attention, memory, model passes   ──▶ Accelerator: rates of one rank
                       ──▶ collectives, dispatch, transfers         ──▶ Link inside
                       ──▶ training steps of small models           ──▶ sustained rates, start of collectives
    one rank per host  ──▶ transfers over a shaped link             ──▶ Link between

Ranks are started as by ``moe-comm train``, with one thread each. More ranks than cores share the cores
(``Accelerator.shared``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moe_comm.bench.calibrate.fit import accelerator_of
from moe_comm.bench.calibrate.ranks import RankMeasurements, measure
from moe_comm.bench.calibrate.steps import CalibrationStep, measure_steps, within_steps
from moe_comm.bench.common.ranks import launch_ranks
from moe_comm.bench.hosts.namespaces import unavailable_reason
from moe_comm.errors import ConfigError
from moe_comm.runtime.launch import available_cores, launch
from moe_plan.machine.collectives import Link
from moe_plan.machine.hardware import Cluster
from moe_plan.machine.link_fit import between_of, inside_of

TIMEOUT_S = 600.0
LOOPBACK = Link("memory of one rank", 1e9, 0.0, 1.0)
"""Placeholder for a link that a cluster does not have."""


def calibrate(
    ranks: int,
    *,
    hosts: int = 1,
    link_gbit: float = 1.0,
    host: Cluster | None = None,
    say: Callable[[str], None] | None = None,
) -> Cluster:
    """Measure ``ranks`` processes on this host. Takes about 15 seconds for 2 ranks and one minute for 8.

    Args:
        ranks: number of ranks, over all hosts.
        hosts: number of hosts of the cluster; several are simulated, with links of ``link_gbit`` Gbit/s.
        link_gbit: rate of each link.
        host: description of ``ranks`` ranks on one host that was measured before. Only the link is measured then.
        say: receives progress messages.

    Returns:
        The description of the cluster, for ``hardware_file.save``. Rates are those of one rank while all ranks work.
    """
    if ranks < 1 or hosts < 1 or ranks % hosts:
        raise ConfigError(f"ranks must be a positive multiple of hosts; got {ranks} ranks and {hosts} hosts")
    if hosts > 1 and (problem := unavailable_reason()):
        raise ConfigError(f"cannot create {hosts} hosts: {problem}")
    log = say or (lambda text: None)
    if host is not None and host.gpus != ranks:
        raise ConfigError(f"host has {host.gpus} ranks; expected {ranks}")
    cluster = host or _calibrate_host(ranks, log)
    if hosts > 1:
        log(f"transfers between {hosts} hosts")
        by_host: list[RankMeasurements] = launch_ranks(measure, (("moves",),), hosts, hosts, link_gbit, TIMEOUT_S)
        transfers = [transfer for rank in by_host for transfer in rank.moves]
        # The hosts are on this machine and share its cores.
        between = between_of(cluster, transfers, f"{link_gbit:g} Gbit/s", spare_cores=available_cores() >= 2 * ranks)
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
