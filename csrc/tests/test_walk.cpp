// The tiles that the blocks of a grouped GEMM on a GPU visit.
#include <vector>

#include "check.h"
#include "cuda/gemm/walk.h"
#include "cuda/gemm/weights.h"

using namespace moe_comm::gemm;
using namespace moe_comm::test;

TEST(walks_of_all_blocks_visit_each_tile_once_and_in_order_of_expert) {
  Random random(3);
  for (int round = 0; round < 300 * repeats(); ++round) {
    const int experts = static_cast<int>(random.below(9)), tiles_n = static_cast<int>(random.between(1, 5));
    const int tile_rows = random.chance(0.5) ? 128 : 256, group = static_cast<int>(random.between(1, 8));
    const int blocks = static_cast<int>(random.between(1, 20));
    std::vector<int64_t> counts(static_cast<size_t>(experts)), starts;
    int64_t total = 0;
    for (auto& count : counts) {
      count = random.chance(0.3) ? 0 : random.below(1500);
      starts.push_back(total);
      total += count;
    }
    std::vector<int> visits(static_cast<size_t>(total * tiles_n));
    for (int block = 0; block < blocks; ++block) {
      Walk tile(counts.data(), experts, tile_rows, tiles_n, group, block, blocks);
      int last = 0;
      while (tile.next()) {
        CHECK(tile.expert >= last && tile.expert < experts);
        CHECK(tile.n >= 0 && tile.n < tiles_n);
        CHECK(tile.rows >= 1 && tile.rows <= tile_rows);
        last = tile.expert;
        const auto e = static_cast<size_t>(tile.expert);
        CHECK(tile.first_row >= starts[e] && tile.first_row + tile.rows <= starts[e] + counts[e]);
        for (int64_t r = tile.first_row; r < tile.first_row + tile.rows; ++r) {
          ++visits[static_cast<size_t>(r * tiles_n + tile.n)];
        }
      }
    }
    for (const int count : visits) CHECK_EQ(count, 1);
  }
}

TEST(neighbouring_blocks_share_the_weights_of_a_group_of_tiles) {
  const std::vector<int64_t> counts = {300, 0, 1000};
  std::vector<int64_t> seen;
  for (int block = 0; block < 6; ++block) {
    Walk tile(counts.data(), 3, 128, 2, 8, block, 22);
    CHECK(tile.next());
    seen.push_back(tile.n * 1000 + tile.first_row);
  }
  CHECK(seen == (std::vector<int64_t>{0, 128, 256, 1000, 1128, 1256}));
}

TEST(walks_of_weight_gradients_visit_each_tile_once) {
  Random random(4);
  for (int round = 0; round < 300 * repeats(); ++round) {
    const int experts = static_cast<int>(random.below(9)), blocks = static_cast<int>(random.between(1, 20));
    const int tiles_m = static_cast<int>(random.between(1, 9)), tiles_n = static_cast<int>(random.between(1, 5));
    const int group = static_cast<int>(random.between(1, 8));
    const bool skip_empty = random.chance(0.5);
    std::vector<int64_t> counts(static_cast<size_t>(experts));
    for (auto& count : counts) count = random.chance(0.3) ? 0 : random.below(300);
    std::vector<int> visits(static_cast<size_t>(experts * tiles_m * tiles_n));
    for (int block = 0; block < blocks; ++block) {
      WeightWalk tile(counts.data(), experts, tiles_m, tiles_n, group, skip_empty, block, blocks);
      while (tile.next()) {
        CHECK(tile.m >= 0 && tile.m < tiles_m && tile.n >= 0 && tile.n < tiles_n);
        int64_t start = 0;
        for (int e = 0; e < tile.expert; ++e) start += counts[static_cast<size_t>(e)];
        CHECK(tile.first_row == start && tile.count == counts[static_cast<size_t>(tile.expert)]);
        ++visits[static_cast<size_t>((tile.expert * tiles_m + tile.m) * tiles_n + tile.n)];
      }
    }
    for (size_t i = 0; i < visits.size(); ++i) {
      const bool empty = counts[i / static_cast<size_t>(tiles_m * tiles_n)] == 0;
      CHECK_EQ(visits[i], skip_empty && empty ? 0 : 1);
    }
  }
}
