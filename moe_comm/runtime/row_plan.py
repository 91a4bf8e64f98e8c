"""Plans of rows to lend, by the native core if it is built. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moe_comm.runtime.native_core import native, native_is_built
from moe_comm.topology.balance import Lent, Limits, digest, plan_rows
from moe_comm.topology.placement import Placement


def choose_rows(
    loads_E: Sequence[int], placement: Placement, limits: Limits, residents: Iterable[tuple[int, int]] = ()
) -> tuple[tuple[Lent, ...], int]:
    """Return the plan of the native core, or of the reference if it is not built, and its digest."""
    if not native_is_built():
        lent = plan_rows(loads_E, placement.homes, placement.world, limits, residents)
        return lent, digest(lent)
    triples, hashed = native().plan_rows(loads_E, placement.homes, placement.world, limits, list(residents))
    return tuple(Lent(*one) for one in triples), hashed
