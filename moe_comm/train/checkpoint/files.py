"""Files of a checkpoint: hashed while they are written, and synced. They are safetensors and JSON, without pickle.

A data file is a safetensors file, so other readers of that format can open it:

    8 bytes   length of the header, little-endian
    header    JSON: name of a part -> dtype, shape, data_offsets; padded with spaces to a multiple of 8 bytes
    data      the parts in sequence, wide dtypes first, so that each is aligned
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from moe_comm.errors import CheckpointError
from moe_comm.runtime import untrusted
from moe_comm.runtime.memory import materialized
from moe_comm.runtime.safe_files import open_new, open_own_folder

BLOCK = 1 << 24
"""Bytes per write, hash or read."""
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors and in metadata.json."""
NAMED_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


class HashedFile:
    """A new file that is hashed while it is written, and synced when it is closed without an error."""

    def __init__(self, path: Path) -> None:
        self._hash = hashlib.sha256()
        self._size = 0
        folder = open_own_folder(path.parent)
        try:
            self._file = open_new(path, folder)
        finally:
            os.close(folder)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def write(self, content: bytes | memoryview) -> None:
        view = memoryview(content)
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            self._hash.update(block)
            write_block(self._file, block)
            self._size += len(block)

    @property
    def digest(self) -> FileDigest:
        return FileDigest(self._size, self._hash.hexdigest())


def write_block(file: IO[bytes], block: memoryview) -> None:
    """Write a block. All bytes of checkpoints are written here, so that faults can be injected."""
    file.write(block)


def write_parts(
    path: Path,
    parts: Sequence[tuple[str, Tensor]],
    note: Mapping[str, str],
    opened: Callable[[int], AbstractContextManager[Tensor]] | None = None,
) -> tuple[FileDigest, list[int]]:
    """Write ``parts``, CPU tensors with their keys, as a new safetensors file whose ``__metadata__`` is ``note``.

    Args:
        opened: returns the values of a part by its number, when it is written; None: the tensors have them.

    Returns:
        The file's digest, and the offset of each part's data in the file.
    """
    header: dict[str, Any] = {"__metadata__": dict(note)}
    starts = [0] * len(parts)
    end = 0
    order = sorted(range(len(parts)), key=lambda n: -parts[n][1].element_size())
    for n in order:
        key, tensor = parts[n]
        starts[n], end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[n], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with HashedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for n in order:
            with nullcontext(parts[n][1]) if opened is None else opened(n) as tensor:
                file.write(bytes_of(tensor.cpu()))
    return file.digest, [8 + len(text) + start for start in starts]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor. They are copied only if it is not contiguous, or has other values in memory."""
    flat = materialized(tensor).contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def write_json(path: Path, value: Mapping[str, Any]) -> FileDigest:
    """Write ``value`` as a new JSON file."""
    with HashedFile(path) as file:
        # No final newline: a file truncated by it would still be valid.
        file.write(json.dumps(value, separators=(",", ":"), allow_nan=False).encode())
    return file.digest


def parse_json(content: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object; see ``untrusted.parse_object``."""
    try:
        return untrusted.parse_object(content)
    except ValueError as error:
        raise CheckpointError(f"{what} is damaged: it is not valid JSON ({error})") from None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def digest_of(path: Path) -> FileDigest:
    """Return size and hash of a file."""
    digest = hashlib.sha256()
    size = 0
    buffer = memoryview(bytearray(BLOCK))
    with os.fdopen(untrusted.open_regular(path), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileDigest(size, digest.hexdigest())
