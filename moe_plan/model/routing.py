"""Mean number of hosts that hold experts of a token.

Experts are distributed over hosts in order, and routing is uniform: all choices of K among E experts are equally
likely. A host with e experts is not reached by C(E - e, K) / C(E, K) of the tokens. Group-limited routing (DeepSeek-V3,
arXiv 2412.19437, section 2.1.2) first chooses M of G groups of experts uniformly, and then K experts of these groups. A
host is not reached if none of its groups is chosen, or none of its experts in the chosen groups.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import comb

from moe_comm.layers.transformer.shape import ModelShape
from moe_plan.model.mapping import Dispatcher

SUM_BYTES = 4
"""Bytes of an element of all_gather's partial sums."""


@lru_cache(maxsize=4096)
def hosts_reached(shape: ModelShape, hosts: int, kept_fraction: float = 1.0) -> float:
    """Return the mean number of hosts, of ``hosts``, that hold experts of a token.

    ``kept_fraction`` of the slots are not dropped. A host is not reached if all of its slots are dropped.
    """
    ends = [shape.experts * host // hosts for host in range(hosts + 1)]
    return sum(1 - _share_without(shape, range(*bounds), kept_fraction) for bounds in pairwise(ends))


def remote_copies(shape: ModelShape, hosts: int, kept_fraction: float) -> float:
    """Return the mean number of other hosts that a token is sent to."""
    return hosts_reached(shape, hosts, kept_fraction) * (hosts - 1) / hosts


def sends_sums(
    dispatcher: Dispatcher, shape: ModelShape, ranks: int, size: int, *, deterministic: bool = False
) -> bool:
    """Return whether combine sends sums instead of rows.

    ``ranks``: ep degree. ``size``: bytes of an element. ``deterministic``: as in ``Workload``.
    """
    if deterministic:
        return False
    fewer = SUM_BYTES * ranks < shape.chosen * size
    return dispatcher == "hierarchical" or (dispatcher == "all_gather" and fewer)


def _share_without(shape: ModelShape, experts: range, kept_fraction: float) -> float:
    """Return the share of tokens without a slot at any of ``experts``."""
    size = shape.experts // shape.groups
    groups = range(experts.start // size, -(-experts.stop // size))
    sizes = [min(experts.stop, (group + 1) * size) - max(experts.start, group * size) for group in groups]
    # Number of ways to choose among the groups that contain ``experts``, by the number of chosen groups and the number
    # of ``experts`` in them (``marked``).
    choices = {(0, 0): 1}
    for count in sizes:
        with_group = {(chosen + 1, marked + count): number for (chosen, marked), number in choices.items()}
        choices = {key: choices.get(key, 0) + with_group.get(key, 0) for key in choices | with_group}
    others = shape.groups - len(sizes)
    group_choices = comb(shape.groups, shape.top_groups)
    pool = shape.top_groups * size + shape.zero_experts
    missed = 0.0
    for (chosen, marked), number in choices.items():
        if 0 <= shape.top_groups - chosen <= others:
            share = number * comb(others, shape.top_groups - chosen) / group_choices
            missed += share * _probability_of_none(pool, marked, shape.top_k, 1 - kept_fraction)
    return missed


def _probability_of_none(pool: int, marked: int, chosen: int, dropped: float) -> float:
    """Return the probability that, of ``chosen`` random experts of ``pool``, all ``marked`` ones are dropped.

    ``dropped``: probability that the slot of an expert is dropped.
    """
    most, all_choices = min(marked, chosen) if dropped else 0, comb(pool, chosen)
    # Divide the integers before multiplying with a float, because they can exceed the range of floats.
    shares = (comb(marked, hits) * comb(pool - marked, chosen - hits) / all_choices for hits in range(most + 1))
    return sum(share * dropped**hits for hits, share in enumerate(shares))
