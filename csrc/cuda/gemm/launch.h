// Launching the GEMMs of this folder on a GPU. The driver's functions are called by address, so nothing links libcuda.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/launch.h"

namespace moe_comm {
namespace gemm {

#define MOE_GEMM_KERNELS(KERNEL) \
  KERNEL(rows)                   \
  KERNEL(rows_transposed)        \
  KERNEL(rows_swiglu)            \
  KERNEL(taken_swiglu)           \
  KERNEL(swiglu_gradient)        \
  KERNEL(weights)                \
  KERNEL(weights_added)          \
  KERNEL(rows_fp8)               \
  KERNEL(arrived) KERNEL(arrived_transposed) KERNEL(arrived_swiglu) KERNEL(published) KERNEL(published_transposed)
#define MOE_GEMM_NUMBER(name) k_##name,
enum Kernel : int { MOE_GEMM_KERNELS(MOE_GEMM_NUMBER) kKernels };

std::vector<const char*> kernel_names();
// Machine code for sm_90a with a function gemm_<name> for each kernel; empty if this build has none.
std::string compiled_kernels();

// A 16-bit matrix for each expert, or one, in device memory: strides in elements, columns dense.
struct Matrices {
  int64_t at = 0, rows = 0, columns = 0, stride = 0, expert_stride = 0;
};

// out[r] = rows[r] @ w[e].T for the rows r of each expert e, in bf16. w: [E, N, K], or transposed: [E, K, N].
// act.at != 0: out is gate | up, and act = silu(gate) * up is stored as well; limit != 0: they alternate, and act is
// that of Glu. slots_at != 0, only with act: row r is
// row slots[r] / top_k of `rows`. bias_at != 0: biases [E, N] in bf16, dense along N and `bias_stride` elements apart,
// both multiples of 2, are added before rounding. Addresses and strides are multiples of 16 bytes, and so are N and K
// (SwiGLU: N / 2).
struct RowsProduct {
  Matrices rows, w, out, act;
  int64_t counts_at = 0, experts = 0;
  bool transposed = false;
  int64_t slots_at = 0, top_k = 1;
  int64_t bias_at = 0, bias_stride = 0;
  float alpha = 0, limit = 0;
};

// The same for the tiles of a list, in whose words is what orders them with other ranks (ListArgs of listed.h), on
// `blocks` blocks. published: flags of the results are raised, without act; else rows are waited for. own: rows of this
// rank, for a linear layer.
struct ListedProduct {
  RowsProduct rows;  // counts_at, slots_at: not used
  Matrices own;
  std::array<int64_t, 18> list{};
  bool published = false;
  int64_t blocks = 1;
};

// grad_act[r] = grad[r] @ w[e], for w [E, K, N] and the rows r of each expert e, rounded to bf16; then grad_h, the
// gradient of h = gate | up, and act = silu(gate) * up, which are multiplied by weights[slots[r]]. The sections of
// <act, grad_act> before that are sections[s, r]. Sizes and strides as in RowsProduct.
struct GradientProduct {
  Matrices grad, w, h, grad_h, act;
  int64_t counts_at = 0, experts = 0;
  int64_t weights_at = 0, slots_at = 0, sections_at = 0;  // 0: without them; see GradientArgs
  float alpha = 0, limit = 0;                             // as in RowsProduct
};

// out[e] = a[rows of e].T @ b[rows of e], zeros without rows; or, if `add`, added to out, which is fp32. a: [R, M],
// b: [R, N], out: [E, M, N]. Addresses and strides are multiples of 16 bytes, and so are M and N.
struct WeightsProduct {
  Matrices a, b, out;
  int64_t counts_at = 0, experts = 0;
  bool add = false;
};

// out[r] = rows[r] @ w[e].T in bf16, for e4m3 rows and weights [E, N, K] with fp32 scales: a row has one per 128
// elements, `scale_stride` apart from the next row's and `scale_step` from the next, and w has one per 128 x 128, dense
// along K. Addresses and strides of rows, w and out are multiples of 16 bytes, and N of 8.
struct Fp8Product {
  Matrices rows, w, out;
  int64_t scales_at = 0, scale_stride = 0, scale_step = 0;
  int64_t w_scales_at = 0, w_scale_expert_stride = 0, w_scale_stride = 0;
  // block_rows > 0: each expert has `sources` blocks of so many rows, with a count for each. 0: sources is 1.
  int64_t counts_at = 0, experts = 0, sources = 1, block_rows = 0;
};

class Launcher {
 public:
  // encode: cuTensorMapEncodeTiled. blocks: number of multiprocessors.
  Launcher(std::shared_ptr<p2p::Starter> starter, uintptr_t encode, int64_t blocks);
  // Throws LaunchError if the kernel was not launched.
  void rows(const RowsProduct& product, uintptr_t stream) const;
  void listed(const ListedProduct& product, uintptr_t stream) const;
  void swiglu_gradient(const GradientProduct& product, uintptr_t stream) const;
  void weights(const WeightsProduct& product, uintptr_t stream) const;
  void rows_fp8(const Fp8Product& product, uintptr_t stream) const;

 private:
  const std::shared_ptr<p2p::Starter> starter_;
  const uintptr_t encode_;
  const int64_t blocks_;
};

}  // namespace gemm
}  // namespace moe_comm
