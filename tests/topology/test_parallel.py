"""``ParallelConfig``: groups, folding and rank order of valid mappings of up to 64 ranks; errors of others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product

import pytest

from moe_comm.errors import ConfigError
from moe_comm.topology import ATTENTION_AXES, EXPERT_AXES, ParallelConfig
from moe_comm.topology.mesh import GROUPS


def factors(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered factorizations of ``number`` into ``parts`` factors."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in factors(number // first, parts - 1))


def valid_mappings(world: int) -> Iterator[ParallelConfig]:
    """Yield all valid mappings of ``world`` ranks."""
    for tp, cp, dp, pp in factors(world, 4):
        for etp, ep, _ in factors(tp * cp * dp, 3):
            yield ParallelConfig(tp, cp, dp, pp, ep, etp)


@pytest.mark.parametrize("world", [6, 8, 12])
def test_groups_that_coincide_do_so_for_every_rank(world: int) -> None:
    """If two axes give the same group of ranks on one rank, they do so on all ranks.

    A rank creates only one process group for equal groups, and all ranks must create groups in the same order.
    """
    for config in valid_mappings(world):
        patterns = set()
        for rank in range(world):
            first_index = {config.group_of(rank, *axes): index for index, axes in reversed(list(enumerate(GROUPS)))}
            patterns.add(tuple(first_index[config.group_of(rank, *axes)] for axes in GROUPS))
        assert len(patterns) == 1, config


@pytest.mark.parametrize("world", [*range(1, 17), 24, 30, 36, 48, 60, 64])
def test_both_grids_of_every_valid_mapping_have_correct_groups(world: int) -> None:
    """Attention grid and expert grid fold onto the same pipeline stages, and the groups of each grid are correct."""
    all_ranks = list(range(world))
    checked: set[tuple[object, ...]] = set()
    for config in valid_mappings(world):
        assert config.world == world
        stage = config.tp * config.cp * config.dp
        assert stage == config.etp * config.ep * config.edp == config.stage
        # A pipeline stage has the same ranks in both grids: a contiguous range.
        expected = [tuple(range(first, first + stage)) for first in range(0, world, stage)]
        assert config.groups("tp", "cp", "dp") == config.groups("etp", "ep", "edp") == expected, config
        for grid in (ATTENTION_AXES, EXPERT_AXES):
            sizes = tuple(config.sizes[axis] for axis in grid)
            if (grid, sizes) in checked:
                continue  # groups do not depend on the other grid: test_groups_of_one_grid_do_not_depend_on_the_other
            checked.add((grid, sizes))
            # Each rank has unique coordinates. Consecutive ranks are adjacent on the fastest axis.
            place_of_rank = [config.place(rank) for rank in all_ranks]
            coordinates = [tuple(place[axis] for axis in reversed(grid)) for place in place_of_rank]
            assert coordinates == list(product(*map(range, reversed(sizes)))), config
            for axes in (axes for axes in GROUPS if set(axes) <= set(grid)):
                groups = config.groups(*axes)
                assert all(len(group) == config.size(*axes) for group in groups), (config, axes)
                assert sorted(chain.from_iterable(groups)) == all_ranks, (config, axes)
                # The ranks of a group and the list of groups are in ascending order.
                assert all(list(group) == sorted(group) for group in groups), (config, axes)
                assert groups == sorted(groups), (config, axes)


@pytest.mark.parametrize("world", [8, 24])
def test_groups_of_one_grid_do_not_depend_on_the_other(world: int) -> None:
    groups_by_sizes: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    for config in valid_mappings(world):
        for axes in GROUPS:
            grid = next(grid for grid in (ATTENTION_AXES, EXPERT_AXES) if set(axes) <= set(grid))
            groups = config.groups(*axes)
            assert groups_by_sizes.setdefault((axes, *(config.sizes[axis] for axis in grid)), groups) == groups


@pytest.mark.parametrize("world", [8, 24])
def test_ranks_of_a_group_differ_on_its_axes_only(world: int) -> None:
    for config in valid_mappings(world):
        places = [config.place(rank) for rank in range(world)]
        for axes in GROUPS:
            grid = next(grid for grid in (ATTENTION_AXES, EXPERT_AXES) if set(axes) <= set(grid))
            fixed = [axis for axis in grid if axis not in axes]
            for group in config.groups(*axes)[:: max(1, world // 8)]:
                assert all(places[rank][axis] == places[group[0]][axis] for rank in group for axis in fixed)


@pytest.mark.parametrize("world", [1, 12])
def test_group_of_returns_the_group_that_contains_the_rank(world: int) -> None:
    for config in valid_mappings(world):
        for axes in GROUPS:
            group_of_rank = {rank: group for group in config.groups(*axes) for rank in group}
            assert all(config.group_of(rank, *axes) == group_of_rank[rank] for rank in range(world)), (config, axes)
            assert config.group_of(world - 1, *reversed(axes)) == group_of_rank[world - 1]


def test_mappings_match_the_documented_examples() -> None:
    config = ParallelConfig(tp=2, dp=2, pp=2, ep=2, etp=2)
    assert [config.place(rank)["ep"] for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert config.groups("tp") == config.groups("etp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert config.groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    full_ep = ParallelConfig(tp=2, cp=2, dp=2, ep=8)
    assert full_ep.groups("ep") == [tuple(range(8))] and full_ep.groups("edp") == [(rank,) for rank in range(8)]
    assert str(ParallelConfig()) == "one rank" and str(ParallelConfig(tp=2, dp=3, ep=6)) == "tp 2, dp 3, ep 6"


def test_groups_of_131072_ranks() -> None:
    config = ParallelConfig.of(131_072, tp=8, cp=2, pp=16, ep=64)
    assert config.group_of(70_000, "ep")[0] == 70_000 - config.place(70_000)["ep"]
    groups = config.groups("tp", "cp", "dp")
    assert len(groups) == 16 and groups[1][0] == config.stage == 8192


def test_omitted_degrees_are_derived_from_the_others() -> None:
    assert ParallelConfig.of(16, tp=2, pp=2) == ParallelConfig(tp=2, dp=4, pp=2, ep=8)
    assert ParallelConfig.of(16, tp=2, pp=2, etp=2).ep == 4
    assert ParallelConfig.of(8, dp=8, ep=2).edp == 4


@pytest.mark.parametrize(
    "arguments",
    [{"tp": 3}, {"tp": 2, "dp": 8}, {"pp": 2, "etp": 3}, {"pp": 2, "ep": 8}, {"dp": 8, "ep": 3}, {"tp": 0}, {"etp": 0}],
    ids=str,
)
def test_mappings_that_do_not_fit_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ParallelConfig.of(8, **arguments)


@pytest.mark.parametrize(("axis", "size"), [("tp", 0), ("cp", -1), ("dp", 2.0), ("etp", True)])
def test_degrees_are_whole_numbers_from_one(axis: str, size: object) -> None:
    with pytest.raises(ConfigError, match=axis):
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
