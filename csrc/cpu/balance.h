// Which rows of an expert are computed on another rank than its home; see moe_comm/topology/balance.py, the reference.
#pragma once

#include <cstdint>
#include <vector>

namespace moe_comm {

struct Lent {
  int64_t expert, rank, rows;
};

// `rows`: lend to keep to it, where that pays. `memory`: never exceeded. `row_ns`, `copy_ns`: costs of a row and of a
// copy that is not resident. `copies`: slots for copies on each rank.
struct BalanceLimits {
  int64_t rows, memory, row_ns, copy_ns, copies;
};

struct Resident {
  int64_t expert, rank;
};

// The rows to lend, by (expert, rank). loads and home have a value for each expert; homes are below `world`.
std::vector<Lent> plan_rows(const std::vector<int64_t>& loads, const std::vector<int64_t>& home, int64_t world,
                            const BalanceLimits& limits, std::vector<Resident> residents);

// A hash of a plan; 0 for the empty plan.
uint64_t plan_digest(const std::vector<Lent>& lent);

}  // namespace moe_comm
