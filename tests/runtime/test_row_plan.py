"""``Residents``: copies whose weights are sent when weights change, planned from the rows of the last steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import pytest

from moe_comm.runtime.row_plan import STEPS, Residents, choose_rows
from moe_comm.topology.balance import Balance, Limits
from moe_comm.topology.placement import Placement

ROWS_PER_RANK, FIRST, LAST = 16384, 8, 40
"""Rows of a call on a rank, and the steps that are counted, after which residents have found their number."""


def call(residents: Residents, placement: Placement, loads_E: Sequence[int], limit: int) -> tuple[int, int]:
    """Plan and record a call. Return the number of its copies, and of those that are resident."""
    limits = Limits(limit, sum(loads_E), 1, 0, placement.slots or 0)
    lent, _ = choose_rows(loads_E, placement, limits, residents.pairs)
    residents.record(loads_E, limits, lent)
    return len(lent), len({(one.expert, one.rank) for one in lent}.intersection(residents.pairs))


@pytest.mark.parametrize("slots", [1, 2])
def test_residents_are_those_of_the_last_steps_up_to_the_slots(slots: int) -> None:
    placement = Balance(copies=slots).placement(Placement.contiguous(4, 2))
    residents = Residents(placement)
    assert residents.advance() == ()
    for loads_E in ((20, 0, 0, 0), (0, 0, 20, 0), (0, 20, 0, 0)):
        before = residents.pairs
        for _ in range(2):  # recomputation
            assert call(residents, placement, loads_E, 11) == (1, 0)
        assert residents.pairs == before  # until weights change
        chosen = residents.advance()
        assert residents.advance() == chosen == residents.pairs
    assert chosen == ((1, 1), (2, 0), (0, 1))[: slots + 1]
    for _ in range(STEPS):
        assert call(residents, placement, (0, 20, 0, 0), 11) == (1, 1)
        chosen = residents.advance()
    assert chosen == ((1, 1),)
    for _ in range(STEPS):
        assert call(residents, placement, (5, 5, 5, 5), 11) == (0, 0)
        chosen = residents.advance()
    assert chosen == ()


def test_a_rank_close_to_the_limit_has_residents() -> None:
    placement = Balance().placement(Placement.contiguous(3, 3))
    residents = Residents(placement)
    call(residents, placement, (30, 9, 3), 18)
    assert residents.advance() == ((0, 2),)
    assert call(residents, placement, (14, 17, 11), 18) == (0, 0)
    assert residents.advance() == ((1, 2),)  # as many as were lent, the most needed first
    assert call(residents, placement, (12, 19, 11), 18) == (1, 1)


def popularity(kind: str, experts: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield the share of each expert in each step.

    "drifting": each popularity changes by about 20%. "moved": 20% of the rows follow another popularity, drawn in each
    step. "alternating": an eighth of the experts has 8 times as many rows as the others; two such sets alternate.
    """

    def drawn() -> np.ndarray:
        weights_E = np.exp(generator.normal(size=experts))
        return weights_E / weights_E.sum()

    share_E = drawn()
    sets = [np.where(np.isin(np.arange(experts), generator.permutation(experts)[: experts // 8]), 8, 1) for _ in "ab"]
    for step in range(LAST):
        if kind == "alternating":
            share_E = sets[step % 2] / sets[step % 2].sum()
        elif step:
            change_E = np.exp(0.2 * generator.normal(size=experts))
            share_E = share_E * change_E if kind == "drifting" else 0.8 * share_E + 0.2 * drawn()
        yield share_E / share_E.sum()


@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize(("kind", "most"), [("drifting", 1.7), ("moved", 2.9), ("alternating", 2.2)])
def test_most_copies_are_resident_and_few_residents_are_not_used(kind: str, most: float, calls: int) -> None:
    """``most``: residents per copy that a call uses. calls: of a step."""
    balance, copies, resident, published = Balance(), 0, 0, 0
    for seed, experts, world in product(range(3), (32, 128), (4, 8)):
        generator, rows = np.random.default_rng(seed), ROWS_PER_RANK * world
        placement = balance.placement(Placement.contiguous(experts, world))
        residents, limit = Residents(placement), balance.limits(rows, ROWS_PER_RANK, world, 0, (1, 0)).rows
        for step, share_E in enumerate(popularity(kind, experts, generator)):
            pairs, drawn = residents.advance(), generator.multinomial(rows, share_E, size=calls).tolist()
            found = [call(residents, placement, loads_E, limit) for loads_E in drawn]
            if step >= FIRST:
                copies += sum(one for one, _ in found)
                resident += sum(one for _, one in found)
                published += len(pairs) * calls
    assert resident >= 0.75 * copies > 0
    assert published <= most * copies
