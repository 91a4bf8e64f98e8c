"""Fit the links of a cluster description to measured transfers.

Errors are logarithmic, so that short and long measurements have the same weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

from moe_plan.machine.collectives import Link
from moe_plan.machine.hardware import Cluster

MoveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True)
class MeasuredTransfer:
    """Time of a transfer over a group of ``ranks``. ``num_bytes`` is the argument of the method of ``Cluster``.

    processor_s: seconds in which it occupied the cores that compute; None if that was not measured.
    """

    kind: MoveKind
    ranks: int
    num_bytes: int
    seconds: float
    processor_s: float | None = None


def inside_of(cluster: Cluster, moves: Sequence[MeasuredTransfer]) -> Cluster:
    """Return ``cluster`` with the link inside a host and the start time of collectives fitted to ``moves``."""

    def with_values(start: float, latency: float, rate: float) -> Cluster:
        return replace(cluster, start_s=start, inside=Link("shared memory", rate, latency, 1.0))

    return with_values(*nearest(partial(_transfer_errors, with_values, moves), (1e-4, 1e-5, 2e9)))


def between_of(cluster: Cluster, moves: Sequence[MeasuredTransfer], name: str, *, spare_cores: bool = False) -> Link:
    """Return the link between hosts fitted to ``moves``, which were measured with one rank per host.

    spare_cores: hosts have cores for transfers besides those that compute, so ``Link.processor`` is 0.
    """

    def with_values(latency: float, rate: float) -> Cluster:
        return replace(cluster, host_size=1, between=Link(name, rate, latency, 1.0))

    link = with_values(*nearest(partial(_transfer_errors, with_values, moves), (1e-4, 1e8))).between
    if spare_cores:
        return link
    occupied = [(one.processor_s, one.seconds) for one in moves if one.processor_s is not None]
    total_s = sum(seconds for _, seconds in occupied)
    return replace(link, processor=min(1.0, sum(s for s, _ in occupied) / total_s)) if total_s else link


def _transfer_errors(
    with_values: Callable[..., Cluster], moves: Sequence[MeasuredTransfer], *values: float
) -> list[float]:
    cluster = with_values(*values)
    return [math.log(_transfer_seconds(cluster, one) / one.seconds) for one in moves]


def nearest(
    errors: Callable[..., Sequence[float]], start: Sequence[float], rounds: int = 200, power: int = 1
) -> tuple[float, ...]:
    """Return positive numbers that minimize the sum of ``abs(error) ** power``.

    This is a pattern search from ``start``: multiply or divide one number at a time by a factor, which shrinks when no
    step is an improvement.
    """

    def loss(values: Sequence[float]) -> float:
        return sum(abs(error) ** power for error in errors(*values))

    best = list(start)
    least, step = loss(best), math.log(4)
    for _ in range(rounds):
        before = least
        for index, sign in product(range(len(best)), (1, -1)):
            candidate = list(best)
            candidate[index] *= math.exp(sign * step)
            total = loss(candidate)
            if total < least:
                best, least = candidate, total
        if least == before:
            step /= 2
            if step < 1e-3:
                break
    return tuple(best)


def _transfer_seconds(cluster: Cluster, one: MeasuredTransfer) -> float:
    group = range(one.ranks)
    seconds: float = getattr(cluster, one.kind)(one.num_bytes, group).seconds
    if one.kind == "all_to_all":  # dispatch or combine, which also copies the rows in memory
        seconds += cluster.accelerator.memory_seconds(2 * one.num_bytes)
    return seconds
