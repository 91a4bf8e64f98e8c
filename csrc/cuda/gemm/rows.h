// Grouped GEMM on Hopper's tensor cores: out[r] = rows[r] @ w[expert of r].T, rows sorted by expert.
//
//   block of 3 warp groups, one per multiprocessor, persistent
//     producer    ── TMA ──▸ ring of stages: rows [128, 64] and weights [256, 64] of a tile, 128-byte swizzle
//     consumers   ── wgmma ─▸ 64 rows x 256 columns each, fp32 sums in registers ─▸ bf16 in shared memory ── TMA ──▸
//     out
//
// The producer loads the next tile while the consumers store. A sum has one order over K, whatever the other rows are.
// Where a tile ends after the last row of an expert, its threads store the rows that are the expert's. A bias is added
// to the fp32 sum, before the only rounding.
#pragma once

#include "cuda/gemm/swiglu.h"
#include "cuda/gemm/take.h"
#include "cuda/gemm/tile.h"
#include "cuda/gemm/walk.h"

namespace moe_comm {
namespace gemm {

// [E, parts * columns] bf16, dense, an expert's `stride` elements after those of the one before it. at 0: none.
struct Biases {
  int64_t at, stride;
};

// SwiGLU: h = rows @ w.T is gate | up, each `columns` wide. A tile has 128 columns of each, and those of act. If they
// alternate (Glu), a tile has 256 columns of h, a thread's pair is gate and up, and two threads exchange those of act.
struct alignas(64) RowsArgs {
  TensorMap rows;     // [1, R, inner], boxes of 128 rows
  TensorMap w;        // [E, N, inner], boxes of 256 rows (SwiGLU: 128); MN-major: [E, inner, N], boxes of 64 rows
  TensorMap out;      // [R, parts, columns], boxes of 16 rows; alternating gate and up: [R, 1, 2 * columns]
  TensorMap act;      // [R, 1, columns], SwiGLU only
  int64_t counts_at;  // [E] int64
  int64_t out_at, out_stride, act_at, act_stride;
  int32_t experts, columns, inner, group;
  TakenRows taken;  // instead of `rows`
  Biases bias;
  Glu glu;
};

constexpr int kStages = 4, kBuffers = 2;  // fewer stages and more buffers were slower on an H200
constexpr int kRowsShared = 1024 + kStages * (kBytesA + kBytesB) + 8 * kBuffers * kBytesBox + 2 * kStages * 8;

#ifdef MOE_HOPPER

// Where the 256 columns of a tile are in h: 256 from `first` of `width`, or in halves 128 of each of two parts.
struct TileColumns {
  int first, width;
  bool halves;
  MOE_HD int second() const { return first + (halves ? width : kTileColumns / 2); }  // of the later 128, in rows of w
};
template <bool kSwiglu>
MOE_DEVICE TileColumns columns_of(const RowsArgs& a, int n) {
  if (!kSwiglu) return {n * kTileColumns, a.columns, false};
  if (a.glu.clamped()) return {n * kTileColumns, 2 * a.columns, false};
  return {n * kTileColumns / 2, a.columns, true};
}

// Adds the biases of the columns of tile n to sums in the layout of `multiply`.
template <bool kSwiglu>
MOE_DEVICE void add_biases(float (&d)[128], const RowsArgs& a, int64_t expert, int tile_n, int lane) {
  const Biases& bias = a.bias;
  const TileColumns columns = columns_of<kSwiglu>(a, tile_n);
#pragma unroll
  for (int j = 0; j < 32; ++j) {
    const int part = columns.halves ? j / 16 : 0, n = columns.first + (columns.halves ? j % 16 : j) * 8 + lane % 4 * 2;
    if (n >= columns.width) continue;  // not stored
    const uint32_t pair = load_word(bias.at + 2 * (expert * bias.stride + part * columns.width + n));
#pragma unroll
    for (int i = 0; i < 4; ++i) d[4 * j + i] = __fadd_rn(d[4 * j + i], float_of(pair, i % 2));
  }
}

// Loads a stage: 64 elements along K, from `inner`, of the rows and the weights of tile n.
template <int kMajorB, bool kSwiglu>
MOE_DEVICE void load_stage(const RowsArgs& a, const TensorMap* rows, const Stages& stages, int stage, int inner,
                           int row, int n, int expert) {
  const TileColumns columns = columns_of<kSwiglu>(a, n);
  const int column = columns.first;
  const uint32_t barrier = stages.full + stage * 8, b = stages.b + stage * kBytesB;
  barrier_expect(barrier, kBytesA + kBytesB);
  load_3d(stages.a + stage * kBytesA, rows, barrier, inner, row, 0);
  if (kSwiglu) {
    load_3d(b, &a.w, barrier, inner, column, expert);
    load_3d(b + kBytesB / 2, &a.w, barrier, inner, columns.second(), expert);
  } else if (kMajorB) {
#pragma unroll
    for (int i = 0; i < 4; ++i) load_3d(b + i * kBytesB / 4, &a.w, barrier, column + i * 64, inner, expert);
  } else {
    load_3d(b, &a.w, barrier, inner, column, expert);
  }
}

// Of 8 columns of a row, lane l of the four that have it has l in the low half of a word, and 4 + l in the high half.
// Returns the columns 2 * l and 2 * l + 1.
MOE_DEVICE uint32_t neighbours(uint32_t pair, int lane) {
  const int from = (lane & ~3) | (lane * 2 & 3);
  const uint32_t a = __shfl_sync(~0u, pair, from), b = __shfl_sync(~0u, pair, from + 1);
  return lane & 2 ? a >> 16 | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
}

// Stores half of the activations of tile n: 64 of its 128 columns.
template <int kBox>
MOE_DEVICE void store_activation(const RowsArgs& a, RowStore<kBuffers>& store, const float (&d)[128], int64_t first_row,
                                 int rows, int n, int lane) {
  const auto of = [&](int j, int h) { return bf16_pair(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]); };
  const RowBox act = {&a.act, a.act_at, a.act_stride};
  const int column = n * (kTileColumns / 2) + kBox * 64;
  if (a.glu.clamped()) {
    store.box(act, first_row, rows, 0, column, a.columns, [&](int j, int h) {
      const uint32_t low = of(kBox * 16 + 2 * j, h), high = of(kBox * 16 + 2 * j + 1, h);
      return neighbours(bf16_pair(clamped_glu(a.glu, float_of(low, 0), float_of(low, 1)),
                                  clamped_glu(a.glu, float_of(high, 0), float_of(high, 1))),
                        lane);
    });
  } else {
    store.box(act, first_row, rows, 0, column, a.columns, [&](int j, int h) {
      const uint32_t gate = of(kBox * 8 + j, h), up = of(16 + kBox * 8 + j, h);
      return bf16_pair(swiglu(float_of(gate, 0), float_of(up, 0)), swiglu(float_of(gate, 1), float_of(up, 1)));
    });
  }
}

// Stores the sums of a warp: 16 rows, of which `rows` are the expert's, and the columns of tile n.
template <bool kSwiglu>
MOE_DEVICE void store_sums(const RowsArgs& a, const RowBox& out, RowStore<kBuffers>& store, const float (&d)[128],
                           int64_t first_row, int rows, int n, int lane) {
  const TileColumns columns = columns_of<kSwiglu>(a, n);
  const auto of = [&](int j, int h) { return bf16_pair(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]); };
#pragma unroll
  for (int box = 0; box < 4; ++box) {
    const int part = columns.halves ? box / 2 : 0, in_part = columns.first + (columns.halves ? box % 2 : box) * 64;
    store.box(out, first_row, rows, part, in_part, columns.width, [&](int j, int h) { return of(box * 8 + j, h); });
  }
  if constexpr (kSwiglu) {
    store_activation<0>(a, store, d, first_row, rows, n, lane);
    store_activation<1>(a, store, d, first_row, rows, n, lane);
  }
}

// kMajorB: 1 if w is [E, inner, N], dense along N. kTaken: rows are `taken`, and there is no map of `rows`.
template <int kMajorB, bool kSwiglu, bool kTaken>
MOE_DEVICE void multiply_rows(const RowsArgs& a) {
  extern __shared__ unsigned char block_shared[];
  const uint32_t a_tiles = (shared_address(block_shared) + 1023) & ~1023u, b_tiles = a_tiles + kStages * kBytesA;
  const uint32_t buffers = b_tiles + kStages * kBytesB, full = buffers + 8 * kBuffers * kBytesBox;
  const uint32_t empty = full + kStages * 8;
  const Stages stages = {a_tiles, b_tiles, full, empty};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const auto* counts = reinterpret_cast<const int64_t*>(a.counts_at);
  constexpr int kColumns = kSwiglu ? kTileColumns / 2 : kTileColumns;  // of `columns`, per tile
  const int tiles_n = (a.columns + kColumns - 1) / kColumns, steps = (a.inner + kTileInner - 1) / kTileInner;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + s * 8, kTaken ? 1 + kTakingWarps : 1);
      barrier_init(empty + s * 8, 8);  // a warp may be behind the others of its group
    }
    barriers_ready();
    if (!kTaken) prefetch_map(&a.rows);
    prefetch_map(&a.w);
    prefetch_map(&a.out);
  }
  // The walk reads the counts one after the other; bring their lines to the cache at once.
  for (int e = static_cast<int>(threadIdx.x) * 16; e < a.experts; e += kThreads * 16) {
    prefetch_line(counts + e);
  }
  __syncthreads();

  Walk tile(counts, a.experts, kTileRows, tiles_n, a.group, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  Ring<kStages> ring;
  if (warp < 4) {
    fewer_registers<40>();
    if constexpr (kTaken) {
      const TileColumns columns = columns_of<kSwiglu>(a, 1);  // `first` is the width of a tile
      take_rows<kStages, kSwiglu>(a.taken, a.w, tile, columns.first, columns.second() - columns.first, a.inner, stages);
      return;
    }
    while (threadIdx.x == 0 && tile.next()) {
      for (int k = 0; k < steps; ++k, ring.next()) {
        barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
        load_stage<kMajorB, kSwiglu>(a, &a.rows, stages, ring.stage, k * kTileInner, static_cast<int>(tile.first_row),
                                     tile.n, tile.expert);
      }
    }
  } else {
    more_registers<232>();
    const int half = warp / 4 - 1, first = half * 64 + warp % 4 * 16;  // row of this warp in a tile
    RowStore<kBuffers> store(buffers + (warp - 4) * kBuffers * kBytesBox, lane);
    while (tile.next()) {
      // Also without rows of its own, so that blocks take equally long and find each other's loads in the cache.
      float d[128];
      multiply_stages<kMajorB>(d, ring, steps, stages, half, lane);
      if (a.bias.at != 0) add_biases<kSwiglu>(d, a, tile.expert, tile.n, lane);
      store_sums<kSwiglu>(a, {&a.out, a.out_at, a.out_stride}, store, d, tile.first_row + first, tile.rows - first,
                          tile.n, lane);
    }
    if (lane == 0) wait_stores_read<0>();
  }
}

#endif  // MOE_HOPPER

}  // namespace gemm
}  // namespace moe_comm
