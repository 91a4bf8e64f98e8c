#include <vector>

#include "check.h"
#include "cpu/rank_slots.h"

using namespace moe_comm;
using namespace moe_comm::test;

namespace {

template <class T>
T& at(std::vector<T>& values, int64_t index) {
  return values[static_cast<size_t>(index)];
}

}  // namespace

// Vectors have exactly the sizes that the header names, so that AddressSanitizer sees a write beyond them.
TEST(rank_slots_layout_and_received_slots_match_loops) {
  Random random(11);
  for (int round = 0; round < 300 * repeats(); ++round) {
    const int64_t world = random.between(1, 5), local = random.between(1, 4), experts = world * local;
    const int64_t tokens = random.below(6), top_k = random.between(1, 7), most = std::min(top_k, world);
    std::vector<int32_t> owner, per_rank(static_cast<size_t>(world)), per_expert(static_cast<size_t>(experts));
    for (int64_t e = 0; e < experts; ++e) owner.push_back(static_cast<int32_t>(e / local));
    std::vector<int32_t> ids(static_cast<size_t>(tokens * top_k));
    for (int32_t& id : ids) id = static_cast<int32_t>(random.below(experts + 1)) - 1;
    std::vector<uint8_t> in_rank(static_cast<size_t>(tokens * world));
    std::vector<int64_t> ranks(static_cast<size_t>(tokens * most), -7);
    rank_layout(ids.data(), tokens, top_k, owner.data(), world,
                {per_rank.data(), per_expert.data(), in_rank.data(), ranks.data()});
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<int64_t> want;
      for (int64_t k = 0; k < top_k; ++k) {
        if (at(ids, t * top_k + k) < 0) continue;
        const int64_t rank = at(ids, t * top_k + k) / local;
        want.erase(std::remove(want.begin(), want.end(), rank), want.end());
        want.push_back(rank);
      }
      want.resize(static_cast<size_t>(most), -1);
      for (int64_t n = 0; n < most; ++n) CHECK_EQ(at(ranks, t * most + n), at(want, n));
    }

    // Words of one row per token, as if this rank had all of them and the experts [first, first + count).
    const int64_t first = random.below(experts), count = random.below(experts - first + 1), width = 2 + 2 * top_k;
    std::vector<int32_t> words(static_cast<size_t>(tokens * width), 9);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < top_k; ++k) at(words, t * width + 2 + k) = at(ids, t * top_k + k);
    }
    std::vector<int64_t> got(ids.size()), rows(static_cast<size_t>(count), -1), want_rows(rows.size());
    std::vector<int32_t> weights(ids.size());
    local_slots(words.data(), {tokens, width, top_k}, {first, count}, got.data(), weights.data(), rows.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      const int64_t id = ids[i] - first;
      const bool mine = ids[i] >= 0 && id >= 0 && id < count;
      CHECK_EQ(got[i], mine ? id : -1);
      CHECK_EQ(weights[i], mine ? 9 : 0);
      if (mine) ++at(want_rows, id);
    }
    CHECK(rows == want_rows);
  }
}

TEST(rank_slots_ids_of_a_mask_match_loops) {
  Random random(12);
  for (int round = 0; round < 300 * repeats(); ++round) {
    const int64_t tokens = random.below(5), experts = random.between(1, 40), top_k = random.between(1, 9);
    std::vector<uint8_t> mask(static_cast<size_t>(tokens * experts));
    for (uint8_t& chosen : mask) chosen = random.chance(0.15);
    std::vector<int64_t> ids(static_cast<size_t>(tokens * top_k), -7);
    int64_t most = 0;
    const int64_t got = ids_of_mask(mask.data(), tokens, experts, top_k, ids.data());
    for (int64_t t = 0; t < tokens; ++t) {
      std::vector<int64_t> want;
      for (int64_t e = 0; e < experts; ++e) {
        if (at(mask, t * experts + e)) want.push_back(e);
      }
      most = std::max(most, static_cast<int64_t>(want.size()));
      want.resize(static_cast<size_t>(top_k), -1);
      for (int64_t k = 0; k < top_k; ++k) CHECK_EQ(at(ids, t * top_k + k), at(want, k));
    }
    CHECK_EQ(got, most);
  }
}
