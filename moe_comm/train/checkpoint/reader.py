"""Reading of a checkpoint in one process. Each file is verified before the first tensor is read from it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from moe_comm.errors import CheckpointError
from moe_comm.runtime import untrusted
from moe_comm.runtime.untrusted import abridged
from moe_comm.train.checkpoint import files
from moe_comm.train.checkpoint.files import FileDigest, parse_json
from moe_comm.train.checkpoint.folder import MANIFEST, METADATA, read_marker
from moe_comm.train.checkpoint.metadata import ChunkLocation, decode, digests

JSON_BYTES = 1 << 30
"""Maximum size of manifest.json and metadata.json. A part of a tensor takes about 50 bytes."""


class CheckpointReader:
    """Reader of a complete checkpoint. It needs no process group, and keeps no tensors and no open files.

    The constructor reads and verifies the JSON files. A data file is hashed once, before the first tensor is read from
    it.

    Args:
        path: the folder of one checkpoint, ``step-00000100``.

    Attributes:
        step: training step after which it was saved.
        state: state shared by all ranks.
        ranks: state of each rank that saved it.

    Raises:
        CheckpointError: it is incomplete or damaged; the message names the file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        marker = read_marker(self.path)
        manifest = self._read(MANIFEST)
        if files.sha256(manifest) != marker.manifest:
            raise CheckpointError(self._damaged(MANIFEST, "its sha256 differs from the one in COMPLETE"))
        self.files = digests(parse_json(manifest, self._what(MANIFEST)), self._what(MANIFEST))
        text = self._read(METADATA)
        if METADATA not in self.files or self.files[METADATA] != FileDigest(len(text), files.sha256(text)):
            raise CheckpointError(self._damaged(METADATA, f"its size or sha256 differs from the one in {MANIFEST}"))
        saved = decode(parse_json(text, self._what(METADATA)), self.files, self._what(METADATA))
        self.step, self.state, self.ranks = saved.step, saved.state, saved.ranks
        self.metadata, self.tensors = saved.metadata, saved.tensors
        self._verified: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self.tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape of a tensor."""
        return tuple(self._tensor(name).size)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).properties.dtype

    def read(self, name: str) -> Tensor:
        """Return a global tensor on the CPU, in the dtype in which it was saved.

        Raises:
            CheckpointError: there is no such tensor, or one of its files is damaged.
        """
        tensor = self._tensor(name)
        indices = [MetadataIndex(name, chunk.offsets) for chunk in tensor.chunks]
        # Verify before the allocation: the files, and so the tensor, must be as large as the manifest says.
        self.verify([self.location(index).file for index in indices])
        whole = torch.empty(tensor.size, dtype=tensor.properties.dtype, device="cpu")
        for index, chunk in zip(indices, tensor.chunks, strict=True):
            box = tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True))
            self.copy(index, chunk.sizes, Size([0] * len(chunk.sizes)), chunk.sizes, whole[box])
        return whole

    def location(self, index: MetadataIndex) -> ChunkLocation:
        """Return the location of a part of a tensor."""
        location: ChunkLocation = self.metadata.storage_data[index]
        return location

    def verify(self, names: Iterable[str] | None = None) -> None:
        """Verify the hashes of files (default: all). Each file is hashed once per reader.

        Raises:
            CheckpointError: a file is missing, truncated or altered; the message names it.
        """
        for name in self.files if names is None else names:
            if name in self._verified:
                continue
            self.verify_sizes([name])
            try:
                digest = files.digest_of(self.path / name)
            except OSError as error:
                raise CheckpointError(self._damaged(name, error.strerror or str(error))) from None
            if digest != self.files[name]:
                raise CheckpointError(self._damaged(name, f"its sha256 differs from the one in {MANIFEST}"))
            self._verified.add(name)

    def verify_sizes(self, names: Iterable[str] | None = None) -> None:
        """Verify that files (default: all) exist and have the size in the manifest, without reading them.

        Raises:
            CheckpointError: one does not; the message names it.
        """
        for name in self.files if names is None else names:
            try:
                size = untrusted.regular_size(self.path / name)
            except OSError as error:
                raise CheckpointError(self._damaged(name, error.strerror or str(error))) from None
            if size != self.files[name].size:
                raise CheckpointError(self._damaged(name, f"it has {size} bytes; expected {self.files[name].size}"))

    def copy_item(self, item: ReadItem, target: Tensor) -> None:
        """Fill ``target`` with the box of a read plan."""
        chunk = self.tensors[item.storage_index.fqn].chunks[item.storage_index.index or 0]
        self.copy(item.storage_index, chunk.sizes, item.storage_offsets, item.lengths, target)

    def copy(self, index: MetadataIndex, sizes: Size, offsets: Size, lengths: Size, target: Tensor) -> None:
        """Fill ``target`` (shape ``lengths``, any device and strides) from a box of a part of shape ``sizes``.

        The file must have been verified.
        """
        location, dtype = self.location(index), self.dtype(index.fqn)
        if 0 in lengths:
            return
        try:
            handle = untrusted.open_regular(self.path / location.file)
            try:
                if not sizes:
                    sizes, offsets, lengths, target = Size([1]), Size([0]), Size([1]), target.view(1)
                _copy(handle, location.start, sizes, offsets, lengths, dtype, target)
            finally:
                os.close(handle)
        except OSError as error:
            raise CheckpointError(self._damaged(location.file, error.strerror or str(error))) from None
        except EOFError:
            raise CheckpointError(self._damaged(location.file, "it was truncated while it was read")) from None

    def _tensor(self, name: str) -> TensorStorageMetadata:
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; it has {first_names(self.names)}")
        return self.tensors[name]

    def _read(self, name: str) -> bytes:
        try:
            return untrusted.read_bounded(self.path / name, JSON_BYTES)
        except OSError as error:
            raise CheckpointError(self._damaged(name, error.strerror or str(error))) from None

    def _what(self, name: str) -> str:
        return f"{name} of {self.path}"

    def _damaged(self, name: str, how: str) -> str:
        return f"{self._what(name)} is damaged: {how}. Restore the file, or load an earlier checkpoint"


def read_tensor(path: str | Path, name: str) -> Tensor:
    """Return a tensor of the checkpoint at ``path``. For several tensors use a ``CheckpointReader``, which hashes once.

    Raises:
        CheckpointError: there is no such tensor or checkpoint, or a file is damaged.
    """
    return CheckpointReader(path).read(name)


def first_names(names: Sequence[str], count: int = 8) -> str:
    """Return the first of ``names``, and the number of others, as text."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return (", ".join(map(abridged, names[:count])) or "nothing") + more


def _copy(
    handle: int, start: int, sizes: Size, offsets: Size, lengths: Size, dtype: torch.dtype, target: Tensor
) -> None:
    """Fill ``target`` from the box at ``offsets`` of the tensor of shape ``sizes`` at byte ``start``."""
    row = math.prod(sizes[1:]) * dtype.itemsize
    if row > files.BLOCK and len(sizes) > 1:
        # A row of expert weights may have hundreds of megabytes. Read only the needed part of it.
        for n in range(lengths[0]):
            at = start + (offsets[0] + n) * row
            _copy(handle, at, sizes[1:], offsets[1:], lengths[1:], dtype, target[n])
        return
    step = max(1, files.BLOCK // max(1, row))
    for first in range(0, lengths[0], step):
        count = min(step, lengths[0] - first)
        content = _pread(handle, start + (offsets[0] + first) * row, count * row)
        block = torch.frombuffer(content, dtype=dtype).view(count, *sizes[1:])
        for dim in range(1, len(sizes)):
            block = block.narrow(dim, offsets[dim], lengths[dim])
        target[first : first + count].copy_(block)


def _pread(handle: int, at: int, count: int) -> bytearray:
    content = bytearray(count)
    view, filled = memoryview(content), 0
    while filled < count:
        count_read = os.preadv(handle, [view[filled:]], at + filled)
        if not count_read:
            raise EOFError
        filled += count_read
    return content
