// Grouped GEMMs on the CPU. The bits of an element of the result depend on its row, its column and k only: not on the
// other rows, on the row's position, on the tiles or on the number of threads. See README.md for the order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe_comm {
namespace gemm {

// Lines of `width` contiguous elements in the memory of one or several sources. Line i is row place_row(place[i]) of
// source place_owner(place[i]) (layout.h), or row i of the only source if place is null.
struct Rows {
  std::vector<uintptr_t> base;
  std::vector<int64_t> rows;  // per source; places are checked against it
  int64_t stride;             // bytes
  const int64_t* place;       // [count] or null
  int64_t count, width;
  const float* scale;  // [count] or null: lines are multiplied by it, and rounded to the dtype
};

// Weights [E, N, K] or results [E, N, K]: addresses, and strides in bytes.
struct Stack {
  uintptr_t base;
  int64_t expert, row, element;
};

struct Groups {
  const int64_t* sizes;  // lines of each expert, in order
  int64_t experts;
  int dtype;  // of operands
  int threads;
};

// [R, N] results: an address, bytes between rows, and whether products are added to what is there.
struct Results {
  uintptr_t base;
  int64_t stride;
  bool accumulate;
};

// out[r] (+)= x[r] @ w[e].T + bias[e] for the rows r of each expert, in x's dtype.
void rows(const Groups& groups, const Rows& x, const Stack& w, int64_t columns, const Stack& bias, const Results& out);

// h[r] = x[r] @ w[e].T + bias[e], gate | up of `width` each, and act[r], its SwiGLU, with the bits of `rows` and
// Kernels::swiglu. Both are dense. Unless h is kept, its memory is arbitrary afterwards.
struct Activations {
  uintptr_t h, act;
  bool keep_h;
};
void activated_rows(const Groups& groups, const Rows& x, const Stack& w, int64_t width, const Stack& bias,
                    const Activations& out);

// out[e] (+)= sum over the rows of expert e, in order, of y[r]^T x[r]: [E, y.width, x.width]. out_dtype: dtype of x or
// fp32. Without `accumulate`, experts without rows get zeros.
void weights(const Groups& groups, const Rows& y, const Rows& x, const Stack& out, int out_dtype, bool accumulate);

// Names of the supported instruction sets for a dtype, best first.
std::vector<std::string> isa_names(int dtype);
// Return the one that is used, and select another one (tests).
std::string isa(int dtype);
bool set_isa(int dtype, const std::string& name);

}  // namespace gemm
}  // namespace moe_comm
