"""Slices of parameters that checkpoint tensors consist of, and their overlap with the part that a rank holds.

gate_up_proj [E, 2F, D]    (e, 0:F)     experts.{e}.w1.weight [F, D]
                           (e, F:2F)    experts.{e}.w3.weight [F, D]

w13 [E, 2F, D] of a block that stores [inputs, outputs], gate and up alternating
                           (:, 0:F)     w_in [E, D, 2F], region [:, :, 0::2], dimensions in the order 0, 2, 1
                           (:, F:2F)    w_in [E, D, 2F], region [:, :, 1::2]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_comm.topology import Box


@dataclass(frozen=True)
class HubSlice:
    """A checkpoint tensor, or a region of one, that is a slice of a parameter.

    Attributes:
        name: name of the checkpoint tensor.
        place: index into the parameter, one entry per leading dimension.
        parameter: name of the parameter, if it is not known otherwise.
        region: index into the checkpoint tensor, one slice per leading dimension.
        order: the dimension of the parameter along which each dimension of the checkpoint tensor runs. None: those that
            ``place`` does not index with an integer, in ascending order.
    """

    name: str
    place: tuple[slice | int, ...] = ()
    parameter: str = ""
    region: tuple[slice, ...] = ()
    order: tuple[int, ...] | None = None

    def dims(self, ndim: int) -> tuple[int, ...]:
        """Return ``order`` for a parameter of ``ndim`` dimensions."""
        if self.order is not None:
            return self.order
        return tuple(d for d in range(ndim) if d >= len(self.place) or not isinstance(self.place[d], int))

    def indices(self, shape: Sequence[int]) -> tuple[range, ...]:
        """Return the indices of each dimension of a parameter of ``shape``."""
        return tuple(_indices(self.place, shape))

    def extents(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the region, given the shape of the parameter."""
        indices = _indices(self.place, shape)
        return tuple(len(indices[d]) for d in self.dims(len(shape)))

    def overlap(self, shape: Sequence[int], box: Box) -> Overlap | None:
        """Return the elements of this slice in a box of a parameter of ``shape``; None if there are none."""
        indices, dims = _indices(self.place, shape), self.dims(len(shape))
        local: list[slice | int] = []
        taken: dict[int, range] = {}
        for d, (index, in_full, in_local) in enumerate(zip(indices, box.full, box.local, strict=True)):
            first = max(0, -((index.start - in_full.start) // index.step))
            last = min(len(index), -((index.start - in_full.stop) // index.step))
            if first >= last:
                return None
            start = index[first] - in_full.start + in_local.start
            local.append(slice(start, index[last - 1] - in_full.start + in_local.start + 1, index.step))
            if d not in dims:
                local[-1] = start
            taken[d] = range(first, last)
        region = [slice(None)] * (len(dims) - len(self.region))
        hub = []
        for d, of_dim in zip(dims, (*self.region, *region), strict=True):
            begin, step = of_dim.start or 0, of_dim.step or 1
            hub.append(slice(begin + taken[d][0] * step, begin + taken[d][-1] * step + 1, step))
        kept = sorted(dims)
        return Overlap(tuple(hub), tuple(local), tuple(kept.index(d) for d in dims))


@dataclass(frozen=True)
class Overlap:
    """Elements that a checkpoint tensor and a local tensor have in common.

    Attributes:
        hub: index into the checkpoint tensor, one slice per dimension.
        local: index into the local tensor, one entry per dimension.
        order: the dimensions of ``tensor[local]`` in the order of the checkpoint tensor.
    """

    hub: tuple[slice, ...]
    local: tuple[slice | int, ...]
    order: tuple[int, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """Return the elements in the local ``tensor`` as a view of the shape that ``hub`` selects."""
        return tensor[self.local].permute(self.order)


def _indices(place: Sequence[slice | int], shape: Sequence[int]) -> list[range]:
    """Return the indices that ``place`` selects of each dimension."""
    indices = [
        range(index, index + 1) if isinstance(index, int) else range(*index.indices(size))
        for index, size in zip(place, shape, strict=False)
    ]
    return indices + [range(size) for size in shape[len(indices) :]]
