"""What a rank saves and loads: local tensors, and which boxes of a global tensor they are made of.

    optimizer/layers.0.w13/exp_avg [2F, D], tp 2, gate | up        what each rank's local tensor [F, D] is made of
                                                                    tp 0: boxes [0..F/2], [F..3F/2]
                                                                    tp 1: boxes [F/2..F], [3F/2..2F]

A checkpoint holds global tensors cut into boxes, so what one mapping saved every other mapping can load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from moe_comm.errors import CheckpointError
from moe_comm.topology import Box, Sharding, Share


@dataclass(frozen=True)
class Entry:
    """A local tensor, the shape of the global one it is a part of, and the boxes that place it there.

    A rank may hold nothing of a tensor (no boxes). Equal boxes on several ranks are copies of the same numbers.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @classmethod
    def of(
        cls,
        tensor: Tensor,
        sharding: Sharding,
        place: Mapping[str, int],
        sizes: Mapping[str, int],
        share: Share | None = None,
    ) -> Entry:
        """The part that ``sharding`` gives the rank at ``place`` on axes of ``sizes``.

        Args:
            tensor: the local part, on any device; of a DTensor its local part.
            place, sizes: ``ParallelMesh.place`` and ``.sizes``, or those of a ``ParallelConfig``.
            share: ``tensor`` is only this share of that part, as FSDP and ZeRO keep it.

        Raises:
            CheckpointError: the tensor has another shape.
        """
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        expected = sharding.local_shape(place, sizes)
        of = ""
        if share is not None and expected:
            expected = share.shape(expected)
            of = f" (rows {share.rows.start}..{share.rows.stop} of dimension {share.dim})"
        if tuple(local.shape) != expected:
            raise CheckpointError(
                f"a tensor of shape {tuple(local.shape)} is not this rank's part{of} of a global {sharding.shape}: "
                f"that is {expected}"
            )
        if math.prod(sharding.shape) == 0:
            # Named by the checkpoint as any other, by a box of nothing.
            return cls(local.detach(), sharding.shape, (Box(_every(local.shape), _every(sharding.shape)),))
        return cls(local.detach(), sharding.shape, tuple(sharding.boxes(place, sizes, share)))

    @classmethod
    def whole(cls, tensor: Tensor) -> Entry:
        """A tensor that every rank that names it holds in full."""
        return cls(tensor.detach(), tuple(tensor.shape), (Box(_every(tensor.shape), _every(tensor.shape)),))

    def piece(self, index: int) -> Tensor:
        """The view of the local tensor that box ``index`` covers."""
        return self.tensor[self.boxes[index].local]

    def chunks(self) -> list[ChunkStorageMetadata]:
        """The boxes as torch's distributed checkpoint describes them, in order."""
        return [chunk_of(box) for box in self.boxes]

    def signature(self) -> tuple[Any, ...]:
        """What a save plan depends on."""
        return (str(self.tensor.dtype), self.shape, tuple((c.offsets, c.sizes) for c in self.chunks()))


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=Size([part.start for part in box.whole]), sizes=Size([part.stop - part.start for part in box.whole])
    )


def _every(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, length) for length in shape)
