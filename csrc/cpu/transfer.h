// Dispatch and combine between the ranks of one host, and their backward passes.
//
//   send     rank 0: x ──┬──▶ rank 0's block     each row read once, written once, at its final place
//                        └──▶ rank 1's block
//   sum      rank 0: y ◀─┬─── rank 0's rows      peers' rows are read where they lie
//                        └─── rank 1's rows
//   spread   sum's backward: gradients out to blocks, and dot products with the rows, in one pass
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "communicator.h"

namespace moe_comm {

// What one dispatch decided; immutable, kept for combine and for both backward passes.
struct Layout {
  std::vector<int64_t> place;            // [T * K] packed places (layout.h), kDropped for none
  std::vector<int64_t> rows_per_expert;  // of this rank's experts
  int64_t tokens = 0, top_k = 0, hidden = 0;
  int dtype = 0;
  const void* maker = nullptr;  // the Transfer that places refer to
  int64_t rows = 0;             // in this rank's block
  int64_t dropped = 0;          // of this rank's slots
};

// A [rows, hidden] matrix whose rows are `stride` bytes apart.
struct Rows {
  const char* data = nullptr;
  int64_t stride = 0;
};

struct Sent {
  std::shared_ptr<Layout> layout;
  int64_t block = -1;  // offset in this rank's heap
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

  Sent send(Op op, Rows x, const int64_t* ids, Shape shape);
  // weights may be null for ones
  void sum(Op op, const Layout& layout, Rows rows, const float* weights, char* y);
  // Returns the block of gradient rows. Without `weight_grads`, rows and grad_weights are not used.
  int64_t spread(Op op, const Layout& layout, Rows g, Rows rows, const float* weights, bool weight_grads,
                 float* grad_weights);

  Heap& heap() const { return *heap_; }
  const std::shared_ptr<Heap>& heap_ptr() const { return heap_; }

 private:
  int rank() const { return communicator_ ? communicator_->rank() : 0; }
  int world() const { return communicator_ ? communicator_->world() : 1; }
  std::string routing_fault(const int64_t* ids, const Shape& shape) const;
  // Offset of `rows` in this rank's heap; copies them there first, into a new block of `scratch`, if they are
  // elsewhere or not dense.
  int64_t place_rows(const Layout& layout, Rows rows, std::vector<int64_t>& scratch);
  // A layout of another dispatcher names places that are not in these heaps.
  bool made_here(const Layout& layout, Op& op) const;
  // Memory that ran out on one rank becomes the same error on all: it travels as the fault of the handshake.
  void begin(const Op& op, const std::vector<int64_t>& scratch);
  char* address(int peer, int64_t offset, int64_t bytes) const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Heap> heap_;
  std::vector<int64_t> expert_offsets_;
  std::vector<int32_t> owner_;  // of each expert
  int threads_;
};

}  // namespace moe_comm
