"""``ExpertLoads``: recorded loads on any number of ranks."""

from __future__ import annotations

import pytest

from moe_plan.model.load import ExpertLoads


@pytest.mark.parametrize(("ranks", "kind"), [(2, "relocate"), (4, "fixed"), (1, "fixed")])
def test_experts_move_if_ranks_have_several(ranks: int, kind: str) -> None:
    placed = ExpertLoads(((((9000, 5000, 500, 500)),) * 5,), "relocate").placed(ranks)
    assert placed.kind == kind
    if kind == "fixed":
        assert placed.ratio == placed.before and placed.moved == 0
    else:
        assert placed.ratio == pytest.approx(9500 / 7500) and placed.before == pytest.approx(14000 / 7500)
