"""Time contestants (the compared implementations) in interleaved rounds, so that noise affects all of them equally.

``measure_pairs`` compares two contestants with nearly equal times in the order A B, B A, A B, ... Noise that lasts
longer than a call affects both calls of a pair, and the effect of the order cancels. The median of the ratios of the
pairs therefore varies much less than the ratio of the medians.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moe_comm.bench.common.clock import Clock, Summary, gather, summarize, sync_group

MAX_ROUNDS = 500
MAX_PAIRS = 300
COLLECT_S = 0.3
"""Interval between garbage collections, which take longer than a small operator."""

Phases = tuple[tuple[str, Callable[[], Any]], ...]
"""Names and functions, in order."""
Rounds = list[dict[tuple[str, str], list[float]]]
"""For each rank, the seconds of all rounds by (contestant, phase)."""

T = TypeVar("T")


def rotated(items: Sequence[T], round_number: int) -> Sequence[T]:
    """Return ``items`` in the order of a round: each round starts with the next item."""
    first = round_number % len(items)
    return (*items[first:], *items[:first])


def run_rounds(
    contestants: Sequence[T],
    measure: Callable[[T, int], None],
    clock: Clock,
    warmup: int,
    rounds: int,
    *,
    seconds: float = 0.0,
    max_rounds: int = MAX_ROUNDS,
    collect_s: float = 0.0,
    before: Callable[[int], None] = lambda round_number: None,
    after: Callable[[int], None] = lambda round_number: None,
) -> None:
    """Call ``measure(contestant, round_number)`` in interleaved rounds: each round starts with the next contestant.

    Garbage collection is disabled, except between measurements.

    Args:
        contestants: any objects.
        measure: measures one contestant with ``clock``.
        clock: its times are discarded after the warm-up.
        warmup: number of discarded rounds.
        rounds: minimum number of measured rounds.
        seconds: add rounds while they fit into this time, because a median of few short rounds is inaccurate.
            Requires a process group.
        max_rounds: maximum number of rounds, unless ``rounds`` is larger.
        collect_s: collect garbage after a round if the last time was longer ago; 0: before each contestant.
        before, after: called with the number of each round. They are not timed.
    """
    gc.collect()
    gc.disable()
    start_ns = collected_ns = time.monotonic_ns()
    round_number = 0
    try:
        while round_number < warmup + rounds:
            if round_number == warmup:
                clock.clear()
                start_ns = time.monotonic_ns()
            before(round_number)
            for contestant in rotated(contestants, round_number):
                if not collect_s:
                    gc.collect()
                measure(contestant, round_number)
            after(round_number)
            if collect_s and time.monotonic_ns() - collected_ns > collect_s * 1e9:
                gc.collect()
                collected_ns = time.monotonic_ns()
            round_number += 1
            if round_number == warmup + rounds:
                rounds += _more_rounds(rounds, start_ns, seconds, max_rounds)
    finally:
        gc.enable()


def measure_interleaved(
    contestants: Mapping[str, Phases],
    warmup: int,
    rounds: int,
    *,
    seconds: float = 0.0,
    on_done: Callable[[str], None] = lambda name: None,
) -> Summary:
    """Return the summary of ``interleaved_times``: milliseconds by (contestant, phase). Collective."""
    return summarize(interleaved_times(contestants, warmup, rounds, seconds=seconds, on_done=on_done))


def interleaved_times(
    contestants: Mapping[str, Phases],
    warmup: int,
    rounds: int,
    *,
    seconds: float = 0.0,
    max_rounds: int = MAX_ROUNDS,
    on_done: Callable[[str], None] = lambda name: None,
) -> Rounds:
    """Measure the phases of all contestants in ``run_rounds``. Collective over the default process group.

    Args:
        contestants: phases by contestant. Several phases also give the phase ``total``.
        warmup, rounds, seconds, max_rounds: as in ``run_rounds``.
        on_done: called with the name of a contestant after its phases. It is not timed.

    Returns:
        The times of all ranks, on every rank.
    """
    clock = Clock()

    def measure(name: str, _: int) -> None:
        clock.measure(name, *contestants[name])
        on_done(name)

    run_rounds(
        list(contestants),
        measure,
        clock,
        warmup,
        rounds,
        seconds=seconds,
        max_rounds=max_rounds,
        collect_s=COLLECT_S,
    )
    return gather(dict(clock.times))


def slowest(rounds: Rounds, name: str, phase: str = "total") -> list[float]:
    """Return the seconds of the slowest rank in each round."""
    return [max(times) for times in zip(*(rank[name, phase] for rank in rounds), strict=True)]


def _more_rounds(done: int, start_ns: int, seconds: float, max_rounds: int) -> int:
    """Return how many rounds to add, the same number on every rank.

    At most ``done`` rounds are added at once, so that one slow round has little influence.
    """
    if not seconds or done >= max_rounds:
        return 0
    elapsed = sync_group(time.monotonic_ns() - start_ns) * 1e-9
    return min(done, max_rounds - done, math.floor(done * (seconds - elapsed) / elapsed))


@dataclass(frozen=True)
class PairedRatio:
    """Ratio of the times of two contestants (second over first), from adjacent calls.

    Attributes:
        ratio: median over the pairs.
        low, high: 95% confidence interval of the median.
        count: number of pairs.
    """

    ratio: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, first: Sequence[float], second: Sequence[float]) -> PairedRatio:
        """Compute the ratio from the times of both contestants in each pair."""
        ratios = sorted(b / a for a, b in zip(first, second, strict=True))
        count = len(ratios)
        rank = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))  # 1.96 sigma of a binomial distribution
        return cls(statistics.median(ratios), ratios[rank], ratios[-1 - rank], count)


def measure_pairs(
    first: Callable[[], Any], second: Callable[[], Any], warmup: int, rounds: int, *, seconds: float = 0.0
) -> PairedRatio:
    """Time two contestants in pairs of calls with alternating order. The slowest rank of each call counts. Collective.

    Args:
        rounds: minimum number of pairs.
        seconds: add pairs while they fit into this time, up to ``MAX_PAIRS``.
    """
    contestants = {"first": (("total", first),), "second": (("total", second),)}
    times = interleaved_times(contestants, warmup, rounds, seconds=seconds, max_rounds=MAX_PAIRS)
    return PairedRatio.of(slowest(times, "first"), slowest(times, "second"))
