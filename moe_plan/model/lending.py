"""Replay of recorded loads of experts with lending: rows per rank before and after, copies and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moe_comm.layers.transformer.shape import MASTER, ModelShape
from moe_comm.runtime.row_plan import Residents, choose_rows
from moe_comm.topology.assignment import Loads
from moe_comm.topology.balance import Balance, busiest_transfers, rows_of_ranks
from moe_comm.topology.placement import Placement
from moe_comm.topology.rebalance import over_mean
from moe_plan.machine.hardware import Cluster, item_bytes

COUNTS = ("copies", "residents", "resident", "busiest", "published", "fresh")
"""Fields of ``LendingReplay`` that are counted."""


@dataclass(frozen=True)
class LendingReplay:
    """Steps of one layer with lent experts.

    Attributes:
        before, ratio: rows of the busiest rank over the mean, without lending and with it.
        copies, residents, resident: of all ranks in a step: lent experts, copies whose weights were sent before the
            step, and lent experts that were among these.
        busiest, published, fresh: at most of one rank in a step: lent experts that it sends or receives, copies whose
            weights it sends or receives before the step, and in it.
        saved_s: seconds that a step saves, after the cost of the copies; by the costs of the plan.
    """

    before: float
    ratio: float
    copies: float
    residents: float
    resident: float
    busiest: float
    published: float
    fresh: float
    saved_s: float


def replay_lending(
    steps: Sequence[Loads], world: int, balance: Balance, costs: tuple[int, int], in_place: bool = False
) -> LendingReplay:
    """Return what lending would have done in ``steps`` on ``world`` ranks with consecutive experts.

    Args:
        steps: loads in the order of the steps. The first step has no residents.
        costs: nanoseconds of a row and of a copy, as ``Balance.costs``.
        in_place: ranks read the weights of others where they are, so none are sent and there are no residents.
    """
    homes = balance.placement(Placement.contiguous(len(steps[0]), world))
    residents, totals = Residents(homes), Counter[str]()
    for loads_E in steps:
        # The rows of a rank's tokens are unknown: those of the mean.
        slots, pairs = -(-sum(loads_E) // world), residents.advance()
        limits = balance.limits(sum(loads_E), slots, world, homes.slots or 0, costs)
        lent, _ = choose_rows(loads_E, homes, limits, pairs)
        if not in_place:
            residents.record(loads_E, limits, lent)
        used = [(one.expert, one.rank) for one in lent]
        fresh = [one for one in used if one not in pairs]
        totals["before"] += max(rows_of_ranks(loads_E, homes.homes, world, ()))
        totals["after"] += max(rows_of_ranks(loads_E, homes.homes, world, lent))
        totals["copies"] += len(used)
        totals["residents"] += len(pairs)
        totals["resident"] += len(used) - len(fresh)
        for name, copies in (("busiest", used), ("published", pairs), ("fresh", fresh)):
            totals[name] += busiest_transfers((homes.homes[expert], rank) for expert, rank in copies)
    count, rows = len(steps), sum(map(sum, steps))
    saved_s = ((totals["before"] - totals["after"]) * costs[0] - totals["fresh"] * costs[1]) / count * 1e-9
    return LendingReplay(
        before=over_mean(totals["before"], rows, world),
        ratio=over_mean(totals["after"], rows, world),
        saved_s=saved_s,
        **{name: totals[name] / count for name in COUNTS},
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

    def bytes_of_step(self, copies: float, published: float, fresh: float, ranks: int, calls: int) -> float:
        """Return the bytes per element that copies take in a step of ``calls`` calls.

        Residents receive weights once, other lent experts in forward and backward of each call, and each lent expert
        returns a gradient in fp32.

        Args:
            copies, published, fresh: see ``LendingReplay``, of all ranks or of one.
        """
        weights = 0 if self.in_place(ranks) else self.size
        return calls * (copies * MASTER + fresh * 2 * weights) + published * weights
