// Collectives of equal parts between the ranks of one host: what peers offer stands in their heaps, and each rank
// reads its share of it where it lies.
//
//   copy     rank r: y ◀── part of rank 0's block, part of rank 1's, ...    all-gather, all-to-all
//   sum      rank r: y ◀── sum of the same part of every block              reduce-scatter, small all-reduce
//   all_sum  rank r sums part r of every block into its own block, then
//            copies the other parts from the ranks that summed them         all-reduce, in place
//
// Sums add in order of rank in fp32 and round once. No rank returns before all have read.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "communicator.h"

namespace moe_comm {

class Exchange {
 public:
  Exchange(std::shared_ptr<Communicator> communicator, int threads);

  // What a rank offers: `bytes` in its own heap. With op.fault set, null; then all ranks throw HandshakeFailed.
  struct Offer {
    const char* data = nullptr;
    int64_t bytes = 0;
  };

  // y [world, part]: from each rank's offer `part` bytes, starting `first` bytes into it.
  void copy(const Op& op, Offer mine, int64_t first, int64_t part, char* y);
  // y [count]: elements [first, first + count) of the offers, summed.
  void sum(const Op& op, Offer mine, int64_t first, int64_t count, int dtype, char* y);
  // The offers themselves become their sum.
  void all_sum(const Op& op, Offer mine, int dtype);

 private:
  void begin(const Op& op, Offer mine);
  char* offered(int peer);
  // Elements [first, first + count) of all offers into y, which may be the same place in this rank's own.
  void add(int64_t first, int64_t count, int dtype, char* y);

  std::shared_ptr<Communicator> communicator_;
  int threads_;
};

// Write into the record of this rank, before an operation, what it offers in it; throws if that is not in its heap.
void publish_offer(Communicator& communicator, Exchange::Offer mine);
// y [count]: the parts, one of each rank, added in that order. y may be one of them.
void add_parts(const std::vector<char*>& parts, int64_t count, int dtype, int threads, char* y);

}  // namespace moe_comm
