"""Where rows go, and what each program does: tables of whole numbers, made on the host from all ranks' counts.

No atomics decide where a row lands (UniEP, arXiv 2604.19241): once every rank knows how many rows every rank has for
every expert, a row's place follows from prefix sums. Rows stand by (expert, source rank, token, slot):

    rank 1 holds experts 2 3                 rows 0   2   3       6   7
    rows_WE   expert  2  3                        ├───┼───┼───────┼───┼──┤
    from rank 0       2  3                        2←0 │2←1│ 3←0   │3←1│     "2←0": rows of expert 2 from rank 0,
    from rank 1       1  1                                                  in the order of its (token, slot)

So a block of rows that leaves for one expert lies together at its destination, and a send is five numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_comm.dispatch.backends.all_to_all import Routes
from moe_comm.overlap.ring import Ring
from moe_comm.overlap.schedule import Schedule, combine_order, dispatch_order
from moe_comm.overlap.tiles import Cut, Ints, column_slices
from moe_comm.topology import ExpertPlacement


@dataclass(frozen=True, eq=False)
class Places:
    """One dispatch, as every rank computes it from the same counts.

    rows_WE: rows that each rank has for each expert; on the host.
    slot_S: [S] flat slots of this rank by (expert, token, slot), dropped ones left out.
    place_TK: [T, K] int64 row of each slot among its destination's; -1 where dropped.
    owner_TK: [T, K] int64 rank of each slot's expert; -1 where dropped.
    """

    ring: Ring
    placement: ExpertPlacement
    rows_WE: Ints
    slot_S: Tensor
    place_TK: Tensor
    owner_TK: Tensor

    @classmethod
    def of(cls, ids_TK: Tensor, routes: Routes, placement: ExpertPlacement, ring: Ring) -> Places:
        """ids_TK: [T, K] int64 or int32, checked: each is an expert, or -1. routes: of the same dispatch."""
        device, rows_WE = ids_TK.device, routes.rows_WE
        # From a slot's place among this rank's slots to its row at the destination.
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
        """[E of this rank, W] rows of each of its experts from each source."""
        return self.rows_WE[:, self.experts.start : self.experts.stop].T

    @property
    def rows_per_expert(self) -> tuple[int, ...]:
        return tuple(self.rows_EW.sum(1).tolist())

    @property
    def rows_of_W(self) -> tuple[int, ...]:
        """Rows that each rank gets."""
        offsets = self.placement.offsets
        return tuple(int(self.rows_WE[:, offsets[d] : offsets[d + 1]].sum()) for d in range(self.ring.world))

    @property
    def num_rows(self) -> int:
        return self.rows_of_W[self.ring.rank]

    @property
    def most_rows(self) -> int:
        """Rows of the rank that gets most: what every rank makes room for."""
        return max(self.rows_of_W)

    def going_TW(self) -> Tensor:
        """[T, W] whether the token has a slot at the rank."""
        going = torch.zeros(self.num_tokens, self.ring.world + 1, dtype=torch.bool, device=self.owner_TK.device)
        return going.scatter_(1, self.owner_TK + 1, True)[:, 1:]

    def relayed(self) -> Tensor:
        """[W] rows that travel to each rank where a token goes there once, however many of its experts are there."""
        return self.going_TW().sum(0)


@dataclass(frozen=True, eq=False)
class Sends:
    """What send programs do: N blocks of rows, in the order in which destinations are served.

    items: [N, 7] int64: destination, first entry of ``index``, entries, first row (or relay slot) there, flag there,
        counter, and the count at which the flag rises: a block counts one.
    index: for each row that leaves its flat slot, or, relayed, its token.
    """

    items: Tensor
    index: Tensor
    num_counters: int

    def __len__(self) -> int:
        return self.items.shape[0]


@dataclass(frozen=True, eq=False)
class Relay:
    """What relay programs do: N blocks of rows that arrived once, each copied to all its experts' rows here.

    items: [N, 5] int64: source, first relay slot, rows, flag that says they are here, blocks of the source: when all
        are copied, flag ``source`` rises.
    slots: relay slots that a rank has at most.
    """

    items: Tensor
    slots: int
    num_flags: int

    def __len__(self) -> int:
        return self.items.shape[0]


@dataclass(frozen=True, eq=False)
class Tiles:
    """What compute programs do, in order.

    items: [N, 7] int64: local expert, first and end row, first and end column, first and end entry of ``flags``.
    flags: [M, 3] int64. Dispatch waits: flag, 0, the rank that raises it. Combine signals: counter, tiles that signal
        it, the rank that waits for them.
    """

    items: Tensor
    flags: Tensor

    def __len__(self) -> int:
        return self.items.shape[0]


@dataclass(frozen=True, eq=False)
class Sums:
    """What combine programs do: N blocks of tokens and columns, slice after slice.

    items: [N, 5] int64: slice, first token, tokens, first and end column.
    sources: ranks that have rows for this rank's tokens, in order of arrival: a slice is there when it is at all.
    """

    items: Tensor
    sources: Tensor
    num_flags: int

    def __len__(self) -> int:
        return self.items.shape[0]


def direct_sends(places: Places, block: int) -> Sends:
    """Each slot's row to its place. Flag ``local expert * W + source`` at the destination: all of them are there."""
    ring, placement = places.ring, places.placement
    rows_E = places.rows_WE[ring.rank]
    begin_E, first_E = _starts(rows_E), _first_rows(places.rows_WE, placement)[ring.rank]
    owner_E = np.repeat(np.arange(ring.world), placement.experts_per_rank)
    local_E = np.arange(len(rows_E)) - np.array(placement.offsets)[owner_E]
    order_E = np.concatenate([[*placement.local_range(d)] for d in ring.sends]).astype(np.int64)
    expert_N, at_N = _cut(order_E, rows_E, block)
    items = (
        owner_E[expert_N],
        begin_E[expert_N] + at_N,
        np.minimum(block, rows_E[expert_N] - at_N),
        first_E[expert_N] + at_N,
        local_E[expert_N] * ring.world + ring.rank,
        expert_N,
        _blocks(rows_E[expert_N], block),
    )
    return Sends(_table(items, places.slot_S.device), places.slot_S, placement.num_experts)


def relay_sends(places: Places, relayed_WW: Ints, block: int) -> Sends:
    """Each token's row once to each rank that has experts of it; a flag for each block."""
    ring, device = places.ring, places.owner_TK.device
    num_W = relayed_WW[ring.rank]
    # The first block of this rank among those of its destination.
    before_W = _blocks(relayed_WW[: ring.rank], block).sum(0)
    peer_N, at_N = _cut(np.array(ring.sends), num_W, block)
    block_N = before_W[peer_N] + at_N // block
    items = (
        peer_N,
        _starts(num_W)[peer_N] + at_N,
        np.minimum(block, num_W[peer_N] - at_N),
        block_N * block,
        ring.world + block_N,
        np.arange(len(peer_N)),
        np.ones_like(peer_N),
    )
    tokens = places.going_TW().t().nonzero()[:, 1]
    return Sends(_table(items, device), tokens.contiguous(), len(peer_N))


def relay_items(places: Places, relayed_WW: Ints, block: int) -> Relay:
    """Blocks that arrive here, in the order of arrival.

    Args:
        relayed_WW: [source, destination] what every rank found as ``Places.relayed``.
    """
    ring = places.ring
    blocks_WW = _blocks(relayed_WW, block)
    num_W = relayed_WW[:, ring.rank]
    source_N, at_N = _cut(np.array(ring.arrivals), num_W, block)
    block_N = _starts(blocks_WW[:, ring.rank])[source_N] + at_N // block
    items = (
        source_N,
        block_N * block,
        np.minimum(block, num_W[source_N] - at_N),
        ring.world + block_N,
        blocks_WW[source_N, ring.rank],
    )
    most = int(blocks_WW.sum(0).max())
    return Relay(_table(items, places.owner_TK.device), most * block, ring.world + most)


def dispatch_tiles(places: Places, cut: Cut, columns: int, relayed: bool) -> Tiles:
    """Tiles by the latest source that they hold rows of; each waits for its own flags.

    Args:
        columns: all columns of each tile are one item.
        relayed: wait for sources, flag ``source``; else for ``local expert * W + source``.
    """
    schedule = dispatch_order(places.rows_EW, places.ring, cut, flags_per_expert=not relayed)
    flags = schedule.needs.values
    flags_M3 = np.stack((flags, np.zeros_like(flags), flags % places.ring.world), 1)
    return _tiles(schedule, np.array([[0, columns]]), schedule.needs.offsets, flags_M3, places.slot_S.device)


def combine_tiles(places: Places, cut: Cut, columns: int, slices: int, align: int) -> Tiles:
    """Tiles slice after slice of columns; counters ``slice * W + destination`` say when one is complete."""
    spans = column_slices(columns, slices, align)
    schedule = combine_order(places.rows_EW, places.ring, cut, len(spans))
    counters = schedule.signals.values
    flags_M3 = np.stack((counters, schedule.expected_F()[counters], counters % places.ring.world), 1)
    bounds = np.array([[span.start, span.stop] for span in spans])
    return _tiles(schedule, bounds, schedule.signals.offsets, flags_M3, places.slot_S.device)


def combine_sums(places: Places, columns: int, slices: int, align: int, block: int) -> Sums:
    """Flag ``slice * W + source`` rises here when ``source`` has finished all rows of the slice for this rank."""
    spans = column_slices(columns, slices, align)
    slice_N, first_N = _cut(np.arange(len(spans)), np.full(len(spans), places.num_tokens), block)
    bounds = np.array([[span.start, span.stop] for span in spans])
    num_N = np.minimum(block, places.num_tokens - first_N)
    items = (slice_N, first_N, num_N, bounds[slice_N, 0], bounds[slice_N, 1])
    offsets, own_E = places.placement.offsets, places.rows_WE[places.ring.rank]
    sources = [d for d in places.ring.arrivals if own_E[offsets[d] : offsets[d + 1]].any()]
    device = places.slot_S.device
    return Sums(_table(items, device), torch.tensor(sources, device=device).long(), len(spans) * places.ring.world)


def _tiles(schedule: Schedule, bounds_S2: Ints, offsets: Ints, flags_M3: Ints, device: torch.device) -> Tiles:
    columns = (bounds_S2[schedule.slice_N, 0], bounds_S2[schedule.slice_N, 1])
    rows = (schedule.expert_N, schedule.first_row_N, schedule.end_row_N)
    return Tiles(_table((*rows, *columns, offsets[:-1], offsets[1:]), device), torch.from_numpy(flags_M3).to(device))


def _first_rows(rows_WE: Ints, placement: ExpertPlacement) -> Ints:
    """[W, E] row, at the owner, of the first row of each (source, expert)."""
    per_E = rows_WE.sum(0)
    start_E = _starts(per_E)
    owner_starts = start_E[np.minimum(np.array(placement.offsets[:-1]), len(per_E) - 1)]
    here_E = start_E - np.repeat(owner_starts, placement.experts_per_rank)
    first_WE: Ints = here_E + np.cumsum(rows_WE, 0) - rows_WE
    return first_WE


def _starts(counts: Ints) -> Ints:
    starts: Ints = np.cumsum(counts) - counts
    return starts


def _blocks(counts: Ints, block: int) -> Ints:
    blocks: Ints = -(-counts // block)
    return blocks


def _cut(order: Ints, sizes: Ints, block: int) -> tuple[Ints, Ints]:
    """``sizes[i]`` in blocks, for each i of ``order``: which i each block is of, and where in it the block begins."""
    blocks = _blocks(sizes[order], block)
    at_N = (np.arange(blocks.sum()) - np.repeat(_starts(blocks), blocks)) * block
    return np.repeat(order, blocks), at_N


def _table(columns: tuple[Ints, ...], device: torch.device) -> Tensor:
    """[N, columns] int64."""
    return torch.from_numpy(np.stack(columns, 1).astype(np.int64)).to(device)
