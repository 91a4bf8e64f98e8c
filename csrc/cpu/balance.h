// Which rows of an expert are computed on another rank than its home; see planner.h.
#pragma once

#include <vector>

#include "planner.h"

namespace moe_comm {

// The rows to lend, by (expert, rank), and their hash.
struct LentRows {
  std::vector<Lent> lent;
  uint64_t digest = 0;
};

// loads and home have a value for each expert; homes are below `world`.
LentRows plan_rows(const std::vector<int64_t>& loads, const std::vector<int64_t>& home, int64_t world,
                   const BalanceLimits& limits, std::vector<Resident> residents);

}  // namespace moe_comm
