"""Tile orders: each row is computed once, after it is received, with minimal waits."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from moe_comm.errors import ConfigError, InputError
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.schedule import (
    TileSchedule,
    dispatch_order,
    gather_order,
    row_order,
    scatter_order,
)
from moe_comm.overlap.simulate import TileTimeline, simulate
from moe_comm.overlap.tiles import Cut, chunk_rows

SEEDED = settings(deadline=None, derandomize=True, max_examples=60)


@dataclass(frozen=True)
class Case:
    """Input of a schedule. ``rows_EWC``: rows for each (expert, source rank, chunk)."""

    rows_EWC: np.ndarray
    ring: Ring
    cut: Cut
    seed: int

    @property
    def rows_EW(self) -> np.ndarray:
        return self.rows_EWC.sum(2)

    @property
    def chunks(self) -> int:
        return self.rows_EWC.shape[2]

    def labels(self) -> list[tuple[int, int, int]]:
        """Return (expert, source rank, chunk) of each row."""
        return [place for place, count in np.ndenumerate(self.rows_EWC) for _ in range(count)]


@st.composite
def cases(draw: st.DrawFn, chunks: int = 1, most_ranks: int = 12) -> Case:
    hosts, size = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if hosts * size > most_ranks:
        hosts = 1
    experts, seed = draw(st.integers(0, 4)), draw(st.integers(0, 2**32 - 1))
    cut = Cut(draw(st.integers(1, 7)), draw(st.sampled_from([0.0, 0.25, 0.5, math.inf])))
    max_rows = draw(st.integers(0, 12))
    generator = np.random.default_rng(seed)
    rows = generator.integers(0, max_rows + 1, (experts, hosts * size, chunks))
    rows *= generator.random(rows.shape) < draw(st.sampled_from([1.0, 0.6, 0.2]))  # empty experts, absent sources
    return Case(rows, Ring(draw(st.integers(0, hosts * size - 1)), hosts * size, size), cut, seed)


def assert_every_row_once(schedule: TileSchedule, case: Case) -> None:
    labels = case.labels()
    assert sorted(row for tile in schedule for row in tile.rows) == list(range(len(labels)))
    for tile in schedule:
        assert 1 <= len(tile.rows) <= case.cut.tile_rows
        assert {labels[row][0] for row in tile.rows} == {tile.expert}
        assert tile.ranks == tuple(sorted({labels[row][1] for row in tile.rows}))


def assert_one_tile_at_a_time(timeline: TileTimeline, workers: int) -> None:
    assert ((timeline.worker_N >= 0) & (timeline.worker_N < workers)).all()
    for worker in range(workers):
        of_worker = timeline.worker_N == worker
        order = np.lexsort((timeline.finish_N[of_worker], timeline.start_N[of_worker]))
        assert (timeline.start_N[of_worker][order][1:] >= timeline.finish_N[of_worker][order][:-1]).all()


@SEEDED
@given(cases())
def test_dispatch_computes_every_row_once_sorted_by_latest_rank_then_expert_then_row(case: Case) -> None:
    schedule = dispatch_order(case.rows_EW, case.ring, case.cut)
    assert_every_row_once(schedule, case)
    distance = {source: step for step, source in enumerate(case.ring.arrivals)}
    keys = [(max(distance[rank] for rank in t.ranks), t.expert, t.first_row) for t in schedule]
    assert keys == sorted(keys)
    assert [tile.stage for tile in schedule] == [stage for stage, _, _ in keys]
    assert all(tile.needs == tile.ranks and tile.signals == () for tile in schedule)


@SEEDED
@given(cases(chunks=3))
def test_each_chunk_and_optionally_each_expert_has_its_own_flag(case: Case) -> None:
    labels, world = case.labels(), case.ring.world
    for per_expert in (False, True):
        schedule = dispatch_order(case.rows_EWC, case.ring, case.cut, flags_per_expert=per_expert)
        assert_every_row_once(schedule, case)
        assert schedule.num_flags == world * case.chunks * (len(case.rows_EWC) if per_expert else 1)
        for tile in schedule:
            labels_of_tile = {labels[row] for row in tile.rows}
            numbers = {(e * per_expert * world + source) * case.chunks + chunk for e, source, chunk in labels_of_tile}
            assert tile.needs == tuple(sorted(numbers))


@SEEDED
@given(cases(chunks=2), st.integers(1, 3), st.booleans(), st.booleans())
def test_no_tile_is_read_before_its_rows_are_received_for_any_order_of_arrival(
    case: Case, workers: int, in_order: bool, per_expert: bool
) -> None:
    schedule = dispatch_order(case.rows_EWC, case.ring, case.cut, flags_per_expert=per_expert)
    generator = np.random.default_rng(case.seed)
    arrivals = 7.0 * generator.permutation(schedule.num_flags)
    times = generator.integers(0, 9, len(schedule)).astype(float)
    timeline = simulate(schedule, arrivals, times, workers=workers, in_order=in_order)
    assert_one_tile_at_a_time(timeline, workers)
    labels, world = case.labels(), case.ring.world
    for tile, start in zip(schedule, timeline.start_N, strict=True):
        for expert, source, chunk in (labels[row] for row in tile.rows):
            assert start >= arrivals[(expert * per_expert * world + source) * case.chunks + chunk]


def plain_row_major_finish(case: Case, arrivals: tuple[float, ...]) -> float:
    """Return the finish time if rows are cut every ``tile_rows`` of an expert and computed in row order."""
    labels, finish = case.labels(), 0.0
    for expert in range(len(case.rows_EW)):
        rows = [row for row, label in enumerate(labels) if label[0] == expert]
        for first in range(0, len(rows), case.cut.tile_rows):
            tile = rows[first : first + case.cut.tile_rows]
            finish = max(finish, *(arrivals[labels[row][1]] for row in tile)) + len(tile)
    return finish


@settings(SEEDED, max_examples=40)
@given(cases(most_ranks=4), st.integers(1, 30))
def test_the_worst_wait_is_no_longer_than_in_row_order(case: Case, gap: int) -> None:
    dispatch, row_major = (order(case.rows_EW, case.ring, case.cut) for order in (dispatch_order, row_order))
    worst_dispatch = worst_row_major = worst_plain = 0.0
    for times in itertools.permutations(gap * step for step in range(1, case.ring.world)):
        arrivals = (*times[: case.ring.rank], 0, *times[case.ring.rank :])  # own rows need no transfer
        worst_dispatch = max(worst_dispatch, simulate(dispatch, arrivals, dispatch.rows_N).idle)
        worst_row_major = max(worst_row_major, simulate(row_major, arrivals, row_major.rows_N).idle)
        worst_plain = max(worst_plain, plain_row_major_finish(case, arrivals) - case.rows_EW.sum())
    assert worst_dispatch <= worst_row_major
    assert worst_dispatch <= worst_plain


@SEEDED
@given(cases(), st.integers(0, 9))
def test_no_order_ends_earlier_if_rows_arrive_in_ring_order(case: Case, gap: int) -> None:
    schedule = dispatch_order(case.rows_EW, case.ring, case.cut)
    generator = np.random.default_rng(case.seed)
    arrivals = np.cumsum(gap * generator.integers(0, 3, case.ring.world))[case.ring.distance_W].astype(float)
    times = generator.integers(1, 5, len(schedule)).astype(float)
    ready = np.array([max(arrivals[rank] for rank in tile.ranks) for tile in schedule])
    # Lower bound: tiles that become ready at a time or later cannot finish before that time plus their durations.
    least = max((start + times[ready >= start].sum() for start in ready), default=0.0)
    assert simulate(schedule, arrivals, times).finish == least
    assert simulate(schedule, arrivals, times, in_order=False).finish == least


@pytest.mark.parametrize("world", [2, 3, 8])
def test_waits_are_strictly_shorter_with_skewed_routing(world: int) -> None:
    for rank in range(world):
        generator = np.random.default_rng(rank)
        rows_EW = generator.poisson(40 / np.arange(1, 7)[:, None], (6, world)) + 1
        case = Case(rows_EW[:, :, None], Ring(rank, world), Cut(16), rank)
        dispatch, row_major = (order(rows_EW, case.ring, case.cut) for order in (dispatch_order, row_order))
        total = int(rows_EW.sum())
        arrivals = total / world * case.ring.distance_W
        waits = [simulate(order, arrivals, order.rows_N).idle for order in (dispatch, row_major)]
        assert waits[0] < waits[1]
        assert waits[0] < plain_row_major_finish(case, tuple(arrivals)) - total
        if world > 2:  # with more than one peer, most of the wait is avoided
            assert waits[0] < waits[1] / 2


@SEEDED
@given(cases())
def test_rows_of_the_own_host_are_computed_before_rows_of_other_hosts(case: Case) -> None:
    host = case.ring.rank // case.ring.host_size
    schedule = dispatch_order(case.rows_EW, case.ring, case.cut)
    crosses = [any(rank // case.ring.host_size != host for rank in tile.ranks) for tile in schedule]
    assert crosses == sorted(crosses)


@SEEDED
@given(cases())
def test_extra_tiles_are_limited(case: Case) -> None:
    schedule = dispatch_order(case.rows_EW, case.ring, case.cut)
    plain_E = [-(-int(rows) // case.cut.tile_rows) for rows in case.rows_EW.sum(1)]
    tiles_E = [sum(tile.expert == expert for tile in schedule) for expert in range(len(plain_E))]
    if math.isinf(case.cut.extra_tiles):
        assert all(len(tile.ranks) == 1 for tile in schedule)
    else:
        assert all(n <= plain * (1 + case.cut.extra_tiles) for n, plain in zip(tiles_E, plain_E, strict=True))


def test_dispatch_order_matches_the_documented_example() -> None:
    schedule = dispatch_order([[2, 3, 3, 2], [0, 4, 1, 0]], Ring(1, 4), Cut(4))
    tiles = [(tile.stage, tile.expert, tile.first_row, tile.end_row, tile.ranks) for tile in schedule]
    assert tiles == [
        (0, 1, 10, 14, (1,)),
        (1, 0, 2, 6, (1, 2)),
        (1, 1, 14, 15, (2,)),
        (2, 0, 6, 10, (2, 3)),
        (3, 0, 0, 2, (0,)),
    ]


def test_gather_order_matches_the_documented_example() -> None:
    schedule = gather_order([4, 4, 4, 4], Ring(2, 4), Cut(2), chunks=2)
    assert [tile.needs for tile in schedule] == [(4,), (5,), (6,), (7,), (0,), (1,), (2,), (3,)]
    assert [tile.first_row for tile in schedule] == [8, 10, 12, 14, 0, 2, 4, 6]


@SEEDED
@given(cases(), st.integers(1, 4))
def test_gather_computes_every_row_once_and_waits_for_its_chunks(case: Case, chunks: int) -> None:
    rows_W = case.rows_EW.sum(0)
    rows_WC = chunk_rows(rows_W, chunks, case.cut.tile_rows)
    whole = Case(rows_WC[None], case.ring, case.cut, case.seed)
    schedule, labels = gather_order(rows_W, case.ring, case.cut, chunks), whole.labels()
    assert_every_row_once(schedule, whole)
    assert schedule.num_flags == case.ring.world * chunks
    for tile in schedule:
        assert tile.needs == tuple(sorted({labels[row][1] * chunks + labels[row][2] for row in tile.rows}))
    own = [tile.ranks == (case.ring.rank,) for tile in schedule]
    assert own == sorted(own, reverse=True)


@SEEDED
@given(cases(), st.integers(1, 3), st.integers(1, 3))
def test_a_counter_is_full_when_the_last_row_of_its_chunk_is_written(case: Case, chunks: int, workers: int) -> None:
    rows_W = case.rows_EW.sum(0)
    whole = Case(chunk_rows(rows_W, chunks, case.cut.tile_rows)[None], case.ring, case.cut, case.seed)
    schedule = scatter_order(rows_W, case.ring, case.cut, chunks)
    times = np.random.default_rng(case.seed).integers(1, 9, len(schedule)).astype(float)
    timeline = simulate(schedule, None, times, workers=workers)
    expected, counts = np.zeros(schedule.num_flags), np.zeros(schedule.num_flags, int)
    labels = whole.labels()
    for tile, end in zip(schedule, timeline.finish_N, strict=True):
        for number in {labels[row][1] * chunks + labels[row][2] for row in tile.rows}:
            expected[number], counts[number] = max(expected[number], end), counts[number] + 1
    assert timeline.raised_F().tolist() == expected.tolist()
    assert schedule.expected_F().tolist() == counts.tolist()
    if workers == 1:
        assert timeline.idle == 0


@SEEDED
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 3))
def test_ranks_with_equal_shards_never_write_to_one_destination_at_a_time(hosts: int, size: int, tiles: int) -> None:
    world, cut = hosts * size, Cut(2, math.inf)
    rings = [Ring(rank, world, size) for rank in range(world)]
    scatters = [scatter_order([2 * tiles] * world, ring, cut, chunks=tiles) for ring in rings]
    steps = list(zip(*scatters, strict=True))
    assert len(steps) == world * tiles
    for step in steps:
        assert sorted(tile.ranks for tile in step) == [(rank,) for rank in range(world)]


@SEEDED
@given(cases(), st.integers(1, 4))
def test_scatter_computes_every_row_once_and_counts_chunks(case: Case, chunks: int) -> None:
    rows_W = case.rows_EW.sum(0)
    rows_WC = chunk_rows(rows_W, chunks, case.cut.tile_rows)
    whole = Case(rows_WC[None], case.ring, case.cut, case.seed)
    schedule, labels = scatter_order(rows_W, case.ring, case.cut, chunks), whole.labels()
    assert_every_row_once(schedule, whole)
    for tile in schedule:
        assert tile.signals == tuple(sorted({labels[row][1] * chunks + labels[row][2] for row in tile.rows}))
    own = [tile.ranks == (case.ring.rank,) for tile in schedule]
    assert own == sorted(own)


def test_scatter_begins_at_the_next_rank_and_ends_with_own_rows() -> None:
    schedule = scatter_order([2, 2, 2, 2], Ring(2, 4), Cut(2))
    assert [tile.ranks for tile in schedule] == [(3,), (0,), (1,), (2,)]
    assert [tile.first_row for tile in schedule] == [6, 0, 2, 4]


@pytest.mark.parametrize(
    "rows_EW",
    [np.zeros((0, 3), int), np.zeros((4, 3), int), np.zeros((1, 3), np.uint8)],
    ids=["no experts", "empty experts", "one empty expert"],
)
def test_a_schedule_without_rows_has_no_tiles_and_no_waits(rows_EW: np.ndarray) -> None:
    ring, cut = Ring(1, 3), Cut(4)
    for schedule in (
        dispatch_order(rows_EW, ring, cut),
        dispatch_order(rows_EW, ring, cut, flags_per_expert=True),
        row_order(rows_EW, ring, cut),
        gather_order(rows_EW.sum(0), ring, cut, 2),
        scatter_order(rows_EW.sum(0), ring, cut, 2),
    ):
        assert len(schedule) == 0 and list(schedule) == []
        assert schedule.expected_F().tolist() == [0] * schedule.num_flags
        timeline = simulate(schedule, np.ones(schedule.num_flags), 1.0, workers=2)
        assert (timeline.finish, timeline.idle) == (0.0, 0.0)
        assert timeline.raised_F().tolist() == [0] * schedule.num_flags


def test_one_rank_computes_its_tiles_in_row_order_in_stage_0() -> None:
    schedule = dispatch_order([[5], [0], [3]], Ring(0, 1), Cut(4))
    assert [(tile.expert, tile.first_row, tile.end_row, tile.stage) for tile in schedule] == [
        (0, 0, 4, 0),
        (0, 4, 5, 0),
        (2, 5, 8, 0),
    ]


def test_schedules_of_many_experts_and_ranks_cover_all_rows() -> None:
    rows_EW = np.random.default_rng(0).integers(0, 600, (512, 64))
    ring, cut = Ring(37, 64, 8), Cut(128)
    schedule = dispatch_order(rows_EW, ring, cut)
    assert schedule.rows_N.sum() == rows_EW.sum()
    assert len(schedule) == (-(-rows_EW.sum(1) // 128)).sum()
    assert (np.diff(schedule.stage_N) >= 0).all()


@SEEDED
@given(st.lists(st.integers(0, 99), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 9))
def test_chunk_rows_differ_by_at_most_one_block_and_cover_the_shard(rows: list[int], chunks: int, align: int) -> None:
    rows_WC = chunk_rows(rows, chunks, align)
    assert rows_WC.shape == (len(rows), chunks) and rows_WC.sum(1).tolist() == rows
    blocks = -(-rows_WC // align)
    assert (blocks.max(1) - blocks.min(1) <= 1).all()
    ends_WC = np.cumsum(rows_WC, axis=1)
    assert ((ends_WC % align == 0) | (ends_WC == ends_WC[:, -1:])).all()


@pytest.mark.parametrize(
    "rows",
    [[[1, 2, 3]], [1, 2], [[1.0, 2.0]], [[1, -1]], [[True, False]], np.zeros((1, 2, 0), int), 3, []],
    ids=["three ranks", "one dimension", "floats", "negative", "booleans", "no chunks", "a number", "nothing"],
)
def test_invalid_row_counts_are_refused(rows: object) -> None:
    with pytest.raises(InputError, match="rows must"):
        dispatch_order(rows, Ring(0, 2), Cut(4))
    if not isinstance(rows, list) or rows != [1, 2]:
        with pytest.raises(InputError, match="rows must"):
            gather_order(rows, Ring(0, 2), Cut(4))


def test_settings_out_of_range_are_refused() -> None:
    for arguments in ((0, 0.0), (1.5, 0.0), (True, 0.0), (4, -0.1), (4, math.nan)):
        with pytest.raises(ConfigError, match=r"tile_rows|extra_tiles"):
            Cut(*arguments)
    with pytest.raises(ConfigError, match="chunks"):
        scatter_order([1], Ring(0, 1), Cut(1), chunks=0)
