"""Plans of rows to lend, by the native core if it is built, and experts whose copies stay resident. Loads no torch.

When weights change, the new ones are sent to residents first, while other modules compute, and plans prefer these
copies. So the residents of a step should be those that its plans will need. They are planned from the rows of the last
steps, the latest first, each with the residents that are chosen already:

    rows of step t - 1 ─▶ plan with half the margin ─▶ a b      step t - 2 ─▶ plan that prefers a b ─▶ a b c      ...

Half the margin, because a rank that was close to the limit may be above it next. The earlier steps keep the residents
of routing that alternates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from moe_comm.runtime.native_core import native, native_is_built
from moe_comm.topology.balance import Lent, Limits, digest, plan_rows
from moe_comm.topology.placement import Placement

STEPS = 4
"""Number of last steps from which residents are planned."""
Copy = tuple[int, int]
"""Expert and rank of a copy."""


def choose_rows(
    loads_E: Sequence[int], placement: Placement, limits: Limits, residents: Iterable[Copy] = ()
) -> tuple[tuple[Lent, ...], int]:
    """Return the plan of the native core, or of the reference if it is not built, and its digest."""
    if not native_is_built():
        lent = plan_rows(loads_E, placement.homes, placement.world, limits, residents)
        return lent, digest(lent)
    triples, hashed = native().plan_rows(loads_E, placement.homes, placement.world, limits, list(residents))
    return tuple(Lent(*one) for one in triples), hashed


class Residents:
    """The residents of one layer; equal on all ranks.

    Args:
        placement: homes, and slots for copies on each rank.

    Attributes:
        pairs: the copies, the most needed first; at most as many as the last steps lent. They change only in
            ``advance``, so all calls of a step, and their recomputation, plan with the same ones.
    """

    def __init__(self, placement: Placement) -> None:
        self.pairs: tuple[Copy, ...] = ()
        self._placement = placement
        # What calls lent, by their rows and limits: in each of the last steps, the latest first, and in this step.
        self._steps: list[dict[tuple[tuple[int, ...], Limits], list[Copy]]] = []
        self._calls: dict[tuple[tuple[int, ...], Limits], list[Copy]] = {}

    def record(self, loads_E: Sequence[int], limits: Limits, lent: Iterable[Lent]) -> None:
        """Record the plan of a call. Recomputation may record it again."""
        self._calls[tuple(loads_E), limits] = [(one.expert, one.rank) for one in lent]

    def advance(self) -> tuple[Copy, ...]:
        """Choose and return the residents of the next step, if a call has been recorded since the last time."""
        if self._calls:
            self._steps, self._calls = [self._calls, *self._steps][:STEPS], {}
            most = len({pair for calls in self._steps for lent in calls.values() for pair in lent})
            used, chosen = Counter[int](), []
            for expert, rank in self._planned(most)[:most]:
                if used[rank] < (self._placement.slots or 0):
                    used[rank] += 1
                    chosen.append((expert, rank))
            self.pairs = tuple(chosen)
        return self.pairs

    def _planned(self, most: int) -> list[Copy]:
        """Return the copies that plans of the last steps need, until there are ``most``."""
        planned = dict[Copy, None]()
        for step, calls in enumerate(self._steps):
            for loads_E, limits in calls:
                if len(planned) >= most:
                    break
                mean = -(-sum(loads_E) // self._placement.world)
                rows = limits.rows if step else (limits.rows + mean) // 2
                lent, _ = choose_rows(loads_E, self._placement, limits._replace(rows=rows), [*planned, *self.pairs])
                lent = tuple(sorted(lent, key=lambda one: (-one.rows, one)))
                planned.update(dict.fromkeys((one.expert, one.rank) for one in lent))
        return list(planned)
