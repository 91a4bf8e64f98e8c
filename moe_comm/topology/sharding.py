"""The part of a parameter that a rank holds, as boxes of the full tensor.

    w13 [E, 2F, D] over ep 2 and etp 2          boxes of rank (ep 1, etp 0)

      dim 0 split by ep                           experts E/2.., gate rows 0..F/2   ─▶ local rows 0..F/2
      dim 1 split by etp, in 2 segments           experts E/2.., up rows   F..3F/2  ─▶ local rows F/2..F
      (gate | up: each is split separately)

Initialization, checkpoints for other mappings, gradient sums, norms and export use this description.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from moe_comm.errors import ConfigError
from moe_comm.topology.parallel import ATTENTION_AXES, EXPERT_AXES
from moe_comm.topology.placement import Placement

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Split:
    """One tensor dimension that is split over the ranks of one mesh axis.

    Args:
        segments: the dimension consists of this many equal segments, each of which is split separately (fused gate and
            up).
        sizes: length on each rank of the axis if the lengths differ (experts); requires one segment.
        ids: indices of the dimension that each rank of the axis holds, in the order in which it stores them, if they
            are not consecutive (experts); requires one segment.
    """

    dim: int
    axis: str
    segments: int = 1
    sizes: tuple[int, ...] | None = None
    ids: tuple[tuple[int, ...], ...] | None = None

    @classmethod
    def of_experts(cls, placement: Placement) -> Split:
        """Return the split of dimension 0, which counts experts, over ``ep``: each expert is on its home only."""
        if not placement.homes_are_consecutive:
            return cls(0, "ep", ids=tuple(map(placement.homes_of, range(placement.world))))
        counts = placement.homes_per_rank
        return cls(0, "ep", sizes=None if len(set(counts)) == 1 else counts)


@dataclass(frozen=True)
class Box:
    """A rectangular region of a parameter.

    Attributes:
        local: position in the local tensor, one slice per dimension.
        full: position in the full tensor, one slice per dimension.
    """

    local: tuple[slice, ...]
    full: tuple[slice, ...]


@dataclass(frozen=True)
class ShardSlice:
    """The slice of a local tensor that one data-parallel rank owns (FSDP, ZeRO): ``rows`` of dimension ``dim``."""

    dim: int
    rows: range

    def shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the slice for a local tensor of shape ``local``."""
        return (*local[: self.dim], len(self.rows), *local[self.dim + 1 :])

    def of(self, local: Tensor) -> Tensor:
        """Return the slice of ``local`` as a view."""
        return local.narrow(self.dim, self.rows.start, len(self.rows))


@dataclass(frozen=True)
class Sharding:
    """How the ranks of a pipeline stage hold one parameter.

    Each rank computes the gradient of its own tokens, so a parameter's gradient is summed over each axis that does not
    split the parameter.

    Args:
        shape: shape of the full tensor.
        splits: the split dimensions.
        expert: the parameter is on the expert grid of the mesh.
    """

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    expert: bool = False

    def __post_init__(self) -> None:
        grid = EXPERT_AXES if self.expert else ATTENTION_AXES
        for values in ([split.dim for split in self.splits], [split.axis for split in self.splits]):
            if len(set(values)) < len(values):
                raise ConfigError(
                    f"each axis can split one dimension, and each dimension can be split by one axis; got {self.splits}"
                )
        for split in self.splits:
            if split.axis not in grid[:-1]:
                raise ConfigError(f"this parameter can be split over the axes {grid[:-1]}; got {split.axis}")
            if not 0 <= split.dim < len(self.shape):
                raise ConfigError(f"dimension {split.dim} does not exist in a tensor of shape {self.shape}")

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Mesh axes over which the parameter is replicated and its gradient is summed; fastest first."""
        split_axes = {split.axis for split in self.splits}
        return tuple(axis for axis in (EXPERT_AXES if self.expert else ATTENTION_AXES)[:-1] if axis not in split_axes)

    def counts_once(self, place: Mapping[str, int]) -> bool:
        """Return whether the rank with coordinates ``place`` is the first of the ranks that hold the same part."""
        return all(place[axis] == 0 for axis in self.sum_axes)

    def local_shape(self, place: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the part of a rank, given ``ParallelConfig.place(rank)`` and ``ParallelConfig.sizes``."""
        return tuple(sum(length for _, length in runs) for runs in self._runs(place, sizes))

    def boxes(self, place: Mapping[str, int], sizes: Mapping[str, int], share: ShardSlice | None = None) -> list[Box]:
        """Return the boxes that make up this rank's part, in local order.

        Args:
            place: coordinates of the rank.
            sizes: size of each mesh axis.
            share: restrict the result to this slice of the local tensor; ``Box.local`` is then relative to the slice.
        """
        runs = self._runs(place, sizes)
        if share is not None and runs:
            runs[share.dim] = _clip_runs(runs[share.dim], share.rows)
        slices_by_dim = []
        for dim_runs in runs:
            starts = accumulate((length for _, length in dim_runs), initial=0)
            slices_by_dim.append(
                [(slice(at, at + n), slice(begin, begin + n)) for at, (begin, n) in zip(starts, dim_runs, strict=False)]
            )
        return [
            Box(tuple(local for local, _ in slices), tuple(full for _, full in slices))
            for slices in itertools.product(*slices_by_dim)
        ]

    def take(self, full: Tensor, place: Mapping[str, int], sizes: Mapping[str, int]) -> Tensor:
        """Return a copy of the part of ``full`` that the rank at ``place`` holds.

        Raises:
            ConfigError: ``full`` has another shape than this sharding.
        """
        if tuple(full.shape) != self.shape:
            raise ConfigError(f"expected a tensor of shape {self.shape}; got {tuple(full.shape)}")
        part = full.new_empty(self.local_shape(place, sizes))
        for box in self.boxes(place, sizes):
            part[box.local] = full[box.full]
        return part

    def _runs(self, place: Mapping[str, int], sizes: Mapping[str, int]) -> list[list[tuple[int, int]]]:
        """Return the (start, length) ranges that the rank holds of each dimension."""
        runs = [[(0, length)] for length in self.shape]
        for split in self.splits:
            runs[split.dim] = self._runs_of_split(split, place[split.axis], sizes[split.axis])
        return runs

    def _runs_of_split(self, split: Split, index: int, parts: int) -> list[tuple[int, int]]:
        length = self.shape[split.dim]
        if split.ids is not None:
            if len(split.ids) != parts or sorted(itertools.chain(*split.ids)) != [*range(length)] or split.segments > 1:
                raise ConfigError(f"ids {split.ids} do not split {length} over {split.axis} {parts}")
            return _runs_of_ids(split.ids[index])
        if split.sizes is not None:
            if len(split.sizes) != parts or sum(split.sizes) != length or split.segments != 1:
                raise ConfigError(f"sizes {split.sizes} do not split {length} over {split.axis} {parts}")
            return [(sum(split.sizes[:index]), split.sizes[index])]
        if length % (parts * split.segments):
            segments = f" in {split.segments} segments" if split.segments > 1 else ""
            raise ConfigError(f"a dimension of {length}{segments} cannot be split evenly over {split.axis} {parts}")
        segment = length // split.segments
        size = segment // parts
        return [(s * segment + index * size, size) for s in range(split.segments)]


def _runs_of_ids(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (start, length) ranges of consecutive ``ids``; one empty range if there is none."""
    runs: list[tuple[int, int]] = []
    for index in ids:
        if runs and index == sum(runs[-1]):
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((index, 1))
    return runs or [(0, 0)]


def _clip_runs(runs: list[tuple[int, int]], rows: range) -> list[tuple[int, int]]:
    """Return the ranges of ``runs`` that the local ``rows`` cover."""
    clipped, offset = [], 0
    for begin, length in runs:
        low, high = max(rows.start, offset), min(rows.stop, offset + length)
        if low < high:
            clipped.append((begin + low - offset, high - low))
        offset += length
    return clipped


def shard_slice(shape: Sequence[int], index: int, parts: int, even: bool = False) -> ShardSlice:
    """Return the slice that owner ``index`` of ``parts`` holds of a local tensor of ``shape`` (one or more dimensions).

        [64, F, D] over 4    experts 0..16, 16..32, 32..48, 48..64
        [1, F, D] over 4     rows 0..F/4, F/4..F/2, F/2..3F/4, 3F/4..F of the one expert

    The tensor is split along dimension 0 if each owner gets some rows. Otherwise it is split along the dimension that
    minimizes the largest slice.

    Args:
        shape: shape of the local tensor.
        index: the owner, from 0.
        parts: number of owners.
        even: use a dimension other than 0 only if ``parts`` divides it (required by FSDP2).
    """
    dim = 0
    if all(shape) and not row_range(shape[0], parts - 1, parts):
        candidates = [d for d, length in enumerate(shape) if d == 0 or not even or length % parts == 0]
        dim = min(candidates, key=lambda d: len(row_range(shape[d], 0, parts)) / shape[d])
    return ShardSlice(dim, row_range(shape[dim], index, parts))


def row_range(rows: int, index: int, parts: int) -> range:
    """Return rows ``index`` of ``parts``, split as by ``torch.chunk`` and FSDP2: only the last ones are shorter."""
    size = math.ceil(rows / parts)
    return range(min(index * size, rows), min((index + 1) * size, rows))
