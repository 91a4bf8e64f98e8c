"""Replay of recorded loads of experts with lending: rows per rank before and after, copies and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_comm.layers.transformer.shape import MASTER, ModelShape
from moe_comm.runtime.row_plan import choose_rows
from moe_comm.topology.assignment import Loads
from moe_comm.topology.balance import Balance, busiest_transfers, rows_of_ranks
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import over_mean
from moe_plan.machine.hardware import Cluster, item_bytes


@dataclass(frozen=True)
class LendingReplay:
    """Steps of one layer with lent experts.

    Attributes:
        before, ratio: rows of the busiest rank over the mean, without lending and with it.
        copies: lent experts in a step, of all ranks.
        busiest: lent experts that one rank sends or receives in a step at most.
        saved_s: seconds that a step saves, after the cost of the copies; by the costs of the plan.
    """

    before: float
    ratio: float
    copies: float
    busiest: float
    saved_s: float


def replay_lending(steps: Sequence[Loads], world: int, balance: Balance, costs: tuple[int, int]) -> LendingReplay:
    """Return what lending would have done in ``steps`` on ``world`` ranks with consecutive experts.

    Args:
        costs: nanoseconds of a row and of a copy, as ``Balance.costs``.
    """
    homes = balance.placement(Placement.contiguous(len(steps[0]), world))
    before = after = copies = busiest = 0
    for loads_E in steps:
        # The rows of a rank's tokens are unknown: those of the mean.
        slots = -(-sum(loads_E) // world)
        limits = balance.limits(sum(loads_E), slots, world, homes.slots or 0, costs)
        lent, _ = choose_rows(loads_E, homes, limits)
        before += max(rows_of_ranks(loads_E, homes.homes, world, ()))
        after += max(rows_of_ranks(loads_E, homes.homes, world, lent))
        copies += len(lent)
        busiest += busiest_transfers((homes.homes[one.expert], one.rank) for one in lent)
    count, rows = len(steps), sum(map(sum, steps))
    saved_s = ((before - after) * costs[0] - busiest * costs[1]) / count * 1e-9
    return LendingReplay(
        over_mean(before, rows, world), over_mean(after, rows, world), copies / count, busiest / count, saved_s
    )


@dataclass(frozen=True)
class Lending:
    """Lending on a cluster, with the costs of its accelerators and links.

    elements: of an expert. size: bytes of each.
    """

    cluster: Cluster
    elements: int
    size: int
    dtype: str

    @classmethod
    def of(cls, shape: ModelShape, cluster: Cluster, dtype: str) -> Lending:
        elements = shape.parameters("moe")["experts"] // shape.experts
        return cls(cluster, elements, item_bytes(dtype), dtype)

    def on_one_host(self, ranks: int) -> bool:
        return ranks <= self.cluster.host_size

    def balance(self, ranks: int) -> Balance:
        """Return the settings for ``ranks`` expert-parallel ranks, as ``placement.balance`` of the trainer."""
        gpu = self.cluster.accelerator
        link = self.cluster.inside if self.on_one_host(ranks) else self.cluster.between
        rate = gpu.flops[self.dtype] * gpu.efficiency[self.dtype] * gpu.sustained
        return Balance(flops=min(max(rate, 1e6), 1e18), bytes_per_s=min(max(link.rate, 1e6), 1e18))

    def costs(self, ranks: int) -> tuple[int, int]:
        """Return the nanoseconds of a row and of a copy."""
        return self.balance(ranks).costs(self.elements, self.size, hosts=1)

    def in_place(self, ranks: int) -> bool:
        """Whether ranks read the weights of others in shared memory."""
        return self.cluster.direct and self.on_one_host(ranks)

    def bytes_of_copy(self, ranks: int) -> int:
        """Return the bytes per element that a copy takes: weights in forward and backward, and a gradient in fp32."""
        return MASTER + (0 if self.in_place(ranks) else 2 * self.size)
