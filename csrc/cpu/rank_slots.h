// One row per (token, rank): each token is sent once to each rank that owns one of its experts (dispatch/per_rank.py).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace moe_comm {

struct RankLayout {
  int32_t* per_rank;    // [world] tokens sent to each rank; 0 before
  int32_t* per_expert;  // [E] slots of each expert; 0 before
  uint8_t* in_rank;     // [T, world] whether a token is sent to a rank; 0 before
  int64_t* ranks;       // [T, min(K, world)] owners of a token's slots, in the order of their last slots; then -1
};

// owner [E]: rank of each expert. ids [T, K] are below E; those below 0 have no owner.
template <class Id>
void rank_layout(const Id* ids, int64_t tokens, int64_t top_k, const int32_t* owner, int64_t world, RankLayout to) {
  const int64_t most = std::min(top_k, world);
  for (int64_t t = 0; t < tokens; ++t) {
    const Id* row = ids + t * top_k;
    uint8_t* in_rank = to.in_rank + t * world;
    int64_t* end = to.ranks + (t + 1) * most;
    int64_t* next = end;
    for (int64_t k = top_k; k-- > 0;) {
      if (row[k] < 0) continue;
      ++to.per_expert[row[k]];
      const int32_t rank = owner[row[k]];
      if (in_rank[rank]) continue;
      in_rank[rank] = 1;
      ++to.per_rank[rank];
      *--next = rank;
    }
    std::fill(std::copy(next, end, end - most), end, -1);
  }
}

// From the received words [R, width] of a dispatch: source rank, token, K ids and, if weights is not null, K weights.
// shape: R, width, K. own: first, count.
//   local    [R, K] ids minus `first`, -1 for ids outside [first, first + count)
//   weights  [R, K] weights, 0 where local is -1; null without
//   rows     [count] slots of each of these experts; set to 0 by the caller
template <class Id>
void local_slots(const int32_t* words, std::array<int64_t, 3> shape, std::array<int64_t, 2> own, Id* local,
                 int32_t* weights, int64_t* rows) {
  const auto [num_rows, width, top_k] = shape;
  const auto [first, count] = own;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int32_t* row = words + r * width + 2;
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t id = row[k] - first;
      const bool mine = row[k] >= 0 && id >= 0 && id < count;
      local[r * top_k + k] = static_cast<Id>(mine ? id : -1);
      if (weights) weights[r * top_k + k] = mine ? row[top_k + k] : 0;
      if (mine) ++rows[id];
    }
  }
}

}  // namespace moe_comm
