"""One call in which experts are lent to other ranks (``lending.py``): its plan, weights and sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from moe_comm.kernels.expert_mlp import Apart
from moe_comm.kernels.native import core
from moe_comm.layers.data_parallel.copies import Partials, Values
from moe_comm.topology import Placement
from moe_comm.topology.balance import Lent, Limits, digest, plan_rows

Orient = Callable[[Values], Sequence[Tensor | None]]
"""Returns the tensors of an ``ExpertMLP`` for those of parameters; None for missing ones."""


@dataclass(frozen=True, eq=False, slots=True)
class CallPlan:
    """The plan of one call; equal on all ranks except ``counts``.

    Attributes:
        lent: (expert, rank, rows).
        place: position of the weights of each of ``lent`` in its rank's buffers; () if they are read in place.
        digest: hash of ``lent``; 0 if it is empty.
        rows: rows of each rank.
        counts: rows of each expert, and of them those of the ranks before this one, and of this rank.
    """

    lent: tuple[Lent, ...]
    place: tuple[int, ...]
    digest: int
    rows: tuple[int, ...]
    counts: tuple[list[int], list[int], list[int]]

    def of_rank(self, rank: int) -> list[int]:
        """Return the positions in ``lent`` of the experts that ``rank`` computes, in the order of their slots."""
        return [at for at, one in enumerate(self.lent) if one.rank == rank]


@dataclass(eq=False, slots=True)
class LentCall:
    """A call with its plan, and the tensors that its experts compute with.

    Attributes:
        plan: the plan.
        homes: number of experts of this rank.
        params: the parameters; {} if no expert is lent.
        borrowed: for each expert of another rank that this rank computes its weights, [1, ...].
        lends: rows of the experts that this rank lends, if their gradients need more precision.
        partials: gradients of both.
    """

    plan: CallPlan
    homes: int
    params: Values
    borrowed: list[Values]
    lends: tuple[int, ...]
    partials: Partials | None

    @property
    def slots(self) -> int:
        """Slots that the plan uses on this rank: its experts, then those that are lent to it."""
        return self.homes + len(self.borrowed)

    def apart(self, weights: Orient, gradients: Orient, b2_columns: slice | None = None) -> dict[int, Apart]:
        """Return the experts whose weights or gradients are not in those of ``params``.

        Args:
            weights, gradients: as the experts need them. Gradients are views.
            b2_columns: columns of the last bias that the parameter has.
        """
        partials = self.partials

        def outputs(borrowed: bool, at: int) -> Sequence[Tensor | None]:
            if partials is None:
                return (None,) * 4
            return gradients(partials.copies(slice(at, at + 1)) if borrowed else partials.home(at))

        result = {row: Apart(None, partial(outputs, False, row), b2_columns) for row in self.lends}
        for at, values in enumerate(self.borrowed):
            result[self.homes + at] = Apart(tuple(weights(values)), partial(outputs, True, at), b2_columns)
        return result


def choose_rows(
    loads_E: Sequence[int], placement: Placement, limits: Limits, residents: Iterable[tuple[int, int]]
) -> tuple[tuple[Lent, ...], int]:
    """Return the plan of the native core, or of the reference if it is not built, and its digest."""
    native = core()
    if native is None:
        lent = plan_rows(loads_E, placement.homes, placement.world, limits, residents)
        return lent, digest(lent)
    triples, hashed = native.plan_rows(loads_E, placement.homes, placement.world, limits, list(residents))
    return tuple(Lent(*one) for one in triples), hashed
