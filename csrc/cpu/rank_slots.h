// One row per (token, rank): each token is sent once to each rank that owns one of its experts (dispatch/per_rank.py).
#pragma once

#include <cstdint>

namespace moe_comm {

struct RankCounts {
  const int32_t* owner;  // [E] rank of each expert
  int64_t experts = 0, world = 0;
  int32_t* per_rank;    // [world] tokens sent to each rank
  int32_t* per_expert;  // [E] slots of each expert
  uint8_t* in_rank;     // [T, world] whether a token is sent to a rank
};

// rank [T, K]: the owner of each slot if no later slot of its token has the same owner, else -1, as for an id below 0.
// Also counts, unless counts.per_rank is null; the caller has set these outputs to 0. Returns false if an id is below
// -1 or not below E; the outputs are then incomplete.
template <class Id>
bool last_slots(const Id* ids, int64_t tokens, int64_t top_k, const RankCounts& counts, int64_t* rank) {
  for (int64_t t = 0; t < tokens; ++t) {
    const Id* row = ids + t * top_k;
    int64_t* out = rank + t * top_k;
    for (int64_t k = 0; k < top_k; ++k) {
      if (row[k] < -1 || row[k] >= counts.experts) return false;
      out[k] = row[k] < 0 ? -1 : counts.owner[row[k]];
      if (counts.per_rank && row[k] >= 0) ++counts.per_expert[row[k]];
    }
    for (int64_t k = 0; k < top_k; ++k) {
      bool last = out[k] >= 0;
      for (int64_t later = k + 1; later < top_k && last; ++later) last = out[later] != out[k];
      if (!last) {
        out[k] = -1;
      } else if (counts.per_rank) {
        ++counts.per_rank[out[k]];
        counts.in_rank[t * counts.world + out[k]] = 1;
      }
    }
  }
  return true;
}

// The received words [R, width] of a dispatch: source rank, token, K ids and, if `weighted`, K weights.
//   local    [R, K] ids minus `first`, -1 for ids outside [first, first + count)
//   weights  [R, K] weights, 0 where local is -1; null without
//   rows     [count] slots of each of these experts; set to 0 by the caller
template <class Id>
void local_slots(const int32_t* words, int64_t num_rows, int64_t width, int64_t top_k, int64_t first, int64_t count,
                 Id* local, int32_t* weights, int64_t* rows) {
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
