"""Torch's checkpoint ``Metadata`` as JSON instead of pickle.

metadata.json:

    {"version": 1, "step": 100, "state": {...}, "ranks": [{...}, {...}],
     "files": ["rank-00000.safetensors", "rank-00001.safetensors"],
     "tensors": {"model/embed.weight": {"dtype": "F32", "shape": [8, 4], "parts": [[0, 104, [0, 0], [4, 4]],
                                                                                  [1, 104, [4, 0], [4, 4]]]}}}

A part consists of the number of its file, the offset of its data in the file, and offsets and lengths of its box.
An invalid file raises ``CheckpointError``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Size
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moe_comm.errors import CheckpointError
from moe_comm.runtime.untrusted import shown
from moe_comm.train.checkpoint.files import DTYPES, NAMED_DTYPES, FileDigest
from moe_comm.train.checkpoint.folder import VERSION

_FILE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
MAX_DIMS = 64
"""Maximum number of dimensions in torch."""


@dataclass(frozen=True)
class ChunkLocation:
    """The file of a part, and the offset of its data in bytes."""

    file: str
    start: int


@dataclass(frozen=True)
class CheckpointContent:
    """The content of metadata.json."""

    step: int
    state: dict[str, Any]  # state shared by all ranks (step, sampler, scheduler, configuration)
    ranks: tuple[dict[str, Any], ...]  # state of each rank
    metadata: Metadata  # torch's description of the tensors, with a ``ChunkLocation`` for each part as ``storage_data``

    @property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        return self.metadata.state_dict_metadata  # type: ignore[return-value]  # never bytes: we save tensors only


def encode(saved: CheckpointContent) -> dict[str, Any]:
    """Return the content of metadata.json."""
    locations: Mapping[MetadataIndex, ChunkLocation] = saved.metadata.storage_data
    files = sorted({location.file for location in locations.values()})
    number = {name: n for n, name in enumerate(files)}
    tensors = {}
    for name, tensor in sorted(saved.tensors.items()):
        parts = []
        for chunk in tensor.chunks:
            location = locations[MetadataIndex(name, chunk.offsets)]
            parts.append([number[location.file], location.start, list(chunk.offsets), list(chunk.sizes)])
        tensors[name] = {"dtype": DTYPES[tensor.properties.dtype], "shape": list(tensor.size), "parts": parts}
    return {
        "version": VERSION,
        "step": saved.step,
        "state": saved.state,
        "ranks": list(saved.ranks),
        "files": files,
        "tensors": tensors,
    }


def decode(value: Mapping[str, Any], files: Mapping[str, FileDigest], what: str) -> CheckpointContent:
    """Parse metadata.json and check it against the files in the manifest."""
    try:
        names = [_checked_name(name, files) for name in value["files"]]
        free_bytes = {name: files[name].size for name in names}
        metadata = Metadata({}, storage_data={})
        for name, tensor in value["tensors"].items():
            dtype, shape = NAMED_DTYPES[tensor["dtype"]], _parse_numbers(tensor["shape"])
            chunks = []
            for file, start, offsets, lengths in tensor["parts"]:
                chunk = ChunkStorageMetadata(_parse_numbers(offsets), _parse_numbers(lengths))
                location = ChunkLocation(names[_parse_numbers([file])[0]], _parse_numbers([start])[0])
                _check_part(chunk, shape, location, dtype.itemsize, files)
                # Shared bytes would allow a small file to claim any number of tensors.
                free_bytes[location.file] -= math.prod(chunk.sizes) * dtype.itemsize
                if free_bytes[location.file] < 0:
                    raise ValueError(f"the parts in {location.file} are longer than the file")
                chunks.append(chunk)
                metadata.storage_data[MetadataIndex(name, chunk.offsets)] = location
            _check_cover(name, shape, chunks)
            metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)
        state, ranks = value["state"], value["ranks"]
        if not isinstance(state, dict) or not all(isinstance(rank_state, dict) for rank_state in ranks):
            raise ValueError("state and ranks must be objects")
        return CheckpointContent(_parse_numbers([value["step"]])[0], state, tuple(ranks), metadata)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{what} is damaged: {type(error).__name__}: {shown(str(error))}") from None


def overlap(chunks: Sequence[ChunkStorageMetadata]) -> tuple[ChunkStorageMetadata, ChunkStorageMetadata] | None:
    """Return two overlapping boxes of a tensor, or None. It sweeps along the dimension with the most cuts."""
    dims = len(chunks[0].offsets) if chunks else 0
    if len(chunks) < 2 or not dims:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    along = max(range(dims), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    active: list[ChunkStorageMetadata] = []
    for b in sorted((chunk for chunk in chunks if 0 not in chunk.sizes), key=lambda chunk: chunk.offsets[along]):
        active = [a for a in active if a.offsets[along] + a.sizes[along] > b.offsets[along]]
        for a in active:
            if all(
                a.offsets[d] < b.offsets[d] + b.sizes[d] and b.offsets[d] < a.offsets[d] + a.sizes[d]
                for d in range(dims)
            ):
                return a, b
        active.append(b)
    return None


def _check_cover(name: str, shape: Size, chunks: Sequence[ChunkStorageMetadata]) -> None:
    """Check that every element is in exactly one part. Elements in no part would be uninitialised memory."""
    elements = sum(math.prod(chunk.sizes) for chunk in chunks)
    if elements != math.prod(shape):
        raise ValueError(f"the parts have {elements} of the {math.prod(shape)} elements of {shown(name)}")
    if len({chunk.offsets for chunk in chunks}) < len(chunks) or overlap(chunks) is not None:
        raise ValueError(f"parts of {shown(name)} overlap")


def _check_part(
    chunk: ChunkStorageMetadata, shape: Size, location: ChunkLocation, itemsize: int, files: Mapping[str, FileDigest]
) -> None:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        raise ValueError(f"a part with offsets {chunk.offsets} and lengths {chunk.sizes} does not fit {shape}")
    if any(start + length > end for start, length, end in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
        raise ValueError(f"a part with offsets {chunk.offsets} and lengths {chunk.sizes} is outside of {shape}")
    if location.start + math.prod(chunk.sizes) * itemsize > files[location.file].size:
        raise ValueError(f"a part is outside of {location.file}")


def _checked_name(name: object, files: Mapping[str, FileDigest]) -> str:
    # Names with a slash could refer to files outside of the folder.
    if not isinstance(name, str) or not _FILE.fullmatch(name) or name not in files:
        raise ValueError(f"no file {shown(name)} in the manifest")
    return name


def digests(value: Mapping[str, Any], what: str) -> dict[str, FileDigest]:
    """Return the files in manifest.json."""
    try:
        files = {
            name: FileDigest(_parse_numbers([entry["size"]])[0], str(entry["sha256"]))
            for name, entry in value["files"].items()
        }
        for name in files:
            _checked_name(name, files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{what} is damaged: {type(error).__name__}: {shown(str(error))}") from None
    return files


def _parse_numbers(values: Sequence[Any]) -> Size:
    if (
        not isinstance(values, list)
        or len(values) > MAX_DIMS
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in values)
        # Torch multiplies the lengths, even if one of them is 0.
        or math.prod(n for n in values if n) >= 1 << 63
    ):
        raise ValueError(f"expected whole numbers; got {shown(values)}")
    return Size(values)
