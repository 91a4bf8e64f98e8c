// Index arithmetic of dispatch, shared by the CPU and CUDA backends and tested on the CPU.
//
// A routed slot (token t, choice k) is assigned to row `row` of the block that rank `owner` allocates for this
// dispatch. Rows of a block are ordered by (local expert, source rank, token, slot):
//
//   rank 1's block    | expert 2              | expert 3        |
//                     | from 0 | from 1 | ... | from 0 | from 1 |
//
// The start of (expert e, source s) follows from the counts of all ranks and two prefix sums. No atomics are needed.
#pragma once

#if defined(__CUDACC_RTC__)  // has no headers of the C++ library
using int64_t = long long;
using uint64_t = unsigned long long;
using int32_t = int;
using uint32_t = unsigned int;
using uint16_t = unsigned short;
using uint8_t = unsigned char;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define MOE_HD __host__ __device__
#define MOE_BLOCK __device__ __forceinline__  // code that all threads of a block run
#else
#define MOE_HD
#define MOE_BLOCK inline
#endif

namespace moe_comm {

constexpr int64_t kDropped = -1;
constexpr int kOwnerShift = 48;
constexpr int64_t kRowMask = (int64_t{1} << kOwnerShift) - 1;
constexpr int kMaxWorld = 1 << 15;

// A place is a packed int64: the owner rank in the upper 16 bits, the row index in the lower 48. kDropped marks a
// dropped slot.
MOE_HD inline int64_t pack_place(int64_t owner, int64_t row) { return (owner << kOwnerShift) | row; }
MOE_HD inline int64_t place_owner(int64_t place) { return place >> kOwnerShift; }
MOE_HD inline int64_t place_row(int64_t place) { return place & kRowMask; }

// Set first_row[e] to the row, in the block of e's owner, of the first slot that `source` sends to expert e.
// count(s, e) is the number of slots that rank s sends to expert e. expert_offsets has world + 1 entries.
template <class Count>
MOE_HD inline void first_rows(const int64_t* expert_offsets, int world, int source, Count count, int64_t* first_row) {
  for (int owner = 0; owner < world; ++owner) {
    int64_t row = 0;
    for (int64_t e = expert_offsets[owner]; e < expert_offsets[owner + 1]; ++e) {
      for (int s = 0; s < world; ++s) {
        if (s == source) first_row[e] = row;
        row += count(s, e);
      }
    }
  }
}

// Called by all lanes of m. Inclusive prefix sum of `values`; `other` is scratch memory of the same size. Returns the
// buffer that holds the result.
template <class M>
MOE_BLOCK int64_t* running_sums(const M& m, int64_t* values, int64_t* other, int n) {
  for (int reach = 1; reach < n; reach *= 2) {
    m.sync();
    m.each(n, [&](int i) { other[i] = i >= reach ? values[i] + values[i - reach] : values[i]; });
    int64_t* swap = values;
    values = other;
    other = swap;
  }
  m.sync();
  return values;
}

}  // namespace moe_comm
