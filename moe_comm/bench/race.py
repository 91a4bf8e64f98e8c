"""Pieces of work that take turns, so that noise hits all alike; what each took is the median of its rounds."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from moe_comm.bench.clock import Clock, Stats, summarise, sync_group

MOST_ROUNDS = 500
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
    after: Callable[[str], None] = lambda name: None,
) -> Rounds:
    """What every rank measured, on every rank. Collective over the default group.

    Several phases of a part also give its ``total``. Each round begins with another part.

    Args:
        seconds: as many more rounds as fit in it: a median over few rounds of something short means little.
        after: called with the part's name when it is done, and not timed.
    """
    clock = Clock(sync_group)
    order = list(parts.items())
    gc.collect()
    gc.disable()
    collected = time.monotonic()
    turn, end = 0, warmup + rounds
    try:
        while turn < end:
            began = time.monotonic_ns()
            if turn == warmup:
                clock.clear()
            shift = turn % len(order)
            for name, phases in order[shift:] + order[:shift]:
                clock.measure(name, *phases)
                after(name)
            if turn == warmup and seconds:
                took = sync_group(time.monotonic_ns() - began) * 1e-9  # the slowest rank's, and so alike on all
                end = warmup + max(rounds, min(MOST_ROUNDS, math.ceil(seconds / took)))
            if time.monotonic() - collected > COLLECT_S:
                gc.collect()
                collected = time.monotonic()
            turn += 1
    finally:
        gc.enable()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, dict(clock.times))
    return every
