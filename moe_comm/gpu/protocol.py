"""What the host and the kernels of csrc/cuda/args.h must name alike: words, faults, sizes. No memory, no launches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moe_comm.gpu.blocks import ALIGN, up

HEADER_WORDS = 49
FAULT_WORD = 8
BAD_IDS_WORD = -1
"""What ``meet`` writes over word FAULT_WORD of a header if ``count`` found bad ids; the first bad slot, its id and how
many there are follow."""
OFFER_WORDS = 5
"""Of an offer: rows, rows of another block, scales, links; last, how many rows there is room for."""
NOWHERE = -1
"""The offer of a rank that could not allocate."""
UNLIMITED = -1
MAX_PARTS = 4
"""Blocks of ll_send an expert."""
NO_FAULT, TIMED_OUT, ABORTED, DISAGREE, BAD_IDS, NO_ROOM = 0, 1, 2, 3, 4, 6
TOLD, DONE, ARRIVED, SENT = range(4)
"""What a rank waited for."""
SAME, BLOCK_SCALES, ROW_SCALES = range(3)
"""How rows travel."""
MOST_SLOTS = 512
"""Of a chunk: they stand in a block's shared memory, and each looks at all others."""
REPORT_WORDS = ("turn", "fault", "who", "what", "wanted", "seen", "rows", "dropped", "overflow", "bad")

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """offsets: ``world + 1`` ids; rank r holds experts ``offsets[r]`` to ``offsets[r + 1]``."""

    rank: int
    offsets: tuple[int, ...]

    @property
    def world(self) -> int:
        return len(self.offsets) - 1

    @property
    def experts(self) -> int:
        return self.offsets[-1]

    @property
    def local_experts(self) -> int:
        """The most that one rank holds."""
        return max(end - first for first, end in pairwise(self.offsets))

    @property
    def own_experts(self) -> slice:
        return slice(self.offsets[self.rank], self.offsets[self.rank + 1])

    @property
    def control_bytes(self) -> int:
        """Of the control area, with which a block begins; see Control in csrc/cuda/args.h."""
        world = self.world
        halves = 2 * world * (HEADER_WORDS + OFFER_WORDS + self.experts)
        return up(8 * (2 * world + halves + self.local_experts * world * (1 + MAX_PARTS)))


@dataclass(frozen=True)
class Report:
    """What the device wrote about the last turn; the fields are those of Report in csrc/cuda/args.h."""

    turn: int
    fault: int
    who: int
    what: int
    wanted: int
    seen: int
    rows: int
    dropped: int
    overflow: int
    bad: int


class Offer(NamedTuple):
    """What this rank has in its block: bytes from its start, or NOWHERE. room: rows, or UNLIMITED."""

    rows: int = 0
    block: int = 0
    scales: int = 0
    links: int = 0
    room: int = UNLIMITED


NOTHING = Offer()


class Links(NamedTuple):
    """Of relayed rows, as ``fan_out`` takes them; ``blocks`` 0: rows are not relayed."""

    rows_at: int = 0
    scales_at: int = 0
    links_at: int = 0
    rows: int = 0
    blocks: int = 0


NOT_RELAYED = Links()


class Counted(NamedTuple):
    """What all ranks have told in a meeting with counts.

    own_L: rows for each of this rank's experts. rows_W: for each rank. said_W: one word of each rank's header.
    dropped: slots of this rank with id -1.
    """

    own_L: list[int]
    rows_W: list[int]
    said_W: list[int]
    dropped: int


def chunk_of(tokens: int, top_k: int, blocks: int) -> int:
    """Slots in each chunk of ``tokens`` with ``top_k`` each, whole tokens: count and push have a block for each chunk,
    about ``blocks`` of them, more if chunks would be too large."""
    return max(1, min(-(-tokens // blocks), MOST_SLOTS // top_k)) * top_k


def address(x: Tensor | None) -> int:
    """Of a tensor's memory; 0 for none."""
    return 0 if x is None else x.data_ptr()  # which is 0 where there is nothing in it


def blocks_bytes(shape: Shape, heap_bytes: int) -> int:
    """Size of a block with a heap of ``heap_bytes``."""
    return shape.control_bytes + up(heap_bytes, ALIGN)
