"""``ExpertPlacement`` and ``Placement``: which rank holds which experts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from moe_comm.errors import ConfigError
from moe_comm.topology import ExpertPlacement, Placement

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


def test_layouts_that_do_not_fit_are_refused() -> None:
    for sizes in ((), (0, 0), (3, -1)):
        with pytest.raises(ConfigError, match="experts_per_rank"):
            ExpertPlacement(sizes)
    for num_experts, world in ((0, 2), (4, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            ExpertPlacement.balanced(num_experts, world)
    for counts in ([4], [1, 2], [5, -1]):
        with pytest.raises(ConfigError):
            ExpertPlacement.of(4, 2, counts)
    for expert in (-1, 4):
        with pytest.raises(ConfigError, match=f"expert id {expert}"):
            ExpertPlacement.balanced(4, 2).owner(expert)


def test_slots_of_a_rank_are_its_homes_then_its_copies_then_empty_slots() -> None:
    placement = Placement(((0,), (1, 0), (0,), (1,)), 2)
    assert [placement.experts_of(rank) for rank in range(2)] == [(0, 2, 1), (1, 3)]
    assert placement.slots_per_rank == (3, 2) and placement.slot_ids() == [[0], [3, 2], [1], [4]]
    assert placement.has_copies and not placement.is_contiguous
    spare = Placement(placement.owners, 2, slots=2)
    assert spare.slots_per_rank == (4, 4) and spare.slot_ids() == [[0], [4, 2], [1], [5]]
    assert spare.homes_per_rank == (2, 2) and spare.copies_per_rank == (1, 0)
    assert Placement.from_json(spare.to_json()) == spare != placement


def test_slots_for_copies_change_the_layout_and_the_digest() -> None:
    placement = Placement.contiguous(4, 2, slots=1)
    assert placement.layout == ExpertPlacement((3, 3)) and not placement.is_contiguous and not placement.has_copies
    assert placement.slot_ids() == [[0], [1], [3], [4]]
    assert len({placement.digest, Placement.contiguous(4, 2, slots=2).digest, Placement.contiguous(4, 2).digest}) == 3
    assert Placement.contiguous(4, 2, slots=0).digest == 0


def test_the_rank_with_fewer_homes_can_hold_more_copies() -> None:
    assert Placement(((0, 1), (0, 1), (0,), (0,), (1,)), 2, slots=2).copies_per_rank == (0, 2)


@SEEDED
@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_slot_ids_of_one_owner_per_expert_are_a_permutation_that_follows_the_owners(homes: list[int]) -> None:
    placement = Placement(tuple((home,) for home in homes), 5, version=3)
    slots = [slot for (slot,) in placement.slot_ids()]
    assert sorted(slots) == list(range(len(homes)))
    assert [placement.layout.owner(slot) for slot in slots] == homes
    assert placement.is_contiguous == (slots == list(range(len(homes))))
    for rank in range(5):
        assert [slots[expert] for expert in placement.experts_of(rank)] == list(placement.layout.local_range(rank))
    assert Placement.from_json(placement.to_json()) == placement


def test_the_contiguous_placement_is_the_layout_of_its_slots() -> None:
    placement = Placement.contiguous(7, 3)
    assert placement.is_contiguous and placement.layout == ExpertPlacement.balanced(7, 3)
    assert Placement.contiguous(3, 2, [0, 3]).experts_of(1) == (0, 1, 2)


@SEEDED
@given(st.lists(st.permutations(range(9)), min_size=1, max_size=4))
def test_experts_that_keep_their_home_keep_their_place(permutations: list[list[int]]) -> None:
    placement = Placement.contiguous(9, 3)
    for permutation in permutations:
        owners = [placement.owners[expert] for expert in permutation]
        new = placement.with_owners(owners)
        assert new.owners == tuple(owners) and new.version == placement.version + 1
        for rank in range(3):
            for old, stored in zip(placement.homes_of(rank), new.homes_of(rank), strict=True):
                assert stored == old or new.homes[old] != rank
            assert sorted(new.homes_of(rank)) == [one for one, home in enumerate(new.homes) if home == rank]
        slots = [slot for (slot,) in new.slot_ids()]
        assert [slots[expert] for rank in range(3) for expert in new.homes_of(rank)] == list(range(9))
        assert Placement.from_json(new.to_json()) == new
        placement = new
    assert placement.with_owners([(expert % 2,) for expert in range(9)]).order is None  # other numbers of homes


def test_the_order_of_a_rank_changes_the_digest_and_must_fit() -> None:
    owners = ((0,), (0,), (1,), (1,))
    swapped = Placement(owners, 2, order=((1, 0), (2, 3)))
    assert swapped.slot_ids() == [[1], [0], [2], [3]] and not swapped.is_contiguous
    assert swapped.digest != Placement(owners, 2).digest == 0
    assert Placement(owners, 2, order=((0, 1), (2, 3))) == Placement(owners, 2)
    for order in (((1, 2), (0, 3)), ((0, 1),), ((0, 0, 1), (2, 3))):
        with pytest.raises(ConfigError, match="the ranks are the homes of"):
            Placement(owners, 2, order=order)
    with pytest.raises(ConfigError, match="one rank stores all experts in ascending order"):
        Placement(((0,), (0,)), 1, order=((1, 0),))


def test_digests_differ_by_owner_world_and_version() -> None:
    one = Placement(((1,), (1,), (0,), (0,)), 2)
    others = [Placement(one.owners, 2, 1), Placement(one.owners, 3), Placement(one.owners[::-1], 2, 1)]
    assert len({placement.digest for placement in (one, *others)}) == 4
    assert Placement(one.owners, 2).digest == one.digest and one.digest < 2**61
    assert Placement.contiguous(4, 2).digest == 0


def test_wrong_owners_and_slots_are_refused() -> None:
    for owners in ((), ((0,), ()), ((0,), (1, 1)), ((0,), (2,)), ((-1,),)):
        with pytest.raises(ConfigError):
            Placement(owners, 2)
    for slots in (0, -1, 5):
        with pytest.raises(ConfigError, match=f"{slots} slots"):
            Placement(((0,), (1, 0), (0,), (1,)), 2, slots=slots)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '"owners"',
        '{"owners": 3, "world": 1, "version": 0}',
        *(f'{{"owners": [[0]], "world": 1, "version": 0, "slots": {slots}}}' for slots in ("false", "0.0", '""', "[]")),
        *(f'{{"owners": [[0]], "world": 1, "version": 0, "order": {order}}}' for order in ("0", "[0]", "[[0.0]]")),
    ],
)
def test_text_that_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a placement"):
        Placement.from_json(text)
