// The inner loops. kernels_impl.inc is compiled once per instruction set; the table is selected at run time.
//
// All instruction sets produce the same bits. Sums use fp32 with a separate multiply and add in a fixed order. Dot
// products use 32 lanes (lane l takes elements l, l + 32, ...) and a tree reduction over lanes, like a warp reduction.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe_comm {

enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };  // same codes as DTYPES in comm/header.py
inline int64_t dtype_bytes(int dtype) { return dtype == kFloat32 ? 4 : 2; }

// Arguments for the loops over tokens [first, last) of a dispatch. `place` holds K packed places per token. base[owner]
// is the start of that owner's block. Rows in blocks have a stride of hidden * dtype_bytes.
struct TokenLoop {
  const int64_t* place;
  char* const* base;
  int64_t top_k;
  int64_t hidden;
  int dtype;
  bool stream;  // use non-temporal stores, for results larger than the cache that are not read soon
};

// The gradient of SwiGLU. h_stride is in elements; all other rows are dense.
struct SwigluGradient {
  const void* h;  // [rows, 2F] gate | up
  int64_t h_stride;
  const void* grad_act;  // [rows, F]; may be the memory of `act`
  void* grad_h;          // [rows, 2F]; may be the memory of h
  void* act;             // [rows, F], computed again; or null
  const float* weights;  // [rows]: grad_h and act are multiplied by them after they are rounded; or null
  float* dots;           // with `weights`: [rows] dot products of act, before that, and grad_act; or null
};

struct Kernels {
  const char* name;
  // rows at `place` = x
  void (*scatter)(const TokenLoop&, int64_t first, int64_t last, const char* x, int64_t x_stride);
  // y = sum over k of weights[k] * row at place[k]. If weights is null, all weights are 1. Rows of y are y_stride bytes
  // apart.
  void (*sum)(const TokenLoop&, int64_t first, int64_t last, char* y, int64_t y_stride, const float* weights);
  // grad row at place[k] (in grad_base) = weights[k] * g; grad_weights[k] = dot(g, row at place[k] in base). If base is
  // null, no weight gradients are computed.
  void (*spread)(const TokenLoop&, int64_t first, int64_t last, const char* g, int64_t g_stride, const float* weights,
                 char* const* grad_base, float* grad_weights);
  // h [rows, 2F] = gate | up (row stride in elements); act = silu(gate) * up
  void (*swiglu)(const void* h, int64_t h_stride, void* act, int64_t rows, int64_t width, int dtype);
  void (*swiglu_backward)(const SwigluGradient&, int64_t first, int64_t last, int64_t width, int dtype);
  // y = x * scale * weight, scale[r] = 1 / sqrt(mean(x[r]^2) + eps); weight is fp32, rows are dense.
  void (*rms_norm)(const void* x, const float* weight, void* y, float* scale, int64_t rows, int64_t width, float eps,
                   int dtype);
  // From grad_y, compute grad_x and add the weight gradient to grad_weight. Either output may be null.
  void (*rms_norm_backward)(const void* x, const float* weight, const float* scale, const void* grad_y, void* grad_x,
                            float* grad_weight, int64_t rows, int64_t width, int dtype);
  // Rotary embedding of one token's heads: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin, where 1 and 2 are the halves of
  // a head. The backward pass uses -sin. fp32; x_stride and y_stride are per head.
  void (*rotate)(const float* x, int64_t x_stride, float* y, int64_t y_stride, const float* cos, const float* sin,
                 float sign, int64_t heads, int64_t half);
  // Bare copy and sum with known addresses. Benchmarks use them as the lower bound.
  void (*bare_gather)(const char* src, const int64_t* index, const int64_t* dst, int64_t first, int64_t last,
                      int64_t row_bytes);
  void (*bare_sum)(char* dst, const int64_t* src, const float* weights, int64_t first, int64_t last, int64_t top_k,
                   int64_t hidden, int dtype);
};

// Return the best table for this machine, or the one selected with set_isa (tests).
const Kernels& kernels();
// Return the names of the supported instruction sets, best first.
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
