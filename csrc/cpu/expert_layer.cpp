#include "expert_layer.h"

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "pool.h"

namespace moe_comm {

namespace {

constexpr int64_t kBatchRows = 256;  // experts with up to so many rows together are computed at once
constexpr int64_t kInvalidLogits = -2;

// A block of a heap, until the end of the scope.
class Block {
 public:
  Block(Heap& heap, int64_t bytes) : heap_(heap), offset_(heap.alloc(bytes)) {}
  ~Block() { heap_.free(offset_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  char* data() const { return heap_.base() + offset_; }

 private:
  Heap& heap_;
  int64_t offset_;
};

gemm::Stack from_expert(const gemm::Stack& stack, int64_t expert) {
  if (!stack.base) return stack;
  return {stack.base + static_cast<uintptr_t>(expert * stack.expert), stack.expert, stack.row, stack.element};
}

// Experts [first, last), whose rows begin at `row`.
struct Batch {
  int64_t first, last, row, rows;
};

std::vector<Batch> batches_of(const std::vector<int64_t>& counts) {
  std::vector<Batch> batches;
  const int64_t experts = static_cast<int64_t>(counts.size());
  for (int64_t e = 0, row = 0; e < experts; row += batches.back().rows) {
    Batch batch{e, e + 1, row, counts[static_cast<size_t>(e)]};
    while (batch.last < experts && batch.rows + counts[static_cast<size_t>(batch.last)] <= kBatchRows) {
      batch.rows += counts[static_cast<size_t>(batch.last++)];
    }
    batches.push_back(batch);
    e = batch.last;
  }
  return batches;
}

}  // namespace

void run_experts(const SwigluExperts& experts, const Layout& layout, const SharedTokens& tokens, Heap& scratch,
                 char* out) {
  const std::vector<Batch> batches = batches_of(layout.rows_per_expert);
  int64_t most = 0;
  for (const Batch& batch : batches) most = std::max(most, batch.rows);
  if (most == 0 || layout.hidden == 0) return;
  const int64_t size = dtype_bytes(layout.dtype), ffn = experts.ffn, row_bytes = layout.hidden * size;
  const Block memory(scratch, most * 3 * ffn * size);
  char *const h = memory.data(), *const act = h + most * 2 * ffn * size;
  const SharedTokens::Part& part = tokens.parts.at(0);
  for (const Batch& batch : batches) {
    if (batch.rows == 0) continue;
    const gemm::Groups groups{layout.rows_per_expert.data() + batch.first, batch.last - batch.first, layout.dtype,
                              experts.threads};
    const gemm::Rows x{part.base,  tokens.tokens, part.stride, layout.token.data() + batch.row,
                       batch.rows, layout.hidden, nullptr};
    gemm::rows(groups, x, from_expert(experts.w13, batch.first), 2 * ffn, from_expert(experts.b13, batch.first),
               {reinterpret_cast<uintptr_t>(h), 2 * ffn * size, false});
    parallel_for(batch.rows, 64, experts.threads, [&](int64_t first, int64_t last) {
      kernels().swiglu(h + first * 2 * ffn * size, 2 * ffn, act + first * ffn * size, last - first, ffn, layout.dtype);
    });
    const gemm::Rows activated{
        {reinterpret_cast<uintptr_t>(act)}, {batch.rows}, ffn * size, nullptr, batch.rows, ffn, nullptr};
    gemm::rows(groups, activated, from_expert(experts.w2, batch.first), layout.hidden,
               from_expert(experts.b2, batch.first),
               {reinterpret_cast<uintptr_t>(out + batch.row * row_bytes), row_bytes, false});
  }
}

std::vector<int64_t> valid_ids(const int64_t* ids, const float* weights, int64_t tokens, int64_t top_k) {
  std::vector<int64_t> valid(ids, ids + tokens * top_k);
  for (int64_t t = 0; t < tokens; ++t) {
    const float* first = weights + t * top_k;
    if (!std::all_of(first, first + top_k, [](float weight) { return std::isfinite(weight); })) {
      std::fill_n(valid.begin() + t * top_k, top_k, kInvalidLogits);
    }
  }
  return valid;
}

}  // namespace moe_comm
