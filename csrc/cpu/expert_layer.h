// The SwiGLU experts of one rank, between a dispatch whose rows they read in place and its combine.
//
//   tokens of all ranks ──w13──▶ h ──SwiGLU──▶ act ──w2──▶ out, in this rank's heap
//
// The bits are those of the same GEMMs and activations one by one.
#pragma once

#include <cstdint>

#include "gemm/gemm.h"
#include "transfer.h"

namespace moe_comm {

// Weights w13 [E, 2F, D] and w2 [E, D, F] with any strides; biases [E, 2F] and [E, D], or addresses of 0.
struct SwigluExperts {
  gemm::Stack w13, w2, b13, b2;
  int64_t experts, ffn;
  int threads;
};

// out [R, D]: the results of the rows of a dispatch. Temporary memory comes from `scratch`.
void run_experts(const SwigluExperts& experts, const Layout& layout, const SharedTokens& tokens, Heap& scratch,
                 char* out);

// ids [T, K] of the slots; -2 for tokens whose weights [T, K] are not finite, so that the dispatch reports them.
std::vector<int64_t> valid_ids(const int64_t* ids, const float* weights, int64_t tokens, int64_t top_k);

}  // namespace moe_comm
