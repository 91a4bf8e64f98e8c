"""Reading of checkpoints: whole tensors in one process, or the local tensors of ranks on any mapping.

``load`` is collective:

    1. open     every rank reads the JSON and determines missing tensors and needed files
    2. verify   each file is hashed by one of the ranks that need it
    3. read     torch's planner returns the intersections of saved and local boxes; each is copied

After each step, the ranks exchange their errors: all continue, or all raise. Values are only copied, so they have the
same bits on every mapping.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import or_
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moe_comm.errors import CheckpointError
from moe_comm.runtime import untrusted
from moe_comm.runtime.untrusted import abridged
from moe_comm.train.checkpoint import files
from moe_comm.train.checkpoint.entries import Entry
from moe_comm.train.checkpoint.exchange import gather_or_raise
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
        # Verify before the allocation: the files, and so the tensor, must be as large as the manifest says.
        self.verify([self.location(MetadataIndex(name, chunk.offsets)).file for chunk in tensor.chunks])
        whole = Entry.whole(torch.empty(tensor.size, dtype=tensor.properties.dtype, device="cpu"))
        self.fill({name: whole}, create_read_items_for_chunk_list(name, tensor, whole.chunks()))
        return whole.tensor

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

    @torch.no_grad()
    def fill(self, entries: Mapping[str, Entry], items: Sequence[ReadItem]) -> None:
        """Copy the planned boxes to the tensors of ``entries``. The files must have been verified."""
        for name, of_entry in groupby(items, key=lambda item: str(item.dest_index.fqn)):
            with entries[name].opened(write=True) as tensor:
                for item in of_entry:
                    target = tensor[entries[name].boxes[item.dest_index.index or 0].local]
                    for dim, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                        target = target.narrow(dim, offset, length)
                    if 0 not in item.lengths:
                        self._copy(item, target)

    def _copy(self, item: ReadItem, target: Tensor) -> None:
        index, offsets, lengths = item.storage_index, item.storage_offsets, item.lengths
        location, tensor = self.location(index), self.tensors[index.fqn]
        sizes = tensor.chunks[index.index or 0].sizes
        if not sizes:
            sizes, offsets, lengths, target = Size([1]), Size([0]), Size([1]), target.view(1)
        try:
            handle = untrusted.open_regular(self.path / location.file)
            try:
                _copy(handle, location.start, sizes, offsets, lengths, tensor.properties.dtype, target)
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


@dataclass(frozen=True)
class Loaded:
    """The content of a checkpoint besides its tensors.

    Attributes:
        step: training step after which it was saved.
        state: state shared by all ranks.
        ranks: state of each rank that saved it. Only the same rank of the same mapping can use it.
    """

    step: int
    state: dict[str, Any]
    ranks: tuple[dict[str, Any], ...]


def load(
    path: str | Path,
    entries: Mapping[str, Entry],
    group: ProcessGroup | None = None,
    *,
    cast: bool = False,
    allow_unused: bool = False,
) -> Loaded:
    """Fill the tensors of ``entries`` from the checkpoint at ``path``. Collective over ``group``.

    Args:
        group: the ranks that load it together (gloo); None for this process only.
        cast: fill a floating-point tensor from one saved in another dtype, rounded as ``Tensor.copy_`` does.
        allow_unused: ignore tensors of the checkpoint that no rank requests, such as optimizer state in an evaluation.

    Raises:
        CheckpointError: on every rank, before any tensor is changed. The checkpoint is incomplete or damaged (the
            message names the file), lacks a tensor, contains one that no rank requests, or one of another shape or
            dtype.
    """
    opened: list[tuple[CheckpointReader, list[ReadItem]]] = []

    def open_and_plan() -> tuple[int, int]:
        reader = CheckpointReader(path)
        items = _plan(reader, entries, cast)
        opened.append((reader, items))
        files = _data_files(reader)
        needed = {reader.location(item.storage_index).file for item in items}
        return _mask(reader.names, entries), _mask(files, needed)

    # 1. open
    requests = gather_or_raise(group, open_and_plan)
    reader, items = opened[0]
    used = reduce(or_, (names for names, _ in requests))
    unused = [name for n, name in enumerate(reader.names) if not used >> n & 1]
    if unused and not allow_unused:
        raise CheckpointError(f"{reader.path} contains tensors that no rank requests: {first_names(unused)}")
    # 2. verify
    to_verify = _to_verify(reader, [files for _, files in requests], 0 if group is None else group.rank())
    gather_or_raise(group, lambda: reader.verify(to_verify))
    # 3. read
    gather_or_raise(group, lambda: reader.fill(entries, items))
    return Loaded(reader.step, reader.state, reader.ranks)


def _plan(reader: CheckpointReader, entries: Mapping[str, Entry], cast: bool) -> list[ReadItem]:
    missing = sorted(set(entries) - set(reader.tensors))
    if missing:
        raise CheckpointError(f"{reader.path} lacks tensors: {first_names(missing)}")
    items = []
    for name, entry in entries.items():
        shape, dtype, expected = reader.shape(name), reader.dtype(name), entry.tensor.dtype
        if shape != entry.shape:
            raise CheckpointError(f"{name} has shape {shape} in {reader.path}; expected {entry.shape}")
        if dtype != expected and not (cast and dtype.is_floating_point and expected.is_floating_point):
            raise CheckpointError(f"{name} has dtype {dtype} in {reader.path}; expected {expected} (cast is not set)")
        boxes: list[ReadItem] = create_read_items_for_chunk_list(name, reader.tensors[name], entry.chunks())
        elements = sum(math.prod(item.lengths) for item in boxes)
        if elements != entry.tensor.numel():
            raise CheckpointError(f"the checkpoint has {elements} of the {entry.tensor.numel()} elements of {name}")
        items += boxes
    return items


def _data_files(reader: CheckpointReader) -> list[str]:
    return sorted(name for name in reader.files if name != METADATA)


def _mask(names: Sequence[str], selected: Collection[str]) -> int:
    """Return a bit mask of the ``names`` in ``selected``. It is faster to exchange between many ranks than names."""
    return sum(1 << n for n, name in enumerate(names) if name in selected)


def _to_verify(reader: CheckpointReader, needed: Sequence[int], rank: int) -> list[str]:
    """Return the files that ``rank`` hashes. Each file is assigned to one rank that needs it, the largest first."""
    to_verify = []
    num_bytes = [0] * len(needed)  # bytes assigned to each rank
    names = _data_files(reader)
    for n in sorted(range(len(names)), key=lambda n: (-reader.files[names[n]].size, n)):
        candidates = [candidate for candidate, files in enumerate(needed) if files >> n & 1]
        if candidates:
            chosen = min(candidates, key=lambda candidate: (num_bytes[candidate], candidate))
            num_bytes[chosen] += reader.files[names[n]].size
            if chosen == rank:
                to_verify.append(names[n])
    return to_verify
