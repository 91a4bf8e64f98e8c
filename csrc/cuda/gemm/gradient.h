// Gradient of SwiGLU on Hopper's tensor cores, in the epilogue of the product that gives the gradient of its result:
//
//   producer    ── TMA ──▸ stages: rows of grad [128, 64], w2 [64, 256] of a tile
//   consumers   ── wgmma ─▸ grad @ w2 = grad_act, 64 rows x 256 columns each, rounded to bf16
//   each warp   h, 16 rows x 64 columns of gate and up ── TMA ──▸ a slot ─▸ grad_h, in its place ── TMA ──▸ out
//                                                                        ─▸ act ───────────────── TMA ──▸ out
//
// Gate and up that alternate (Glu) are columns 2 * 64 * n to 2 * 64 * (n + 1) of h, in two boxes of a slot; a thread
// reads and writes the four of two columns of grad_act in 8 bytes. These spread over all banks as matrices do.
//
// A warp loads h for its next 64 columns while it computes with these; the first ones of a tile arrive during its
// products. grad_act is not stored. grad_h and act are multiplied by the routing weight of the row, if there are any,
// after they have been rounded, as kernels/triton/swiglu.py does: the same bits.
//
// The gradient of the weight of a row is <act, grad_act> of the rounded values. Each tile gives the sum over its
// section of 256 columns: 32 lanes, lane l adds the columns l, l + 32, ... in order; then lanes are added in halves (l
// + 16, l + 8, ..., l + 1). Sections are added later, in order (kernels/triton/swiglu_gradient.py), so the bits depend
// on nothing but the row.
#pragma once

#include "cuda/gemm/swiglu.h"
#include "cuda/gemm/tile.h"
#include "cuda/gemm/walk.h"

namespace moe_comm {
namespace gemm {

struct alignas(64) GradientArgs {
  TensorMap grad;     // [1, R, inner], boxes of 128 rows
  TensorMap w;        // [E, inner, columns], boxes of 64 rows
  TensorMap h;        // [R, 2, columns], boxes of 16 rows; alternating: [R, 1, 2 * columns]
  TensorMap grad_h;   // the same
  TensorMap act;      // [R, 1, columns], boxes of 16 rows
  int64_t counts_at;  // [E] int64
  int64_t grad_h_at, grad_h_stride, act_at, act_stride;
  int64_t weights_at;   // fp32 routing weight of each slot; 0: rows are not multiplied
  int64_t slots_at;     // [R] int64 slot of each row; 0: rows are slots
  int64_t sections_at;  // [sections, R] fp32; 0: not needed
  int64_t rows;         // R
  int32_t experts, columns, inner, group;
  Glu glu;
};

constexpr int kGradientStages = 3, kBytesSlot = 2 * kBytesBox;
// Of each of 8 warps: two slots for h, and a buffer for the activation.
constexpr int kGradientWarp = 2 * kBytesSlot + kBytesBox;
constexpr int kGradientShared =
    1024 + kGradientStages * (kBytesA + kBytesB) + 8 * kGradientWarp + 2 * kGradientStages * 8 + 8 * 2 * 8;

#ifdef MOE_HOPPER

// The epilogue of a warp: its slots, and the loads of h ahead of their use.
class GradientRows {
 public:
  // memory, loaded: slots and buffer, and barriers, of this warp. first: its first row in a tile.
  MOE_DEVICE GradientRows(const GradientArgs& args, uint32_t memory, uint32_t loaded, int first, int lane,
                          const Walk& ahead)
      : args_(args), memory_(memory), loaded_(loaded), first_(first), lane_(lane), ahead_(ahead) {
    load();
  }

  // Weights of the rows lane / 4 and lane / 4 + 8 of the tile, before its products.
  MOE_DEVICE void begin(const Walk& tile) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      weight_[h] = 1.0f;
      const int row = first_ + lane_ / 4 + 8 * h;
      if (args_.weights_at == 0 || row >= tile.rows) continue;
      int64_t slot = tile.first_row + row;
      if (args_.slots_at != 0) slot = reinterpret_cast<const int64_t*>(args_.slots_at)[slot];
      weight_[h] = reinterpret_cast<const float*>(args_.weights_at)[slot];
    }
  }

  // d: grad_act, in the layout of `multiply`.
  MOE_DEVICE void store(const float (&d)[128], const Walk& tile) {
    const bool clamped = args_.glu.clamped();
    const int64_t first_row = tile.first_row + first_;
    const int rows = tile.rows - first_;
    const uint32_t buffer = memory_ + 2 * kBytesSlot;
    const RowBox grad_h = {&args_.grad_h, args_.grad_h_at, args_.grad_h_stride};
    const RowBox act = {&args_.act, args_.act_at, args_.act_stride};
    float lanes[2][8] = {};  // of rows lane / 4 + {0, 8} and columns 8 * j + lane % 4 * 2 + {0, 1}, j = 0 to 3
#pragma unroll
    for (int box = 0; box < 4; ++box) {
      const int column = tile.n * kTileColumns + box * 64;
      const uint32_t slot = memory_ + ring_.stage * kBytesSlot;
      if (lane_ == 0) {
        wait_stores_read<0>();  // the stores of the last box, from the other slot
        load();
      }
      barrier_wait(loaded_ + ring_.stage * 8, ring_.phase);
      ring_.next();
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int row = lane_ % 16, word = j + lane_ / 16;
        const uint32_t place = row * 128 + ((word ^ (row & 7)) << 4);
        uint32_t value[4];
        const auto grad_of = [&](int i) {
          const float* const v = d + 4 * (box * 8 + j + i / 2) + 2 * (i % 2);
          return bf16_pair(v[0], v[1]);
        };
        const auto sums_of = [&](int i) { return &lanes[i % 2][(j + i / 2) % 4 * 2]; };
        if (clamped) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t at = alternating(slot, j + i / 2, i % 2);
            uint32_t four[2], gate, up;
            load_shared(at, four);
            separate(four[0], four[1], gate, up);
            compute<true>(gate, up, value[i], grad_of(i), weight_[i % 2], sums_of(i));
            separate(gate, up, four[0], four[1]);
            store_shared(at, four);
          }
        } else {
          uint32_t gate[4], up[4];
          load_matrices(slot + place, gate);
          load_matrices(slot + kBytesBox + place, up);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            compute<false>(gate[i], up[i], value[i], grad_of(i), weight_[i % 2], sums_of(i));
          }
          store_matrices(slot + place, gate[0], gate[1], gate[2], gate[3]);
          store_matrices(slot + kBytesBox + place, up[0], up[1], up[2], up[3]);
        }
        store_matrices(buffer + place, value[0], value[1], value[2], value[3]);
      }
      const int first = clamped ? 2 * column : column, width = clamped ? 2 * args_.columns : args_.columns;
      store_box(grad_h, slot, lane_, first_row, rows, 0, first, width);
      store_box(grad_h, slot + kBytesBox, lane_, first_row, rows, clamped ? 0 : 1, clamped ? first + 64 : first, width);
      store_box(act, buffer, lane_, first_row, rows, 0, column, args_.columns);
      if (lane_ == 0) commit_stores();
    }
    if (args_.sections_at != 0) store_sums(lanes, tile.n, first_row, rows);
  }

 private:
  // Where a slot has gate and up of this thread's two columns of grad_act, columns 8 * j + lane % 4 * 2 of 64, in the
  // row lane / 4 + 8 * h: the word j % 4 * 2 + lane % 4 / 2 of a box.
  MOE_DEVICE uint32_t alternating(uint32_t slot, int j, int h) const {
    const uint32_t first = ((lane_ % 4 / 2) ^ (lane_ / 4)) << 4, row = slot + lane_ / 4 * 128 + lane_ % 2 * 8;
    return row + h * 8 * 128 + j / 4 * kBytesBox + (first ^ ((j % 4) << 5));
  }

  // Two elements: gate, up and the gradient of the activation become the gradients of gate and up, and the activation.
  // Adds their products to sums[0] and sums[1].
  template <bool kClamped>
  MOE_DEVICE void compute(uint32_t& gate, uint32_t& up, uint32_t& act, uint32_t grad, float weight, float* sums) const {
    float of_gate[2], of_up[2], of_act[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float g = float_of(grad, c);
      const SwigluGradient v = kClamped ? clamped_gradient(args_.glu, float_of(gate, c), float_of(up, c), g)
                                        : swiglu_gradient(float_of(gate, c), float_of(up, c), g);
      of_gate[c] = v.gate;
      of_up[c] = v.up;
      of_act[c] = v.act;
    }
    gate = bf16_pair(of_gate[0], of_gate[1]);
    up = bf16_pair(of_up[0], of_up[1]);
    act = bf16_pair(of_act[0], of_act[1]);
#pragma unroll
    for (int c = 0; c < 2; ++c) sums[c] = __fadd_rn(sums[c], __fmul_rn(float_of(act, c), float_of(grad, c)));
    gate = weighted(gate, weight);
    up = weighted(up, weight);
    act = weighted(act, weight);
  }
  MOE_DEVICE static uint32_t weighted(uint32_t pair, float weight) {
    return bf16_pair(__fmul_rn(float_of(pair, 0), weight), __fmul_rn(float_of(pair, 1), weight));
  }

  // Adds the lanes of a row, which 4 threads have, in halves.
  MOE_DEVICE void store_sums(const float (&lanes)[2][8], int section, int64_t first_row, int rows) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float* v = lanes[h] + c;
        sum[c] = __fadd_rn(__fadd_rn(v[0], v[4]), __fadd_rn(v[2], v[6]));
        sum[c] = __fadd_rn(sum[c], __shfl_xor_sync(~0u, sum[c], 2));
        sum[c] = __fadd_rn(sum[c], __shfl_xor_sync(~0u, sum[c], 1));
      }
      const int row = lane_ / 4 + 8 * h;
      if (lane_ % 4 == 0 && row < rows) {
        reinterpret_cast<float*>(args_.sections_at)[section * args_.rows + first_row + row] = __fadd_rn(sum[0], sum[1]);
      }
    }
  }

  // Lane 0 loads the next box of h, of this tile or of the next one, into the slot after the last one.
  MOE_DEVICE void load() {
    if (lane_ != 0 || ended_) return;
    if (next_box_ == 4) {
      ended_ = !ahead_.next();
      if (ended_) return;
      next_box_ = 0;
    }
    const uint32_t barrier = loaded_ + next_ * 8, slot = memory_ + next_ * kBytesSlot;
    const int column = ahead_.n * kTileColumns + next_box_ * 64, row = static_cast<int>(ahead_.first_row) + first_;
    barrier_expect(barrier, kBytesSlot);
    const bool alternate = args_.glu.clamped();
    load_3d(slot, &args_.h, barrier, alternate ? 2 * column : column, 0, row);
    load_3d(slot + kBytesBox, &args_.h, barrier, alternate ? 2 * column + 64 : column, alternate ? 0 : 1, row);
    ++next_box_;
    next_ ^= 1;
  }

  const GradientArgs& args_;
  const uint32_t memory_, loaded_;
  const int first_, lane_;
  Walk ahead_;
  Ring<2> ring_;
  int next_ = 0, next_box_ = 4;
  bool ended_ = false;
  float weight_[2];
};

MOE_DEVICE void activation_gradient(const GradientArgs& a) {
  extern __shared__ unsigned char block_shared[];
  constexpr int kStages = kGradientStages;
  const uint32_t a_tiles = (shared_address(block_shared) + 1023) & ~1023u, b_tiles = a_tiles + kStages * kBytesA;
  const uint32_t slots = b_tiles + kStages * kBytesB, full = slots + 8 * kGradientWarp, empty = full + kStages * 8;
  const uint32_t loaded = empty + kStages * 8;
  const Stages stages = {a_tiles, b_tiles, full, empty};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const auto* counts = reinterpret_cast<const int64_t*>(a.counts_at);
  const int tiles_n = (a.columns + kTileColumns - 1) / kTileColumns, steps = (a.inner + kTileInner - 1) / kTileInner;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 8);
    }
    for (int s = 0; s < 8 * 2; ++s) barrier_init(loaded + s * 8, 1);
    barriers_ready();
    prefetch_map(&a.grad);
    prefetch_map(&a.w);
    prefetch_map(&a.h);
  }
  for (int e = static_cast<int>(threadIdx.x) * 16; e < a.experts; e += kThreads * 16) {
    prefetch_line(counts + e);
  }
  __syncthreads();

  Walk tile(counts, a.experts, kTileRows, tiles_n, a.group, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  Ring<kStages> ring;
  if (warp < 4) {
    fewer_registers<40>();
    while (threadIdx.x == 0 && tile.next()) {
      for (int k = 0; k < steps; ++k, ring.next()) {
        const uint32_t barrier = full + ring.stage * 8, b = b_tiles + ring.stage * kBytesB;
        barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
        barrier_expect(barrier, kBytesA + kBytesB);
        load_3d(a_tiles + ring.stage * kBytesA, &a.grad, barrier, k * kTileInner, static_cast<int>(tile.first_row), 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          load_3d(b + i * kBytesB / 4, &a.w, barrier, tile.n * kTileColumns + i * 64, k * kTileInner, tile.expert);
        }
      }
    }
    return;
  }
  more_registers<232>();
  const int half = warp / 4 - 1;
  GradientRows rows(a, slots + (warp - 4) * kGradientWarp, loaded + (warp - 4) * 2 * 8, half * 64 + warp % 4 * 16, lane,
                    tile);
  while (tile.next()) {
    float d[128];
    rows.begin(tile);
    multiply_stages<1>(d, ring, steps, stages, half, lane);
    rows.store(d, tile);
  }
  if (lane == 0) wait_stores_read<0>();
}

#endif  // MOE_HOPPER

}  // namespace gemm
}  // namespace moe_comm
