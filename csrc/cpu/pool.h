// A small thread pool for loops; the calling thread takes part. It is separate from OpenMP because torch ships its own
// OpenMP runtime.
#pragma once

#include <cstdint>
#include <functional>

namespace moe_comm {

// Run body(first, last) over [0, count) in `threads` contiguous parts of at least `grain` iterations each.
void parallel_for(int64_t count, int64_t grain, int threads, const std::function<void(int64_t, int64_t)>& body);

}  // namespace moe_comm
