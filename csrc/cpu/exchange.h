// Collectives with equal-sized parts between the ranks of one host. Each rank publishes a buffer in its heap, and its
// peers read the part they need directly from there.
//
//   copy     rank r: y ◀── part of rank 0's block, part of rank 1's, ...    all-gather, all-to-all
//   sum      rank r: y ◀── sum of the same part of every block              reduce-scatter, small all-reduce
//   values   rank r: y ◀── the values in the record of each rank                  all-gather of a few words
//   all_sum  rank r sums part r of every block into its own block, then
//            copies the other parts from the ranks that summed them         all-reduce, in place
//
// Sums are accumulated in fp32 in rank order and rounded once. A call returns only after all ranks have finished
// reading, but values returns before: its peers may still have to wake up.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "communicator.h"

namespace moe_comm {

using Values = std::array<int64_t, kValues>;

class Exchange {
 public:
  Exchange(std::shared_ptr<Communicator> communicator, int threads);

  int world() const { return communicator_->world(); }

  // The buffer that a rank publishes: `bytes` in its own heap. Null if op.fault is set; all ranks then throw
  // HandshakeFailed.
  struct Buffer {
    const char* data = nullptr;
    int64_t bytes = 0;
  };

  // y [world, part]: `part` bytes from each rank's buffer, starting at byte `first`.
  void copy(const Op& op, Buffer own, int64_t first, int64_t part, char* y);
  // y [count]: the sum of elements [first, first + count) over all ranks' buffers.
  void sum(const Op& op, Buffer own, int64_t first, int64_t count, int dtype, char* y);
  // y [world]: the values of each rank.
  void values(const Op& op, const Values& own, Values* y);
  // In-place all-reduce: the published buffers are overwritten with their sum.
  void all_sum(const Op& op, Buffer own, int dtype);

 private:
  void begin(const Op& op, Buffer own);
  char* buffer_of(int peer);
  // Sum elements [first, first + count) of all buffers into y. y may alias this rank's own range.
  void add(int64_t first, int64_t count, int dtype, char* y);

  std::shared_ptr<Communicator> communicator_;
  int threads_;
};

// Write the location of the buffer `own` into this rank's record, before an operation. Throws if the buffer is not in
// this rank's heap.
void publish_buffer(Communicator& communicator, Exchange::Buffer own);
// y [count]: the sum of `parts` (one per rank), added in rank order. y may alias one of the parts.
void add_parts(const std::vector<char*>& parts, int64_t count, int dtype, int threads, char* y);

}  // namespace moe_comm
