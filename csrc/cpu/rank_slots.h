// One row per (token, rank): each token is sent once to each rank that owns one of its experts (dispatch/per_rank.py).
// Also the ids of routers that return a mask (dispatch/slots/plain.py).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace moe_comm {

struct RankLayout {
  int32_t* per_rank;    // [world] tokens sent to each rank; 0 before
  int32_t* per_expert;  // [E] slots of each expert; 0 before
  uint8_t* in_rank;     // [T, world] whether a token is sent to a rank; 0 before
  int64_t* ranks;       // [T, min(K, world)] owners of a token's slots, in the order of their last slots; then -1
};

// owner [E]: rank of each expert. ids [T, K] are below E; those below 0 have no owner. Whether a slot is the last one
// of its rank is not predictable, so it moves a pointer and is not a branch.
template <class Id>
void rank_layout(const Id* ids, int64_t tokens, int64_t top_k, const int32_t* owner, int64_t world, RankLayout to) {
  const int64_t most = std::min(top_k, world);
  std::vector<int64_t> backwards(static_cast<size_t>(most) + 1);  // the last element is written and not used
  for (int64_t t = 0; t < tokens; ++t) {
    const Id* row = ids + t * top_k;
    uint8_t* in_rank = to.in_rank + t * world;
    int64_t* next = backwards.data();
    for (int64_t k = top_k; k-- > 0;) {
      if (row[k] < 0) continue;
      ++to.per_expert[row[k]];
      const int32_t rank = owner[row[k]];
      const uint8_t first = in_rank[rank] ^ 1;
      in_rank[rank] = 1;
      to.per_rank[rank] += first;
      *next = rank;
      next += first;
    }
    int64_t* ranks = to.ranks + t * most;
    ranks = std::reverse_copy(backwards.data(), next, ranks);
    std::fill(ranks, to.ranks + (t + 1) * most, -1);
  }
}

// From the received words [R, width] of a dispatch: source rank, token, K ids and, if weights is not null, K weights.
// shape: R, width, K. own: first, count.
//   local    [R, K] ids minus `first`, -1 for ids outside [first, first + count)
//   weights  [R, K] weights, 0 where local is -1; null without
//   rows     [count] slots of each of these experts
template <class Id>
void local_slots(const int32_t* words, std::array<int64_t, 3> shape, std::array<int64_t, 2> own, Id* local,
                 int32_t* weights, int64_t* rows) {
  const auto [num_rows, width, top_k] = shape;
  // No branches on whether a slot is this rank's, which is not predictable. Ids outside `own` wrap to large ones.
  const auto first = static_cast<uint32_t>(own[0]), count = static_cast<uint32_t>(own[1]);
  std::vector<int64_t> found(size_t{2} * (count + 1));  // even and odd slots, so that equal ids do not wait
  for (int64_t r = 0; r < num_rows; ++r) {
    const int32_t* row = words + r * width + 2;
    for (int64_t k = 0; k < top_k; ++k) {
      const uint32_t id = std::min(static_cast<uint32_t>(row[k]) - first, count);
      local[r * top_k + k] = id == count ? -1 : static_cast<Id>(id);
      if (weights) weights[r * top_k + k] = id == count ? 0 : row[top_k + k];
      ++found[size_t{2} * id + (k & 1)];
    }
  }
  for (size_t e = 0; e < count; ++e) rows[e] = found[2 * e] + found[2 * e + 1];
}

// Write the experts of each token's mask [T, E] of 0 and 1 in ascending order, then -1, to ids [T, K]. Return the most
// experts of a token; ids beyond K are not written.
inline int64_t ids_of_mask(const uint8_t* mask, int64_t tokens, int64_t experts, int64_t top_k, int64_t* ids) {
  int64_t most = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const uint8_t* row = mask + t * experts;
    int64_t* to = ids + t * top_k;
    int64_t found = 0;
    const auto add = [&](int64_t expert) {
      if (found < top_k) to[found] = expert;
      ++found;
    };
    int64_t e = 0;
    for (; e + 8 <= experts; e += 8) {
      uint64_t eight;
      std::memcpy(&eight, row + e, 8);
      for (; eight; eight &= eight - 1) add(e + __builtin_ctzll(eight) / 8);
    }
    for (; e < experts; ++e) {
      if (row[e]) add(e);
    }
    if (found < top_k) std::fill(to + found, to + top_k, -1);
    most = std::max(most, found);
  }
  return most;
}

}  // namespace moe_comm
