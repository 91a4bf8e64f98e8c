#include <algorithm>
#include <tuple>
#include <vector>

#include "check.h"
#include "layout.h"

using namespace moe_comm;
using namespace moe_comm::test;

TEST(layout_places_pack_and_unpack) {
  for (const int64_t owner : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{kMaxWorld - 1}}) {
    for (const int64_t row : {int64_t{0}, int64_t{1}, int64_t{1} << 31, (int64_t{1} << 33) + 5, kRowMask}) {
      const int64_t place = pack_place(owner, row);
      CHECK(place >= 0 && place != kDropped);
      CHECK_EQ(place_owner(place), owner);
      CHECK_EQ(place_row(place), row);
    }
  }
}

// Compares with a literal implementation of the contract: list all rows of an owner sorted by (expert, source) and find
// the first.
TEST(layout_first_rows_match_sorting_for_thousands_of_random_routings) {
  Random random(5);
  for (int round = 0; round < 3000 * repeats(); ++round) {
    const int world = static_cast<int>(random.between(1, 9));
    std::vector<int64_t> offsets = {0};
    for (int r = 0; r < world; ++r) offsets.push_back(offsets.back() + random.below(4));
    const int64_t experts = offsets.back();
    std::vector<int64_t> counts(static_cast<size_t>(world * experts));
    for (int64_t& count : counts) count = random.chance(0.3) ? 0 : random.below(5);
    const auto count = [&](int s, int64_t e) { return counts[static_cast<size_t>(s * experts + e)]; };
    for (int source = 0; source < world; ++source) {
      std::vector<int64_t> first(static_cast<size_t>(experts), -1);
      first_rows(offsets.data(), world, source, count, first.data());
      for (int owner = 0; owner < world; ++owner) {
        std::vector<std::pair<int64_t, int>> rows;
        for (int s = world; s-- > 0;) {
          for (int64_t e = offsets[static_cast<size_t>(owner)]; e < offsets[static_cast<size_t>(owner) + 1]; ++e) {
            rows.insert(rows.end(), static_cast<size_t>(count(s, e)), {e, s});
          }
        }
        std::sort(rows.begin(), rows.end());
        for (int64_t e = offsets[static_cast<size_t>(owner)]; e < offsets[static_cast<size_t>(owner) + 1]; ++e) {
          const auto at = std::lower_bound(rows.begin(), rows.end(), std::make_pair(e, source));
          CHECK_EQ(first[static_cast<size_t>(e)], static_cast<int64_t>(at - rows.begin()));
        }
      }
    }
  }
}

TEST(layout_counts_beyond_32_bits) {
  const int64_t offsets[] = {0, 2, 3};
  const int64_t many = int64_t{3} << 31;
  int64_t first[3];
  first_rows(offsets, 2, 1, [&](int, int64_t) { return many; }, first);
  CHECK_EQ(first[0], many);
  CHECK_EQ(first[1], 3 * many);
  CHECK_EQ(first[2], many);
}
