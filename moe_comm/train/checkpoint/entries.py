"""The tensors that a rank saves and loads, and the boxes (rectangular ranges) of global tensors that they contain.

    optimizer/layers.0.w13/exp_avg [2F, D], tp 2, gate | up        content of each rank's local tensor [F, D]
                                                                    tp 0: boxes [0..F/2], [F..3F/2]
                                                                    tp 1: boxes [F/2..F], [3F/2..2F]

A checkpoint contains global tensors as boxes. So every mapping can load what any other mapping has saved. The state of
random number generators belongs to one rank.
"""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor

from moe_comm.errors import CheckpointError
from moe_comm.runtime.untrusted import shown
from moe_comm.topology import Box, Sharding, ShardSlice

MAX_ELEMENTS = (1 << 63) - 1
"""Maximum product of the lengths of a tensor, without lengths of 0."""


@dataclass(frozen=True)
class Entry:
    """A local tensor, the shape of its global tensor, and the boxes of the global tensor that it contains.

    A rank may have no box of a tensor. Equal boxes on several ranks are replicas.

    Attributes:
        opener: opens a tensor of this shape that is not in memory, to read it, or with True to write it. ``tensor``
            then has no values. None: ``tensor`` has them.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    opener: Callable[[bool], AbstractContextManager[Tensor]] | None = None

    @contextmanager
    def opened(self, write: bool = False) -> Iterator[Tensor]:
        """Yield the local tensor in memory. ``write``: all of its values are written, and none are read."""
        if self.opener is None:
            yield self.tensor
        else:
            with self.opener(write) as tensor:
                yield tensor

    @classmethod
    def of(
        cls,
        tensor: Tensor,
        sharding: Sharding,
        place: Mapping[str, int],
        sizes: Mapping[str, int],
        share: ShardSlice | None = None,
    ) -> Entry:
        """Return the entry of the rank at ``place`` for a sharded tensor.

        Args:
            tensor: the local shard, on any device; a DTensor is replaced by its local tensor.
            place, sizes: ``ParallelMesh.place`` and ``.sizes``, or those of a ``ParallelConfig``.
            share: ``tensor`` is only this slice of the shard, as with FSDP and ZeRO.

        Raises:
            CheckpointError: the tensor has another shape.
        """
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        expected = sharding.local_shape(place, sizes)
        suffix = ""
        if share is not None and expected:
            expected = share.shape(expected)
            suffix = f" (rows {share.rows.start}..{share.rows.stop} of dimension {share.dim})"
        if tuple(local.shape) != expected:
            raise CheckpointError(
                f"the local tensor has shape {tuple(local.shape)}; this rank's shard{suffix} of a global tensor "
                f"of shape {sharding.shape} has shape {expected}"
            )
        if math.prod(sharding.shape) == 0:
            # An empty box, so that the checkpoint contains the tensor.
            return cls(local.detach(), sharding.shape, (Box(_full_slices(local.shape), _full_slices(sharding.shape)),))
        return cls(local.detach(), sharding.shape, tuple(sharding.boxes(place, sizes, share)))

    @classmethod
    def whole(cls, tensor: Tensor) -> Entry:
        """Return the entry of a tensor that each rank holds in full."""
        return cls(tensor.detach(), tuple(tensor.shape), (Box(_full_slices(tensor.shape), _full_slices(tensor.shape)),))

    def local_box(self, index: int) -> Tensor:
        """Return the view of the local tensor that box ``index`` covers."""
        return self.tensor[self.boxes[index].local]

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Return the boxes in the format of torch's distributed checkpoint."""
        return [
            ChunkStorageMetadata(
                Size([part.start for part in box.full]), Size([part.stop - part.start for part in box.full])
            )
            for box in self.boxes
        ]


class CopiesToCpu:
    """Copies tensors to CPU memory, also while a GPU computes.

    A separate stream copies from a GPU, after the work that was enqueued on the caller's stream when ``mark`` was
    called.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}
        self._ready: dict[torch.device, Any] = {}

    def mark(self, entries: Mapping[str, Entry]) -> None:
        """Record that the entries are complete after the work enqueued so far. Called by the training thread."""
        for device in {entry.tensor.device for entry in entries.values() if entry.tensor.is_cuda}:
            self._ready[device] = torch.cuda.current_stream(device).record_event()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each pair of a CPU tensor and its source, and wait until all are copied."""
        used = set()
        for target, source in pairs:
            if source.is_cuda:
                used.add(source.device)
                with torch.cuda.stream(self._stream(source.device)):
                    target.copy_(source, non_blocking=True)
            else:
                target.copy_(source)
        for device in used:
            self._stream(device).synchronize()

    def _stream(self, device: torch.device) -> Any:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        if device in self._ready:
            self._streams[device].wait_event(self._ready.pop(device))
        return self._streams[device]


def check_loadable(name: object, entry: Entry) -> None:
    """Check that a checkpoint with ``entry`` under ``name`` can be loaded."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor must be a string; got {shown(name)}")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the name of a tensor must be valid Unicode; got {shown(name)}") from None
    if math.prod(length for length in entry.shape if length) > MAX_ELEMENTS:
        raise ValueError(f"{shown(name)} has shape {entry.shape}, of which no tensor can be created")


def _full_slices(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(0, length) for length in shape)


def rng_state() -> dict[str, Any]:
    """Return the state of torch's CPU generator, of the current GPU's if it is in use, and of Python's."""
    state: dict[str, Any] = {"torch": _text(torch.get_rng_state())}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    version, words, gauss = random.getstate()
    state["python"] = [version, list(words), gauss]
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the generators to the result of ``rng_state``."""
    try:
        version, words, gauss = state["python"]
        restored, cuda = _tensor(state["torch"]), state.get("cuda")
        if gauss is not None and not isinstance(gauss, float):
            raise ValueError("the cached number of Python's gauss() must be a float or null")
        previous = random.getstate()
        random.setstate((version, tuple(words), gauss))
        try:
            torch.set_rng_state(restored)
        except (TypeError, RuntimeError):
            random.setstate(previous)
            raise
        if cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_tensor(cuda))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"not a state of random number generators: {type(error).__name__}: {error}") from None


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
