#include "transfer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "../layout.h"
#include "errors.h"
#include "kernels.h"
#include "pool.h"

namespace moe_comm {

namespace {

constexpr int64_t kBlockFailed = -2;
constexpr int64_t kInputFault = 1;                   // InputError; fault codes are 1 + index in header.FAULTS
constexpr int64_t kRoutingFault = 2;                 // RoutingError
constexpr int64_t kHeapFault = 4;                    // HeapError
constexpr int64_t kStreamBytes = int64_t{2} << 20;   // larger results are written with non-temporal stores
constexpr int64_t kGrainBytes = int64_t{256} << 10;  // minimum bytes per thread

int64_t grain(const Layout& layout) {
  return std::max<int64_t>(
      1, kGrainBytes / std::max<int64_t>(1, layout.top_k * layout.hidden * dtype_bytes(layout.dtype)));
}

TokenLoop token_loop(const Layout& layout, const std::vector<char*>& base, int64_t result_bytes) {
  return {layout.place.data(), base.data(), layout.top_k, layout.hidden, layout.dtype, result_bytes > kStreamBytes};
}

int64_t extra_grain(const Layout& layout, int64_t width) {
  return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, layout.top_k * width * 4));
}

// Call visit(slot, place) for the slots of tokens [0, T) that are not dropped.
template <class Visit>
void for_each_slot(const Layout& layout, int64_t width, int threads, Visit visit) {
  parallel_for(layout.tokens, extra_grain(layout, width), threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      for (int64_t k = 0; k < layout.top_k; ++k) visit(t, k, layout.place[static_cast<size_t>(t * layout.top_k + k)]);
    }
  });
}

void alloc_extra(Record& own, PendingTransfer& pending, int64_t rows, int64_t width) {
  own.extra_bytes = rows * width * 4;
  own.extra_offset = pending.alloc(own.extra_bytes);
}

// Write the extra words of each slot to its owner's block.
void write_extra(const Layout& layout, const std::vector<char*>& base, const Extra& extra, int threads) {
  for_each_slot(layout, extra.width, threads, [&](int64_t t, int64_t k, int64_t place) {
    if (place == kDropped) return;
    const uint32_t* from = extra.data + t * extra.token_stride + k * extra.slot_stride;
    auto* to =
        reinterpret_cast<uint32_t*>(base[static_cast<size_t>(place_owner(place))]) + place_row(place) * extra.width;
    for (int64_t i = 0; i < extra.width; ++i) to[i] = from[i];
  });
}

}  // namespace

Transfer::Transfer(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap,
                   std::vector<int64_t> expert_offsets, int threads)
    : communicator_(std::move(communicator)),
      heap_(std::move(heap)),
      expert_offsets_(std::move(expert_offsets)),
      threads_(threads) {
  if (static_cast<int>(expert_offsets_.size()) != world() + 1 || world() > kMaxWorld) {
    throw std::invalid_argument("expert_offsets must have " + std::to_string(world() + 1) + " entries for " +
                                std::to_string(world()) + " ranks, and at most " + std::to_string(kMaxWorld) +
                                " ranks are supported; got " + std::to_string(expert_offsets_.size()) + " entries");
  }
  for (int r = 0; r < world(); ++r) {
    for (int64_t e = expert_offsets_[static_cast<size_t>(r)]; e < expert_offsets_[static_cast<size_t>(r) + 1]; ++e) {
      owner_.push_back(r);
    }
  }
}

std::string Transfer::routing_fault(const int64_t* ids, const Shape& shape) const {
  const int64_t experts = static_cast<int64_t>(owner_.size());
  int64_t bad = 0, first = -1;
  for (int64_t i = 0; i < shape.tokens * shape.top_k; ++i) {
    if (ids[i] >= kDropped && ids[i] < experts) continue;
    if (first < 0) first = i;
    ++bad;
  }
  if (ids[first] == -2) {
    return "router logits of token " + std::to_string(first / shape.top_k) + " are NaN or all -Inf";
  }
  return "expert id " + std::to_string(ids[first]) + " of token " + std::to_string(first / shape.top_k) + ", slot " +
         std::to_string(first % shape.top_k) + " is outside 0.." + std::to_string(experts - 1) +
         " (-1 drops a slot); " + std::to_string(bad) + " bad ids";
}

std::shared_ptr<Layout> Transfer::new_layout(const Shape& shape) const {
  auto layout = std::make_shared<Layout>();
  layout->creator = this;
  layout->tokens = shape.tokens;
  layout->top_k = shape.top_k;
  layout->hidden = shape.hidden;
  layout->dtype = shape.dtype;
  return layout;
}

void Transfer::count_slots(Op& op, const int64_t* ids, Layout& layout, int64_t* counts) const {
  const int64_t experts = static_cast<int64_t>(owner_.size());
  bool valid = true;
  for (int64_t i = 0; i < layout.tokens * layout.top_k && !op.fault; ++i) {
    if (ids[i] >= 0 && ids[i] < experts) {
      ++counts[ids[i]];
    } else if (ids[i] == kDropped) {
      ++layout.dropped;
    } else {
      valid = false;
    }
  }
  if (!valid) {
    op.fault = kRoutingFault;
    op.fault_text = routing_fault(ids, {layout.tokens, layout.top_k, layout.hidden, layout.dtype});
  }
}

int64_t Transfer::rows_of_expert(const Layout& layout, int64_t expert) const {
  int64_t rows = 0;
  for (size_t s = 0; s < static_cast<size_t>(world()); ++s) {
    rows += layout.counts[s * owner_.size() + static_cast<size_t>(expert)];
  }
  return rows;
}

void Transfer::read_counts(Layout& layout, int64_t own_offset) const {
  const size_t my_rank = static_cast<size_t>(rank()), experts = owner_.size();
  layout.counts.resize(static_cast<size_t>(world()) * experts);
  for (int p = 0; p < world() && experts; ++p) {
    const int64_t offset = communicator_ ? communicator_->record(p).counts_offset : own_offset;
    std::memcpy(layout.counts.data() + static_cast<size_t>(p) * experts,
                address(p, offset, static_cast<int64_t>(experts) * 8), experts * 8);
  }
  for (int64_t e = expert_offsets_[my_rank]; e < expert_offsets_[my_rank + 1]; ++e) {
    layout.own += layout.counts[my_rank * experts + static_cast<size_t>(e)];
    layout.rows_per_expert.push_back(rows_of_expert(layout, e));
    layout.rows += layout.rows_per_expert.back();
  }
}

void Transfer::assign_places(Layout& layout, const int64_t* ids) const {
  const size_t experts = owner_.size();
  const auto count = [&](int64_t s, int64_t e) {
    return layout.counts[static_cast<size_t>(s) * experts + static_cast<size_t>(e)];
  };
  std::vector<int64_t> next_row(experts);
  first_rows(expert_offsets_.data(), world(), rank(), count, next_row.data());
  layout.place.resize(static_cast<size_t>(layout.tokens * layout.top_k));
  for (size_t i = 0; i < layout.place.size(); ++i) {
    const size_t e = static_cast<size_t>(ids[i]);
    layout.place[i] = ids[i] < 0 ? kDropped : pack_place(owner_[e], next_row[e]++);
  }
}

Sent Transfer::start_send(Op op, Rows x, const int64_t* ids, Shape shape, Extra extra) {
  const int64_t experts = static_cast<int64_t>(owner_.size());
  const size_t world_size = static_cast<size_t>(world());

  auto pending = std::make_shared<PendingReceive>(communicator_, heap_);
  Record local{};
  Record& own = communicator_ ? communicator_->record() : local;

  // Count this rank's slots per expert in memory that the peers can read. If the allocation fails on one rank, that
  // rank sends the fault in the handshake, so that all ranks raise the same error.
  int64_t* counts = nullptr;
  own.block_offset = kBlockFailed;
  try {
    own.counts_offset = pending->alloc(experts * 8);
    counts = reinterpret_cast<int64_t*>(heap_->base() + own.counts_offset);
    std::memset(counts, 0, static_cast<size_t>(experts) * 8);
  } catch (const HeapError& error) {
    if (!op.fault) op.fault_text = error.what();
    if (!op.fault) op.fault = kHeapFault;
  }
  const std::shared_ptr<Layout> layout = new_layout(shape);
  count_slots(op, ids, *layout, counts);
  pending->begin(op);

  // Allocate this rank's block and publish its offset first: peers can then write to the block while this rank computes
  // the destination (`place`) of each of its slots.
  read_counts(*layout, own.counts_offset);
  const int64_t row_bytes = shape.hidden * dtype_bytes(shape.dtype);
  std::string heap_error;
  try {
    if (extra.width) alloc_extra(own, *pending, layout->rows, extra.width);
    own.block_offset = pending->alloc(layout->rows * row_bytes);
  } catch (const HeapError& error) {
    heap_error = error.what();
  }
  if (communicator_) communicator_->publish_ready();
  assign_places(*layout, ids);

  if (communicator_) communicator_->wait_ready();
  std::vector<char*> base(world_size, nullptr), extra_base(base);
  int failed = -1;
  for (int p = 0; p < world(); ++p) {
    const Record& other = communicator_ ? communicator_->record(p) : local;
    const int64_t block = other.block_offset;
    if (block == kBlockFailed) {
      failed = p;
      continue;
    }
    const size_t owner = static_cast<size_t>(p);
    int64_t rows = 0;
    for (int64_t e = expert_offsets_[owner]; e < expert_offsets_[owner + 1]; ++e) rows += rows_of_expert(*layout, e);
    base[owner] = address(p, block, rows * row_bytes);
    if (extra.width) extra_base[owner] = address(p, other.extra_offset, other.extra_bytes);
  }
  if (failed >= 0) {
    pending->finish();
    throw HeapError(!heap_error.empty() ? heap_error
                                        : "rank " + std::to_string(failed) +
                                              " has no room for its rows in shared memory, so no rows were sent. Free "
                                              "/dev/shm on its host, or send fewer tokens per call");
  }
  if (row_bytes > 0) {
    const TokenLoop loop = token_loop(*layout, base, shape.tokens * shape.top_k * row_bytes);
    parallel_for(shape.tokens, grain(*layout), threads_,
                 [&](int64_t first, int64_t last) { kernels().scatter(loop, first, last, x.data, x.stride); });
  }
  if (extra.width) write_extra(*layout, extra_base, extra, threads_);
  const int64_t block = pending->release(own.block_offset);
  const int64_t extra_block = extra.width ? pending->release(own.extra_offset) : -1;
  pending->publish_done();
  return {layout, block, extra_block, std::move(pending)};
}

void Transfer::copy_rows(Rows rows, int64_t count, int64_t row_bytes, char* to) const {
  parallel_for(count, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, row_bytes)), threads_,
               [&](int64_t first, int64_t last) {
                 for (int64_t r = first; r < last; ++r) {
                   std::memcpy(to + r * row_bytes, rows.data + r * rows.stride, static_cast<size_t>(row_bytes));
                 }
               });
}

char* Transfer::alloc_shared(Op& op, PendingTransfer& pending, const std::vector<Rows>& parts, Shape shape,
                             int64_t extra_bytes) {
  if (!communicator_) return nullptr;
  Record& own = communicator_->record();
  const int64_t flag_bytes = SharedTokens::flag_bytes(world()), row_bytes = shape.hidden * dtype_bytes(shape.dtype);
  const int64_t part_bytes = shape.tokens * row_bytes;
  const int64_t aligned_bytes = (extra_bytes + kBlockAlign - 1) / kBlockAlign * kBlockAlign;
  own.rows_bytes = static_cast<int64_t>(parts.size()) * part_bytes;
  try {
    own.block_offset = pending.alloc(flag_bytes + aligned_bytes + own.rows_bytes);
  } catch (const HeapError& error) {
    if (!op.fault) op.fault_text = error.what();
    if (!op.fault) op.fault = kHeapFault;
    return nullptr;
  }
  own.extra_offset = own.block_offset + flag_bytes;
  own.extra_bytes = extra_bytes;
  own.rows_offset = own.extra_offset + aligned_bytes;
  std::memset(heap_->base() + own.block_offset, 0, static_cast<size_t>(flag_bytes));
  char* to = heap_->base() + own.rows_offset;
  for (size_t i = 0; i < parts.size() && !op.fault; ++i, to += part_bytes) {
    copy_rows(parts[i], shape.tokens, row_bytes, to);
  }
  return heap_->base() + own.extra_offset;
}

std::shared_ptr<SharedTokens> Transfer::shared_tokens(PendingTransfer& pending, const std::vector<Rows>& parts,
                                                      Shape shape) {
  auto shared = std::make_shared<SharedTokens>(communicator_);
  if (!communicator_) {
    for (const Rows& x : parts) shared->parts.push_back({{reinterpret_cast<uintptr_t>(x.data)}, x.stride});
    shared->tokens = {shape.tokens};
    return shared;
  }
  const int64_t row_bytes = shape.hidden * dtype_bytes(shape.dtype), count = static_cast<int64_t>(parts.size());
  shared->parts.resize(parts.size(), {{}, row_bytes});
  std::vector<int64_t> blocks;
  for (int p = 0; p < world(); ++p) {
    const Record& other = communicator_->record(p);
    const auto base = reinterpret_cast<uintptr_t>(address(p, other.rows_offset, other.rows_bytes));
    const int64_t part_bytes = other.rows_bytes / count;
    for (size_t i = 0; i < parts.size(); ++i) {
      shared->parts[i].base.push_back(base + i * static_cast<uintptr_t>(part_bytes));
    }
    shared->tokens.push_back(row_bytes ? part_bytes / row_bytes : 0);
    blocks.push_back(other.block_offset);
  }
  shared->hold(pending.release(communicator_->record().block_offset), blocks);
  return shared;
}

Shared Transfer::start_share(Op op, Rows x, const int64_t* ids, Shape shape) {
  const size_t experts = owner_.size();
  auto transfer = std::make_shared<PendingTransfer>(communicator_, heap_);
  PendingTransfer& pending = *transfer;
  Record local{};
  Record& own = communicator_ ? communicator_->record() : local;
  const std::shared_ptr<Layout> layout = new_layout(shape);
  int64_t* counts = nullptr;
  try {
    own.counts_offset = pending.alloc(static_cast<int64_t>(experts) * 8);
    counts = reinterpret_cast<int64_t*>(heap_->base() + own.counts_offset);
    std::memset(counts, 0, experts * 8);
  } catch (const HeapError& error) {
    if (!op.fault) op.fault_text = error.what();
    if (!op.fault) op.fault = kHeapFault;
  }
  count_slots(op, ids, *layout, counts);
  const int64_t slots = op.fault ? 0 : shape.tokens * shape.top_k;
  std::vector<int64_t> own_list(communicator_ ? 0 : static_cast<size_t>(slots));
  auto* list = reinterpret_cast<int64_t*>(alloc_shared(op, pending, {x}, shape, slots * 8));
  if (!communicator_) list = own_list.data();
  if (!op.fault) {
    std::vector<int64_t> next(experts + 1, 0);
    for (size_t e = 0; e < experts; ++e) next[e + 1] = next[e] + counts[e];
    for (int64_t i = 0; i < slots; ++i) {
      if (ids[i] >= 0) list[next[static_cast<size_t>(ids[i])]++] = i;
    }
  }
  pending.begin(op);

  read_counts(*layout, own.counts_offset);
  assign_places(*layout, ids);
  // The rows of an expert are those of rank 0, then of rank 1, ...
  layout->token.resize(static_cast<size_t>(layout->rows));
  layout->slot.resize(static_cast<size_t>(layout->rows));
  const size_t my_rank = static_cast<size_t>(rank());
  const int64_t first_expert = expert_offsets_[my_rank];
  std::vector<int64_t> next_row(layout->rows_per_expert.size(), 0);
  for (size_t e = 1; e < next_row.size(); ++e) next_row[e] = next_row[e - 1] + layout->rows_per_expert[e - 1];
  for (int p = 0; p < world(); ++p) {
    const int64_t* from = list;
    if (communicator_) {
      const Record& other = communicator_->record(p);
      from = reinterpret_cast<const int64_t*>(address(p, other.extra_offset, other.extra_bytes));
    }
    const int64_t* sent = layout->counts.data() + static_cast<size_t>(p) * experts;
    from += std::accumulate(sent, sent + first_expert, int64_t{0});
    for (size_t e = 0; e < next_row.size(); ++e) {
      const int64_t count = sent[static_cast<size_t>(first_expert) + e];
      for (int64_t i = 0; i < count; ++i, ++from) {
        const size_t row = static_cast<size_t>(next_row[e]++);
        layout->slot[row] = *from;
        layout->token[row] = pack_place(p, *from / shape.top_k);
      }
    }
  }
  std::shared_ptr<SharedTokens> tokens = shared_tokens(pending, {x}, shape);
  pending.publish_done();
  return {layout, std::move(tokens), std::move(transfer)};
}

std::shared_ptr<SharedTokens> Transfer::share_again(Op op, const Layout& layout, const std::vector<Rows>& parts,
                                                    const uint32_t* words, uint32_t* word_of_row) {
  const Shape shape{layout.tokens, layout.top_k, layout.hidden, layout.dtype};
  PendingTransfer pending(communicator_, heap_);
  created_here(layout, op);
  const int64_t bytes = words ? layout.tokens * layout.top_k * 4 : 0;  // null without tokens, too
  char* own_words = alloc_shared(op, pending, parts, shape, bytes);
  if (own_words && bytes && !op.fault) std::memcpy(own_words, words, static_cast<size_t>(bytes));
  pending.begin(op);
  if (word_of_row) {
    std::vector<std::pair<const uint32_t*, int64_t>> of_rank(static_cast<size_t>(world()), {words, bytes});
    for (int p = 0; p < world() && communicator_; ++p) {
      const Record& other = communicator_->record(p);
      const char* at = address(p, other.extra_offset, other.extra_bytes);
      of_rank[static_cast<size_t>(p)] = {reinterpret_cast<const uint32_t*>(at), other.extra_bytes};
    }
    for (size_t row = 0; row < layout.slot.size(); ++row) {
      const auto [from, limit] = of_rank[static_cast<size_t>(place_owner(layout.token[row]))];
      if (layout.slot[row] * 4 >= limit) throw std::out_of_range("a rank shares fewer words than it has slots");
      word_of_row[row] = from[layout.slot[row]];
    }
  }
  std::shared_ptr<SharedTokens> tokens = shared_tokens(pending, parts, shape);
  pending.finish();
  return tokens;
}

void Transfer::copy_shared(const Layout& layout, const SharedTokens& tokens, size_t part, int64_t row, int64_t count,
                           char* y) const {
  const SharedTokens::Part& rows = tokens.parts.at(part);
  if (row < 0 || count < 0 || row + count > layout.rows) {
    throw std::invalid_argument("rows " + std::to_string(row) + " to " + std::to_string(row + count) +
                                " are outside the " + std::to_string(layout.rows) + " rows of the dispatch");
  }
  const int64_t row_bytes = layout.hidden * dtype_bytes(layout.dtype);
  parallel_for(count, std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, row_bytes)), threads_,
               [&](int64_t first, int64_t last) {
                 for (int64_t r = first; r < last; ++r) {
                   const int64_t place = layout.token[static_cast<size_t>(row + r)];
                   const uintptr_t from = rows.base[static_cast<size_t>(place_owner(place))] +
                                          static_cast<uintptr_t>(place_row(place) * rows.stride);
                   std::memcpy(y + r * row_bytes, reinterpret_cast<const char*>(from), static_cast<size_t>(row_bytes));
                 }
               });
}

int64_t Transfer::ensure_in_heap(const Layout& layout, Rows rows, PendingTransfer& pending) {
  const int64_t row_bytes = layout.hidden * dtype_bytes(layout.dtype);
  const int64_t bytes = layout.rows * row_bytes;
  if (bytes == 0) return 0;
  if (rows.stride == row_bytes && heap_->owns(rows.data, bytes)) return rows.data - heap_->base();
  const int64_t offset = pending.alloc(bytes);
  copy_rows(rows, layout.rows, row_bytes, heap_->base() + offset);
  return offset;
}

bool Transfer::created_here(const Layout& layout, Op& op) const {
  if (layout.creator == this) return true;
  op.fault = kInputFault;
  op.fault_text = "this handle was returned by another dispatcher; call combine on the dispatcher that returned it";
  return false;
}

bool Transfer::in_heap(const Layout& layout, Rows rows, Op& op) const {
  const int64_t bytes = layout.rows * layout.hidden * dtype_bytes(layout.dtype);
  if (bytes == 0 || heap_->owns(rows.data, bytes)) return true;
  op.fault = kInputFault;
  op.fault_text =
      "rows that are computed after start_sum must be in this rank's heap, where peers read them; allocate them with "
      "Heap.tensor";
  return false;
}

char* Transfer::address(int peer, int64_t offset, int64_t bytes) const {
  return communicator_ ? communicator_->address(peer, offset, bytes) : heap_->base() + offset;
}

std::shared_ptr<PendingSum> Transfer::start_sum(Op op, const Layout& layout, Rows rows, bool computed,
                                                ExtraRows extra) {
  auto pending = std::make_shared<PendingSum>(communicator_, heap_, layout, threads_);
  try {
    if (!op.fault && created_here(layout, op) && (computed || in_heap(layout, rows, op))) {
      pending->publish_rows(rows.data ? ensure_in_heap(layout, rows, *pending) : 0, computed);
      if (extra.data) {
        Record& own = pending->record();
        alloc_extra(own, *pending, layout.rows, extra.width);
        std::memcpy(heap_->base() + own.extra_offset, extra.data, static_cast<size_t>(own.extra_bytes));
      }
    }
  } catch (const HeapError& error) {
    op.fault = kHeapFault;
    op.fault_text = error.what();
  }
  pending->post(op);
  return pending;
}

int64_t Transfer::sum(Op op, const Layout& layout, Rows rows, const float* weights, ExtraRows extra,
                      uint32_t* extra_out, Heap* results) {
  int64_t block = -1;
  try {
    if (results) block = results->alloc(layout.tokens * layout.hidden * dtype_bytes(layout.dtype));
  } catch (const HeapError& error) {  // all ranks raise it
    op.fault = kHeapFault;
    op.fault_text = error.what();
  }
  try {
    const std::shared_ptr<PendingSum> pending = start_sum(std::move(op), layout, rows, /*computed=*/true, extra);
    pending->sum(weights, results ? results->base() + block : nullptr, extra_out, extra.width);
    pending->finish();
  } catch (...) {
    if (block >= 0) results->free(block);
    throw;
  }
  return block;
}

void read_extra(const Layout& layout, const std::vector<char*>& base, int64_t width, int threads, uint32_t* out) {
  for_each_slot(layout, width, threads, [&](int64_t t, int64_t k, int64_t place) {
    uint32_t* to = out + (t * layout.top_k + k) * width;
    if (place == kDropped) {
      std::memset(to, 0, static_cast<size_t>(width) * 4);
      return;
    }
    const auto* from =
        reinterpret_cast<uint32_t*>(base[static_cast<size_t>(place_owner(place))]) + place_row(place) * width;
    for (int64_t i = 0; i < width; ++i) to[i] = from[i];
  });
}

void sum_rows(const Layout& layout, const std::vector<char*>& base, const float* weights, int threads, char* y) {
  const int64_t row_bytes = layout.hidden * dtype_bytes(layout.dtype);
  const TokenLoop loop = token_loop(layout, base, layout.tokens * row_bytes);
  parallel_for(layout.tokens, grain(layout), threads,
               [&](int64_t first, int64_t last) { kernels().sum(loop, first, last, y, row_bytes, weights); });
}

Spread Transfer::start_spread(Op op, const Layout& layout, Rows g, Rows rows, const float* weights, bool weight_grads,
                              float* grad_weights, Extra extra) {
  const int64_t row_bytes = layout.hidden * dtype_bytes(layout.dtype);
  auto pending = std::make_shared<PendingReceive>(communicator_, heap_);
  Record local{};
  Record& own = communicator_ ? communicator_->record() : local;
  own.rows_bytes = layout.rows * row_bytes;
  own.rows_offset = 0;
  try {
    own.block_offset = pending->alloc(own.rows_bytes);
    if (extra.width) alloc_extra(own, *pending, layout.rows, extra.width);
    if (created_here(layout, op) && weight_grads) own.rows_offset = ensure_in_heap(layout, rows, *pending);
  } catch (const HeapError& error) {
    op.fault = kHeapFault;
    op.fault_text = error.what();
  }
  pending->begin(op);
  std::vector<char*> base(static_cast<size_t>(world()), nullptr), grad_base(base), extra_base(base);
  for (int p = 0; p < world(); ++p) {
    const Record& other = communicator_ ? communicator_->record(p) : local;
    if (weight_grads) base[static_cast<size_t>(p)] = address(p, other.rows_offset, other.rows_bytes);
    grad_base[static_cast<size_t>(p)] = address(p, other.block_offset, other.rows_bytes);
    if (extra.width) extra_base[static_cast<size_t>(p)] = address(p, other.extra_offset, other.extra_bytes);
  }
  const TokenLoop loop = token_loop(layout, base, layout.tokens * layout.top_k * row_bytes);
  parallel_for(layout.tokens, grain(layout), threads_, [&](int64_t first, int64_t last) {
    kernels().spread(loop, first, last, g.data, g.stride, weights, grad_base.data(),
                     weight_grads ? grad_weights : nullptr);
  });
  if (extra.width) write_extra(layout, extra_base, extra, threads_);
  const int64_t block = pending->release(own.block_offset);
  const int64_t extra_block = extra.width ? pending->release(own.extra_offset) : -1;
  pending->publish_done();
  return {block, extra_block, std::move(pending)};
}

}  // namespace moe_comm
