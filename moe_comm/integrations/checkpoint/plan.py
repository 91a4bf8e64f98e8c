"""Plan the files of a checkpoint, and the parts of each parameter that each rank writes.

    rank 0    gate_up_proj [0:4]   down_proj [0:4]   embedding [0:40]     experts: by the ranks that hold them
    rank 1    gate_up_proj [4:7]   down_proj [4:7]   embedding [40:96]    others: divided, for equal numbers of bytes
    file      header | tensor | tensor | ...    each rank writes byte ranges

All ranks compute the same plan from the same descriptions.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from moe_comm.errors import CheckpointError, ConfigError
from moe_comm.integrations.checkpoint.files import DTYPES, INDEX, SINGLE

Range = tuple[int, int]
Region = tuple[Range, ...]
"""The ranges [start, stop) of a rectangular region of a tensor, one per dimension."""
CHUNK_BYTES = 16 << 20
"""Values that several ranks hold are divided into chunks of about this size."""
SMALL_BYTES = 1 << 20
"""Smaller tensors are not divided."""
_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "GIB": 1 << 30, "MIB": 1 << 20, "KIB": 1 << 10}
STORED = {dtype: name for name, dtype in DTYPES.items()}
"""Names of dtypes in headers."""


@dataclass(frozen=True)
class FilePlan:
    """A safetensors file.

    Attributes:
        name: in the folder.
        header: its first bytes: length and JSON.
        offsets: first byte of each tensor in the file.
        size: of the file in bytes.
    """

    name: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


def parse_size(size: int | str) -> int:
    """Return a number of bytes, given as an integer or as text: "5GB", "200MB", "1GiB".

    Raises:
        ConfigError: ``size`` has another form.
    """
    if isinstance(size, str):
        text = size.strip().upper()
        unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
        try:
            size = int(float(text.removesuffix(unit)) * _UNITS[unit]) if unit else int(text)
        except (ValueError, OverflowError):
            size = 0
    if not isinstance(size, int) or size < 1:
        raise ConfigError("max_shard_size must be a positive number of bytes, or text such as '5GB' or '200MB'")
    return size


def plan_files(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], max_bytes: int, single: str = SINGLE
) -> list[FilePlan]:
    """Distribute tensors (shape and dtype by name) over files, in their order and as transformers does.

    Args:
        max_bytes: maximum bytes of the tensors of a file; a larger tensor gets a separate file.
        single: name of the file if there is one; several are numbered.

    Raises:
        ConfigError: safetensors has no such dtype.
    """
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, (shape, dtype) in tensors.items():
        if dtype not in STORED:
            raise ConfigError(f"{name} has dtype {dtype}, which safetensors files do not have")
        nbytes = prod(shape) * dtype.itemsize
        if nbytes > max_bytes:
            files.append([name])
            continue
        if filled + nbytes > max_bytes:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += nbytes
    if current or not files:
        files.append(current)
    return [
        _file(file_name(number, len(files), single), {name: tensors[name] for name in names})
        for number, names in enumerate(files)
    ]


def file_name(number: int, count: int, single: str = SINGLE) -> str:
    """Return the name of file ``number`` (from 0) of ``count``."""
    stem, _, suffix = single.rpartition(".")
    return single if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.{suffix}"


def _file(name: str, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> FilePlan:
    order, entries, starts, end = list(STORED), {}, {}, 0
    for key, (shape, dtype) in sorted(tensors.items(), key=lambda item: (order.index(item[1][1]), item[0])):
        starts[key], start = end, end
        end += prod(shape) * dtype.itemsize
        entries[key] = {"dtype": STORED[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FilePlan(name, header, {key: len(header) + start for key, start in starts.items()}, len(header) + end)


def variant_name(variant: str | None) -> str:
    """Return the name of the file if there is one, of a variant as in transformers ("fp16")."""
    return SINGLE if variant is None else f"model.{variant}.safetensors"


def index_name(single: str = SINGLE) -> str:
    """Return the name of the index of several files."""
    if single == SINGLE:
        return INDEX
    stem, _, variant = single.removesuffix(".safetensors").rpartition(".")
    return f"{stem}.safetensors.index.{variant}.json"  # as transformers names it


def index_text(files: Sequence[FilePlan], metadata: Mapping[str, int]) -> str:
    """Return the index of several files."""
    file_of = {name: planned.name for planned in files for name in planned.offsets}
    index = {"metadata": dict(metadata), "weight_map": dict(sorted(file_of.items()))}
    return json.dumps(index, indent=2) + "\n"


@dataclass(frozen=True)
class Described:
    """A parameter or buffer, as all ranks describe it."""

    shape: tuple[int, ...]
    itemsize: int
    is_buffer: bool = False

    @property
    def whole(self) -> Region:
        return tuple((0, size) for size in self.shape)


def assign(
    described: Mapping[str, Described], regions_W: Sequence[Mapping[str, Iterable[Region]]]
) -> list[dict[str, list[Region]]]:
    """Return the regions of each tensor that each rank writes.

    A region that one rank holds is written by it. Others are divided among the ranks that hold them, so that the ranks
    write nearly equal numbers of bytes. The values of buffers may differ between ranks; those of the first rank are
    written.

    Args:
        regions_W: the regions that each rank holds.

    Raises:
        CheckpointError: the regions of all ranks do not make up a tensor.
    """
    result: list[dict[str, list[Region]]] = [{} for _ in regions_W]
    load = [0] * len(regions_W)
    shared: list[tuple[str, Region, list[int]]] = []
    for name, of_tensor in described.items():
        owners: dict[Region, list[int]] = {}
        for rank, regions in enumerate(regions_W):
            for region in regions.get(name, ()):
                owners.setdefault(region, []).append(rank)
        held = sum(map(_count, owners))
        if held != prod(of_tensor.shape):
            raise CheckpointError(
                f"the {len(regions_W)} ranks hold {held} of the {prod(of_tensor.shape)} elements of {name}. All ranks "
                "that hold parts of the model must call save_checkpoint; pass their group if it is not the default one"
            )
        for region, ranks in owners.items():
            if len(ranks) > 1 and not of_tensor.is_buffer:
                shared += [(name, part, ranks) for part in _chunks(region, of_tensor.itemsize)]
                continue
            result[ranks[0]].setdefault(name, []).append(region)
            load[ranks[0]] += _count(region) * of_tensor.itemsize
    for name, region, ranks in shared:
        rank = min(ranks, key=load.__getitem__)
        result[rank].setdefault(name, []).append(region)
        load[rank] += _count(region) * described[name].itemsize
    return result


def _count(region: Region) -> int:
    return prod(stop - start for start, stop in region)


def _chunks(region: Region, itemsize: int) -> Iterator[Region]:
    """Divide a region along its first dimension."""
    nbytes = _count(region) * itemsize
    if nbytes <= SMALL_BYTES or not region:
        yield region
        return
    (start, stop), *rest = region
    rows = max(1, CHUNK_BYTES * (stop - start) // nbytes)
    yield from (((first, min(first + rows, stop)), *rest) for first in range(start, stop, rows))


def runs(shape: Sequence[int], index: Sequence[slice]) -> tuple[int, Iterator[int]]:
    """Return the length of the runs of consecutive elements of ``index`` in a tensor, and their first elements."""
    ranges = [range(*of_dim.indices(size)) for of_dim, size in zip(index, shape, strict=True)]
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    depth, run = len(shape), 1
    while depth and ranges[depth - 1].step == 1:
        depth -= 1
        run *= len(ranges[depth])
        if len(ranges[depth]) < shape[depth]:
            break
    start = sum(ranges[d].start * strides[d] for d in range(depth, len(shape)))
    leading = ([i * strides[d] for i in ranges[d]] for d in range(depth))
    return run, (start + sum(offsets) for offsets in itertools.product(*leading))
