// The order in which push and spread send rows to GEMMs that wait for tiles: by expert, not by token.
//
//   rank 1 of 4, experts 2 per rank, sends the tiles of        (a row has one tile where there are few rows)
//
//     block 0   e0 of rank 0   e0 of rank 2   e1 of rank 0   e1 of rank 2
//     block 1   e0 of rank 3   e0 of rank 1   e1 of rank 3   e1 of rank 1     own rows last, ranks below this one first
//
//   so all rows of each rank's first expert are written first, by all ranks, and at any time ranks write to different
//   ranks: rank r receives from r + 1, r + 2, ... and itself.
//
//   order   [ number of tiles | tiles of a group | tiles: SendTile | slots, by expert, then as in ids ]
//
// A block sends a group of tiles before it sets their flags after one fence: one tile, or several where an expert has
// few rows.
//
// A row of x is read once for each of its K experts: from memory for the first one, and then mostly from the L2 cache,
// because its other experts follow within one pass over the experts. A second pass over half of the tokens at a time
// would read less, but no tile would be complete before the last pass.
#pragma once

#include "cuda/meet.h"

namespace moe_comm {
namespace p2p {

// `rows` of this rank's rows for an expert, from its row `first`: the slots from `listed` of the list. flag: the number
// of the tile among those of the expert.
struct SendTile {
  int64_t expert, flag, first, rows, listed;
};

// The most tiles that `slots` slots have: an expert with n rows has at most n / kTileRows + 1.
MOE_HD inline int64_t most_tiles(int64_t slots, int64_t experts) { return slots / kTileRows + experts; }
constexpr int64_t kOrderWords = 2;  // before the tiles
MOE_HD inline int64_t order_words(int64_t slots, int64_t experts) {
  return kOrderWords + most_tiles(slots, experts) * static_cast<int64_t>(sizeof(SendTile) / 8) + slots;
}

// Rows of a tile that a block handles at once.
struct TileRows {
  int tile, first;
};

struct SendOrder {
  int64_t* sizes;  // number of tiles, and of tiles of a group
  SendTile* tile;
  int64_t* slots;
  int blocks, group;

  // blocks: that send. Each sends a few groups, so that all end at about the same time.
  MOE_BLOCK SendOrder(int64_t order_at, int64_t all_slots, int64_t experts, int64_t blocks)
      : sizes(at<int64_t>(order_at)),
        tile(reinterpret_cast<SendTile*>(sizes + kOrderWords)),
        slots(reinterpret_cast<int64_t*>(tile + most_tiles(all_slots, experts))),
        blocks(static_cast<int>(blocks)),
        group(1) {}
  MOE_BLOCK void read_group() {
    const int few = tiles() / (4 * blocks), most = static_cast<int>(sizes[1]);
    group = few < 1 ? 1 : few < most ? few : most;
  }

  MOE_BLOCK int tiles() const { return static_cast<int>(sizes[0]); }
  MOE_BLOCK int group_of(const TileRows& rows) const { return rows.tile / group; }
  MOE_BLOCK TileRows first_of_block(int64_t block) const { return {static_cast<int>(block) * group, 0}; }
  MOE_BLOCK int count(const TileRows& rows) const {
    const int64_t left = tile[rows.tile].rows - rows.first;
    return static_cast<int>(left < kTileRows ? left : kTileRows);
  }
  MOE_BLOCK TileRows next(const TileRows& rows) const {
    const int batch = static_cast<int>(kTileRows);
    if (rows.first + batch < tile[rows.tile].rows) return {rows.tile, rows.first + batch};
    const TileRows follows = {rows.tile + 1, 0};
    if (follows.tile < tiles() && group_of(follows) == group_of(rows)) return follows;
    return {(group_of(rows) + blocks) * group, 0};
  }
};

// The position of an expert among those that a rank sends to: by its position at its owner, then the ring from the rank
// below this one to this one.
MOE_BLOCK int64_t sending_position(const int64_t* offsets, int64_t world, int64_t rank, int64_t expert) {
  const int64_t owner = owner_of(offsets, world, expert), local = expert - offsets[owner];
  const int64_t steps = (rank - 1 - owner + world) % world;
  int64_t before = 0;
  for (int64_t other = 0; other < world; ++other) {
    const int64_t held = offsets[other + 1] - offsets[other], other_steps = (rank - 1 - other + world) % world;
    const int64_t ahead = local + (other_steps < steps ? 1 : 0);
    before += held < ahead ? held : ahead;
  }
  return before;
}

template <class M>
MOE_BLOCK void order(M& m, const OrderArgs& a) {
  if (failed(a)) return;
  const SendOrder to(a.order_at, a.tokens * a.top_k, a.experts, 1);
  const int experts = static_cast<int>(a.experts), n = chunk_slots(a.tokens, a.top_k, a.chunk, m.block());
  const int64_t* rows = at<const int64_t>(a.expert_rows_at);
  const int64_t* before_chunk = at<const int64_t>(a.counts_at) + m.block() * a.experts;
  const int64_t first_slot = m.block() * a.chunk;
  int64_t* ends = m.template shared<int64_t>(a.experts + 1);
  int64_t* more_ends = m.template shared<int64_t>(a.experts + 1);
  int64_t* tiles = m.template shared<int64_t>(a.experts + 1);
  int64_t* more_tiles = m.template shared<int64_t>(a.experts + 1);
  m.each(1, [&](int) { ends[0] = tiles[0] = 0; });
  m.each(experts, [&](int e) { ends[e + 1] = rows[e]; });
  const int64_t* listed = running_sums(m, ends, more_ends, experts + 1);
  m.each(n, [&](int i) {
    const int64_t packed = at<const int64_t>(a.place_at)[first_slot + i];
    if (packed == kDropped) return;
    const int64_t id = at<const int64_t>(a.ids_at)[first_slot + i];
    to.slots[listed[id] + before_chunk[id] + ChunkRank::of(packed).before] = first_slot + i;
  });
  if (m.block() != 0) return;
  const int64_t* offsets = at<const int64_t>(a.offsets_at);
  const auto position = [&](int e) { return sending_position(offsets, a.world, a.rank, e); };
  m.each(experts, [&](int e) { tiles[position(e) + 1] = num_flags(rows[e]); });
  const int64_t* first_tile = running_sums(m, tiles, more_tiles, experts + 1);
  m.each(experts, [&](int e) {
    const int64_t of_tile = flag_rows(rows[e]), first = first_tile[position(e)];
    for (int64_t t = 0; t < num_flags(rows[e]); ++t) {
      const int64_t left = rows[e] - t * of_tile;
      to.tile[first + t] = {e, t, t * of_tile, left < of_tile ? left : of_tile, listed[e] + t * of_tile};
    }
  });
  m.each(1, [&](int) {
    const int64_t all = first_tile[experts], of_group = listed[experts] > 0 ? kTileRows * all / listed[experts] : 1;
    to.sizes[0] = all;
    to.sizes[1] = of_group > 1 ? of_group : 1;
  });
}

// Called by the whole block after it has written `last`, the last rows of a group: sets the flags of the group's tiles.
template <class M, class Args>
MOE_BLOCK void raise_group(M& m, const Args& a, const Blocks& blocks, const SendOrder& order, const TileRows& last) {
  m.sync();
  const int first = order.group_of(last) * order.group;
  m.each(last.tile - first + 1,
         [&](int i) { raise_tile(m, a, blocks, order.tile[first + i].expert, order.tile[first + i].flag); });
}

}  // namespace p2p
}  // namespace moe_comm
