"""To how many hosts a token's rows go: the mean number of different hosts that have experts of it.

Experts stand host after host, and routing is even: all choices of K among E experts are as likely. A host with e of
them is missed by C(E - e, K) / C(E, K) of the tokens. Group-limited routing (DeepSeek-V3, arXiv 2412.19437, section
2.1.2) chooses M of G groups of experts first, all choices as likely, then K experts of these: a host is missed if none
of its groups is chosen, or none of its experts in those that are.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import comb

from moe_comm.plan.model.mapping import Dispatcher
from moe_comm.plan.model.shape import ModelShape

SUM_BYTES = 4
"""Of an element of all_gather's sums."""


@lru_cache(maxsize=4096)
def hosts_reached(shape: ModelShape, hosts: int, kept: float = 1.0) -> float:
    """Different hosts, of ``hosts``, that have experts of a token, on average.

    Args:
        kept: share of slots that find room in their expert; a host whose slots are all dropped is not reached.
    """
    ends = [shape.experts * host // hosts for host in range(hosts + 1)]
    return sum(1 - _missed(shape, range(*both), kept) for both in pairwise(ends))


def copies(shape: ModelShape, hosts: int, kept: float) -> float:
    """Of a token on hosts that are not its own."""
    return hosts_reached(shape, hosts, kept) * (hosts - 1) / hosts


def sends_sums(dispatcher: Dispatcher, shape: ModelShape, ranks: int, size: int) -> bool:
    """Whether sums come back, and not each row. ranks: "ep", that share the experts. size: bytes of an element."""
    fewer = SUM_BYTES * ranks < shape.chosen * size
    return dispatcher == "hierarchical" or (dispatcher == "all_gather" and fewer)


def _missed(shape: ModelShape, experts: range, kept: float) -> float:
    """Share of tokens without a slot at any of ``experts``."""
    size = shape.experts // shape.groups
    groups = range(experts.start // size, -(-experts.stop // size))
    here = [min(experts.stop, (one + 1) * size) - max(experts.start, one * size) for one in groups]
    # How many choices of groups leave so many of these groups, and of the experts, to be chosen from.
    ways = {(0, 0): 1}
    for count in here:
        more = {(chosen + 1, left + count): number for (chosen, left), number in ways.items()}
        ways = {key: ways.get(key, 0) + more.get(key, 0) for key in ways | more}
    others = shape.groups - len(here)
    every = comb(shape.groups, shape.top_groups)
    pool = shape.top_groups * size + shape.zero_experts
    found = 0.0
    for (chosen, left), number in ways.items():
        if 0 <= shape.top_groups - chosen <= others:
            share = number * comb(others, shape.top_groups - chosen) / every
            found += share * _none(pool, left, shape.top_k, 1 - kept)
    return found


def _none(pool: int, marked: int, chosen: int, dropped: float) -> float:
    """Chance that of ``chosen`` of a ``pool`` none is among the ``marked`` ones but those that are dropped."""
    most, every = min(marked, chosen) if dropped else 0, comb(pool, chosen)
    # Whole numbers are divided before they meet a fraction: they may be larger than any of those.
    ways = (comb(marked, some) * comb(pool - marked, chosen - some) / every for some in range(most + 1))
    return sum(share * dropped**some for some, share in enumerate(ways))
