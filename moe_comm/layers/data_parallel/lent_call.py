"""One call in which experts are lent to other ranks (``lending.py``): its plan, weights and sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from moe_comm.kernels.expert_mlp import Apart
from moe_comm.kernels.native import core
from moe_comm.topology import Placement
from moe_comm.topology.balance import Lent, Limits, digest, plan_rows

Values = Mapping[str, Tensor]
"""Tensors by name of a parameter."""
Orient = Callable[[Values], Sequence[Tensor | None]]
"""Returns the tensors of an ``ExpertMLP`` for those of parameters; None for missing ones."""


@dataclass(frozen=True, eq=False, slots=True)
class CallPlan:
    """The plan of one call; equal on all ranks except ``cuts``.

    Attributes:
        lent: (expert, rank, rows).
        place: position of the weights of each of ``lent`` in its rank's buffers; () if they are read in place.
        digest: hash of ``lent``; 0 if it is empty.
        rows: rows of each rank.
        cuts: for each lent expert the ids of its slots in the layout, the home's first, and the number of this rank's
            rows for each of them, in the order of (token, slot).
    """

    lent: tuple[Lent, ...]
    place: tuple[int, ...]
    digest: int
    rows: tuple[int, ...]
    cuts: dict[int, tuple[list[int], list[int]]]

    def of_rank(self, rank: int) -> list[int]:
        """Return the positions in ``lent`` of the experts that ``rank`` computes, in the order of their slots."""
        return [at for at, one in enumerate(self.lent) if one.rank == rank]


class Partials:
    """The gradients of one call that this rank adds up before they are rounded: of experts that it has been lent, and
    of its own experts that it lends, if these are not fp32. Allocated when backward asks for them.

    Args:
        params: the trained parameters.
        borrowed: number of experts that the rank has been lent.
        allocate: returns [N, width], N rows of fp32, from N and the width.
    """

    def __init__(
        self, params: Values, borrowed: int, allocate: Callable[[int, int], tuple[Tensor, Tensor | None]]
    ) -> None:
        self._shapes = {name: param.shape[1:] for name, param in params.items()}
        self._width = sum(shape.numel() for shape in self._shapes.values())
        self._borrowed, self._allocate = borrowed, allocate
        self._rows: tuple[Tensor, Tensor | None] | None = None
        self._home: dict[int, Tensor] = {}

    def rows(self) -> tuple[Tensor, Tensor | None]:
        """Return [N, width] gradients of the experts lent to this rank, and the shared memory that has them."""
        if self._rows is None:
            self._rows = self._allocate(self._borrowed, self._width)
        return self._rows

    def values(self, row_X: Tensor) -> dict[str, Tensor]:
        """Return the gradients in a row, [1, ...] by name of the parameter."""
        parts = row_X.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(1, *shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def borrowed(self, at: int) -> dict[str, Tensor]:
        return self.values(self.rows()[0][at])

    def home(self, row: int) -> dict[str, Tensor]:
        """Return the gradients of the expert at ``row`` of the parameters."""
        if row not in self._home:
            self._home[row] = self._allocate(0, self._width)[0].new_empty(self._width)
        return self.values(self._home[row])

    def release(self) -> None:
        """Release the memory."""
        self._rows, self._home = None, {}


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
            return gradients(partials.borrowed(at) if borrowed else partials.home(at))

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
