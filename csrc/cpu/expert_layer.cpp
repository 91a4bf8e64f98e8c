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

std::vector<Batch> batches_of(const int64_t* sizes, int64_t experts) {
  std::vector<Batch> batches;
  for (int64_t e = 0, row = 0; e < experts; row += batches.back().rows) {
    Batch batch{e, e + 1, row, sizes[e]};
    while (batch.last < experts && batch.rows + sizes[batch.last] <= kBatchRows) batch.rows += sizes[batch.last++];
    batches.push_back(batch);
    e = batch.last;
  }
  return batches;
}

gemm::Rows rows_of(const gemm::Rows& all, const Batch& batch) {
  gemm::Rows rows = all;
  rows.count = batch.rows;
  if (rows.place) {
    rows.place += batch.row;
  } else if (rows.base.size() == 1) {
    rows.base[0] += static_cast<uintptr_t>(batch.row * rows.stride);
    rows.rows[0] -= batch.row;
  }
  return rows;
}

gemm::Rows dense_rows(const char* data, int64_t rows, int64_t width, int dtype) {
  return {{reinterpret_cast<uintptr_t>(data)}, {rows}, width * dtype_bytes(dtype), nullptr, rows, width, nullptr};
}

gemm::Stack transposed(const gemm::Stack& w) { return {w.base, w.expert, w.element, w.row}; }

const gemm::Stack kNone{0, 0, 0, 0};

// Gradients whose lines run across k have the gradients of the transposed weights.
void weight_gradients(const gemm::Groups& groups, const gemm::Rows& y, const gemm::Rows& x, const gemm::Stack& out,
                      int dtype) {
  if (!out.base) return;
  if (out.element == dtype_bytes(dtype) || x.width == 1) {
    gemm::weights(groups, y, x, {out.base, out.expert, out.row, dtype_bytes(dtype)}, dtype, false);
  } else {
    gemm::weights(groups, x, y, transposed(out), dtype, false);
  }
}

}  // namespace

int64_t most_rows(const int64_t* sizes, int64_t experts) {
  int64_t most = 0;
  for (const Batch& batch : batches_of(sizes, experts)) most = std::max(most, batch.rows);
  return most;
}

void run_forward(const SwigluExperts& experts, const int64_t* sizes, const ExpertForward& pass) {
  const int64_t size = dtype_bytes(experts.dtype), ffn = experts.ffn;
  for (const Batch& batch : batches_of(sizes, experts.experts)) {
    if (batch.rows == 0) continue;
    const gemm::Groups groups{sizes + batch.first, batch.last - batch.first, experts.dtype, experts.threads};
    char* const h = pass.h + (pass.keep ? batch.row * 2 * ffn * size : 0);
    gemm::activated_rows(groups, rows_of(pass.x, batch), from_expert(experts.w13, batch.first), ffn,
                         from_expert(experts.b13, batch.first),
                         {reinterpret_cast<uintptr_t>(h), reinterpret_cast<uintptr_t>(pass.act), pass.keep});
    gemm::rows(groups, dense_rows(pass.act, batch.rows, ffn, experts.dtype), from_expert(experts.w2, batch.first),
               experts.hidden, from_expert(experts.b2, batch.first),
               {reinterpret_cast<uintptr_t>(pass.out + batch.row * pass.out_stride), pass.out_stride, false});
  }
}

void run_backward(const SwigluExperts& experts, const int64_t* sizes, const ExpertBackward& pass) {
  const int64_t size = dtype_bytes(experts.dtype), ffn = experts.ffn;
  for (const Batch& batch : batches_of(sizes, experts.experts)) {
    const gemm::Groups groups{sizes + batch.first, batch.last - batch.first, experts.dtype, experts.threads};
    const gemm::Rows x = rows_of(pass.x, batch), grad = rows_of(pass.grad, batch);
    const int64_t local = pass.at_once ? 0 : batch.row;
    char *const act = pass.act + local * ffn * size, *const grad_h = pass.grad_h + local * 2 * ffn * size;
    const gemm::Rows of_h = dense_rows(grad_h, batch.rows, 2 * ffn, experts.dtype);
    const gemm::Rows of_act = dense_rows(act, batch.rows, ffn, experts.dtype);
    const gemm::Stack w13 = from_expert(experts.w13, batch.first);
    if (batch.rows > 0) {
      // grad_h shares its memory with an h that is computed again, act with its gradient: SwiGLU reads them first.
      const char* h = pass.h ? pass.h + batch.row * pass.h_stride * size : grad_h;
      if (!pass.h) gemm::rows(groups, x, w13, 2 * ffn, kNone, {of_h.base[0], of_h.stride, false});
      gemm::rows(groups, grad, transposed(from_expert(experts.w2, batch.first)), ffn, kNone,
                 {of_act.base[0], of_act.stride, false});
      const SwigluGradient gradient{h,
                                    pass.h ? pass.h_stride : 2 * ffn,
                                    act,
                                    grad_h,
                                    act,
                                    pass.weights ? pass.weights + batch.row : nullptr,
                                    pass.dots ? pass.dots + batch.row : nullptr};
      parallel_for(batch.rows, 64, experts.threads, [&](int64_t first, int64_t last) {
        kernels().swiglu_backward(gradient, first, last, ffn, experts.dtype);
      });
      if (pass.grad_x) {
        gemm::rows(
            groups, of_h, transposed(w13), experts.hidden, kNone,
            {reinterpret_cast<uintptr_t>(pass.grad_x + batch.row * pass.grad_x_stride), pass.grad_x_stride, false});
      }
    }
    weight_gradients(groups, grad, of_act, from_expert(pass.grad_w2, batch.first), pass.dtype_w2);
    weight_gradients(groups, of_h, x, from_expert(pass.grad_w13, batch.first), pass.dtype_w13);
  }
}

void run_experts(const SwigluExperts& experts, const Layout& layout, const SharedTokens& tokens, Heap& scratch,
                 char* out) {
  const int64_t* sizes = layout.rows_per_expert.data();
  const int64_t most = most_rows(sizes, experts.experts), size = dtype_bytes(experts.dtype);
  if (most == 0 || experts.hidden == 0) return;
  const Block memory(scratch, most * 3 * experts.ffn * size);
  const SharedTokens::Part& part = tokens.parts.at(0);
  const gemm::Rows x{part.base, tokens.tokens, part.stride, layout.token.data(), layout.rows, experts.hidden, nullptr};
  run_forward(experts, sizes,
              {x, memory.data(), false, memory.data() + most * 2 * experts.ffn * size, out, experts.hidden * size});
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
