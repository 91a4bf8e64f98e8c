"""Constants and structures shared by the CPU and the kernels of csrc/cuda/args.h.

An operation of all ranks (a ``turn`` in csrc/cuda) begins with a handshake, in which ranks exchange headers, offers
(addresses of their buffers) and counts. A chunk is the slots, or (token, expert) pairs, of one thread block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_comm.gpu.blocks import ALIGN, round_up
from moe_comm.runtime.memory import address

HEADER_WORDS = 49
FAULT_WORD = 8
BAD_IDS_WORD = -1
"""``meet`` writes this value to word FAULT_WORD of a header if ``count`` found invalid ids.

The next words are the first invalid slot, its id, and the number of invalid ids.
"""
OFFER_WORDS = 5
"""Words of an offer: rows, rows of another block, scales, links, and the number of rows that there is room for."""
NOWHERE = -1
"""Offer of a rank that could not allocate."""
UNLIMITED = -1
MAX_PARTS = 4
"""Maximum number of thread blocks of ll_send per expert."""
MAX_SLICES, SLICE_COLUMNS = 4, 256
"""Maximum number of column slices of a combine that overlaps, and the multiple at which slices begin."""
TILE_ROWS, TILE_FLAGS = 128, 16
"""Approximate number of rows of a tile with a flag, and maximum number of tiles that a rank sends to one expert."""
ORDER_WORDS, SEND_TILE_WORDS = 2, 5
"""Words of an order before its tiles, and of a tile; see csrc/cuda/order.h."""
NO_FAULT, TIMED_OUT, ABORTED, DISAGREE, BAD_IDS, NO_ROOM = 0, 1, 2, 3, 4, 6
POSTED, DONE, ARRIVED, SENT, RESULTS, STAGED = range(6)
"""What a rank waited for: a header, the end of a turn, rows, rows or results of low-latency dispatch, the
end of a stage of a reduced combine."""
SAME, BLOCK_SCALES, ROW_SCALES = range(3)
"""Encodings of rows."""
COUNT_BLOCKS = 256
"""Approximate number of thread blocks of count, at most one per token."""
MOST_SLOTS = 512
"""Maximum number of slots of a chunk. They are held in shared memory, and each is compared with all others."""
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupShape:
    """This rank, and ``world + 1`` expert ids: rank r holds experts ``offsets[r]`` to ``offsets[r + 1] - 1``."""

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
        """Maximum number of experts of a rank."""
        return max(end - first for first, end in pairwise(self.offsets))

    @property
    def own_experts(self) -> slice:
        return slice(self.offsets[self.rank], self.offsets[self.rank + 1])

    @property
    def control_bytes(self) -> int:
        """Size of the control area at the start of a block; see Control in csrc/cuda/args.h."""
        world = self.world
        # Alternate operations use two copies: a rank may begin one while a peer still reads the previous one.
        exchanged = 2 * world * (HEADER_WORDS + OFFER_WORDS + self.experts)
        flags = 4 + MAX_SLICES + self.local_experts * (TILE_FLAGS + 2 * MAX_PARTS)
        return round_up(8 * (exchanged + flags * world))


class FaultReport(NamedTuple):
    """Result of the last operation, written by the device. The fields are those of Report in csrc/cuda/args.h.

    After a timeout, ``who`` is the awaited rank; its flag ``value`` is below ``expected``.
    """

    turn: int
    fault: int
    who: int
    what: int
    expected: int
    value: int
    rows: int
    dropped: int
    overflow: int
    bad: int


REPORT_WORDS = FaultReport._fields


class Offer(NamedTuple):
    """Memory that this rank offers to its peers: byte offsets in its block, or NOWHERE. room: rows, or UNLIMITED.

    scales: of rows in fp8, or one fp32 number for each row.
    """

    rows: int = 0
    block: int = 0
    scales: int = 0
    links: int = 0
    room: int = UNLIMITED


NOTHING = Offer()


class RelayLinks(NamedTuple):
    """Arguments of ``fan_out`` for relayed rows. ``blocks`` is 0 if rows are not relayed."""

    rows_at: int = 0
    scales_at: int = 0
    links_at: int = 0
    rows: int = 0
    blocks: int = 0


NOT_RELAYED = RelayLinks()


class Reduction(NamedTuple):
    """Arguments of ``reduce``: this rank's number of rows, and the addresses of rows, links, and reduced rows.

    A link is a RowLink of csrc/cuda/args.h, of ``ROW_LINK_WORDS`` words.
    """

    rows: int
    rows_at: int
    links_at: int
    reduced_at: int


ROW_LINK_WORDS = 2


class Sending(NamedTuple):
    """How the kernel ``push`` sends rows.

    blocks: maximum number of thread blocks. format: encoding of the rows, and power_of_two: of their scales.
    bulk: whether to copy rows by cp.async.bulk. wait: whether kernels that wait for the rows of all ranks follow.
    order_at: address of ``order_words`` int64 words for a list of the slots by expert, or 0. by_expert: whether to send
    rows in this order, with a flag for each tile. Rows that are converted or relayed are sent by token. strict: whether
    more rows for a rank than its offer has room for are a fault, on every rank, instead of overflow. own_counts_at:
    address of int64 words for the number of rows of each of this rank's experts, or 0. digest_at: address of an int64
    word on the device that is added to the digest of the placement in the header, or 0.
    """

    blocks: int
    format: int
    power_of_two: int
    bulk: int
    wait: int = 1
    order_at: int = 0
    by_expert: int = 0
    strict: int = 0
    own_counts_at: int = 0
    digest_at: int = 0


class RowFlags(NamedTuple):
    """Where kernels find the flags of rows or results, and where they report a rank whose flag is missing.

    peers_W: [W] int64 addresses of the ranks' blocks. state, report, abort: State, Report and the abort word of
    csrc/cuda/args.h. first_flag: word of the control area with the first flag. For rows, that of tile t of (local
    expert e, rank) is ``(e * W + rank) * TILE_FLAGS + t`` words after it; for results, that of (slice i, rank) is
    ``i * W + rank`` words after it. turn: a flag is set if its value is at least this number.
    """

    peers_W: Tensor
    state: Tensor
    report: Tensor
    abort: Tensor
    rank: int
    world: int
    first_flag: int
    turn: int
    timeout_ns: int


@lru_cache
def chunk_of(tokens: int, top_k: int) -> int:
    """Return the number of slots per chunk: all slots of whole tokens, for about ``COUNT_BLOCKS`` chunks.

    There are more chunks if one would exceed ``MOST_SLOTS``.
    """
    return max(1, min(-(-tokens // COUNT_BLOCKS), MOST_SLOTS // top_k)) * top_k


def order_words(slots: int, experts: int) -> int:
    """Return the number of int64 words for the order of ``slots`` slots; see csrc/cuda/order.h."""
    return ORDER_WORDS + SEND_TILE_WORDS * (slots // TILE_ROWS + experts) + slots


def num_slices(columns: int) -> int:
    """Return the number of column slices of a combine that overlaps."""
    return min(-(-columns // SLICE_COLUMNS), MAX_SLICES)


def words_address(x: Tensor | None) -> int:
    """Return the address of dense int64 words in the memory of any device; 0 for None or an empty tensor."""
    return 0 if x is None else address(x, torch.int64, device=x.device.type)


def blocks_bytes(shape: GroupShape, heap_bytes: int) -> int:
    """Return the size of a block with a heap of ``heap_bytes``."""
    return shape.control_bytes + round_up(heap_bytes, ALIGN)
