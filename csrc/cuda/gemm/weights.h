// Gradients of the experts' weights on Hopper's tensor cores: out[e] = a[rows of e].T @ b[rows of e], rows sorted by
// expert; or added to fp32 values of out. out is [E, M, N]; an expert's rows are the inner dimension of its product.
//
//   block of 3 warp groups, one per multiprocessor, persistent
//     producer    ── TMA ──▸ ring of stages: 64 rows, 128 columns of a and 256 of b, 128-byte swizzle
//     consumers   ── wgmma ─▸ 64 x 256 of out each, fp32 sums in registers ─▸ shared memory ── TMA ──▸ out
//
// To add to out, the consumers load their part of it into shared memory ahead, add the sums there and store it.
//
// Both operands are MN-major: in memory, and so in shared memory, the elements of a row are consecutive. A sum has the
// order of the rows, 16 at a time from the expert's first one, so its bits do not depend on other experts, and nothing
// is split over blocks. A stage may end with rows of the next expert, or beyond all of them, whose values may be
// infinite or NaN. Products of whole groups of 16 such rows are skipped, and the consumers write zeros over the rest.
#pragma once

#include "cuda/gemm/hopper.h"

namespace moe_comm {
namespace gemm {

constexpr int kGradRows = 128, kGradColumns = 256;  // tile of out: a.columns, b.columns

// Visits the tiles first, first + step, ... of the matrices of all experts, in order of expert, `group` rows of tiles
// column by column.
class WeightWalk {
 public:
  MOE_HD WeightWalk(const int64_t* counts, int experts, int tiles_m, int tiles_n, int group, bool skip_empty, int first,
                    int step)
      : counts_(counts),
        experts_(experts),
        tiles_m_(tiles_m),
        tiles_n_(tiles_n),
        group_(group),
        step_(step),
        skip_empty_(skip_empty),
        skip_(first),
        next_count_(experts ? static_cast<int>(counts[0]) : 0) {}

  int expert = -1;
  int m = 0, n = 0;              // tile
  int first_row = 0, count = 0;  // of the expert

  MOE_HD bool next() {
    while (skip_ >= tiles_) {
      skip_ -= tiles_;
      first_row += count;
      if (++expert >= experts_) return false;
      count = next_count_;
      next_count_ = expert + 1 < experts_ ? static_cast<int>(counts_[expert + 1]) : 0;  // loaded ahead
      tiles_ = skip_empty_ && count == 0 ? 0 : tiles_m_ * tiles_n_;
    }
    const int band = skip_ / (group_ * tiles_n_) * group_, index = skip_ - band * tiles_n_;
    const int height = tiles_m_ - band < group_ ? tiles_m_ - band : group_;
    n = index / height;
    m = band + index - n * height;
    skip_ += step_;
    return true;
  }

 private:
  const int64_t* const counts_;
  const int experts_, tiles_m_, tiles_n_, group_, step_;
  const bool skip_empty_;
  int skip_, next_count_, tiles_ = 0;
};

struct alignas(64) WeightsArgs {
  TensorMap a;        // [1, R, M], boxes of 64 rows and 64 columns
  TensorMap b;        // [1, R, N], the same boxes
  TensorMap out;      // [E, M, N], boxes of 64 rows and 128 bytes
  int64_t counts_at;  // [E] int64
  int32_t experts, rows, columns, group;
};

constexpr int kGradSlotBytes = 64 * 128;

constexpr int kGradStep = 64, kGradBox = kGradStep * 128;  // rows of a stage, bytes of 64 columns of it
constexpr int kGradStage = (kGradRows + kGradColumns) / 64 * kGradBox;

template <int kStages, int kSlots>
constexpr int gradient_bytes() {
  return 1024 + kStages * kGradStage + 2 * kSlots * kGradSlotBytes + 2 * (kStages + kSlots) * 8;
}

// Stages, and slots of each warp group.
constexpr int kGradStages = 4, kGradSlots = 2;
constexpr int kAddedStages = 3, kAddedSlots = 4;

#ifdef MOE_HOPPER

// Writes zeros over the rows of a stage from `live` to the next multiple of 16: in 64 columns of a, and in b, where
// both warp groups do.
MOE_DEVICE void zero_rows(uint32_t a, uint32_t b, int live, int thread) {
  const int words = (-live & 15) * 40;
  for (int i = thread; i < words; i += 128) {
    const int row = live + i / 40, box = i % 40 / 8, word = i % 8;
    const uint32_t to = (box == 0 ? a : b + (box - 1) * kGradBox) + row * 128 + word * 16;
    store_shared_zeros(to);
  }
}

// The part of a warp group in the tiles of out: 64 rows, 128 bytes of them in a slot.
struct GradTile {
  int expert, row, column;
};

// Stores sums in bf16 through slots in shared memory, which are used in turn.
template <int kSlots>
class GradStore {
 public:
  MOE_DEVICE GradStore(const TensorMap* map, uint32_t slots, int group, int thread)
      : map_(map), slots_(slots), group_(group), thread_(thread) {}

  MOE_DEVICE void store(const float (&d)[128], GradTile tile) {
    const int lane = thread_ % 32, row = thread_ / 32 * 16 + lane % 16;
#pragma unroll
    for (int box = 0; box < 4; ++box) {
      const uint32_t slot = slots_ + next_ * kGradSlotBytes;
      next_ = next_ + 1 == kSlots ? 0 : next_ + 1;
      if (thread_ == 0) wait_stores_read<kSlots - 1>();
      group_sync(group_);
#pragma unroll
      for (int word = 0; word < 8; word += 2) {
        const float* v = d + (box * 8 + word) * 4;
        store_matrices(slot + row * 128 + (((word + lane / 16) ^ (row & 7)) << 4), bf16_pair(v[0], v[1]),
                       bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
      }
      fence_async();
      group_sync(group_);
      if (thread_ == 0) {
        store_3d(map_, slot, tile.column + box * 64, tile.row, tile.expert);
        commit_stores();
      }
    }
  }

 private:
  const TensorMap* const map_;
  const uint32_t slots_;
  const int group_, thread_;
  int next_ = 0;
};

// Adds sums to fp32 values, which it loads ahead into slots in shared memory.
template <int kSlots>
class GradAdd {
 public:
  // ahead: the tiles of this block. loaded: barriers of the slots. Thread 0 loads.
  MOE_DEVICE GradAdd(const TensorMap* map, uint32_t slots, uint32_t loaded, int group, int thread, WeightWalk ahead)
      : map_(map), slots_(slots), loaded_(loaded), group_(group), thread_(thread), ahead_(ahead) {
    for (int i = 0; i < kSlots; ++i) load();
  }

  MOE_DEVICE void store(const float (&d)[128], GradTile tile) {
    const int lane = thread_ % 32;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const uint32_t slot = slots_ + ring_.stage * kGradSlotBytes;
      barrier_wait(loaded_ + ring_.stage * 8, ring_.phase);
      ring_.next();
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = thread_ / 32 * 16 + lane / 4 + i / 4 * 8, word = i % 4 * 2 + lane % 4 / 2;
        const uint32_t at = slot + row * 128 + ((word ^ (row & 7)) << 4) + lane % 2 * 8;
        const float* v = d + (box * 4 + i % 4) * 4 + i / 4 * 2;
        add_shared(at, v[0], v[1]);
      }
      fence_async();
      group_sync(group_);
      if (thread_ == 0) {
        store_3d(map_, slot, tile.column + box * 32, tile.row, tile.expert);
        commit_stores();
        if (stored_) {
          wait_stores_read<1>();
          load();  // into the slot before this one
        }
        stored_ = true;
      }
    }
  }

 private:
  static constexpr int kBoxes = 8;

  MOE_DEVICE void load() {
    if (thread_ != 0 || ended_) return;
    if (next_box_ == kBoxes) {
      ended_ = !ahead_.next();
      if (ended_) return;
      next_box_ = 0;
    }
    const uint32_t barrier = loaded_ + next_ * 8;
    barrier_expect(barrier, kGradSlotBytes);
    load_3d(slots_ + next_ * kGradSlotBytes, map_, barrier, ahead_.n * kGradColumns + next_box_ * 32,
            ahead_.m * kGradRows + (group_ - 1) * 64, ahead_.expert);
    ++next_box_;
    next_ = next_ + 1 == kSlots ? 0 : next_ + 1;
  }

  const TensorMap* const map_;
  const uint32_t slots_, loaded_;
  const int group_, thread_;
  WeightWalk ahead_;
  Ring<kSlots> ring_;
  int next_ = 0, next_box_ = kBoxes;
  bool ended_ = false, stored_ = false;
};

template <bool kAdd, int kStages, int kSlots>
MOE_DEVICE void weight_gradients(const WeightsArgs& args) {
  extern __shared__ unsigned char block_shared[];
  const uint32_t stages = (shared_address(block_shared) + 1023) & ~1023u, slots = stages + kStages * kGradStage;
  const uint32_t full = slots + 2 * kSlots * kGradSlotBytes, empty = full + kStages * 8, loaded = empty + kStages * 8;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + s * 8, 1);
      barrier_init(empty + s * 8, 8);
    }
    if (kAdd) {
      for (int s = 0; s < 2 * kSlots; ++s) barrier_init(loaded + s * 8, 1);
    }
    barriers_ready();
    prefetch_map(&args.a);
    prefetch_map(&args.b);
    prefetch_map(&args.out);
  }
  __syncthreads();
  WeightWalk tile(reinterpret_cast<const int64_t*>(args.counts_at), args.experts,
                  (args.rows + kGradRows - 1) / kGradRows, (args.columns + kGradColumns - 1) / kGradColumns, args.group,
                  kAdd, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  Ring<kStages> ring;
  if (warp < 4) {
    fewer_registers<40>();
    while (threadIdx.x == 0 && tile.next()) {
      const int row = tile.m * kGradRows, column = tile.n * kGradColumns;
#pragma unroll 1  // with 40 registers
      for (int k = 0; k < tile.count; k += kGradStep, ring.next()) {
        const uint32_t barrier = full + ring.stage * 8, at = stages + ring.stage * kGradStage, bt = at + 2 * kGradBox;
        barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
        barrier_expect(barrier, kGradStage);
#pragma unroll
        for (int i = 0; i < 2; ++i) load_3d(at + i * kGradBox, &args.a, barrier, row + i * 64, tile.first_row + k, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          load_3d(bt + i * kGradBox, &args.b, barrier, column + i * 64, tile.first_row + k, 0);
      }
    }
    return;
  }
  more_registers<232>();
  const int group = warp / 4, thread = threadIdx.x % 128;
  const uint32_t own_slots = slots + (group - 1) * kSlots * kGradSlotBytes, own_a = (group - 1) * kGradBox;
  const auto results = [&] {
    if constexpr (kAdd) {
      return GradAdd<kSlots>(&args.out, own_slots, loaded + (group - 1) * kSlots * 8, group, thread, tile);
    } else {
      return GradStore<kSlots>(&args.out, own_slots, group, thread);
    }
  };
  auto result = results();
  while (tile.next()) {
    float d[128];
    if (tile.count == 0) {
#pragma unroll
      for (int i = 0; i < 128; ++i) d[i] = 0.0f;
    }
    uint32_t used = 0;  // barrier of the stage that the products in flight read
    const auto multiply_16 = [&](uint32_t at, uint32_t bt, int i, int keep) {
      multiply<1, 1>(d, descriptor(at + i * 2048, kGradBox), descriptor(bt + i * 2048, kGradBox), keep);
    };
    const int whole = tile.count / kGradStep, live = tile.count % kGradStep;
    for (int k = 0; k < whole; ++k, ring.next()) {
      const uint32_t stage = stages + ring.stage * kGradStage;
      barrier_wait(full + ring.stage * 8, ring.phase);
      keep_registers(d);
      products_begin();
#pragma unroll
      for (int i = 0; i < kGradStep / 16; ++i) multiply_16(stage + own_a, stage + 2 * kGradBox, i, k > 0 || i > 0);
      products_commit();
      keep_registers(d);
      if (k > 0) {
        products_wait<1>();
        if (lane == 0) barrier_arrive(used);
      }
      used = empty + ring.stage * 8;
    }
    // The votes tell the compiler that all threads take the same branch; otherwise it serializes all products.
    if (__any_sync(~0u, live > 0)) {
      const uint32_t stage = stages + ring.stage * kGradStage;
      barrier_wait(full + ring.stage * 8, ring.phase);
      if (live % 16 != 0) {
        zero_rows(stage + own_a, stage + 2 * kGradBox, live, thread);
        fence_async();
        group_sync(group);
      }
      keep_registers(d);
      products_begin();
      for (int i = 0; __any_sync(~0u, i * 16 < live); ++i) {
        multiply_16(stage + own_a, stage + 2 * kGradBox, i, whole > 0 || i > 0);
      }
      products_commit();
      keep_registers(d);
      if (whole > 0) {
        products_wait<1>();
        if (lane == 0) barrier_arrive(used);
      }
      used = empty + ring.stage * 8;
      ring.next();
    }
    products_wait<0>();
    keep_registers(d);
    if (tile.count > 0 && lane == 0) barrier_arrive(used);
    result.store(d, {tile.expert, tile.m * kGradRows + (group - 1) * 64, tile.n * kGradColumns});
  }
  if (thread == 0) wait_stores_read<0>();
}

#endif  // MOE_HOPPER

}  // namespace gemm
}  // namespace moe_comm
