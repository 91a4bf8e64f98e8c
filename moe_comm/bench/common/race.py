"""Pieces of work that take turns, so that noise hits all alike; what each took is the median of its rounds.

Two that are nearly alike are told apart by ``pairs``: A B, B A, A B, ... Noise that lasts longer than a call is in both
of a pair, and what follows from who is first is in every other one, so the median of the pairs' ratios is much steadier
than the ratio of the medians.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from moe_comm.bench.common.clock import Clock, Stats, summarise, sync_group

MOST_ROUNDS = 500
MOST_PAIRS = 300
COLLECT_S = 0.3
"""Between two garbage collections, which take longer than a small operator."""

Phases = tuple[tuple[str, Callable[[], Any]], ...]
"""Names and what to do, one after the other."""


Rounds = list[dict[tuple[str, str], list[float]]]
"""By rank: seconds of every round, by (part, phase)."""


def race(
    parts: Mapping[str, Phases],
    warmup: int,
    rounds: int,
    *,
    seconds: float = 0.0,
    after: Callable[[str], None] = lambda name: None,
) -> dict[tuple[str, str], Stats]:
    """``take_turns``, summarised: milliseconds by (part, phase), of the slowest rank in each round."""
    return summarise(take_turns(parts, warmup, rounds, seconds=seconds, after=after))


def take_turns(
    parts: Mapping[str, Phases],
    warmup: int,
    rounds: int,
    *,
    seconds: float = 0.0,
    most: int = MOST_ROUNDS,
    after: Callable[[str], None] = lambda name: None,
) -> Rounds:
    """What every rank measured, on every rank. Collective over the default group.

    Several phases of a part also give its ``total``. Each round begins with another part.

    Args:
        seconds: as many more rounds as fit in it: a median over few rounds of something short means little.
        most: rounds, however short they are, unless ``rounds`` asks for more.
        after: called with the part's name when it is done, and not timed.
    """
    clock = Clock(sync_group)
    order = list(parts.items())
    gc.collect()
    gc.disable()
    collected = time.monotonic()
    turn, end = 0, warmup + rounds
    began = time.monotonic_ns()
    try:
        while turn < end or (end := end + _more(turn - warmup, began, seconds, most)) > turn:
            if turn == warmup:
                clock.clear()
                began = time.monotonic_ns()
            shift = turn % len(order)
            for name, phases in order[shift:] + order[:shift]:
                clock.measure(name, *phases)
                after(name)
            if time.monotonic() - collected > COLLECT_S:
                gc.collect()
                collected = time.monotonic()
            turn += 1
    finally:
        gc.enable()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dict(clock.times))
    return every


def _more(done: int, began: int, seconds: float, most: int) -> int:
    """Rounds that still fit, at most as many as are done: one slow round decides little. The same on every rank."""
    if not seconds or done >= most:
        return 0
    took = sync_group(time.monotonic_ns() - began) * 1e-9
    return min(done, most - done, math.floor(done * (seconds - took) / took))


@dataclass(frozen=True)
class Pairs:
    """How many times as long as the first the second took, in calls next to each other.

    ratio: the median. low, high: between them the true median is with 95% probability. count: pairs.
    """

    ratio: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> Pairs:
        """From what each took in every pair."""
        ratios = sorted(b / a for a, b in zip(first, second, strict=True))
        count = len(ratios)
        away = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))  # of a binomial distribution, 1.96 sigma
        return cls(statistics.median(ratios), ratios[away], ratios[-1 - away], count)


def pairs(
    first: Callable[[], Any], second: Callable[[], Any], warmup: int, rounds: int, *, seconds: float = 0.0
) -> Pairs:
    """Let two take turns, each first in every other pair; of each call the slowest rank counts. Collective.

    Args:
        rounds, seconds: pairs; more of them while they fit in so many seconds, up to ``MOST_PAIRS``.
    """
    works = {"first": first, "second": second}
    parts = {name: (("total", work),) for name, work in works.items()}
    ranks = take_turns(parts, warmup, rounds, seconds=seconds, most=MOST_PAIRS)
    by_rank = {name: [rank[name, "total"] for rank in ranks] for name in works}
    slowest = {name: [max(times) for times in zip(*by_rank[name], strict=True)] for name in works}
    return Pairs.of(slowest["first"], slowest["second"])
