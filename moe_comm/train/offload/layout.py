"""Division of optimizer state and masters into chunks, which are read, updated and written as a whole.

    parameters    a [5000]         b [100]    c [9000]
    chunk 0       a[0..4096]                              master | exp_avg | exp_avg_sq of each range
    chunk 1       a[4096..5000]    b          c[0..3072]
    chunk 2                                   c[3072..]

Ranges begin at multiples of ``UNIT`` elements: vector instructions and the remainder of a loop may round in different
ways, and so the remainder stays at the end of the parameter. Chunks begin at multiples of ``BLOCK`` bytes of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moe_comm.runtime.offload.files import BLOCK

UNIT = 64
"""Alignment of ranges in elements."""
MOST_CHUNK = 16 << 20
"""Maximum bytes of a chunk of ranges: larger ones do not transfer faster."""
LEAST_CHUNK = 64 << 10
"""Minimum capacity of chunks of ranges."""
SLOTS = 16
"""Number of chunks of ranges that fit in the budget, unless they would be larger or smaller than that."""


@dataclass(frozen=True)
class Part:
    """A range of elements of a parameter in a chunk.

    Attributes:
        item: number of the parameter.
        start, stop: range of elements of its flat shard.
        offsets: byte offset in the chunk of each field.
    """

    item: int
    start: int
    stop: int
    offsets: dict[str, int]


@dataclass(frozen=True)
class Chunk:
    """Parts that are stored together. ``nbytes`` is a multiple of ``BLOCK``. ``group``: see ``Sweep``."""

    parts: tuple[Part, ...]
    nbytes: int
    group: int = 0


@dataclass(frozen=True)
class Stored:
    """A parameter whose state is stored: number, elements, bytes of an element, and names of its fields."""

    number: int
    elements: int
    itemsize: int
    fields: tuple[str, ...]


def chunk_bytes(budget: int, in_flight: int) -> int:
    """Return the capacity of chunks of ranges for a budget."""
    wanted = min(MOST_CHUNK, budget // max(SLOTS, in_flight + 1))
    return max(LEAST_CHUNK, wanted // BLOCK * BLOCK)


def cut(items: Sequence[Stored], capacity: int) -> list[Chunk]:
    """Divide parameters into chunks of ranges of at most ``capacity`` bytes.

    A parameter without fields is one part without bytes: it is updated in memory.
    """
    chunks: list[Chunk] = []
    parts: list[Part] = []
    used = 0
    for item in items:
        start = 0
        unit = UNIT * item.itemsize * len(item.fields)
        while start < item.elements:
            units = (capacity - used) // unit if unit else -(-item.elements // UNIT)
            if not units:
                chunks.append(Chunk(tuple(parts), _aligned(used, BLOCK)))
                parts, used = [], 0
                continue
            stop = min(item.elements, start + units * UNIT)
            part, used = _part(item, start, stop, used)
            parts.append(part)
            start = stop
    if parts:
        chunks.append(Chunk(tuple(parts), _aligned(used, BLOCK)))
    return chunks


def whole(groups: Sequence[Sequence[Stored]]) -> list[Chunk]:
    """Return one chunk for each group, with whole parameters."""
    chunks = []
    for number, group in enumerate(groups):
        parts, used = [], 0
        for item in group:
            part, used = _part(item, 0, item.elements, used)
            parts.append(part)
        chunks.append(Chunk(tuple(parts), _aligned(used, BLOCK), number))
    return chunks


def _part(item: Stored, start: int, stop: int, used: int) -> tuple[Part, int]:
    """Return the part of a range that begins at byte ``used`` of a chunk, and the end of the part."""
    offsets = {}
    for field in item.fields:
        offsets[field] = used
        used += _aligned((stop - start) * item.itemsize, UNIT * item.itemsize)
    return Part(item.number, start, stop, offsets), used


def _aligned(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
