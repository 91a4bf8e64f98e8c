"""torch's checkpoint ``Metadata`` as JSON, in place of the pickle that torch itself writes.

metadata.json:

    {"version": 1, "step": 100, "state": {...}, "ranks": [{...}, {...}],
     "files": ["rank-00000.safetensors", "rank-00001.safetensors"],
     "tensors": {"model/embed.weight": {"dtype": "F32", "shape": [8, 4], "parts": [[0, 104, [0, 0], [4, 4]],
                                                                                  [1, 104, [4, 0], [4, 4]]]}}}

A part is the number of its file, where its data starts in it, and the offsets and lengths of its box.
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
from moe_comm.train.checkpoint.files import DTYPES, NAMED_DTYPES, Digest
from moe_comm.train.checkpoint.folder import VERSION

_FILE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
MOST_DIMS = 64
"""What torch takes."""


@dataclass(frozen=True)
class Place:
    """Where the data of a part is: a file of the checkpoint, and the byte of the file at which it starts."""

    file: str
    start: int


@dataclass(frozen=True)
class Saved:
    """What metadata.json says.

    state: what all ranks share (step, sampler, scheduler, configuration). ranks: what each rank gave of its own.
    metadata: the tensors, as torch has it, with a ``Place`` for every part as ``storage_data``.
    """

    step: int
    state: dict[str, Any]
    ranks: tuple[dict[str, Any], ...]
    metadata: Metadata

    @property
    def tensors(self) -> Mapping[str, TensorStorageMetadata]:
        return self.metadata.state_dict_metadata  # type: ignore[return-value]  # never bytes: we save tensors only


def encode(saved: Saved) -> dict[str, Any]:
    """What goes into metadata.json."""
    places: Mapping[MetadataIndex, Place] = saved.metadata.storage_data
    files = sorted({place.file for place in places.values()})
    number = {name: n for n, name in enumerate(files)}
    tensors = {}
    for name, tensor in sorted(saved.tensors.items()):
        parts = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            parts.append([number[place.file], place.start, list(chunk.offsets), list(chunk.sizes)])
        tensors[name] = {"dtype": DTYPES[tensor.properties.dtype], "shape": list(tensor.size), "parts": parts}
    return {
        "version": VERSION,
        "step": saved.step,
        "state": saved.state,
        "ranks": list(saved.ranks),
        "files": files,
        "tensors": tensors,
    }


def decode(value: Mapping[str, Any], files: Mapping[str, Digest], what: str) -> Saved:
    """The content of metadata.json, checked against the files that the manifest lists.

    Raises:
        CheckpointError: it cannot be; ``what`` names the file.
    """
    try:
        names = [_file(name, files) for name in value["files"]]
        room = {name: files[name].size for name in names}
        metadata = Metadata({}, storage_data={})
        for name, tensor in value["tensors"].items():
            dtype, shape = NAMED_DTYPES[tensor["dtype"]], _size(tensor["shape"])
            chunks = []
            for file, start, offsets, lengths in tensor["parts"]:
                chunk = ChunkStorageMetadata(_size(offsets), _size(lengths))
                place = Place(names[_size([file])[0]], _size([start])[0])
                _check(chunk, shape, place, dtype.itemsize, files)
                # Parts that share bytes would let a small file pass for any number of tensors.
                room[place.file] -= math.prod(chunk.sizes) * dtype.itemsize
                if room[place.file] < 0:
                    raise ValueError(f"the parts in {place.file} are together longer than it")
                chunks.append(chunk)
                metadata.storage_data[MetadataIndex(name, chunk.offsets)] = place
            _check_cover(name, shape, chunks)
            metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)
        state, ranks = value["state"], value["ranks"]
        if not isinstance(state, dict) or not all(isinstance(own, dict) for own in ranks):
            raise ValueError("state and ranks must be objects")
        return Saved(_size([value["step"]])[0], state, tuple(ranks), metadata)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{what} is damaged: {type(error).__name__}: {shown(str(error))}") from None


def overlap(chunks: Sequence[ChunkStorageMetadata]) -> tuple[ChunkStorageMetadata, ChunkStorageMetadata] | None:
    """Two of ``chunks``, boxes of one tensor, that overlap: a sweep along the dimension with the most cuts."""
    dims = len(chunks[0].offsets) if chunks else 0
    if len(chunks) < 2 or not dims:
        return (chunks[0], chunks[1]) if len(chunks) > 1 else None
    along = max(range(dims), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted((one for one in chunks if 0 not in one.sizes), key=lambda one: one.offsets[along]):
        active = [one for one in active if one.offsets[along] + one.sizes[along] > chunk.offsets[along]]
        for one in active:
            if all(
                one.offsets[d] < chunk.offsets[d] + chunk.sizes[d] and chunk.offsets[d] < one.offsets[d] + one.sizes[d]
                for d in range(dims)
            ):
                return one, chunk
        active.append(chunk)
    return None


def _check_cover(name: str, shape: Size, chunks: Sequence[ChunkStorageMetadata]) -> None:
    """Every element is in exactly one part: what no part covers would be read as whatever is in memory."""
    found = sum(math.prod(chunk.sizes) for chunk in chunks)
    if found != math.prod(shape):
        raise ValueError(f"{found} of the {math.prod(shape)} elements of {shown(name)}")
    if len({chunk.offsets for chunk in chunks}) < len(chunks) or overlap(chunks) is not None:
        raise ValueError(f"parts of {shown(name)} overlap")


def _check(chunk: ChunkStorageMetadata, shape: Size, place: Place, itemsize: int, files: Mapping[str, Digest]) -> None:
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        raise ValueError(f"a part with offsets {chunk.offsets} and lengths {chunk.sizes} in a tensor {shape}")
    if any(at + n > whole for at, n, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
        raise ValueError(f"a part with offsets {chunk.offsets} and lengths {chunk.sizes} lies outside of {shape}")
    if place.start + math.prod(chunk.sizes) * itemsize > files[place.file].size:
        raise ValueError(f"a part lies outside of {place.file}")


def _file(name: object, files: Mapping[str, Digest]) -> str:
    # A name with a slash would lead out of the folder.
    if not isinstance(name, str) or not _FILE.fullmatch(name) or name not in files:
        raise ValueError(f"no file {shown(name)} in the manifest")
    return name


def digests(value: Mapping[str, Any], what: str) -> dict[str, Digest]:
    """The files that manifest.json lists.

    Raises:
        CheckpointError: it cannot be; ``what`` names the file.
    """
    try:
        found = {name: Digest(_size([one["size"]])[0], str(one["sha256"])) for name, one in value["files"].items()}
        for name in found:
            _file(name, found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{what} is damaged: {type(error).__name__}: {shown(str(error))}") from None
    return found


def _size(values: Sequence[Any]) -> Size:
    if (
        not isinstance(values, list)
        or len(values) > MOST_DIMS
        or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in values)
        # What torch multiplies, also where another length is 0.
        or math.prod(n for n in values if n) >= 1 << 63
    ):
        raise ValueError(f"expected whole numbers; got {shown(values)}")
    return Size(values)
