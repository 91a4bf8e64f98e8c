// Products of rows that other ranks are sending, or whose results other ranks read while they are computed. The kernels
// of rows.h, with tiles from a list (overlap/triton/tile_list.py) and flags of csrc/cuda/args.h:
//
//   arrived     producer  takes a tile ─▸ flags of its rows raised? ─▸ TMA ─▸ stages ─▸ consumers ─▸ out
//                            ╰── not yet: sets it aside, takes the next one; returns to it when all others are taken
//   published   consumers  out of a tile is written ─▸ count for each rank with rows in it ─▸ the last one of a slice
//   of
//               columns raises the flag of (slice, this rank) in the memory of that rank
//
// The thread that loads tiles hands them to the consumers through shared memory, in a ring of two. Blocks take tiles
// with one counter, so a block that starts late, because push occupied its processor, takes fewer. No block waits for
// another one of its launch. The protocol is that of overlap/triton/arrived_mm.py and publish_mm.py, and so are the
// bits.
#pragma once

#include "cuda/args.h"
#include "cuda/gemm/rows.h"

namespace moe_comm {
namespace gemm {

struct ListArgs {
  int64_t items_at;  // [N, 6] int64 tiles: expert, first row, end row, first source, last source, first row of it
  int64_t count_at;  // [1] number of tiles
  int64_t rows_at;   // [E, W] rows of each expert from each rank
  int64_t tiles_at;  // [W] published: tiles that have rows of each rank
  int64_t taken_at;  // zeros. arrived: [1] tiles that blocks have taken; published: [slices * W] counts, then that
  int64_t aside_at;  // arrived: [N * tiles of the columns] the next of the tiles that a block has set aside
  int64_t peers_at;  // [W] addresses of the ranks' words
  int64_t state_at, report_at, abort_at;  // State, Report and the abort word of csrc/cuda/args.h
  int64_t rank, world, first_flag, turn, timeout_ns;
};

struct alignas(64) ListedArgs {
  RowsArgs rows;  // without counts
  ListArgs list;
};

constexpr int kItemWords = 6, kHanded = 2, kHandedBytes = 32;
constexpr int kPatience = 32;  // polls of the flags of a tile before it is set aside
constexpr int kListedShared = kRowsShared + kHanded * (kHandedBytes + 2 * 8) + 16;

#ifdef MOE_HOPPER

// A tile that the producer hands to the consumers; rows: 0 after the last one.
struct ListedTile {
  int32_t expert, n, rows, first_source, last_source, slice;
  int64_t first_row;
};

MOE_DEVICE int64_t* words_at(int64_t address) { return reinterpret_cast<int64_t*>(address); }

// The producer's tiles.
template <bool kPublished>
class ListedTiles {
 public:
  MOE_DEVICE ListedTiles(const ListArgs& list, int tiles_n) : a_(list), tiles_n_(tiles_n) {
    healthy_ = words_at(a_.state_at)[1] == 0;
    count_ = healthy_ ? words_at(a_.count_at)[0] : 0;
    total_ = count_ * tiles_n;
    if (kPublished) {
      slices_ = p2p::num_slices(int64_t{tiles_n} * kTileColumns);
      end_ = end_of(0);
    }
    fresh_ = take();
    tile_ = fresh_ < total_ ? fresh_ : -1;
  }

  ListedTile now;
  MOE_DEVICE bool healthy() const { return healthy_; }

  MOE_DEVICE bool next() { return kPublished ? next_of_slice() : next_arrived(); }

 private:
  MOE_DEVICE int64_t take() { return add_system(words_at(a_.taken_at) + (kPublished ? slices_ * a_.world : 0), 1); }
  MOE_DEVICE int64_t end_of(int slice) const { return (slice + 1) * int64_t{tiles_n_} / slices_; }  // in tiles

  MOE_DEVICE void set(const int64_t* item, int64_t n, int slice) {
    now = {static_cast<int32_t>(item[0]),
           static_cast<int32_t>(n),
           static_cast<int32_t>(item[2] - item[1]),
           static_cast<int32_t>(item[3]),
           static_cast<int32_t>(item[4]),
           slice,
           item[1]};
  }

  // Slice by slice of the columns; in a slice, in the order of the list.
  MOE_DEVICE bool next_of_slice() {
    if (fresh_ >= total_) return false;
    while (fresh_ >= count_ * end_) {
      begin_ = end_;
      end_ = end_of(++slice_);
    }
    const int64_t width = end_ - begin_, tile = fresh_ - count_ * begin_;
    set(words_at(a_.items_at) + tile / width * kItemWords, begin_ + tile % width, slice_);
    fresh_ = take();
    return true;
  }

  // The next tile whose rows have been received.
  MOE_DEVICE bool next_arrived() {
    const int64_t start = now_ns();
    for (int polls = 1; tile_ >= 0; ++polls) {
      const int64_t* const item = words_at(a_.items_at) + tile_ / tiles_n_ * kItemWords;
      const int64_t late = late_flag(item);
      if (late < 0) {
        fence_loads();
        set(item, tile_ % tiles_n_, 0);
        advance();
        return true;
      }
      const bool aborted = load_system(words_at(a_.abort_at)) != 0;
      if (aborted || now_ns() - start >= a_.timeout_ns || load_system(words_at(a_.state_at) + 1) != 0) {
        report(late, aborted ? p2p::kAborted : p2p::kTimedOut);
        return false;
      }
      pause();
      if (polls >= kPatience) {
        set_aside();
        polls = 0;
      }
    }
    return false;
  }

  // The first flag of a tile that is not raised, or -1. Acquires the rows.
  MOE_DEVICE int64_t late_flag(const int64_t* item) const {
    int64_t begin = item[5];
    for (int64_t source = item[3]; source <= item[4]; ++source) {
      const int64_t pair = item[0] * a_.world + source, rows = words_at(a_.rows_at)[pair];
      if (rows == 0) continue;  // it sets no flag
      const int64_t of_flag = p2p::flag_rows(rows), end = begin + rows;
      const int64_t first = (item[1] > begin ? item[1] - begin : 0) / of_flag;
      const int64_t last = ((item[2] < end ? item[2] : end) - 1 - begin) / of_flag;
      const int64_t* const flags = words_at(words_at(a_.peers_at)[a_.rank]) + a_.first_flag;
      for (int64_t word = pair * p2p::kTileFlags + first; word <= pair * p2p::kTileFlags + last; ++word) {
        if (load_system(flags + word) < a_.turn) return word;
      }
      begin = end;
    }
    return -1;
  }

  MOE_DEVICE void set_aside() {
    int64_t* const next = words_at(a_.aside_at);
    next[tile_] = -1;
    if (oldest_ < 0) {
      oldest_ = tile_;
    } else {
      next[newest_] = tile_;
    }
    newest_ = tile_;
    advance();
  }
  // To the next tile of the list, or the oldest of those set aside.
  MOE_DEVICE void advance() {
    if (fresh_ < total_) fresh_ = take();
    tile_ = fresh_;
    if (fresh_ < total_) return;
    tile_ = oldest_;
    if (oldest_ >= 0) oldest_ = words_at(a_.aside_at)[oldest_];
  }

  // As `fail` of csrc/cuda/machine.h. The first report counts.
  MOE_DEVICE void report(int64_t late, int64_t fault) {
    tile_ = oldest_ = -1;
    fresh_ = total_;
    if (store_if_zero(words_at(a_.state_at) + 1, fault) != 0) return;
    auto* const to = reinterpret_cast<p2p::Report*>(a_.report_at);
    to->who = late / p2p::kTileFlags % a_.world;
    to->what = p2p::kArrived;
    to->expected = a_.turn;
    to->value = load_system(words_at(words_at(a_.peers_at)[a_.rank]) + a_.first_flag + late);
    store_system(&to->fault, fault);
    store_system(&to->turn, a_.turn);
  }

  const ListArgs& a_;
  const int tiles_n_;
  bool healthy_;
  int slice_ = 0;
  int64_t count_, total_, fresh_, tile_, slices_ = 1, begin_ = 0, end_ = 0, oldest_ = -1, newest_ = -1;
};

// Called by lane 0 of each of the 8 warps of a tile after its results are written. The last one of the tiles of a slice
// with rows of a rank raises the flag of the slice at this rank.
MOE_DEVICE void publish(const ListArgs& a, const ListedTile& tile, int tiles_n) {
  const int64_t slices = p2p::num_slices(int64_t{tiles_n} * kTileColumns);
  const int64_t width = (tile.slice + 1) * int64_t{tiles_n} / slices - tile.slice * int64_t{tiles_n} / slices;
  for (int64_t to = tile.first_source; to <= tile.last_source; ++to) {
    if (words_at(a.rows_at)[tile.expert * a.world + to] == 0) continue;
    const int64_t before = add_system(words_at(a.taken_at) + tile.slice * a.world + to, 1);
    if (before + 1 != words_at(a.tiles_at)[to] * width * 8) continue;
    store_system(words_at(words_at(a.peers_at)[to]) + a.first_flag + tile.slice * a.world + a.rank, a.turn);
  }
}
// Called by one thread: ranks without rows here need not wait.
MOE_DEVICE void publish_nothing(const ListArgs& a, int tiles_n) {
  const int64_t slices = p2p::num_slices(int64_t{tiles_n} * kTileColumns);
  for (int64_t to = 0; to < a.world; ++to) {
    if (words_at(a.tiles_at)[to] != 0) continue;
    int64_t* const flags = words_at(words_at(a.peers_at)[to]) + a.first_flag;
    for (int64_t slice = 0; slice < slices; ++slice) store_system(flags + slice * a.world + a.rank, a.turn);
  }
}

template <int kMajorB, bool kSwiglu, bool kPublished>
MOE_DEVICE void multiply_listed(const ListedArgs& args) {
  extern __shared__ unsigned char block_shared[];
  const RowsArgs& a = args.rows;
  const uint32_t a_tiles = (shared_address(block_shared) + 1023) & ~1023u, b_tiles = a_tiles + kStages * kBytesA;
  const uint32_t buffers = b_tiles + kStages * kBytesB, full = buffers + 8 * kBuffers * kBytesBox;
  const uint32_t empty = full + kStages * 8, handed = empty + kStages * 8, taken = handed + kHanded * 8;
  const uint32_t tiles = (taken + kHanded * 8 + 15) & ~15u;
  const Stages stages = {a_tiles, b_tiles, full, empty};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  constexpr int kColumns = kSwiglu ? kTileColumns / 2 : kTileColumns;
  const int tiles_n = (a.columns + kColumns - 1) / kColumns, steps = (a.inner + kTileInner - 1) / kTileInner;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 8);
    }
    for (int s = 0; s < kHanded; ++s) {
      barrier_init(handed + s * 8, 1);
      barrier_init(taken + s * 8, 8);
    }
    barriers_ready();
    prefetch_map(&a.rows);
    prefetch_map(&a.w);
    prefetch_map(&a.out);
  }
  __syncthreads();

  Ring<kStages> ring;
  Ring<kHanded> hand;
  if (warp < 4) {
    fewer_registers<72>();  // a list needs more of them than a walk
    if (threadIdx.x != 0) return;
    ListedTiles<kPublished> list(args.list, tiles_n);
    if (kPublished && blockIdx.x == 0 && list.healthy()) publish_nothing(args.list, tiles_n);
    for (bool more = true; more; hand.next()) {
      more = list.next();
      ListedTile& tile = list.now;
      if (!more) tile = {};
      barrier_wait(taken + hand.stage * 8, hand.phase ^ 1);
      const uint32_t to = tiles + hand.stage * kHandedBytes;
      const auto row = static_cast<uint64_t>(tile.first_row);
      store_shared(to, {static_cast<uint32_t>(tile.expert), static_cast<uint32_t>(tile.n),
                        static_cast<uint32_t>(tile.rows), static_cast<uint32_t>(tile.slice)});
      store_shared(to + 16, {static_cast<uint32_t>(tile.first_source), static_cast<uint32_t>(tile.last_source),
                             static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32)});
      barrier_arrive(handed + hand.stage * 8);
      for (int k = 0; more && k < steps; ++k, ring.next()) {
        barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
        load_stage<kMajorB, kSwiglu>(a, stages, ring.stage, k * kTileInner, static_cast<int>(tile.first_row),
                                     tile.n * kColumns, tile.expert);
      }
    }
    return;
  }
  more_registers<216>();
  const int half = warp / 4 - 1, first = half * 64 + warp % 4 * 16;
  RowStore<kBuffers> store(buffers + (warp - 4) * kBuffers * kBytesBox, lane);
  ListedTile written = {};  // rows: 0 without a tile whose results are not reported yet
  const auto report = [&] {
    if (!kPublished || written.rows == 0) return;
    if (lane == 0) wait_stores<0>();
    __syncwarp();
    if (lane == 0) publish(args.list, written, tiles_n);
  };
  for (;; hand.next()) {
    barrier_wait(handed + hand.stage * 8, hand.phase);
    uint32_t v[4], w[4];
    load_shared(tiles + hand.stage * kHandedBytes, v);
    load_shared(tiles + hand.stage * kHandedBytes + 16, w);
    __syncwarp();
    if (lane == 0) barrier_arrive(taken + hand.stage * 8);
    const ListedTile tile = {static_cast<int32_t>(v[0]),
                             static_cast<int32_t>(v[1]),
                             static_cast<int32_t>(v[2]),
                             static_cast<int32_t>(w[0]),
                             static_cast<int32_t>(w[1]),
                             static_cast<int32_t>(v[3]),
                             static_cast<int64_t>(w[2] | static_cast<uint64_t>(w[3]) << 32)};
    if (tile.rows == 0) break;
    float d[128];
    multiply_stages<kMajorB>(d, ring, steps, stages, half, lane);
    if (a.bias.at != 0) add_biases<kSwiglu>(d, a.bias, tile.expert, tile.n * kColumns, a.columns, lane);
    report();  // of the last tile, whose stores have had the time of these products
    store_sums<kSwiglu>(a, store, d, tile.first_row + first, tile.rows - first, tile.n * kColumns);
    written = tile;
  }
  report();
  if (lane == 0) wait_stores_read<0>();
}

#endif  // MOE_HOPPER

}  // namespace gemm
}  // namespace moe_comm
