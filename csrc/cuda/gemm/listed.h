// Products of rows that other ranks are sending, or whose results other ranks read while they are computed. The kernels
// of rows.h, with tiles from a list (overlap/triton/tile_list.py) and flags of csrc/cuda/args.h:
//
//   arrived     producer  takes a tile ─▸ flags of its rows raised? ─▸ TMA ─▸ stages ─▸ consumers ─▸ out
//                            ╰── not yet: sets it aside, takes the next one; returns to it when all others are taken
//   published   consumers  out of a tile is written ─▸ count for each rank with rows in it ─▸ the last one of a slice
//   of
//               columns raises the flag of (slice, this rank) in the memory of that rank
//
// Linear layers (overlap/triton/linear.py) are products with one expert, whose rows are those of all ranks:
//
//   arrived     all-gather + GEMM      own rows first, from where they are; those of other ranks after their flags
//   published   GEMM + reduce-scatter  rows of other ranks first; results are stored in the memory of the rank of the
//                                      rows, which adds those of all ranks; a flag for each tile, raised by the last of
//                                      the 8 warps that store it
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
  // Linear layers: flags of each rank, one for 128 rows that it sends, or for 128 x 128 results. Else 0.
  int64_t flags;
  int64_t own_row;  // arrived: first of this rank's rows
  int64_t slot;     // published: where a rank receives the results of this one, in bytes from the start of its block
};

struct alignas(64) ListedArgs {
  RowsArgs rows;  // without counts
  TensorMap own;  // arrived, linear layers: this rank's rows, which are not in `rows`
  ListArgs list;
};

constexpr int kItemWords = 6, kHanded = 2, kHandedBytes = 32;
constexpr int kPatience = 32;  // polls of the flags of a tile before it is set aside
constexpr int kFailed = -1;    // slice of a tile whose rows have not been received in time
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
    healthy_ = load_system(words_at(a_.state_at) + 1) == 0;
    // After a fault, results of linear layers that depend on other ranks become NaN.
    count_ = healthy_ || (!kPublished && a_.flags != 0) ? words_at(a_.count_at)[0] : 0;
    total_ = count_ * tiles_n;
    if (kPublished) {
      slices_ = p2p::num_slices(int64_t{tiles_n} * kTileColumns);
      counts_ = (a_.flags != 0 ? a_.flags : slices_) * a_.world;
      end_ = end_of(0);
    }
    fresh_ = take();
    tile_ = fresh_ < total_ ? fresh_ : -1;
  }

  ListedTile now;
  int32_t row = 0;  // where the rows of the tile begin: in `own`, or in `rows`
  bool own = false;
  MOE_DEVICE bool healthy() const { return healthy_; }

  MOE_DEVICE bool next() { return kPublished ? next_of_slice() : next_arrived(); }

 private:
  MOE_DEVICE int64_t take() { return count_up(words_at(a_.taken_at) + (kPublished ? counts_ : 0)); }
  MOE_DEVICE int64_t end_of(int slice) const { return (slice + 1) * int64_t{tiles_n_} / slices_; }  // in tiles

  MOE_DEVICE void set(const int64_t* item, int64_t n, int slice) {
    now = {static_cast<int32_t>(item[0]),
           static_cast<int32_t>(n),
           static_cast<int32_t>(item[2] - item[1]),
           static_cast<int32_t>(item[3]),
           static_cast<int32_t>(item[4]),
           slice,
           item[1]};
    row = static_cast<int32_t>(item[1]);
    own = !kPublished && a_.flags != 0 && item[3] == a_.rank;
    if (own) row -= static_cast<int32_t>(a_.own_row);
    if (kPublished && a_.flags != 0) now.first_row -= item[5];  // in the memory of the rank that receives the results
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
      // The abort word is in the memory of the CPU, and slow to read.
      const bool failed = late >= 0 && polls >= kPatience && has_failed(late, start);
      if (failed && a_.flags == 0) break;
      if (late < 0 || failed) {
        fence_loads();
        set(item, tile_ % tiles_n_, failed ? kFailed : 0);
        advance();
        return true;
      }
      pause();
      if (polls >= kPatience) {
        set_aside();
        polls = 0;
      }
    }
    tile_ = oldest_ = -1;
    fresh_ = total_;
    return false;
  }

  // The first flag of a tile that is not raised, or -1. Acquires the rows.
  MOE_DEVICE int64_t late_flag(const int64_t* item) const {
    if (a_.flags != 0 && item[3] == a_.rank) return -1;
    int64_t begin = item[5];
    for (int64_t source = item[3]; source <= item[4]; ++source) {
      const int64_t pair = item[0] * a_.world + source, rows = words_at(a_.rows_at)[pair];
      if (rows == 0) continue;  // it sets no flag
      const int64_t of_flag = a_.flags != 0 ? kTileRows : p2p::flag_rows(rows), end = begin + rows;
      const int64_t first = (item[1] > begin ? item[1] - begin : 0) / of_flag;
      const int64_t last = ((item[2] < end ? item[2] : end) - 1 - begin) / of_flag;
      const int64_t* const flags = words_at(words_at(a_.peers_at)[a_.rank]) + a_.first_flag;
      for (int64_t word = pair * flags_of_pair() + first; word <= pair * flags_of_pair() + last; ++word) {
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

  MOE_DEVICE int64_t flags_of_pair() const { return a_.flags != 0 ? a_.flags : p2p::kTileFlags; }

  // Whether to wait no longer for a flag, which is then reported.
  MOE_DEVICE bool has_failed(int64_t late, int64_t start) {
    const bool aborted = load_system(words_at(a_.abort_at)) != 0;
    const bool failed = aborted || now_ns() - start >= a_.timeout_ns || load_system(words_at(a_.state_at) + 1) != 0;
    if (failed) report(late, aborted ? p2p::kAborted : p2p::kTimedOut);
    return failed;
  }

  // As `fail` of csrc/cuda/machine.h. The first report counts.
  MOE_DEVICE void report(int64_t late, int64_t fault) {
    if (store_if_zero(words_at(a_.state_at) + 1, fault) != 0) return;
    auto* const to = reinterpret_cast<p2p::Report*>(a_.report_at);
    to->who = late / flags_of_pair() % a_.world;
    to->what =
        a_.flags != 0 ? a_.first_flag + late : p2p::kArrived;  // overlap/triton/memory.py names a flag by its word
    to->expected = a_.turn;
    to->value = load_system(words_at(words_at(a_.peers_at)[a_.rank]) + a_.first_flag + late);
    store_system(&to->fault, fault);
    store_system(&to->turn, a_.turn);
  }

  const ListArgs& a_;
  const int tiles_n_;
  bool healthy_;
  int slice_ = 0;
  int64_t count_, total_, fresh_, tile_, slices_ = 1, counts_ = 0, begin_ = 0, end_ = 0, oldest_ = -1, newest_ = -1;
};

// Called by lane 0 of each of the 8 warps of a tile after its results are written. The last one of the tiles of a slice
// with rows of a rank raises the flag of the slice at this rank.
MOE_DEVICE void publish(const ListArgs& a, const ListedTile& tile, int columns) {
  if (a.flags != 0) {
    const int64_t to = tile.first_source, across = (columns + 127) / 128;  // flags of a row of tiles
    const int64_t flag = tile.first_row / kTileRows * across + 2 * tile.n;
    if (add_system(words_at(a.taken_at) + to * a.flags + flag, 1) + 1 != 8) return;
    int64_t* const flags = words_at(words_at(a.peers_at)[to]) + a.first_flag + a.rank * a.flags + flag;
    store_system(flags, a.turn);
    if (2 * tile.n + 1 < across) store_system(flags + 1, a.turn);
    return;
  }
  const int64_t tiles_n = (columns + kTileColumns - 1) / kTileColumns;
  const int64_t slices = p2p::num_slices(int64_t{tiles_n} * kTileColumns);
  const int64_t width = (tile.slice + 1) * tiles_n / slices - tile.slice * tiles_n / slices;
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
    if (!kPublished && args.list.flags != 0) prefetch_map(&args.own);
  }
  __syncthreads();

  Ring<kStages> ring;
  Ring<kHanded> hand;
  if (warp < 4) {
    fewer_registers<72>();  // a list needs more of them than a walk
    if (threadIdx.x != 0) return;
    ListedTiles<kPublished> list(args.list, tiles_n);
    if (kPublished && args.list.flags == 0 && blockIdx.x == 0 && list.healthy()) publish_nothing(args.list, tiles_n);
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
        load_stage<kMajorB, kSwiglu>(a, list.own ? &args.own : &a.rows, stages, ring.stage, k * kTileInner, list.row,
                                     tile.n, tile.expert);
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
    if (lane == 0) publish(args.list, written, a.columns);
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
    if (a.bias.at != 0) add_biases<kSwiglu>(d, a, tile.expert, tile.n, lane);
    report();  // of the last tile, whose stores have had the time of these products
    if (!kPublished && !kSwiglu && tile.slice == kFailed) {
#pragma unroll
      for (int i = 0; i < 128; ++i) d[i] = __uint_as_float(0x7fc00000);
    }
    RowBox out = {&a.out, a.out_at, a.out_stride};
    if (kPublished && args.list.flags != 0) {
      out.elsewhere = true;
      out.at = words_at(args.list.peers_at)[tile.first_source] + args.list.slot;
    }
    store_sums<kSwiglu>(a, out, store, d, tile.first_row + first, tile.rows - first, tile.n, lane);
    written = tile;
  }
  report();
  if (lane == 0) wait_stores_read<0>();
}

#endif  // MOE_HOPPER

}  // namespace gemm
}  // namespace moe_comm
