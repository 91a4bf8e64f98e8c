// A producer that takes the rows of a tile from others by index, as the rows of experts are taken from tokens:
//
//   slots  7 1 4 ...  ── / top_k ─▸ row of x ── cp.async, 16 bytes a thread ──▸ the place of TMA's 128-byte swizzle
//
// sm_90 has no TMA for rows by index. A bulk copy of a row cannot swizzle, and a tensor copy of one row would move 128
// bytes a request, 128 requests a stage. So the 128 threads of the producer copy: 8 threads read 128 consecutive bytes
// of a row, and each thread copies the same word of 8 rows in every stage. Weights are loaded by TMA as usual.
//
// wgmma sees a thread's copies after the thread has waited for them and called fence_async. So a stage is reported full
// when the copies of `kTakeLag` later stages have been started, without waiting for these.
#pragma once

#include "cuda/gemm/tile.h"
#include "cuda/gemm/walk.h"

namespace moe_comm {
namespace gemm {

// Row r is row slots[r] / top_k of x.
struct TakenRows {
  int64_t x_at, x_stride;  // address; bytes between rows
  int64_t slots_at;        // [R] int64
  uint32_t top_k;
};

constexpr int kTakingWarps = 4, kTakeLag = 2;

#ifdef MOE_HOPPER

// The producer's loop. kSwiglu: a stage has the rows of w from width * n, and from `second` rows after them.
template <int kStages, bool kSwiglu>
MOE_DEVICE void take_rows(const TakenRows& taken, const TensorMap& w, Walk tile, int width, int second, int inner,
                          const Stages& stages) {
  // The consumers have released all but the last two stages, so more stages must not be held back.
  static_assert(kTakeLag <= kStages - 2, "the consumers would wait for a stage that waits for them");
  constexpr int kRows = kTileRows / 16;  // of a thread
  const int lane = threadIdx.x % 32, word = threadIdx.x % 8, first = threadIdx.x / 8;
  const auto* slots = reinterpret_cast<const int64_t*>(taken.slots_at);
  const uint32_t place = first * 128 + ((word ^ (first & 7)) << 4), stride = static_cast<uint32_t>(taken.x_stride / 16);
  Ring<kStages> ring, late;
  int held = 0;  // stages that are not reported yet
  const auto report = [&] {
    fence_async();
    __syncwarp();
    if (lane == 0) barrier_arrive(stages.full + late.stage * 8);
    late.next();
  };
  while (tile.next()) {
    uint32_t from[kRows], live = 0;  // in words of 16 bytes; bit i: row first + 16 * i is the expert's
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first + i * 16;
      from[i] = word;
      if (row < tile.rows) {
        from[i] += static_cast<uint32_t>(slots[tile.first_row + row]) / taken.top_k * stride;
        live |= 1u << i;
      }
    }
#pragma unroll 1
    for (int k = 0; k < inner; k += kTileInner, ring.next()) {
      const uint32_t barrier = stages.full + ring.stage * 8, b = stages.b + ring.stage * kBytesB;
      barrier_wait(stages.empty + ring.stage * 8, ring.phase ^ 1);
      if (threadIdx.x == 0) {
        const int column = tile.n * width;
        barrier_expect(barrier, kBytesB);
        load_3d(b, &w, barrier, k, column, tile.expert);
        if (kSwiglu) load_3d(b + kBytesB / 2, &w, barrier, k, column + second, tile.expert);
      }
      const bool inside = k + word * 8 < inner;
      const int64_t source = inside ? taken.x_at + 2 * k : taken.x_at;
      const uint32_t some = inside ? live : 0, to = stages.a + ring.stage * kBytesA + place;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        copy_16(to + i * 16 * 128, source + static_cast<int64_t>(from[i]) * 16, some >> i & 1 ? 16 : 0);
      }
      copies_commit();
      if (held == kTakeLag) {
        copies_wait<kTakeLag>();
        report();
      } else {
        ++held;
      }
    }
  }
  copies_wait<0>();
  for (; held > 0; --held) report();
}

#endif  // MOE_HOPPER

}  // namespace gemm
}  // namespace moe_comm
