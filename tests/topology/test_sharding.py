"""``Sharding``: the boxes of all ranks tile the full tensor once per replica, and ``take`` agrees with them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from moe_comm.errors import ConfigError
from moe_comm.topology import ExpertPlacement, ParallelConfig, Sharding, ShardSlice, Split, row_range, shard_slice

SEEDED = settings(deadline=None, derandomize=True, max_examples=60)


@st.composite
def shardings(draw: st.DrawFn) -> tuple[ParallelConfig, Sharding]:
    """A mapping of up to 16 ranks and a parameter split over one grid: segments, uneven sizes, up to 3 dimensions."""
    tp, cp, dp, pp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 4), (1, 2), (1, 2), (1, 2)))
    etp = draw(st.sampled_from([n for n in (1, 2, 4) if (tp * cp * dp) % n == 0]))
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if (tp * cp * dp) % (etp * n) == 0]))
    config = ParallelConfig(tp, cp, dp, pp, ep, etp)
    expert = draw(st.booleans())
    dims = draw(st.integers(1, 3))
    axes = draw(st.lists(st.sampled_from(("etp", "ep") if expert else ("tp",)), unique=True, max_size=dims))
    shape, splits = [draw(st.integers(1, 4)) for _ in range(dims)], []
    for dim, axis in zip(draw(st.permutations(range(dims))), axes, strict=False):
        parts = config.sizes[axis]
        if draw(st.booleans()):
            cut = draw(st.lists(st.integers(0, 3), min_size=parts, max_size=parts).filter(any))
            shape[dim] = sum(cut)
            splits.append(Split(dim, axis, sizes=tuple(cut)))
        else:
            segments = draw(st.integers(1, 3))
            shape[dim] = parts * segments * draw(st.integers(1, 2))
            splits.append(Split(dim, axis, segments))
    return config, Sharding(tuple(shape), tuple(splits), expert)


@SEEDED
@given(shardings())
def test_the_ranks_that_count_once_tile_the_tensor(case: tuple[ParallelConfig, Sharding]) -> None:
    config, sharding = case
    covered = torch.zeros(sharding.shape, dtype=torch.int64)
    copies = torch.zeros(sharding.shape, dtype=torch.int64)
    for rank in range(config.stage):
        place = config.place(rank)
        for box in sharding.boxes(place, config.sizes):
            copies[box.full] += 1
            covered[box.full] += sharding.counts_once(place)
    assert (covered == 1).all() and (copies == config.size(*sharding.sum_axes)).all()


@SEEDED
@given(shardings())
def test_boxes_reassemble_the_parts_of_all_ranks(case: tuple[ParallelConfig, Sharding]) -> None:
    config, sharding = case
    full = torch.arange(torch.Size(sharding.shape).numel()).view(sharding.shape)
    reassembled = torch.full_like(full, -1)
    for rank in range(config.world):
        place = config.place(rank)
        part = sharding.take(full, place, config.sizes)
        assert tuple(part.shape) == sharding.local_shape(place, config.sizes)
        boxes = sharding.boxes(place, config.sizes)
        assert sum(part[box.local].numel() for box in boxes) == part.numel()
        for box in boxes:
            assert torch.equal(part[box.local], full[box.full])
            reassembled[box.full] = part[box.local]
    assert torch.equal(reassembled, full)


@SEEDED
@given(shardings(), st.integers(1, 5), st.booleans())
def test_the_shard_slices_of_a_part_tile_it(case: tuple[ParallelConfig, Sharding], owners: int, even: bool) -> None:
    """Their boxes select the same values of the full tensor, for each dimension and each split of the part."""
    config, sharding = case
    full = torch.arange(torch.Size(sharding.shape).numel()).view(sharding.shape)
    for rank in range(config.stage):
        place = config.place(rank)
        part = sharding.take(full, place, config.sizes)
        times = torch.zeros_like(part)
        for index in range(owners):
            share = shard_slice(part.shape, index, owners, even)
            share.of(times).add_(1)
            own = part.new_full(share.shape(part.shape), -1)
            for box in sharding.boxes(place, config.sizes, share):
                assert (own[box.local] == -1).all()
                own[box.local] = full[box.full]
            assert torch.equal(own, share.of(part))
        assert (times == 1).all()


@SEEDED
@given(st.lists(st.integers(0, 20), min_size=1, max_size=3), st.integers(1, 9), st.booleans())
def test_each_owner_gets_a_slice_if_a_dimension_is_long_enough(shape: list[int], owners: int, even: bool) -> None:
    """Each rank selects the dimension on its own, so the choice must not depend on the rank."""
    slices = [shard_slice(shape, index, owners, even) for index in range(owners)]
    [dim] = {share.dim for share in slices}
    counts = [torch.Size(share.shape(shape)).numel() for share in slices]
    assert sum(counts) == torch.Size(shape).numel() and max(counts) == counts[0]
    gets_all = [len(row_range(length, owners - 1, owners)) > 0 for length in shape]
    divides = [length % owners == 0 for length in shape]
    if gets_all[0] or not all(shape):
        assert dim == 0
    elif any(divides):
        assert min(counts) == max(counts)
    elif even:
        assert dim == 0
    else:
        assert not any(gets_all) or min(counts) > 0


def test_shard_slices_of_few_experts_split_another_dimension() -> None:
    assert [shard_slice((1, 8, 6), index, 4) for index in (0, 3)] == [
        ShardSlice(1, range(2)),
        ShardSlice(1, range(6, 8)),
    ]
    assert shard_slice((2, 6, 8), 1, 4) == ShardSlice(2, range(2, 4)), "4 divides 8 but not 6"
    assert shard_slice((1, 6, 5), 1, 4) == ShardSlice(1, range(2, 4)), "2 of 6 is a smaller share than 2 of 5"
    assert shard_slice((1, 6, 5), 1, 4, even=True) == ShardSlice(0, range(1, 1)), "4 divides no dimension"
    assert shard_slice((50257, 768), 7, 8) == ShardSlice(0, range(43981, 50257)), "dimension 0 is long enough"


@given(st.integers(0, 40), st.integers(1, 9))
@SEEDED
def test_row_ranges_are_those_of_torch_chunk(rows: int, parts: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(parts)] if rows else []
    ranges = [list(row_range(rows, index, parts)) for index in range(parts)]
    assert [r for r in ranges if r] == chunks and sum(map(len, ranges)) == rows


def test_a_fused_gate_and_up_projection_is_split_per_segment() -> None:
    config = ParallelConfig(dp=4, ep=2, etp=2)
    sharding = Sharding((4, 8, 1), (Split(0, "ep"), Split(1, "etp", segments=2)), expert=True)
    full = torch.arange(32).view(4, 8, 1)
    part = sharding.take(full, config.place(3), config.sizes)  # ep 1, etp 1
    assert torch.equal(part, full[2:, [2, 3, 6, 7]])
    assert sharding.sum_axes == ("edp",)


def test_sum_axes_are_those_of_replicas_and_counts_once_selects_one_replica() -> None:
    config = ParallelConfig(tp=2, cp=2, dp=2, ep=2, etp=2)
    cut, full = Sharding((4,), (Split(0, "tp"),)), Sharding((4,))
    assert cut.sum_axes == ("cp", "dp") and full.sum_axes == ("tp", "cp", "dp")
    assert Sharding((4, 1), (Split(0, "ep"),), expert=True).sum_axes == ("etp", "edp")
    assert [rank for rank in range(8) if cut.counts_once(config.place(rank))] == [0, 1]
    assert [rank for rank in range(8) if full.counts_once(config.place(rank))] == [0]


def test_boxes_of_uneven_experts_follow_the_placement() -> None:
    placement = ExpertPlacement.balanced(7, 3)
    sharding = Sharding((7, 2), (Split(0, "ep", sizes=placement.experts_per_rank),), expert=True)
    config = ParallelConfig(dp=3, ep=3)
    for rank in range(3):
        own = placement.local_range(rank)
        assert sharding.boxes(config.place(rank), config.sizes)[0].full[0] == slice(own.start, own.stop)


def test_invalid_splits_raise() -> None:
    place, sizes = {"tp": 0, "ep": 0}, {"tp": 4, "ep": 2}
    for split in (Split(0, "tp"), Split(0, "tp", segments=2)):
        with pytest.raises(ConfigError, match="evenly over tp 4"):
            Sharding((6,), (split,)).local_shape(place, sizes)
    with pytest.raises(ConfigError, match=r"sizes \(3, 2\)"):
        Sharding((6,), (Split(0, "ep", sizes=(3, 2)),), expert=True).boxes(place, sizes)
    for splits in (
        (Split(0, "ep"),),
        (Split(0, "tp"), Split(0, "cp")),
        (Split(0, "tp"), Split(1, "tp")),
        (Split(2, "tp"),),
    ):
        with pytest.raises(ConfigError):
            Sharding((8, 8), splits)
    with pytest.raises(ConfigError, match=r"\(5,\)"):
        Sharding((6,)).take(torch.zeros(5), place, sizes)
