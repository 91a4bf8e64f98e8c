// A few threads that split a loop; the caller works too. Kept apart from OpenMP, of which torch brings its own.
#pragma once

#include <cstdint>
#include <functional>

namespace moe_comm {

// Run body(first, last) over [0, count) in `threads` contiguous parts, of at least `grain` each.
void parallel_for(int64_t count, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body);

}  // namespace moe_comm
