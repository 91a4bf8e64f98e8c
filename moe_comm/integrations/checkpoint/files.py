"""Read slices of tensors in safetensors files, directly into the memory of parameters where that is possible.

    file        header │ a [4, D] bf16 │ b [F, D] bf16 │ ...

    a[1:3]      one run of bytes     ─▶ the parameter, if it has this dtype and is contiguous there
    b[:, 0:8]   short runs of bytes  ─▶ a buffer with whole rows ─▶ the parameter, converted or transposed

Files are read with ``pread``. Mapped pages would count as memory of the process, and a truncated file would kill it.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from moe_comm.errors import CheckpointError, ConfigError, CorruptFile, InputError, UnsupportedModel
from moe_comm.integrations.checkpoint.slices import HubSlice
from moe_comm.runtime.untrusted import open_regular, parse_object, read_bounded
from moe_comm.topology import Sharding, ShardSlice

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
INDEX_BYTES = 256 << 20
"""Maximum size of an index."""
HEADER_BYTES = 100 << 20
"""Maximum size of the header of a file, as in the safetensors library."""
BUFFER_BYTES = 4 << 20
"""Memory of a thread for values that are converted, transposed or dequantized."""
SAMPLES = 16
"""Number of places in a file whose bytes ``HubFolder.digest`` reads."""
SAMPLE_BYTES = 1024
SHORT_RUN = 64 << 10
"""Runs of fewer bytes are read together with the bytes between them."""
QUANTIZED_BLOCK = 128
"""Rows and columns of a weight in fp8 that have one scale."""
SCALE = "_scale_inv"
"""Suffix of the name of the scales of a weight in fp8."""
DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in headers, in the order in which the safetensors library stores tensors."""
FP8 = ("F8_E4M3", "F8_E5M2")
FLOATS = ("F64", "F32", "F16", "BF16")
Use = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: its name, shape, dtype as in the header, and first byte."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


class HubFolder:
    """The safetensors files of a model folder, or one file. ``name in hub_folder`` tests whether a tensor exists.

    tensors: those of a file in another format.

    Files are opened when they are first needed. Reading is thread-safe.

    Raises:
        ConfigError: the folder has no safetensors, or a file cannot be read.
        CorruptFile: a file is damaged.
    """

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor] | None = None) -> None:
        self.folder = folder
        self._open: dict[str, tuple[IO[bytes], dict[str, StoredTensor]]] = {}
        self._lock, self._of_thread = threading.Lock(), threading.local()
        if folder.is_file():
            self.folder, single = folder.parent, folder.name
            if tensors is not None:
                self._open[single] = os.fdopen(open_regular(folder), "rb", buffering=0), tensors
        elif (folder / SINGLE).exists():  # preferred, as by transformers, whose save_pretrained leaves an old index
            single = SINGLE
        elif (folder / INDEX).exists():
            self._file_of = _read_index(folder / INDEX)
            return
        else:
            text = f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors can be read"
            for pickled in sorted(folder.glob("pytorch_model*.bin"))[:1]:
                text += f". Load {pickled.name} into the unswapped model in one process, and save that as safetensors, "
                text += "with model.save_pretrained(folder) or safetensors.torch.save_model"
            if (folder / "adapter_model.safetensors").exists():
                text += ". The folder has adapters (LoRA) only: load the base model, and wrap it with PEFT"
            raise ConfigError(text)
        self._file_of = dict.fromkeys(self._handle(single)[1], single)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def stored(self, name: str) -> StoredTensor:
        """Return where the tensor ``name`` is.

        Raises:
            InputError: the folder has no such tensor.
            CorruptFile: the file of the index does not contain it, or is damaged.
            ConfigError: the file cannot be read.
        """
        if name not in self._file_of:
            raise InputError(
                f"{self.folder} has no tensor {name!r}; check that it contains this model with its output projection"
            )
        file = self._file_of[name]
        tensors = self._handle(file)[1]
        if name not in tensors:
            raise CorruptFile(f"{self.folder / file}: cannot read {name}: the index names it, but the file has none")
        return tensors[name]

    def digest(self) -> str:
        """Return a checksum of the headers and of samples of the values, to compare the copies that ranks read."""
        crc = 0
        for name in sorted(set(self._file_of.values())):
            file, tensors = self._handle(name)
            crc = zlib.crc32(repr(sorted(tensors.items())).encode(), crc)
            last = max(0, os.fstat(file.fileno()).st_size - SAMPLE_BYTES)
            for sample in range(SAMPLES):
                crc = zlib.crc32(os.pread(file.fileno(), SAMPLE_BYTES, last * sample // (SAMPLES - 1)), crc)
        return f"{crc:08x}"

    def check(self, name: str, shape: tuple[int, ...], required_by: str = "the configuration") -> StoredTensor:
        """Return where the tensor ``name`` is, if it has floating-point values of ``shape``.

        Raises:
            InputError: the folder has no such tensor, or its shape differs.
            UnsupportedModel: the tensor is quantized.
            CorruptFile, ConfigError: see ``stored``.
        """
        stored = self.stored(name)
        path = self.folder / stored.file
        if stored.shape != shape:
            raise InputError(f"{path}: {name} has shape {stored.shape}; {required_by} requires {shape}")
        if stored.dtype not in FLOATS:
            raise UnsupportedModel(
                f"{path}: {name} has dtype {stored.dtype}; supported are {', '.join(FLOATS)}. Dequantize the weights "
                "first."
            )
        return stored

    @torch.no_grad()
    def read_into(self, stored: StoredTensor, index: Sequence[slice], target: Tensor, use: Use = Tensor.copy_) -> None:
        """Read ``stored[index]`` into ``target``, which has the shape of the slice.

        Args:
            use: called with a part of ``target`` and its values. By default they are copied and converted, without a
                buffer if dtype and layout are the same.

        Raises:
            CheckpointError: the file cannot be read.
            CorruptFile: the file has become shorter.
        """
        ranges = [range(*of_dim.indices(size)) for of_dim, size in zip(index, stored.shape, strict=True)]
        if all(map(len, ranges)):
            self._fill(stored, stored.offset, stored.shape, ranges, target.detach(), use)

    @torch.no_grad()
    def read_dequantized(
        self, stored: StoredTensor, scales: StoredTensor, index: Sequence[slice], target: Tensor
    ) -> None:
        """Read ``stored[index]``, a weight [R, C] in fp8, times its scales, into ``target``.

        Args:
            scales: [ceil(R / 128), ceil(C / 128)].

        Raises:
            CheckpointError, CorruptFile: see ``read_into``.
        """
        full = torch.empty(scales.shape, dtype=torch.float32, device="cpu")
        self.read_into(scales, [slice(None)] * full.dim(), full)
        rows, columns = (range(*of_dim.indices(size)) for of_dim, size in zip(index, stored.shape, strict=True))
        columns_C = torch.arange(columns.start, columns.stop, columns.step, device="cpu")
        count = max(1, BUFFER_BYTES // (12 * len(columns)))  # values, scales and product in fp32
        for first in range(0, len(rows), count):
            part = rows[first : first + count]
            quantized = torch.empty(len(part), len(columns), dtype=DTYPES[stored.dtype], device="cpu")
            self.read_into(stored, (slice(part.start, part.stop, part.step), index[1]), quantized)
            rows_R = torch.arange(part.start, part.stop, part.step, device="cpu")
            scales_RC = full[rows_R // QUANTIZED_BLOCK][:, columns_C // QUANTIZED_BLOCK]
            target[first : first + len(part)].copy_(quantized.float().mul_(scales_RC))

    def _fill(
        self, stored: StoredTensor, offset: int, shape: Sequence[int], index: Sequence[range], target: Tensor, use: Use
    ) -> None:
        """Read the slice ``index`` of the tensor of ``shape`` at ``offset``."""
        item = DTYPES[stored.dtype].itemsize
        if not shape:
            self._read_run(stored, offset, target, use)
            return
        rows, row = index[0], prod(shape[1:]) * item
        whole_rows = all(len(of_dim) == size for of_dim, size in zip(index[1:], shape[1:], strict=True))
        if whole_rows and rows.step == 1:
            self._read_run(stored, offset + rows.start * row, target, use)
        elif row * rows.step <= BUFFER_BYTES and (whole_rows or _run(shape[1:], index[1:]) * item < SHORT_RUN):
            count = max(1, BUFFER_BYTES // (row * rows.step))
            inner = [slice(of_dim.start, of_dim.stop, of_dim.step) for of_dim in index[1:]]
            for first in range(0, len(rows), count):
                part = rows[first : first + count]
                values = self._buffer((part[-1] - part[0] + 1, *shape[1:]), stored.dtype)
                self._read(stored, offset + part[0] * row, values)
                use(target[first : first + len(part)], values[(slice(None, None, rows.step), *inner)])
        else:
            for position, index_of_row in enumerate(rows):
                self._fill(stored, offset + index_of_row * row, shape[1:], index[1:], target[position], use)

    def _read_run(self, stored: StoredTensor, offset: int, target: Tensor, use: Use) -> None:
        """Read consecutive values."""
        dtype = DTYPES[stored.dtype]
        if use is Tensor.copy_ and target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous():
            self._read(stored, offset, target)
            return
        size = target.numel() * dtype.itemsize
        if size <= BUFFER_BYTES:
            values = self._buffer(tuple(target.shape), stored.dtype)
            self._read(stored, offset, values)
            use(target, values)
            return
        row = size // target.shape[0]
        count = max(1, BUFFER_BYTES // row)
        for first in range(0, target.shape[0], count):
            part = target[first] if row > BUFFER_BYTES else target[first : first + count]
            self._read_run(stored, offset + first * row, part, use)

    def _buffer(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return memory of this thread, which the next call returns again."""
        if not hasattr(self._of_thread, "buffer"):
            self._of_thread.buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu")
        buffer: Tensor = self._of_thread.buffer
        kind = DTYPES[dtype]
        return buffer[: prod(shape) * kind.itemsize].view(kind).view(shape)

    def _read(self, stored: StoredTensor, offset: int, target: Tensor) -> None:
        """Read bytes into a contiguous tensor on the CPU."""
        memory = memoryview(target.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        path = self.folder / stored.file
        file = self._handle(stored.file)[0].fileno()
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(file, [memory[done : done + (1 << 30)]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            if not count:
                raise CorruptFile(f"{path}: cannot read {stored.name}: the file ends before its last value")
            done += count

    def _handle(self, file: str) -> tuple[IO[bytes], dict[str, StoredTensor]]:
        with self._lock:
            if file not in self._open:
                path = self.folder / file
                try:
                    opened = os.fdopen(open_regular(path), "rb", buffering=0)  # a pipe would block
                    self._open[file] = opened, _read_header(opened, file)
                except OSError as error:
                    raise ConfigError(f"{path} cannot be read: {error}") from error
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise CorruptFile(f"{path} is damaged or not a safetensors file: {error}") from error
            return self._open[file]


def _run(shape: Sequence[int], index: Sequence[range]) -> int:
    """Return the length of the runs of consecutive elements in a slice."""
    run = 1
    for size, of_dim in zip(reversed(shape), reversed(index), strict=True):
        if of_dim.step != 1:
            return run
        run *= len(of_dim)
        if len(of_dim) < size:
            return run
    return run


def _read_header(file: IO[bytes], name: str) -> dict[str, StoredTensor]:
    """Return the tensors of a file. ValueError, KeyError, TypeError, AttributeError: the header is invalid."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(_exactly(file, 8), "little")
    if length > min(size - 8, HEADER_BYTES):
        raise ValueError(f"its header would have {length} bytes, and the file has {size}")
    tensors, end, data = {}, 0, 8 + length
    for key, entry in parse_object(_exactly(file, length)).items():
        if key == "__metadata__":
            continue
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(number) is int and number >= 0 for number in (*shape, first, last)) or first > last:
            raise ValueError(f"{key} has an invalid shape or position")
        if dtype in DTYPES and last - first != prod(shape) * DTYPES[dtype].itemsize:
            raise ValueError(f"{key} has {last - first} bytes, which do not fit {dtype} {list(shape)}")
        tensors[key] = StoredTensor(key, name, shape, str(dtype), data + first)
        end = max(end, last)
    if data + end != size:
        raise ValueError(f"the file has {size} bytes instead of {data + end}")
    return tensors


def _exactly(file: IO[bytes], count: int) -> bytes:
    content = file.read(count)
    if len(content) < count:
        raise ValueError("the header is incomplete")
    return content


def _read_index(path: Path) -> dict[str, str]:
    try:
        file_of: dict[str, str] = parse_object(read_bounded(path, INDEX_BYTES))["weight_map"]
        # Only file names in the folder of the index: no other paths.
        if all(isinstance(file, str) and Path(file).name == file for file in file_of.values()):
            return file_of
        problem = "weight_map must contain file names without directories"
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise CorruptFile(f"{path} is damaged or not an index of safetensors files: {problem}")


def read_shard(
    hub: HubFolder,
    made_of: list[HubSlice],
    local: Tensor,
    sharding: Sharding,
    place: Mapping[str, int],
    sizes: Mapping[str, int],
    share: ShardSlice | None = None,
) -> None:
    """Fill ``local``, a rank's shard of a parameter, from hub tensors. Only the bytes of the shard are read.

    Args:
        made_of: result of ``hub_slices``.
        sharding, place, sizes: sharding of the parameter, the rank's index on each mesh axis, the sizes of the axes.
        share: slice of the rank's shard that ``local`` contains. None: all of it.

    Raises:
        InputError, UnsupportedModel, CorruptFile, ConfigError, CheckpointError: see ``HubFolder``.
    """
    for box in sharding.boxes(place, sizes, share):
        for hub_slice in made_of:
            if (overlap := hub_slice.overlap(sharding.shape, box)) is not None:
                stored = hub.check(hub_slice.name, hub_slice.extents(sharding.shape))
                hub.read_into(stored, overlap.hub, overlap.of(local))
