// The inner loops, compiled once per instruction set from kernels_impl.inc and chosen at run time.
//
// All instruction sets give the same bits: sums are fp32 with a separate multiply and add in a fixed order, dot
// products run in 32 lanes (lane l takes elements l, l + 32, ...) that are then added in halves, as a warp would.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe_comm {

enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };  // as DTYPES in comm/header.py
inline int64_t dtype_bytes(int dtype) { return dtype == kFloat32 ? 4 : 2; }

// Tokens [first, last) of a dispatch. `place` holds K packed places a token; base[owner] is the start of that
// owner's block. Row strides in bytes of blocks are hidden * dtype_bytes.
struct TokenLoop {
  const int64_t* place;
  char* const* base;
  int64_t top_k;
  int64_t hidden;
  int dtype;
  bool stream;  // non-temporal stores: for results larger than the cache, which nobody reads soon
};

struct Kernels {
  const char* name;
  // rows at `place` = x
  void (*scatter)(const TokenLoop&, int64_t first, int64_t last, const char* x, int64_t x_stride);
  // y = sum over k of weights[k] * row at place[k]; weights may be null for ones. y has y_stride bytes a row.
  void (*sum)(const TokenLoop&, int64_t first, int64_t last, char* y, int64_t y_stride, const float* weights);
  // grad row at place[k] (in grad_base) = weights[k] * g; grad_weights[k] = dot(g, row at place[k] in base).
  // base may be null: then no weight gradients.
  void (*spread)(const TokenLoop&, int64_t first, int64_t last, const char* g, int64_t g_stride, const float* weights,
                 char* const* grad_base, float* grad_weights);
  // h [rows, 2F] = gate | up (row stride in elements); act = silu(gate) * up
  void (*swiglu)(const void* h, int64_t h_stride, void* act, int64_t rows, int64_t width, int dtype);
  // From grad_act: grad_h [rows, 2F], and act again if it is not null.
  void (*swiglu_backward)(const void* h, int64_t h_stride, const void* grad_act, void* grad_h, void* act, int64_t rows,
                          int64_t width, int dtype);
  // y = x * scale * weight, scale[r] = 1 / sqrt(mean(x[r]^2) + eps); weight is fp32, rows are dense.
  void (*rms_norm)(const void* x, const float* weight, void* y, float* scale, int64_t rows, int64_t width, float eps,
                   int dtype);
  // From the gradient of y: that of x, and that of weight added to grad_weight; either may be null.
  void (*rms_norm_backward)(const void* x, const float* weight, const float* scale, const void* grad_y, void* grad_x,
                            float* grad_weight, int64_t rows, int64_t width, int dtype);
  // One token's heads, each turned by the token's angles: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin, where 1 and 2 are
  // the halves of a head; backward with -sin. fp32; x_stride and y_stride from head to head.
  void (*rotate)(const float* x, int64_t x_stride, float* y, int64_t y_stride, const float* cos, const float* sin,
                 float sign, int64_t heads, int64_t half);
  // The limits that benchmarks compare with: addresses known beforehand, nothing else done.
  void (*bare_gather)(const char* src, const int64_t* index, const int64_t* dst, int64_t first, int64_t last,
                      int64_t row_bytes);
  void (*bare_sum)(char* dst, const int64_t* src, const float* weights, int64_t first, int64_t last, int64_t top_k,
                   int64_t hidden, int dtype);
};

// The best for this machine, or the one chosen with set_isa (tests).
const Kernels& kernels();
// Names that can run here, best first.
std::vector<std::string> isa_names();
bool set_isa(const std::string& name);

namespace baseline {
const Kernels& table();
}
namespace avx2 {
const Kernels& table();
}
namespace avx512 {
const Kernels& table();
}
namespace neon {
const Kernels& table();
}

}  // namespace moe_comm
