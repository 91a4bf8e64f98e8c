// What products of rows share: the sizes of a tile, the loop over its stages, and stores of a warp's results.
//
// A tile has 128 rows and 256 columns. A stage has 64 elements of each along K. Two consumer warp groups multiply 64
// rows each, and each warp stores 16 of them.
#pragma once

#include "cuda/gemm/hopper.h"

namespace moe_comm {
namespace gemm {

constexpr int kTileRows = 128, kTileColumns = 256, kTileInner = 64;
constexpr int kThreads = 384;
constexpr int kBytesA = kTileRows * 128, kBytesB = kTileColumns * 128, kBytesBox = 16 * 128;

#ifdef MOE_HOPPER

// The stages of a tile in shared memory, and their barriers.
struct Stages {
  uint32_t a, b, full, empty;
};

// d = the products of 64 rows with 256 columns, over `steps` stages. half: of the 128 rows of a stage.
template <int kMajorB, int kStages>
MOE_DEVICE void multiply_stages(float (&d)[128], Ring<kStages>& ring, int steps, const Stages& stages, int half,
                                int lane) {
  uint32_t used = 0;  // barrier of the stage that the products in flight read
  for (int k = 0; k < steps; ++k, ring.next()) {
    barrier_wait(stages.full + ring.stage * 8, ring.phase);
    const uint32_t at = stages.a + ring.stage * kBytesA + half * (kBytesA / 2), bt = stages.b + ring.stage * kBytesB;
    keep_registers(d);
    products_begin();
#pragma unroll
    for (int i = 0; i < kTileInner / 16; ++i) {
      const uint64_t b = kMajorB ? descriptor(bt + i * 2048, kBytesB / 4) : descriptor(bt + i * 32, 0);
      multiply<0, kMajorB>(d, descriptor(at + i * 32, 0), b, k > 0 || i > 0);
    }
    products_commit();
    keep_registers(d);
    products_wait<1>();
    if (k > 0 && lane == 0) barrier_arrive(used);
    used = stages.empty + ring.stage * 8;
  }
  products_wait<0>();
  keep_registers(d);
  if (lane == 0) barrier_arrive(used);
}

// Stores 16 rows and 64 columns, which a warp has written to `buffer`, at (first_row, part, column). rows: those to
// store. TMA reads the buffer until the next wait_stores_read; lane 0 has to commit.
struct RowBox {
  const TensorMap* map;
  int64_t at, stride;
  bool elsewhere = false;  // `at` is in the memory of another rank, which `map` does not describe
};
MOE_DEVICE void store_box(const RowBox& to, uint32_t buffer, int lane, int64_t first_row, int rows, int part,
                          int column, int columns) {
  fence_async();
  __syncwarp();
  if (rows >= 16 && !to.elsewhere) {
    if (lane == 0) store_3d(to.map, buffer, column, part, static_cast<int32_t>(first_row));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 4 + lane / 8, word = lane % 8, first = column + word * 8;
    if (row < rows && first < columns) {
      uint32_t v[4];
      load_shared(buffer + row * 128 + ((word ^ (row & 7)) << 4), v);
      store_global(to.at + 2 * ((first_row + row) * to.stride + static_cast<int64_t>(part) * columns + first), v);
    }
  }
  __syncwarp();
}

// Stores 16 rows of a warp, 64 columns at a time, through `kBuffers` buffers of its own.
template <int kBuffers>
class RowStore {
 public:
  MOE_DEVICE RowStore(uint32_t buffers, int lane) : buffers_(buffers), lane_(lane) {}

  // pair(j, h): elements of columns 8 * j + {0, 1} + lane % 4 * 2 and row lane / 4 + 8 * h. rows: those to store.
  template <class Pair>
  MOE_DEVICE void box(const RowBox& to, int64_t first_row, int rows, int part, int column, int columns, Pair pair) {
    const uint32_t buffer = buffers_ + next_ * kBytesBox;
    next_ = next_ + 1 == kBuffers ? 0 : next_ + 1;
    if (lane_ == 0) wait_stores_read<kBuffers - 1>();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const int row = lane_ % 16, word = j + lane_ / 16;
      store_matrices(buffer + row * 128 + ((word ^ (row & 7)) << 4), pair(j, 0), pair(j, 1), pair(j + 1, 0),
                     pair(j + 1, 1));
    }
    store_box(to, buffer, lane_, first_row, rows, part, column, columns);
    if (lane_ == 0) commit_stores();  // also without a store, so that the last groups are those of the other buffers
  }

 private:
  const uint32_t buffers_;
  const int lane_;
  int next_ = 0;
};

#endif  // MOE_HOPPER

}  // namespace gemm
}  // namespace moe_comm
