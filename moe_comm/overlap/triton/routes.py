"""Row positions and work tables of the kernels for experts, computed on the host from the counts of all ranks.

The position of a row does not depend on atomics (UniEP, arXiv 2604.19241). Once every rank knows how many rows each
rank has for each expert, positions follow from prefix sums. Rows are ordered by (expert, source rank, token, slot):

    rank 1 holds experts 2 3                 rows 0   2   3       6   7
    rows_WE   expert  2  3                        ├───┼───┼───────┼───┼──┤
    from rank 0       2  3                        2←0 │2←1│ 3←0   │3←1│     "2←0": rows of expert 2 from rank 0,
    from rank 1       1  1                                                  in the order of its (token, slot)

A block of rows for one expert is contiguous at its destination, so a few integers describe a send.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_comm.dispatch.backends.all_to_all import Routes
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.schedule import TileSchedule, combine_order, dispatch_order
from moe_comm.overlap.tiles import Cut, Ints, column_slices
from moe_comm.topology import ExpertPlacement


@dataclass(frozen=True, eq=False)
class RowPositions:
    """Positions of the rows of one dispatch, computed from the same counts on every rank.

    rows_WE: rows that each rank has for each expert; on the host.
    slot_S: [S] flat slots of this rank by (expert, token, slot), without dropped ones.
    place_TK: [T, K] int64 row of each slot on its destination rank; -1 if dropped.
    owner_TK: [T, K] int64 rank of each slot's expert; -1 if dropped.
    """

    ring: Ring
    placement: ExpertPlacement
    rows_WE: Ints
    slot_S: Tensor
    place_TK: Tensor
    owner_TK: Tensor

    @classmethod
    def of(cls, ids_TK: Tensor, routes: Routes, placement: ExpertPlacement, ring: Ring) -> RowPositions:
        """Compute the positions. ids_TK: [T, K] int64 or int32 valid expert ids, or -1. routes: of the same
        dispatch."""
        device, rows_WE = ids_TK.device, routes.rows_WE
        # Difference between a slot's row at the destination and its index in this rank's sorted slots.
        shift_E = _first_rows(rows_WE, placement)[ring.rank] - _starts(rows_WE[ring.rank])
        owner_E = np.repeat(np.arange(ring.world), placement.experts_per_rank)
        dropped_TK = ids_TK < 0
        expert_TK = ids_TK.long().masked_fill(dropped_TK, 0)
        place_TK = routes.place_TK + torch.from_numpy(shift_E).to(device)[expert_TK]
        return cls(
            ring,
            placement,
            rows_WE,
            routes.slot_S.contiguous(),
            place_TK.masked_fill_(dropped_TK, -1).contiguous(),
            torch.from_numpy(owner_E).to(device)[expert_TK].masked_fill_(dropped_TK, -1).contiguous(),
        )

    @property
    def num_tokens(self) -> int:
        return self.place_TK.shape[0]

    @property
    def top_k(self) -> int:
        return self.place_TK.shape[1]

    @property
    def experts(self) -> range:
        """Global ids of this rank's experts."""
        return self.placement.local_range(self.ring.rank)

    @property
    def rows_EW(self) -> Ints:
        """[local E, W] rows of each local expert from each source."""
        return self.rows_WE[:, self.experts.start : self.experts.stop].T

    @property
    def rows_of_W(self) -> tuple[int, ...]:
        """Rows that each rank receives."""
        offsets = self.placement.offsets
        return tuple(int(self.rows_WE[:, offsets[d] : offsets[d + 1]].sum()) for d in range(self.ring.world))

    @property
    def num_rows(self) -> int:
        return self.rows_of_W[self.ring.rank]

    @property
    def max_rows(self) -> int:
        """Maximum over ranks of the received rows, which each rank allocates memory for."""
        return max(self.rows_of_W)

    def sent_TW(self) -> Tensor:
        """Return [T, W]: whether the token has a slot on the rank."""
        sent = torch.zeros(self.num_tokens, self.ring.world + 1, dtype=torch.bool, device=self.owner_TK.device)
        return sent.scatter_(1, self.owner_TK + 1, True)[:, 1:]

    def relayed_rows(self) -> Tensor:
        """Return [W]: rows sent to each rank if a token is sent there once for all its experts on that rank."""
        return self.sent_TW().sum(0)


@dataclass(frozen=True, eq=False)
class _Table:
    """Work items of programs, one row each."""

    items: Tensor

    def __len__(self) -> int:
        return self.items.shape[0]


@dataclass(frozen=True, eq=False)
class SendTable(_Table):
    """Work of the send programs: N blocks of rows, in the order in which destinations are served.

    items: [N, 7] int64: destination, first entry of ``index``, entries, first row (or relay slot) there, flag there,
        counter, and the count at which the flag is raised. Each block adds one to the counter.
    index: the flat slot of each sent row or, if relayed, its token.
    """

    index: Tensor
    num_counters: int


@dataclass(frozen=True, eq=False)
class RelayTable(_Table):
    """Work of the relay programs: N blocks of rows that were received once, each copied to all its experts' rows.

    items: [N, 5] int64: source, first relay slot, rows, flag of the block, number of blocks of the source. Flag
        ``source`` is raised when all blocks of the source are copied.
    slots: maximum number of relay slots of a rank.
    """

    slots: int
    num_flags: int


@dataclass(frozen=True, eq=False)
class TileTable(_Table):
    """Work of the compute programs, in order.

    items: [N, 7] int64: local expert, first and end row, first and end column, first and end entry of ``flags``.
    flags: [M, 3] int64. Dispatch waits: flag, 0, rank that raises it. Combine signals: counter, number of tiles that
        signal it, rank that waits for them.
    """

    flags: Tensor


@dataclass(frozen=True, eq=False)
class SumTable(_Table):
    """Work of the sum programs: N blocks of tokens and columns, slice by slice.

    items: [N, 5] int64: slice, first token, tokens, first and end column.
    sources: ranks that have rows for this rank's tokens, in order of arrival. A slice is complete when it is complete
        on all of them.
    """

    sources: Tensor
    num_flags: int


def direct_sends(positions: RowPositions, block: int) -> SendTable:
    """Send each slot's row to its position. Flag ``local expert * W + source``: all rows of both are complete."""
    ring, placement = positions.ring, positions.placement
    rows_E = positions.rows_WE[ring.rank]
    begin_E, first_E = _starts(rows_E), _first_rows(positions.rows_WE, placement)[ring.rank]
    owner_E = np.repeat(np.arange(ring.world), placement.experts_per_rank)
    local_E = np.arange(len(rows_E)) - np.array(placement.offsets)[owner_E]
    order_E = np.concatenate([[*placement.local_range(d)] for d in ring.sends]).astype(np.int64)
    expert_N, offset_N = _cut(order_E, rows_E, block)
    items = (
        owner_E[expert_N],
        begin_E[expert_N] + offset_N,
        np.minimum(block, rows_E[expert_N] - offset_N),
        first_E[expert_N] + offset_N,
        local_E[expert_N] * ring.world + ring.rank,
        expert_N,
        _blocks(rows_E[expert_N], block),
    )
    return SendTable(_table(items, positions.slot_S.device), positions.slot_S, placement.num_experts)


def relay_sends(positions: RowPositions, relayed_WW: Ints, block: int) -> SendTable:
    """Send each token's row once to each rank that has experts for it; one flag for each block."""
    ring, device = positions.ring, positions.owner_TK.device
    num_W = relayed_WW[ring.rank]
    # The first block of this rank among those of its destination.
    first_block_W = _blocks(relayed_WW[: ring.rank], block).sum(0)
    peer_N, offset_N = _cut(np.array(ring.sends), num_W, block)
    block_N = first_block_W[peer_N] + offset_N // block
    items = (
        peer_N,
        _starts(num_W)[peer_N] + offset_N,
        np.minimum(block, num_W[peer_N] - offset_N),
        block_N * block,
        ring.world + block_N,
        np.arange(len(peer_N)),
        np.ones_like(peer_N),
    )
    tokens = positions.sent_TW().t().nonzero()[:, 1]
    return SendTable(_table(items, device), tokens.contiguous(), len(peer_N))


def relay_items(positions: RowPositions, relayed_WW: Ints, block: int) -> RelayTable:
    """Return the blocks that this rank receives, in order of arrival.

    Args:
        relayed_WW: [source, destination] ``RowPositions.relayed_rows`` of all ranks.
    """
    ring = positions.ring
    blocks_WW = _blocks(relayed_WW, block)
    num_W = relayed_WW[:, ring.rank]
    source_N, offset_N = _cut(np.array(ring.arrivals), num_W, block)
    block_N = _starts(blocks_WW[:, ring.rank])[source_N] + offset_N // block
    items = (
        source_N,
        block_N * block,
        np.minimum(block, num_W[source_N] - offset_N),
        ring.world + block_N,
        blocks_WW[source_N, ring.rank],
    )
    max_blocks = int(blocks_WW.sum(0).max())
    return RelayTable(_table(items, positions.owner_TK.device), max_blocks * block, ring.world + max_blocks)


def dispatch_tiles(positions: RowPositions, cut: Cut, columns: int, relayed: bool) -> TileTable:
    """Return the tiles sorted by the latest source of their rows. Each waits for its own flags.

    Args:
        columns: All columns of a tile are one item.
        relayed: Wait for flag ``source``; else for ``local expert * W + source``.
    """
    schedule = dispatch_order(positions.rows_EW, positions.ring, cut, flags_per_expert=not relayed)
    flags = schedule.needs.values
    flags_M3 = np.stack((flags, np.zeros_like(flags), flags % positions.ring.world), 1)
    return _tiles(schedule, np.array([[0, columns]]), schedule.needs.offsets, flags_M3, positions.slot_S.device)


def combine_tiles(positions: RowPositions, cut: Cut, columns: int, slices: int, align: int) -> TileTable:
    """Return the tiles, slice by slice of columns. Counter ``slice * W + destination`` counts completed tiles."""
    spans = column_slices(columns, slices, align)
    schedule = combine_order(positions.rows_EW, positions.ring, cut, len(spans))
    counters = schedule.signals.values
    flags_M3 = np.stack((counters, schedule.expected_F()[counters], counters % positions.ring.world), 1)
    bounds = np.array([[span.start, span.stop] for span in spans])
    return _tiles(schedule, bounds, schedule.signals.offsets, flags_M3, positions.slot_S.device)


def combine_sums(positions: RowPositions, columns: int, slices: int, align: int, block: int) -> SumTable:
    """Return the sums. ``source`` raises flag ``slice * W + source`` when its rows of the slice are complete."""
    spans = column_slices(columns, slices, align)
    slice_N, first_N = _cut(np.arange(len(spans)), np.full(len(spans), positions.num_tokens), block)
    bounds = np.array([[span.start, span.stop] for span in spans])
    num_N = np.minimum(block, positions.num_tokens - first_N)
    items = (slice_N, first_N, num_N, bounds[slice_N, 0], bounds[slice_N, 1])
    offsets, local_rows_E = positions.placement.offsets, positions.rows_WE[positions.ring.rank]
    sources = [d for d in positions.ring.arrivals if local_rows_E[offsets[d] : offsets[d + 1]].any()]
    device, num_flags = positions.slot_S.device, len(spans) * positions.ring.world
    return SumTable(_table(items, device), torch.tensor(sources, device=device).long(), num_flags)


def _tiles(schedule: TileSchedule, bounds_S2: Ints, offsets: Ints, flags_M3: Ints, device: torch.device) -> TileTable:
    columns = (bounds_S2[schedule.slice_N, 0], bounds_S2[schedule.slice_N, 1])
    rows = (schedule.expert_N, schedule.first_row_N, schedule.end_row_N)
    return TileTable(
        _table((*rows, *columns, offsets[:-1], offsets[1:]), device), torch.from_numpy(flags_M3).to(device)
    )


def _first_rows(rows_WE: Ints, placement: ExpertPlacement) -> Ints:
    """Return [W, E]: position, on the owner, of the first row of each (source, expert)."""
    total_E = rows_WE.sum(0)
    start_E = _starts(total_E)
    owner_starts = start_E[np.minimum(np.array(placement.offsets[:-1]), len(total_E) - 1)]
    local_start_E = start_E - np.repeat(owner_starts, placement.experts_per_rank)
    first_WE: Ints = local_start_E + np.cumsum(rows_WE, 0) - rows_WE
    return first_WE


def _starts(counts: Ints) -> Ints:
    starts: Ints = np.cumsum(counts) - counts
    return starts


def _blocks(counts: Ints, block: int) -> Ints:
    blocks: Ints = -(-counts // block)
    return blocks


def _cut(order: Ints, sizes: Ints, block: int) -> tuple[Ints, Ints]:
    """Cut ``sizes[i]`` into blocks, for each i in ``order``. Returns i, and the offset, of each block."""
    blocks = _blocks(sizes[order], block)
    offset_N = (np.arange(blocks.sum()) - np.repeat(_starts(blocks), blocks)) * block
    return np.repeat(order, blocks), offset_N


def _table(columns: tuple[Ints, ...], device: torch.device) -> Tensor:
    """Return the columns as one table, int64 [N, columns]."""
    return torch.from_numpy(np.stack(columns, 1).astype(np.int64)).to(device)
