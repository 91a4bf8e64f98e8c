"""Which part of a parameter a rank holds, and the boxes of the global tensor that part is made of.

    w13 [E, 2F, D] over ep 2 and etp 2          what rank (ep 1, etp 0) holds, as boxes of the global tensor
      dim 0 split by ep                           experts E/2.., gate rows 0..F/2   ─▶ local rows 0..F/2
      dim 1 split by etp, in 2 segments           experts E/2.., up rows   F..3F/2  ─▶ local rows F/2..F
      (gate | up: each is split by itself)

Fresh weights, checkpoints on another mapping, gradient sums, norms and export all read this one description.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.topology.parallel import ATTENTION_AXES, EXPERT_AXES


@dataclass(frozen=True)
class Split:
    """One dimension cut over the ranks of one mesh axis.

    segments: the dimension is this many equal parts, each of which is cut by itself (a fused gate and up projection).
    sizes: of the cut by rank of the axis, where they are not all equal (experts); only with one segment.
    """

    dim: int
    axis: str
    segments: int = 1
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Box:
    """A piece of a local tensor and its place in the global one, both as slices."""

    local: tuple[slice, ...]
    whole: tuple[slice, ...]


@dataclass(frozen=True)
class Share:
    """What one of the ranks that hold the same part owns of it, as ``deal`` gives it: ``rows`` of dimension ``dim``."""

    dim: int
    rows: range

    def shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """Of the share, where the part has shape ``local``."""
        return (*local[: self.dim], len(self.rows), *local[self.dim + 1 :])

    def of(self, local: Tensor) -> Tensor:
        """A view of the share in the part ``local``."""
        return local.narrow(self.dim, self.rows.start, len(self.rows))


@dataclass(frozen=True)
class Sharding:
    """How the ranks of a pipeline stage hold one parameter.

    shape: of the global tensor. splits: the cut dimensions. expert: it lives on the expert side of the mesh.

    A rank sees its own tokens only, so a parameter's gradient is summed over every axis that does not cut it.
    """

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    expert: bool = False

    def __post_init__(self) -> None:
        side = EXPERT_AXES if self.expert else ATTENTION_AXES
        for what in ([split.dim for split in self.splits], [split.axis for split in self.splits]):
            if len(set(what)) < len(what):
                raise ConfigError(f"a dimension is cut by one axis, and an axis cuts one dimension; got {self.splits}")
        for split in self.splits:
            if split.axis not in side[:-1]:
                raise ConfigError(f"{split.axis} does not cut parameters of this side; its axes are {side[:-1]}")
            if not 0 <= split.dim < len(self.shape):
                raise ConfigError(f"dimension {split.dim} is cut, but the shape is {self.shape}")

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Mesh axes over which this parameter is replicated, and its gradient summed; fastest first."""
        cut = {split.axis for split in self.splits}
        return tuple(axis for axis in (EXPERT_AXES if self.expert else ATTENTION_AXES)[:-1] if axis not in cut)

    def counts_once(self, place: Mapping[str, int]) -> bool:
        """Whether the rank at ``place`` is the one that stands for all that hold the same part."""
        return all(place[axis] == 0 for axis in self.sum_axes)

    def local_shape(self, place: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the part of the rank at ``place`` on axes of ``sizes`` (``ParallelConfig.place`` and ``.sizes``)."""
        return tuple(sum(length for _, length in runs) for runs in self._runs(place, sizes))

    def boxes(self, place: Mapping[str, int], sizes: Mapping[str, int], share: Share | None = None) -> list[Box]:
        """The boxes that make up this rank's part, in local order.

        Args:
            share: only this share of the local tensor, as FSDP and ZeRO keep it; ``Box.local`` is a place in the share.
        """
        runs = self._runs(place, sizes)
        if share is not None and runs:
            runs[share.dim] = _cut(runs[share.dim], share.rows)
        placed = []
        for dim_runs in runs:
            starts = [0, *accumulate(length for _, length in dim_runs)]
            placed.append(
                [(slice(at, at + n), slice(begin, begin + n)) for at, (begin, n) in zip(starts, dim_runs, strict=False)]
            )
        return [
            Box(tuple(local for local, _ in pick), tuple(whole for _, whole in pick))
            for pick in itertools.product(*placed)
        ]

    def take(self, whole: Tensor, place: Mapping[str, int], sizes: Mapping[str, int]) -> Tensor:
        """A copy of the part of ``whole`` that the rank at ``place`` holds."""
        if tuple(whole.shape) != self.shape:
            raise ConfigError(f"expected a tensor of shape {self.shape}; got {tuple(whole.shape)}")
        part = whole.new_empty(self.local_shape(place, sizes))
        for box in self.boxes(place, sizes):
            part[box.local] = whole[box.whole]
        return part

    def _runs(self, place: Mapping[str, int], sizes: Mapping[str, int]) -> list[list[tuple[int, int]]]:
        """For each dimension the (start, length) of what is held of it."""
        runs = [[(0, length)] for length in self.shape]
        for split in self.splits:
            runs[split.dim] = self._held(split, place[split.axis], sizes[split.axis])
        return runs

    def _held(self, split: Split, index: int, parts: int) -> list[tuple[int, int]]:
        length = self.shape[split.dim]
        if split.sizes is not None:
            if len(split.sizes) != parts or sum(split.sizes) != length or split.segments != 1:
                raise ConfigError(f"sizes {split.sizes} do not cut {length} over {split.axis} {parts}")
            return [(sum(split.sizes[:index]), split.sizes[index])]
        if length % (parts * split.segments):
            of = f" in {split.segments} segments" if split.segments > 1 else ""
            raise ConfigError(f"a dimension of {length}{of} cannot be cut evenly over {split.axis} {parts}")
        segment = length // split.segments
        piece = segment // parts
        return [(s * segment + index * piece, piece) for s in range(split.segments)]


def _cut(runs: list[tuple[int, int]], rows: range) -> list[tuple[int, int]]:
    """The part of ``runs``, laid end to end, that ``rows`` covers."""
    kept, at = [], 0
    for begin, length in runs:
        low, high = max(rows.start, at), min(rows.stop, at + length)
        if low < high:
            kept.append((begin + low - at, high - low))
        at += length
    return kept


def deal(shape: Sequence[int], index: int, parts: int, even: bool = False) -> Share:
    """The share of owner ``index`` of ``parts``, where a rank's part of ``shape`` (one dimension or more) is dealt out.

        [64, F, D] to 4    experts 0..16, 16..32, 32..48, 48..64
        [1, F, D] to 4     rows 0..F/4, F/4..F/2, F/2..3F/4, 3F/4..F of the one expert

    Along dimension 0, which moves nothing about, where every owner gets something of it; else along the dimension that
    leaves the largest share smallest.

    Args:
        even: a dimension other than 0 is dealt out only if it divides by ``parts``, as FSDP2 needs it.
    """
    dim = 0
    if all(shape) and not row_range(shape[0], parts - 1, parts):
        fit = [d for d, length in enumerate(shape) if d == 0 or not even or length % parts == 0]
        dim = min(fit, key=lambda d: len(row_range(shape[d], 0, parts)) / shape[d])
    return Share(dim, row_range(shape[dim], index, parts))


def row_range(rows: int, index: int, parts: int) -> range:
    """The rows that part ``index`` of ``parts`` owns, as ``torch.chunk`` and FSDP2 cut them: all but the last alike."""
    size = math.ceil(rows / parts)
    return range(min(index * size, rows), min((index + 1) * size, rows))
