// Dispatch and combine between the ranks of one host, and their backward passes.
//
//   send     rank 0: x ──┬──▶ rank 0's block     each row is read once and written once, to its final position
//                        └──▶ rank 1's block
//   sum      rank 0: y ◀─┬─── rank 0's rows      peers' rows are read in place
//                        └─── rank 1's rows
//   spread   backward of sum: writes row gradients to the owners' blocks and computes dot products
//
//   share    a dispatch without rows: each rank's tokens are copied to its heap once, and experts read them there
//
// Each operation can also move a few 32-bit words with each row (Extra), in blocks of their own and in the same
// handshake.
//
// start_* starts an operation. It is complete when finish() of the returned object has returned (pending.h).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "communicator.h"
#include "pending.h"
#include "shared_tokens.h"

namespace moe_comm {

// The layout of one dispatch. Immutable; kept for combine and for both backward passes.
struct Layout {
  std::vector<int64_t> place;            // [T * K] packed places (layout.h); kDropped for dropped slots
  std::vector<int64_t> rows_per_expert;  // rows for each of this rank's experts
  std::vector<int64_t> counts;           // [world, E] slots that each rank sends to each expert
  int64_t tokens = 0, top_k = 0, hidden = 0;
  int dtype = 0;
  const void* creator = nullptr;  // the Transfer that created this layout
  int64_t rows = 0;               // number of rows in this rank's block
  int64_t dropped = 0;            // number of this rank's slots that are dropped
  int64_t own = 0;                // number of this rank's slots routed to its own experts
  // Of `share`, for each of this rank's rows: the packed place (source rank, token), and the slot at the source, [T *
  // K].
  std::vector<int64_t> token, slot;
};

// A [rows, hidden] matrix whose rows are `stride` bytes apart.
struct Rows {
  const char* data = nullptr;
  int64_t stride = 0;
};

// 32-bit words [T, K, width] that are sent with the row of each slot. Strides are in words, and may be 0.
struct Extra {
  const uint32_t* data = nullptr;
  int64_t width = 0, token_stride = 0, slot_stride = 0;
};

// The words of the rows of a block, [rows, width], dense.
struct ExtraRows {
  const char* data = nullptr;
  int64_t width = 0;
};

// A dispatch whose rows are in flight to this rank's block. No peer writes to the block after `pending` has finished.
struct Sent {
  std::shared_ptr<Layout> layout;
  int64_t block = -1;        // offset of the block in this rank's heap
  int64_t extra_block = -1;  // offset of the [rows, width] extra words; -1 without
  std::shared_ptr<PendingReceive> pending;
};

// A dispatch whose rows are read in place.
struct Shared {
  std::shared_ptr<Layout> layout;
  std::shared_ptr<SharedTokens> tokens;
  std::shared_ptr<PendingTransfer> pending;
};

struct Spread {
  int64_t block = -1, extra_block = -1;
  std::shared_ptr<PendingReceive> pending;
};

struct Shape {
  int64_t tokens = 0, top_k = 0, hidden = 0;
  int dtype = 0;
};

class Transfer {
 public:
  // `expert_offsets` has world + 1 entries: rank r owns experts [expert_offsets[r], expert_offsets[r + 1]). If
  // `communicator` is null, this process holds all experts and allocates blocks from `heap`.
  Transfer(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap, std::vector<int64_t> expert_offsets,
           int threads);

  // On return, all rows of this rank are written at their owners.
  Sent start_send(Op op, Rows x, const int64_t* ids, Shape shape, Extra extra = {});
  // On return, the tokens of all ranks can be read. `pending` may finish after that: a peer that sleeps wakes up in the
  // meantime.
  Shared start_share(Op op, Rows x, const int64_t* ids, Shape shape);
  // The same, finished.
  Shared share(Op op, Rows x, const int64_t* ids, Shape shape) {
    Shared shared = start_share(std::move(op), x, ids, shape);
    shared.pending->finish();
    return shared;
  }
  // Share other rows of the same tokens, such as their gradients, or the same ones again; one or more parts. `words`
  // has a word for each slot, [T, K]; word_of_row [rows] gets those of this rank's rows. Both may be null on all ranks.
  std::shared_ptr<SharedTokens> share_again(Op op, const Layout& layout, const std::vector<Rows>& parts,
                                            const uint32_t* words, uint32_t* word_of_row);
  // y [count, hidden]: a copy of rows from `row` on that this rank's experts read in place.
  void copy_shared(const Layout& layout, const SharedTokens& tokens, size_t part, int64_t row, int64_t count,
                   char* y) const;
  // If `computed` is false, `rows` is in this rank's heap and the caller writes it and then raises the flags. `layout`
  // must outlive the returned object. `extra` has the words of each row, whose width the sum's caller passes again; its
  // data is null without. If rows.data is null, only these are returned.
  std::shared_ptr<PendingSum> start_sum(Op op, const Layout& layout, Rows rows, bool computed, ExtraRows extra = {});
  // All of start_sum and PendingSum::sum. Return the offset of the sums [T, hidden] in `results`; -1 if it is null.
  int64_t sum(Op op, const Layout& layout, Rows rows, const float* weights, ExtraRows extra, uint32_t* extra_out,
              Heap* results);
  // The returned `block` holds gradient rows. On return, this rank's gradients are written at their owners. Without
  // `weight_grads`, `rows` and `grad_weights` are unused.
  Spread start_spread(Op op, const Layout& layout, Rows g, Rows rows, const float* weights, bool weight_grads,
                      float* grad_weights, Extra extra = {});

  // Number of this rank's experts.
  int64_t experts() const {
    const size_t own = static_cast<size_t>(rank());
    return expert_offsets_[own + 1] - expert_offsets_[own];
  }
  Heap& heap() const { return *heap_; }
  const std::shared_ptr<Heap>& heap_ptr() const { return heap_; }

 private:
  int rank() const { return communicator_ ? communicator_->rank() : 0; }
  int world() const { return communicator_ ? communicator_->world() : 1; }
  // Count this rank's slots for each expert in `counts`, which is zero, and its dropped slots. Sets op.fault if an id
  // is invalid.
  void count_slots(Op& op, const int64_t* ids, Layout& layout, int64_t* counts) const;
  // Read the counts of all ranks at the offsets in their records, and derive the rows of this rank's experts.
  void read_counts(Layout& layout, int64_t own_offset) const;
  // Compute the places of this rank's slots from the counts.
  void assign_places(Layout& layout, const int64_t* ids) const;
  int64_t rows_of_expert(const Layout& layout, int64_t expert) const;
  std::shared_ptr<Layout> new_layout(const Shape& shape) const;
  // Allocate this rank's block of shared tokens before the handshake; sets op.fault if there is no memory. The record
  // gets its offsets. Return the address of `extra_bytes` in front of the tokens; null without a communicator.
  char* alloc_shared(Op& op, PendingTransfer& pending, const std::vector<Rows>& parts, Shape shape,
                     int64_t extra_bytes);
  // After the handshake: return the tokens of all ranks.
  std::shared_ptr<SharedTokens> shared_tokens(PendingTransfer& pending, const std::vector<Rows>& parts, Shape shape);
  std::string routing_fault(const int64_t* ids, const Shape& shape) const;
  // Return the offset of `rows` in this rank's heap. Rows that are outside the heap or not dense are first copied to a
  // temporary block.
  int64_t ensure_in_heap(const Layout& layout, Rows rows, PendingTransfer& pending);
  void copy_rows(Rows rows, int64_t count, int64_t row_bytes, char* to) const;
  // Return whether this Transfer created `layout`; sets op.fault if not. Places of another Transfer do not refer to
  // these heaps.
  bool created_here(const Layout& layout, Op& op) const;
  // Return whether `rows` are in this rank's heap; sets op.fault if not.
  bool in_heap(const Layout& layout, Rows rows, Op& op) const;
  char* address(int peer, int64_t offset, int64_t bytes) const;

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Heap> heap_;
  std::vector<int64_t> expert_offsets_;
  std::vector<int32_t> owner_;  // owner rank of each expert
  int threads_;
};

// out [T, K, width]: the words of the row of each slot, 0 for dropped slots. base[p] is the address of rank p's words.
void read_extra(const Layout& layout, const std::vector<char*>& base, int64_t width, int threads, uint32_t* out);
// y [T, D]: the reduction of a sum. base[p] is the address of rank p's rows.
void sum_rows(const Layout& layout, const std::vector<char*>& base, const float* weights, int threads, char* y);

}  // namespace moe_comm
