"""Write values of any dtype, device and strides to their byte ranges in a safetensors file, in little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.integrations.checkpoint.layout import CheckpointTensor, HeldTensor
from moe_comm.integrations.checkpoint.plan import Described, FilePlan, Region, runs
from moe_comm.runtime.memory import materialized
from moe_comm.runtime.safe_files import open_new
from moe_comm.topology import Box

BUFFER_BYTES = 16 << 20
"""Memory for values that are converted, transposed or not contiguous."""


def nbytes(shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def last_range(found: Sequence[tuple[slice, Tensor]]) -> tuple[int, int]:
    """Return the range of the last dimension that interleaved values are in."""
    return min(columns.start for columns, _ in found), max(columns.stop for columns, _ in found)


def merged_rows(
    leading: tuple[slice, ...], found: Sequence[tuple[slice, Tensor]]
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield values that alternate along the last dimension as consecutive ones, some rows at a time.

    They would be written one by one otherwise.
    """
    start, stop = last_range(found)
    shape = found[0][1].shape[:-1]
    row = nbytes((*shape[1:], stop - start)) * found[0][1].element_size()
    count = max(1, BUFFER_BYTES // max(1, row))
    for first in range(0, shape[0], count) if shape else (0,):
        rows = slice(first, first + count) if shape else Ellipsis
        parts = [(columns, values[rows]) for columns, values in found]
        merged = parts[0][1].new_empty((*parts[0][1].shape[:-1], stop - start))
        for columns, values in parts:
            merged[..., columns.start - start :: columns.step][..., : values.shape[-1]] = values
        at = leading
        if shape:
            begin = leading[0].start + first
            at = (slice(begin, begin + merged.shape[0]), *leading[1:])
        yield (*at, slice(start, stop)), merged


def create(path: Path, planned: FilePlan) -> None:
    """Create a safetensors file in its final size, with its header and without values."""
    with open_new(path) as file:
        file.write(planned.header)
        file.truncate(planned.size)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Part:
    """The values of a parameter or buffer that this rank holds.

    boxes: where they are in ``tensor``, and in the full parameter.
    """

    tensor: Tensor
    boxes: list[Box]

    @classmethod
    def of(cls, held: HeldTensor) -> Part:
        if held.tensor.is_meta:
            raise ConfigError(f"{held.names[0]} is on meta and has no values; call load_checkpoint first")
        return cls(materialized(held.local), held.boxes())

    def box(self, region: Region) -> Box:
        """Return the box of a region inside one of the boxes."""
        for box in self.boxes:
            if all(s.start <= start and stop <= s.stop for s, (start, stop) in zip(box.full, region, strict=True)):
                local = tuple(
                    slice(in_local.start + start - in_full.start, in_local.start + stop - in_full.start)
                    for in_local, in_full, (start, stop) in zip(box.local, box.full, region, strict=True)
                )
                return Box(local, tuple(slice(*of_dim) for of_dim in region))
        raise AssertionError(f"{region} is in none of {self.boxes}")


def values_of(
    entry: CheckpointTensor,
    described: Mapping[str, Described],
    parts: Mapping[str, Part],
    boxes: Mapping[str, Sequence[Box]],
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield the values of a checkpoint tensor that this rank writes, each with its index in that tensor."""
    interleaved: dict[Region, list[tuple[slice, Tensor]]] = {}
    for piece in entry.slices:
        for box in boxes.get(piece.parameter, ()):
            overlap = piece.overlap(described[piece.parameter].shape, box)
            if overlap is None:
                continue
            values = overlap.of(parts[piece.parameter].tensor)
            if overlap.hub and (overlap.hub[-1].step or 1) > 1:
                region = tuple((of_dim.start, of_dim.stop) for of_dim in overlap.hub[:-1])
                interleaved.setdefault(region, []).append((overlap.hub[-1], values))
            else:
                yield overlap.hub, values
    for region, found in interleaved.items():
        leading = tuple(slice(*of_dim) for of_dim in region)
        if sum(values.numel() for _, values in found) != nbytes(
            [stop - start for start, stop in (*region, last_range(found))]
        ):
            yield from (((*leading, columns), values) for columns, values in found)
            continue
        yield from merged_rows(leading, found)


@dataclass(frozen=True)
class Target:
    """A tensor, or a slice of one along leading dimensions, in a file."""

    handle: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def write_values(target: Target, index: Sequence[slice], values: Tensor) -> None:
    """Write ``values`` to the elements ``index`` of a tensor in a file."""
    item = target.dtype.itemsize
    in_place = values.device.type == "cpu" and values.dtype == target.dtype and values.is_contiguous()
    if not values.numel():
        return
    if in_place or values.numel() * item <= BUFFER_BYTES:
        ready = values.to("cpu", target.dtype).contiguous()
        memory = memoryview(ready.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        run, starts = runs(target.shape, index)
        for number, start in enumerate(starts):
            _pwrite(
                target.handle, memory[number * run * item : (number + 1) * run * item], target.offset + start * item
            )
    elif len(values) > 1:
        count = max(1, BUFFER_BYTES * len(values) // (values.numel() * item))
        rows = range(*index[0].indices(target.shape[0]))
        for first in range(0, len(rows), count):
            part = rows[first : first + count]
            write_values(target, (slice(part[0], part[-1] + 1, part.step), *index[1:]), values[first : first + count])
    else:
        row = nbytes(target.shape[1:], target.dtype)
        inner = replace(target, offset=target.offset + index[0].start * row, shape=target.shape[1:])
        write_values(inner, index[1:], values[0])


def _pwrite(handle: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        done += os.pwrite(handle, memory[done : done + (1 << 30)], offset + done)
