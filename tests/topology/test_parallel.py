"""``ParallelConfig``: groups, folding and order for every legal mapping of up to 64 ranks; errors of illegal ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product

import pytest

from moe_comm.errors import ConfigError
from moe_comm.topology import ATTENTION_AXES, EXPERT_AXES, ParallelConfig
from moe_comm.topology.mesh import GROUPS


def factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write ``number`` as a product of ``parts`` numbers."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factors(number // first, parts - 1))


def legal(world: int) -> Iterator[ParallelConfig]:
    for tp, cp, dp, pp in factors(world, 4):
        for etp, ep, _ in factors(tp * cp * dp, 3):
            yield ParallelConfig(tp, cp, dp, pp, ep, etp)


@pytest.mark.parametrize("world", [4, 6, 8, 12])
def test_groups_that_coincide_do_so_for_every_rank(world: int) -> None:
    """A rank creates a group of the same ranks once; the creation order must be the same on all ranks that share it."""
    for config in legal(world):
        patterns = set()
        for rank in range(world):
            first = {config.group_of(rank, *axes): place for place, axes in reversed(list(enumerate(GROUPS)))}
            patterns.add(tuple(first[config.group_of(rank, *axes)] for axes in GROUPS))
        assert len(patterns) == 1, config


@pytest.mark.parametrize("world", range(1, 65))
def test_every_legal_mapping(world: int) -> None:
    """Both grids fold onto the same pipeline stages, and the groups of each grid are right."""
    everyone = list(range(world))
    checked: set[tuple[object, ...]] = set()
    for config in legal(world):
        assert config.world == world
        stage = config.tp * config.cp * config.dp
        assert stage == config.etp * config.ep * config.edp == config.stage
        # The same pipeline stage on both sides: stage s is one block of ranks.
        expected = [tuple(range(first, first + stage)) for first in range(0, world, stage)]
        assert config.groups("tp", "cp", "dp") == config.groups("etp", "ep", "edp") == expected, config
        for side in (ATTENTION_AXES, EXPERT_AXES):
            sizes = tuple(config.sizes[axis] for axis in side)
            if (side, sizes) in checked:
                continue  # a test below shows independence of the other grid
            checked.add((side, sizes))
            # Each rank has unique coordinates, and ranks count up along the fastest axis first.
            places = [config.place(rank) for rank in everyone]
            coordinates = [tuple(place[axis] for axis in reversed(side)) for place in places]
            assert coordinates == list(product(*map(range, reversed(sizes)))), config
            for axes in (axes for axes in GROUPS if set(axes) <= set(side)):
                groups = config.groups(*axes)
                assert all(len(group) == config.size(*axes) for group in groups), (config, axes)
                assert sorted(chain.from_iterable(groups)) == everyone, (config, axes)
                # Ranks of a group are ordered by coordinates, fastest axis first: ascending. So are the groups.
                assert all(list(group) == sorted(group) for group in groups), (config, axes)
                assert groups == sorted(groups), (config, axes)


@pytest.mark.parametrize("world", [8, 24, 64])
def test_groups_of_one_side_do_not_depend_on_the_other(world: int) -> None:
    found: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    for config in legal(world):
        for axes in GROUPS:
            side = next(side for side in (ATTENTION_AXES, EXPERT_AXES) if set(axes) <= set(side))
            groups = config.groups(*axes)
            assert found.setdefault((axes, *(config.sizes[axis] for axis in side)), groups) == groups


@pytest.mark.parametrize("world", [8, 24, 64])
def test_ranks_of_a_group_differ_on_its_axes_only(world: int) -> None:
    for config in legal(world):
        places = [config.place(rank) for rank in range(world)]
        for axes in GROUPS:
            side = next(side for side in (ATTENTION_AXES, EXPERT_AXES) if set(axes) <= set(side))
            fixed = [axis for axis in side if axis not in axes]
            for group in config.groups(*axes)[:: max(1, world // 8)]:
                assert all(places[rank][axis] == places[group[0]][axis] for rank in group for axis in fixed)


@pytest.mark.parametrize("world", [1, 12, 16])
def test_one_ranks_group_is_the_one_of_all_groups_that_holds_it(world: int) -> None:
    for config in legal(world):
        for axes in GROUPS:
            found = {rank: group for group in config.groups(*axes) for rank in group}
            assert all(config.group_of(rank, *axes) == found[rank] for rank in range(world)), (config, axes)
            assert config.group_of(world - 1, *reversed(axes)) == found[world - 1]


def test_the_worked_pictures_of_the_documentation() -> None:
    config = ParallelConfig(tp=2, dp=2, pp=2, ep=2, etp=2)
    assert [config.place(rank)["ep"] for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert config.groups("tp") == config.groups("etp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert config.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    wide = ParallelConfig(tp=2, cp=2, dp=2, ep=8)
    assert wide.groups("ep") == [tuple(range(8))] and wide.groups("edp") == [(rank,) for rank in range(8)]
    assert str(ParallelConfig()) == "one rank" and str(ParallelConfig(tp=2, dp=3, ep=6)) == "tp 2, dp 3, ep 6"


def test_a_hundred_thousand_ranks() -> None:
    config = ParallelConfig.of(131_072, tp=8, cp=2, pp=16, ep=64)
    assert config.group_of(70_000, "ep")[0] == 70_000 - config.place(70_000)["ep"]
    groups = config.groups("tp", "cp", "dp")
    assert len(groups) == 16 and groups[1][0] == config.stage == 8192


def test_omitted_degrees_are_derived_from_the_others() -> None:
    assert ParallelConfig.of(16, tp=2, pp=2) == ParallelConfig(tp=2, dp=4, pp=2, ep=8)
    assert ParallelConfig.of(16, tp=2, pp=2, etp=2).ep == 4
    assert ParallelConfig.of(8, dp=8, ep=2).edp == 4


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ({"world": 8, "tp": 3}, "= 3 must divide the 8 ranks"),
        ({"world": 8, "tp": 2, "dp": 2}, "= 4, but there are 8 ranks"),
        ({"world": 8, "tp": 2, "dp": 8}, "= 16, but there are 8 ranks"),
        ({"world": 8, "pp": 2, "etp": 3}, "etp = 3 must divide the ranks of a pipeline stage, 4"),
        ({"world": 8, "pp": 2, "ep": 8}, r"etp \* ep = 1 \* 8 = 8 must divide .* = 1 \* 1 \* 4 = 4"),
        ({"world": 12, "ep": 4, "etp": 2}, r"= 2 \* 4 = 8 must divide .* = 12"),
        ({"world": 8, "tp": 0}, "= 0 must divide the 8 ranks"),
        ({"world": 8, "etp": 0}, "etp = 0 must divide"),
    ],
)
def test_mappings_that_do_not_fit_name_both_numbers(given: dict[str, int], numbers: str) -> None:
    with pytest.raises(ConfigError, match=numbers):
        ParallelConfig.of(**given)


@pytest.mark.parametrize("axis", ["tp", "cp", "dp", "pp", "ep", "etp"])
@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_degrees_are_whole_numbers_from_one(axis: str, size: object) -> None:
    with pytest.raises(ConfigError, match=f"{axis} must be a whole number of at least 1; got {size!r}"):
        ParallelConfig(**{axis: size})  # type: ignore[arg-type]


def test_ranks_and_axes_that_do_not_exist_are_refused() -> None:
    config = ParallelConfig(tp=2, dp=2, ep=4)
    for rank in (-1, 4):
        with pytest.raises(ConfigError, match=rf"rank {rank} is outside 0\.\.3"):
            config.place(rank)
    for axes in (("tp", "ep"), ("xp",)):
        with pytest.raises(ConfigError, match="axes of a group must all be in"):
            config.groups(*axes)
        with pytest.raises(ConfigError, match="axes of a group must all be in"):
            config.group_of(0, *axes)
