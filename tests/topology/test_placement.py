"""``ExpertPlacement``: which rank holds which experts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from moe_comm.errors import ConfigError
from moe_comm.topology import ExpertPlacement

SEEDED = settings(deadline=None, derandomize=True)


@SEEDED
@given(st.integers(1, 300), st.integers(1, 64))
def test_balanced_sizes_differ_by_one_at_most_and_larger_come_first(num_experts: int, world: int) -> None:
    sizes = ExpertPlacement.balanced(num_experts, world).experts_per_rank
    assert len(sizes) == world and sum(sizes) == num_experts
    assert max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)


@SEEDED
@given(st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(any))
def test_every_expert_has_exactly_one_owner_whose_range_holds_it(sizes: list[int]) -> None:
    placement = ExpertPlacement.of(sum(sizes), len(sizes), sizes)
    assert placement.num_experts == sum(sizes) and placement.world == len(sizes)
    assert [e for rank in range(placement.world) for e in placement.local_range(rank)] == list(range(sum(sizes)))
    for expert in range(sum(sizes)):
        assert expert in placement.local_range(placement.owner(expert))
    assert [len(placement.local_range(rank)) for rank in range(placement.world)] == sizes
    assert placement.offsets[0] == 0 and placement.offsets[-1] == sum(sizes)


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0), (3, -1)])
def test_placements_without_experts_or_with_negative_counts_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="experts_per_rank"):
        ExpertPlacement(sizes)


@pytest.mark.parametrize(("num_experts", "world"), [(0, 2), (4, 0), (-1, 1)])
def test_balancing_needs_an_expert_and_a_rank(num_experts: int, world: int) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        ExpertPlacement.balanced(num_experts, world)


@pytest.mark.parametrize("sizes", [[4], [1, 2], [2, 2, 0], [5, -1]])
def test_sizes_that_do_not_fit_are_refused_with_what_was_expected(sizes: list[int]) -> None:
    with pytest.raises(ConfigError):
        ExpertPlacement.of(4, 2, sizes)


@pytest.mark.parametrize("expert", [-1, 4])
def test_an_expert_id_out_of_range_has_no_owner(expert: int) -> None:
    with pytest.raises(ConfigError, match=f"expert id {expert}"):
        ExpertPlacement.balanced(4, 2).owner(expert)
