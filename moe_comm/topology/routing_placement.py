"""Placement of experts for inference, from recorded routing: even load, and experts of a token on one host.

Hierarchical dispatch sends one copy of a token to each other host that holds one of its experts. Experts that tokens
choose together should therefore be on one host (Speculative MoE, arXiv 2503.04398):

    tokens choose {0 2} {0 2} {1 3} {1 3}      hosts {0 1} {2 3}: both hosts for each token
                                               hosts {0 2} {1 3}: one host for each token
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_comm.errors import ConfigError
from moe_comm.topology.assignment import Loads, homes_near
from moe_comm.topology.balance import Limits, plan_rows
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import rebalance

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
TOKENS = 8192
"""Largest number of tokens, evenly sampled, that determine groups of experts."""


def loads_of(ids_TK: npt.ArrayLike, experts: int) -> list[int]:
    """Return the rows of each expert. Ids of -1 have no row."""
    ids = _checked(ids_TK, experts)
    loads: list[int] = np.bincount(ids[ids >= 0], minlength=experts).tolist()
    return loads


def remote_copies(
    ids_TK: npt.ArrayLike, placement: Placement, ranks_per_host: int, host_T: npt.ArrayLike | None = None
) -> float:
    """Return the mean number of other hosts that hold an expert of a token: the rows that hierarchical dispatch sends.

    Args:
        ids_TK: experts of each token.
        placement: the ranks of each expert. Only homes are counted.
        ranks_per_host: consecutive ranks that share a host.
        host_T: host of each token. None: each host has an equal number of tokens of every kind.

    Raises:
        ConfigError: the ids, hosts or ranks do not fit.
    """
    tokens = _Tokens.of(ids_TK, placement.num_experts, _hosts(placement.world, ranks_per_host), host_T)
    host_E = np.array(placement.homes) // ranks_per_host
    return float(tokens.away_TH[tokens.counts(host_E) > 0].sum() / max(len(tokens.chosen_TE), 1))


def placement_from_routing(
    ids_TK: npt.ArrayLike,
    experts: int,
    world: int,
    *,
    ranks_per_host: int | None = None,
    host_T: npt.ArrayLike | None = None,
    theta: float = 0.5,
    slots: int = 0,
) -> Placement:
    """Return a placement of experts for tokens that are routed like the recorded ones.

    On one host, the loads of the ranks are evened (``rebalance``), and ``slots`` take copies that even them further.
    With several hosts, experts are first divided into hosts by exchanges that reduce ``theta`` times the rows of the
    busiest host over the mean, plus ``1 - theta`` times the share of other hosts that tokens are sent to. Then the
    loads of the ranks of each host are evened.

    Args:
        ids_TK: [T, K] experts of recorded tokens; -1: none.
        experts: number of experts.
        world: number of expert-parallel ranks.
        ranks_per_host: consecutive ranks that share a host; None: all.
        host_T: [T] host of each token; None: each host has an equal number of tokens of every kind.
        theta: 1: only even loads count. 0: only transfers between hosts count.
        slots: copies per rank, on one host only.

    Raises:
        ConfigError: the ids, hosts or ranks do not fit, ``theta`` is not from 0 to 1, or slots with several hosts.
    """
    loads, first = loads_of(ids_TK, experts), Placement.contiguous(experts, world)
    per_host = world if ranks_per_host is None else ranks_per_host
    hosts = _hosts(world, per_host)
    if not 0 <= theta <= 1:
        raise ConfigError(f"theta must be from 0 to 1; got {theta}")
    if hosts == 1:
        return _with_copies(loads, rebalance(loads, first), slots)
    if slots:
        raise ConfigError(f"copies are placed on one host only; got slots={slots} with {hosts} hosts")
    tokens = _Tokens.of(ids_TK, experts, hosts, host_T)
    old_E = np.array(first.homes) // per_host
    host_E = tokens.grouped(old_E, np.array(loads), theta)
    home_E = [0] * experts
    room = first.slots_per_rank
    for host in range(hosts):
        chosen = np.flatnonzero(host_E == host).tolist()
        ranks = range(host * per_host, (host + 1) * per_host)
        start = [rank for rank in range(per_host) for _ in range(room[ranks[rank]])]
        homes = homes_near([loads[expert] for expert in chosen], start, [room[rank] for rank in ranks])[0]
        for expert, home in zip(chosen, homes, strict=True):
            home_E[expert] = ranks[home]
    return Placement(tuple((home,) for home in home_E), world, first.version + 1)


def _with_copies(loads_E: Loads, placement: Placement, slots: int) -> Placement:
    """Return ``placement`` with the copies of the plan that lends rows of these loads with ``slots`` for each rank."""
    most = len(loads_E) - max(placement.homes_per_rank)
    if not 0 <= slots <= most:
        raise ConfigError(f"slots must be from 0 to the {most} experts of other ranks; got {slots}")
    rows, owners = sum(loads_E), [[home] for home in placement.homes]
    limits = Limits(-(-rows // placement.world), rows, 1, 0, slots)
    for one in plan_rows(loads_E, placement.homes, placement.world, limits) if slots else ():
        owners[one.expert].append(one.rank)
    return placement.with_owners(owners) if slots else placement


@dataclass(frozen=True)
class _Tokens:
    """chosen_TE: whether a token has an expert. away_TH: cost of sending a token to a host, 0 for its own host."""

    chosen_TE: Floats
    away_TH: Floats

    @classmethod
    def of(cls, ids_TK: npt.ArrayLike, experts: int, hosts: int, host_T: npt.ArrayLike | None) -> _Tokens:
        ids = _checked(ids_TK, experts)
        away = np.full((len(ids), hosts), (hosts - 1) / hosts)
        if host_T is not None:
            host = np.asarray(host_T)
            if host.shape != (len(ids),) or (len(host) and not 0 <= host.min() <= host.max() < hosts):
                raise ConfigError(f"host_T must hold a host from 0 to {hosts - 1} for each of {len(ids)} tokens")
            away[:] = 1.0
            away[np.arange(len(ids)), host] = 0.0
        chosen = np.zeros((len(ids), experts + 1))
        chosen[np.arange(len(ids))[:, None], ids] = 1.0  # ids of -1 are in the last column
        return cls(chosen[:, :experts], away)

    def counts(self, host_E: Ints) -> Floats:
        """Return the number of a token's experts on each host, [T, H]."""
        return self.chosen_TE @ np.eye(self.away_TH.shape[1])[host_E]

    def grouped(self, host_E: Ints, load_E: Ints, theta: float) -> Ints:
        """Return a host for each expert: ``host_E``, improved by exchanges of experts until the objective stops
        falling."""
        every = -(-len(self.chosen_TE) // TOKENS) or 1
        tokens, host_E = _Tokens(self.chosen_TE[::every], self.away_TH[::every]), host_E.copy()
        hosts = self.away_TH.shape[1]
        most = max(len(tokens.chosen_TE) * min(hosts, int(tokens.chosen_TE.sum(1).max(initial=1))), 1)
        mean = max(load_E.sum() / hosts, 1)
        for _ in range(len(host_E)):
            change_EE = (1 - theta) / most * tokens.exchanges(host_E)
            change_EE += theta / mean * _busiest_after(load_E, host_E, hosts)
            change_EE[host_E[:, None] == host_E[None, :]] = np.inf
            first, second = np.unravel_index(int(np.argmin(change_EE)), change_EE.shape)
            if change_EE[first, second] > -1e-9:
                break
            host_E[[first, second]] = host_E[[second, first]]
        return host_E

    def exchanges(self, host_E: Ints) -> Floats:
        """Return the change of the transfers if two experts exchange their hosts, [E, E]."""
        counts_TH = self.counts(host_E)
        # A host is no longer needed by the tokens that have one expert there, and needed by those that had none.
        leaves_TE = self.chosen_TE * (self.away_TH * (counts_TH == 1))[:, host_E]
        joins_EH = self.chosen_TE.T @ (self.away_TH * (counts_TH == 0))
        less_E = leaves_TE.sum(0)
        # Tokens with both experts need the same hosts afterwards.
        both_EE = leaves_TE.T @ self.chosen_TE
        joins_EE = joins_EH[:, host_E]
        change_EE = joins_EE + joins_EE.T - less_E[:, None] - less_E[None, :] + both_EE + both_EE.T
        return np.asarray(change_EE, dtype=np.float64)


def _busiest_after(load_E: Ints, host_E: Ints, hosts: int) -> Floats:
    """Return the change of the rows of the busiest host if two experts exchange their hosts, [E, E]."""
    total_H = np.bincount(host_E, load_E, hosts)
    more_EE = load_E[None, :] - load_E[:, None]  # rows that the host of the first expert gains
    pair_EE = np.maximum(total_H[host_E][:, None] + more_EE, total_H[host_E][None, :] - more_EE)
    order = np.argsort(-total_H, kind="stable")[:3]
    # The busiest host other than the two is one of the three busiest hosts.
    others_EE = np.zeros_like(pair_EE)
    for host in order[::-1]:
        free = (host_E != host)[:, None] & (host_E != host)[None, :]
        others_EE = np.where(free, total_H[host], others_EE)
    return np.asarray(np.maximum(pair_EE, others_EE) - total_H.max(), dtype=np.float64)


def _hosts(world: int, ranks_per_host: int) -> int:
    if ranks_per_host < 1 or world % ranks_per_host:
        raise ConfigError(f"ranks_per_host must divide the {world} ranks; got {ranks_per_host}")
    return world // ranks_per_host


def _checked(ids_TK: npt.ArrayLike, experts: int) -> Ints:
    ids = np.asarray(ids_TK)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or (ids.size and not -1 <= ids.min() <= ids.max() < experts):
        raise ConfigError(f"routing must be integers [T, K] from -1 to {experts - 1}; got {ids.dtype} {ids.shape}")
    return ids.astype(np.int64)
