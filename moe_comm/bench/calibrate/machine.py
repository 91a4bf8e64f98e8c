"""``moe-comm plan --calibrate``: this machine, measured, as a cluster of CPU ranks that the planner can plan for.

    ranks, all at once ──▶ products, attention, memory, whole passes ──▶ Accelerator: what one rank has
                       ──▶ collectives, dispatch, transfers          ──▶ Link inside
                       ──▶ training steps of small models            ──▶ what rates and meetings are in them
    one rank a host    ──▶ the same, over a shaped link              ──▶ Link between

Ranks are started as ``moe-comm train`` starts them, one thread each. More ranks than cores share these: each has its
part, and more of it while others wait (``Accelerator.shared``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moe_comm.bench.calibrate.fit import accelerator_of, between_of, inside_of
from moe_comm.bench.calibrate.ranks import Found, measure
from moe_comm.bench.calibrate.steps import Stepped, measure_steps, within_steps
from moe_comm.errors import ConfigError
from moe_comm.plan.machine.collectives import Link
from moe_comm.plan.machine.hardware import Cluster
from moe_comm.runtime.launch import launch

LOOPBACK = Link("memory of one rank", 1e9, 0.0, 1.0)
"""Stands where a cluster has no such link; nothing is ever sent over it."""
OnHosts = Callable[[Callable[..., Any], Sequence[Any]], list[Any]]
"""Runs a function in one rank on each host; what they return, by rank."""


def calibrate(
    ranks: int,
    *,
    on_hosts: OnHosts | None = None,
    hosts: int = 1,
    link: str = "link between hosts",
    host: Cluster | None = None,
    say: Callable[[str], None] | None = None,
) -> Cluster:
    """Measure ``ranks`` processes on this host; a quarter of a minute for 2 of them, a whole one for 8.

    Args:
        on_hosts: runs the ranks that measure the link between hosts, such as ``run_on_hosts`` with its last arguments
            given. None: there is one host.
        hosts: that the cluster then has, each with ``ranks / hosts``; without ``on_hosts`` 1.
        link: its name in the description.
        host: of as many ranks, measured before; only the link between hosts is measured then.
        say: told what is measured next.

    Returns:
        The description, for ``hardware_file.save``. Rates are those of a rank while all others work, too.

    Raises:
        ConfigError: numbers that do not fit. RankFailed: a rank raised or was killed.
    """
    if ranks < 1 or hosts < 1 or ranks % hosts:
        raise ConfigError(f"{ranks} ranks cannot be spread evenly over {hosts} hosts; take a multiple of the hosts")
    if (hosts > 1) != (on_hosts is not None):
        raise ConfigError(f"a link between hosts is measured on several of them; got {hosts} hosts")
    tell = say or (lambda text: None)
    if host is not None and host.gpus != ranks:
        raise ConfigError(f"the host measured before has {host.gpus} ranks, not {ranks}")
    cluster = host or _host(ranks, tell)
    if on_hosts is not None:
        tell(f"transfers between {hosts} hosts")
        apart: list[Found] = on_hosts(measure, (("moves",),))
        between = between_of(cluster, [one for each in apart for one in each.moves], link)
        cluster = replace(cluster, host_size=ranks // hosts, between=between)
    return cluster


def _host(ranks: int, tell: Callable[[str], None]) -> Cluster:
    tell(f"products, memory and passes of {ranks} rank(s)")
    found: list[Found] = launch(measure, (("products", "passes"),), ranks)
    share = max(1.0, ranks / found[0].cores)
    cluster = Cluster(accelerator_of(found, share), ranks, ranks, LOOPBACK, LOOPBACK, direct=True)
    if ranks > 1:
        tell(f"transfers of {ranks} ranks")
        moved: list[Found] = launch(measure, (("moves",),), ranks)
        cluster = inside_of(cluster, [one for each in moved for one in each.moves])
        cluster = replace(cluster, between=cluster.inside)
    tell(f"training steps of {ranks} rank(s)")
    stepped: list[list[Stepped]] = launch(measure_steps, (), ranks)
    return within_steps(cluster, stepped[0])
