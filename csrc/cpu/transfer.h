// Dispatch and combine between the ranks of one host, and their backward passes.
//
//   send     rank 0: x ──┬──▶ rank 0's block     each row read once, written once, at its final place
//                        └──▶ rank 1's block
//   sum      rank 0: y ◀─┬─── rank 0's rows      peers' rows are read where they lie
//                        └─── rank 1's rows
//   spread   sum's backward: gradients out to blocks, and dot products with the rows, in one pass
//
// Each is begun by start_*, and is over when what that returned is finished (underway.h).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "communicator.h"
#include "underway.h"

namespace moe_comm {

// What one dispatch decided; immutable, kept for combine and for both backward passes.
struct Layout {
  std::vector<int64_t> place;            // [T * K] packed places (layout.h), kDropped for none
  std::vector<int64_t> rows_per_expert;  // of this rank's experts
  std::vector<int64_t> counts;           // [world, E] slots that each rank has for each expert
  int64_t tokens = 0, top_k = 0, hidden = 0;
  int dtype = 0;
  const void* maker = nullptr;  // the Transfer that places refer to
  int64_t rows = 0;             // in this rank's block
  int64_t dropped = 0;          // of this rank's slots
  int64_t own = 0;              // of these, those of its own experts
};

// A [rows, hidden] matrix whose rows are `stride` bytes apart.
struct Rows {
  const char* data = nullptr;
  int64_t stride = 0;
};

// Rows on their way into this rank's block. `arriving` is of use until it is finished, and no peer writes after that.
struct Sent {
  std::shared_ptr<Layout> layout;
  int64_t block = -1;  // offset in this rank's heap
  std::shared_ptr<Arriving> arriving;
};

struct Spread {
  int64_t block = -1;
  std::shared_ptr<Arriving> arriving;
};

struct Shape {
  int64_t tokens = 0, top_k = 0, hidden = 0;
  int dtype = 0;
};

class Transfer {
 public:
  // `expert_offsets` has world + 1 entries: rank r owns experts [expert_offsets[r], expert_offsets[r + 1]).
  // `communicator` null: this process holds every expert, and `heap` gives the blocks.
  Transfer(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap, std::vector<int64_t> expert_offsets,
           int threads);

  // All rows of this rank stand at their owners when it returns.
  Sent start_send(Op op, Rows x, const int64_t* ids, Shape shape);
  // Where not `computed`, `rows` stand in this rank's heap and are filled while flags rise. The layout must outlive it.
  std::shared_ptr<Leaving> start_sum(Op op, const Layout& layout, Rows rows, bool computed);
  // `block` is of gradient rows; this rank's stand at their owners. Without `weight_grads`, rows and grad_weights are
  // not used.
  Spread start_spread(Op op, const Layout& layout, Rows g, Rows rows, const float* weights, bool weight_grads,
                      float* grad_weights);

  Heap& heap() const { return *heap_; }
  const std::shared_ptr<Heap>& heap_ptr() const { return heap_; }

 private:
  int rank() const { return communicator_ ? communicator_->rank() : 0; }
  int world() const { return communicator_ ? communicator_->world() : 1; }
  std::string routing_fault(const int64_t* ids, const Shape& shape) const;
  // Offset of `rows` in this rank's heap; copies them there first, into a new block until the end, if they are
  // elsewhere or not dense.
  int64_t place_rows(const Layout& layout, Rows rows, Underway& underway);
  // A layout of another dispatcher names places that are not in these heaps.
  bool made_here(const Layout& layout, Op& op) const;
  char* address(int peer, int64_t offset, int64_t bytes) const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Heap> heap_;
  std::vector<int64_t> expert_offsets_;
  std::vector<int32_t> owner_;  // of each expert
  int threads_;
};

// y [T, D], the second half of a sum: base[p] is where the rows of rank p stand.
void sum_rows(const Layout& layout, const std::vector<char*>& base, const float* weights, int threads, char* y);

}  // namespace moe_comm
