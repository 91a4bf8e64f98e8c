// Grouped GEMM of e4m3 rows and weights with fp32 scales on Hopper's tensor cores: out[r] = rows[r] @ w[e].T, rows
// sorted by expert. kernels/fp8.py defines the scales: one for a row and 128 elements along K, one for a block of 128 x
// 128 weights.
//
//   block of 3 warp groups, one per multiprocessor, persistent
//     producer    ── TMA ──▸ ring of stages: rows [128, 128] and weights [256, 128] of a tile, 128-byte swizzle
//     consumers   ── wgmma ─▸ the sums of 128 elements along K, for 64 rows x 128 columns
//                   ─ fma ──▸ total = fma(sum, scale of the row * scale of the weights, total), in fp32
//                 ── TMA ──▸ out in bf16
//
// A consumer has the 128 rows of a tile and 128 of its columns, whose weights have one scale. It multiplies 64 rows at
// a time, so that totals and sums fit into its registers; the other consumer multiplies while it adds. The tensor
// cores' sums of e4m3 products have less than fp32's precision, which then affects 128 of them. Blocks of 128 elements
// are added in their order, whatever the other rows are.
#pragma once

#include "cuda/gemm/hopper.h"
#include "cuda/gemm/tile.h"
#include "cuda/gemm/walk.h"

namespace moe_comm {
namespace gemm {

struct alignas(64) Fp8Args {
  TensorMap rows;  // [1, R, inner] bytes, boxes of 128 rows
  TensorMap w;     // [E, columns, inner] bytes, boxes of 256 rows
  TensorMap out;   // [R, 1, columns] bf16, boxes of 16 rows
  int64_t counts_at;
  int64_t scales_at, scale_stride, scale_stride_block;                // fp32 [R, inner / 128]; strides in elements
  int64_t w_scales_at, w_scale_stride_expert, w_scale_stride_column;  // fp32 [E, columns / 128, inner / 128], dense
  int64_t out_at, out_stride;
  int64_t block_rows;  // rows of each block; 0: the rows of an expert follow those of the one before it
  int32_t experts, sources, columns, inner, group;
};

constexpr int kFp8Inner = 128;  // of a stage, and of a scale
constexpr int kFp8Columns = 256, kFp8Stages = 4, kFp8Buffers = 2;
constexpr int kFp8BytesB = kFp8Columns * kFp8Inner;
constexpr int kFp8Shared =
    1024 + kFp8Stages * (kBytesA + kFp8BytesB) + 8 * kFp8Buffers * kBytesBox + 2 * kFp8Stages * 8;

#ifdef MOE_HOPPER

// The scales of a thread's rows and of a consumer's columns, loaded one block ahead of their use.
class Fp8Scales {
 public:
  // first: the thread's first row in the tile; the others are 8, 64 and 72 below. rows: of the tile.
  MOE_DEVICE Fp8Scales(const Fp8Args& a, int64_t first_row, int rows, int first, int expert, int column)
      : rows_(reinterpret_cast<const float*>(a.scales_at) + first_row * a.scale_stride),
        w_(reinterpret_cast<const float*>(a.w_scales_at) + expert * a.w_scale_stride_expert +
           column / kFp8Inner * a.w_scale_stride_column),
        row_step_(static_cast<int>(a.scale_stride_block)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + i % 2 * 8 + i / 2 * 64;
      offset_[i] = (row < rows ? row : rows - 1) * static_cast<int>(a.scale_stride);
      row_[i] = rows_[offset_[i]];
    }
    of_w_ = *w_;
  }
  // Returns those of rows 64 * part + {0, 8} in this block, and loads those of the next one, if there is one.
  MOE_DEVICE void take(int part, bool more, float (&scale)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] = row_[part * 2 + h] * of_w_;
    if (!more) return;
#pragma unroll
    for (int i = part * 2; i < part * 2 + 2; ++i) row_[i] = rows_[offset_[i] += row_step_];
    if (part == 1) of_w_ = *++w_;
  }

 private:
  const float *const rows_, *w_;
  const int row_step_;
  int offset_[4];
  float row_[4], of_w_;
};

MOE_DEVICE void multiply_rows_fp8(const Fp8Args& a) {
  extern __shared__ unsigned char block_shared[];
  const uint32_t a_tiles = (shared_address(block_shared) + 1023) & ~1023u, b_tiles = a_tiles + kFp8Stages * kBytesA;
  const uint32_t buffers = b_tiles + kFp8Stages * kFp8BytesB, full = buffers + 8 * kFp8Buffers * kBytesBox;
  const uint32_t empty = full + kFp8Stages * 8;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const auto* counts = reinterpret_cast<const int64_t*>(a.counts_at);
  const int tiles_n = (a.columns + kFp8Columns - 1) / kFp8Columns, steps = (a.inner + kFp8Inner - 1) / kFp8Inner;
  const int groups = a.experts * a.sources;

  if (threadIdx.x == 0) {
    for (int s = 0; s < kFp8Stages; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 8);
    }
    barriers_ready();
    prefetch_map(&a.rows);
    prefetch_map(&a.w);
    prefetch_map(&a.out);
  }
  for (int g = static_cast<int>(threadIdx.x) * 16; g < groups; g += kThreads * 16) prefetch_line(counts + g);
  __syncthreads();

  Walk tile(counts, groups, kTileRows, tiles_n, a.group, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x),
            a.block_rows);
  Ring<kFp8Stages> ring;
  if (warp < 4) {
    fewer_registers<40>();
    while (threadIdx.x == 0 && tile.next()) {
      const int row = static_cast<int>(tile.first_row), column = tile.n * kFp8Columns;
      for (int k = 0; k < steps; ++k, ring.next()) {
        const uint32_t barrier = full + ring.stage * 8;
        barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
        barrier_expect(barrier, kBytesA + kFp8BytesB);
        load_3d(a_tiles + ring.stage * kBytesA, &a.rows, barrier, k * kFp8Inner, row, 0);
        load_3d(b_tiles + ring.stage * kFp8BytesB, &a.w, barrier, k * kFp8Inner, column, tile.expert / a.sources);
      }
    }
    return;
  }
  more_registers<232>();
  const int half = warp / 4 - 1;  // of the columns
  RowStore<kFp8Buffers> store(buffers + (warp - 4) * kFp8Buffers * kBytesBox, lane);
  while (tile.next()) {
    const int first = warp % 4 * 16, column = tile.n * kFp8Columns + half * (kFp8Columns / 2);
    // Columns beyond the last one have no scale; they are not stored.
    Fp8Scales scales(a, tile.first_row, tile.rows, first + lane / 4, tile.expert / a.sources,
                     column < a.columns ? column : 0);
    float total[2][64];
#pragma unroll
    for (int i = 0; i < 128; ++i) total[i / 64][i % 64] = 0.0f;
    for (int k = 0; k < steps; ++k, ring.next()) {
      barrier_wait(full + ring.stage * 8, ring.phase);
      const uint32_t at = a_tiles + ring.stage * kBytesA;
      const uint32_t bt = b_tiles + ring.stage * kFp8BytesB + half * (kFp8BytesB / 2);
#pragma unroll
      for (int part = 0; part < 2; ++part) {  // 64 rows
        float sum[64];
        keep_registers(sum);
        products_begin();
#pragma unroll
        for (int i = 0; i < kFp8Inner / 32; ++i) {
          multiply_e4m3(sum, descriptor(at + part * (kBytesA / 2) + i * 32, 0), descriptor(bt + i * 32, 0), i > 0);
        }
        products_commit();
        keep_registers(sum);
        products_wait<0>();
        keep_registers(sum);
        float scale[2];
        scales.take(part, k + 1 < steps, scale);
        if (part == 1 && lane == 0) barrier_arrive(empty + ring.stage * 8);
#pragma unroll
        for (int i = 0; i < 64; ++i) total[part][i] = __fmaf_rn(sum[i], scale[i / 2 % 2], total[part][i]);
      }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        store.box({&a.out, a.out_at, a.out_stride}, tile.first_row + first + part * 64, tile.rows - first - part * 64,
                  0, column + box * 64, a.columns, [&](int j, int h) {
                    const float* v = total[part] + 4 * (box * 8 + j) + 2 * h;
                    return bf16_pair(v[0], v[1]);
                  });
      }
    }
  }
  if (lane == 0) wait_stores_read<0>();
}

#endif  // MOE_HOPPER

}  // namespace gemm
}  // namespace moe_comm
