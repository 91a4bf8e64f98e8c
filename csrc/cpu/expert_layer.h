// The SwiGLU experts of one rank, forward and backward.
//
//   rows, or tokens of all ranks in place ──w13──▶ h ──SwiGLU──▶ act ──w2──▶ out
//
// A few experts at a time, so that h and act are in the cache when the next GEMM reads them. The bits are those of the
// same GEMMs and activations one by one.
#pragma once

#include <cstdint>

#include "gemm/gemm.h"
#include "transfer.h"

namespace moe_comm {

// Weights w13 [E, 2F, D] and w2 [E, D, F] with any strides; biases [E, 2F] and [E, D], or addresses of 0.
struct SwigluExperts {
  gemm::Stack w13, w2, b13, b2;
  int64_t experts, hidden, ffn;
  int dtype, threads;
};

struct ExpertForward {
  gemm::Rows x;  // [R, D]
  char* h;       // [R, 2F] if it is kept; otherwise of `most_rows`
  bool keep;
  char* act;           // [most_rows, F]
  char* out;           // [R, D]
  int64_t out_stride;  // bytes
};

// R rows: `sizes` of each expert.
void run_forward(const SwigluExperts& experts, const int64_t* sizes, const ExpertForward& pass);

struct ExpertBackward {
  gemm::Rows x, grad;  // [R, D]: rows, and gradients of the outputs, or of the outputs times `weights`
  const char* h;       // [R, 2F]; null: it is computed again
  int64_t h_stride;    // elements
  char *act, *grad_h;  // [most_rows, F] and [most_rows, 2F] if `at_once`; otherwise of R
  bool at_once;
  const float* weights;  // [R]: act and grad_h are multiplied by them; or null
  float* dots;           // [R]: gradients of `weights`; or null
  char* grad_x;          // [R, D], or null
  int64_t grad_x_stride;
  gemm::Stack grad_w13, grad_w2;  // addresses of 0: not needed
  int dtype_w13, dtype_w2;        // of these: that of the rows, or fp32
};

// Without biases.
void run_backward(const SwigluExperts& experts, const int64_t* sizes, const ExpertBackward& pass);

// The largest number of rows that are computed at once.
int64_t most_rows(const int64_t* sizes, int64_t experts);

// out [R, D]: the results of the rows of a dispatch. Temporary memory comes from `scratch`.
void run_experts(const SwigluExperts& experts, const Layout& layout, const SharedTokens& tokens, Heap& scratch,
                 char* out);

// ids [T, K] of the slots; -2 for tokens whose weights [T, K] are not finite, so that the dispatch reports them.
std::vector<int64_t> valid_ids(const int64_t* ids, const float* weights, int64_t tokens, int64_t top_k);

}  // namespace moe_comm
