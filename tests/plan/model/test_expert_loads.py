"""``ExpertLoads``: recorded loads on any number of ranks."""

from __future__ import annotations

import pytest

from moe_plan.model.load import ExpertLoads

HOT = (9000, 500, 500)


@pytest.mark.parametrize(
    ("ranks", "slots", "copies"),
    [(2, 1, 1), (2, 2, 1), (3, 2, 1), (1, 1, 0)],
    ids=["fit", "more_than_room", "fewer_are_enough", "one_rank_holds_all"],
)
def test_a_rank_has_at_most_as_many_copies_as_there_are_other_experts(ranks: int, slots: int, copies: int) -> None:
    placed = ExpertLoads(((HOT,) * 5,), "replicate", slots).placed(ranks)
    assert placed.copies == copies
    if copies:
        assert placed.kind == "replicate" and placed.ratio == pytest.approx(1, abs=1e-3) and placed.before > 1.5
    else:
        assert placed.kind == "fixed" and placed.ratio == placed.before == 1.0
