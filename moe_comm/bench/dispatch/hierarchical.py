"""``moe-comm bench hierarchical``: one copy of a token for each host, against plain all-to-all, between real links.

Ranks on several hosts (network namespaces, links of a given rate) take turns in one run:

    all_to_all          the row of each slot goes to its expert's rank, and back
    all_gather          every token to every rank, and the row of each slot back
    hierarchical        one copy of a token to each host; the row of each slot back: the bits of one rank
    hierarchical_sums   one copy to each host, and one sum of a host's rows back (``deterministic=False``)

each forward (dispatch, combine) and backward, with nothing between dispatch and combine, so that only what moves rows
is measured. Before that, answers are compared with plain torch. Bytes are counted twice: those of the rows, weights and
ids that are given to the group's backend for other hosts, and what the interfaces of all hosts say they sent, which
has headers, handshakes and lost packets too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.bench.common import machine, report
from moe_comm.bench.common.case import (
    Case,
    expected_dweights,
    expected_dx,
    expected_rows,
    expected_y,
    make_case,
    make_ids,
    require,
)
from moe_comm.bench.common.race import race
from moe_comm.bench.common.ranks import on_ranks
from moe_comm.bench.common.settings import Shape
from moe_comm.bench.hosts.namespaces import INTERFACE, Hosts
from moe_comm.bench.hosts.ranks import measure_links, run_on_hosts
from moe_comm.dispatch import Dispatcher, DispatchOptions, Traffic, make_dispatcher
from moe_comm.dispatch.hierarchical.relay_routes import HostMap, inter_host_bytes
from moe_comm.errors import ConfigError
from moe_comm.topology import ExpertPlacement

LINK_BYTES = 32 << 20
"""Sent to measure the links; far more than what passes at once."""
TIMEOUT_S = 900.0
CONTESTANTS = {
    "all_to_all": ("all_to_all", True),
    "all_gather": ("all_gather", True),
    "hierarchical": ("hierarchical", True),
    "hierarchical_sums": ("hierarchical", False),
}
"""Backend, and whether deterministic, of each."""
BASELINE = "all_to_all"


@dataclass(frozen=True)
class HierarchicalBench:
    """fp32 rows. tokens: of each rank. link_gbit: Gbit/s of each host's link.

    Raises:
        ConfigError: sizes that cannot be.
    """

    hosts: int = 2
    ranks_per_host: int = 2
    link_gbit: float = 1.0
    tokens: int = 1024
    hidden: int = 1024
    experts: int = 64
    top_k: int = 8
    warmup: int = 2
    rounds: int = 7
    seed: int = 0

    def __post_init__(self) -> None:
        if self.hosts < 2 or self.ranks_per_host < 2:
            raise ConfigError(
                f"two levels need at least 2 hosts of 2 ranks; got {self.hosts} hosts of {self.ranks_per_host}"
            )
        if self.rounds < 1:
            raise ConfigError(f"rounds must be at least 1; got {self.rounds}")
        _ = self.shape

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def shape(self) -> Shape:
        """Of the seeded inputs."""
        return Shape(self.world, self.tokens, self.hidden, self.experts, self.top_k, warmup=self.warmup, seed=self.seed)


class _Contestant:
    """One dispatcher and this rank's input."""

    def __init__(self, name: str, bench: HierarchicalBench, case: Case) -> None:
        backend, deterministic = CONTESTANTS[name]
        self.name, self.case, self.deterministic = name, case, deterministic
        self.dispatcher: Dispatcher = make_dispatcher(
            bench.experts, dist.group.WORLD, backend, options=DispatchOptions(deterministic=deterministic)
        )
        self.x_TD = case.x_TD.clone().requires_grad_()
        self.weights_TK = case.weights_TK.clone().requires_grad_()
        self._y_TD: Tensor | None = None

    def forward(self, scaled: bool = False) -> Tensor:
        """Dispatch and combine; ``scaled`` lets each expert multiply its rows, so that a row at the wrong one shows."""
        sent = self.dispatcher.dispatch(self.x_TD, self.case.ids_TK, label=self.name)
        rows_RD = sent.rows_RD
        if scaled:
            own = self.dispatcher.local_experts
            counts = torch.tensor(sent.handle.rows_per_expert)
            rows_RD = rows_RD * self.case.scale_E[own.start : own.stop].repeat_interleave(counts).unsqueeze(1)
        self._y_TD = self.dispatcher.combine(rows_RD, self.weights_TK, sent.handle)
        return self._y_TD

    def backward(self) -> None:
        assert self._y_TD is not None
        self.x_TD.grad = self.weights_TK.grad = None
        self._y_TD.backward(self.case.grad_TD)
        self._y_TD = None

    def check(self, shape: Shape) -> None:
        """Forward and backward against plain torch.

        Raises:
            WrongAnswer: a result differs.
        """
        rows_RD = self.dispatcher.dispatch(self.case.x_TD, self.case.ids_TK).rows_RD
        require(self.name, "rows", rows_RD, expected_rows(shape, dist.get_rank()), bits=True)
        y_TD = self.forward(scaled=True).detach()
        self.backward()
        assert self.x_TD.grad is not None and self.weights_TK.grad is not None
        require(self.name, "y", y_TD, expected_y(self.case), bits=self.deterministic)
        require(self.name, "gradient of x", self.x_TD.grad, expected_dx(self.case), bits=False)
        require(self.name, "gradient of the weights", self.weights_TK.grad, expected_dweights(self.case), bits=False)


def run(bench: HierarchicalBench, threads: int) -> list[dict[str, Any]]:
    """One rank's part. Returns the results on every rank."""
    case = make_case(bench.shape, dist.get_rank())
    # `auto` would take it here, too: that is what explain_choice says between real hosts.
    group = dist.group.WORLD
    chosen = make_dispatcher(bench.experts, group, traffic=Traffic(bench.top_k, bench.hidden)).name
    contestants = [_Contestant(name, bench, case) for name in CONTESTANTS]
    for contestant in contestants:
        contestant.check(bench.shape)
    parts = {one.name: (("forward", one.forward), ("backward", one.backward)) for one in contestants}
    stats = race(parts, bench.warmup, bench.rounds)
    counted = _counted(bench)
    results = []
    for one in contestants:
        times = {f"{phase}_ms": stats[one.name, phase]["median_ms"] for phase in ("forward", "backward", "total")}
        times["total_min_ms"] = stats[one.name, "total"]["min_ms"]
        speedup = stats[BASELINE, "total"]["median_ms"] / times["total_ms"]
        found: dict[str, Any] = {"contestant": one.name, "auto": one.deterministic and one.dispatcher.name == chosen}
        found |= times | {"speedup": speedup, "counted_bytes": counted.get(one.name), "link_bytes": _link_bytes(one)}
        results.append(found)
    return results


def _counted(bench: HierarchicalBench) -> dict[str, int]:
    """Bytes that all ranks give to the backend for other hosts, forward and backward, by contestant."""
    ids_WTK = [make_ids(bench.shape, rank) for rank in range(bench.world)]
    placement = ExpertPlacement.balanced(bench.experts, bench.world)
    hosts = [rank // bench.ranks_per_host for rank in range(bench.world)]
    found = {}
    for name, deterministic in (("hierarchical", True), ("hierarchical_sums", False)):
        parts = inter_host_bytes(
            ids_WTK, placement, hosts, bench.hidden, torch.float32, deterministic=deterministic
        ).values()
        found[name] = sum(part.total for part in parts)
    where = HostMap.of(hosts)
    owner_E = torch.tensor([where.host(placement.owner(expert)) for expert in range(bench.experts)])
    slots = sum(int((owner_E[ids] != where.host(rank)).sum()) for rank, ids in enumerate(ids_WTK))
    # A row in each of the four operations; and in combine's backward its weight, and the weight's gradient.
    found["all_to_all"] = slots * (4 * 4 * bench.hidden + 4 + 4)
    return found


def _link_bytes(one: _Contestant) -> int:
    """What the interfaces of all hosts sent during one forward and backward."""
    dist.barrier()
    before = _sent()
    dist.barrier()
    one.forward()
    one.backward()
    dist.barrier()
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, (_network(), _sent() - before))
    return sum(dict(by_rank).values())


def _network() -> str:
    """The host's network: ranks of one host share its interface."""
    return str(Path("/proc/self/ns/net").readlink())


def _sent() -> int:
    """Bytes that this host's interface has sent so far, headers too."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    raise ConfigError(f"this host has no interface {INTERFACE}")


def main(bench: HierarchicalBench, json_out: str | None = None) -> dict[str, Any]:
    """Make the hosts, measure, print a table, write JSON; the body of ``moe-comm bench hierarchical``.

    Raises:
        ConfigError: hosts cannot be made here (not root, no iproute2).
        WrongAnswer: a contestant does not give what plain torch gives.
    """
    report.check_writable(json_out)
    facts = machine.facts("cpu")
    with Hosts(bench.hosts, bench.link_gbit) as hosts:
        links = measure_links(hosts, LINK_BYTES)
        args = (run, bench, bench.world, "cpu")
        results = run_on_hosts(on_ranks, args, hosts, bench.ranks_per_host, TIMEOUT_S)[0]
    found = {
        "benchmark": "hierarchical",
        "results": results,
        "link_gbit_measured": links,
        "settings": asdict(bench),
        "machine": facts,
    }
    report.write_json(found, json_out)
    report.show(report.hierarchical_tables(found), json_out)
    return found
