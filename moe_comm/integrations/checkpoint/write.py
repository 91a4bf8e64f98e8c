"""Write values of any dtype, device and strides to their byte ranges in a safetensors file, in little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from moe_comm.integrations.checkpoint.plan import FilePlan, runs
from moe_comm.runtime.safe_files import open_new

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
