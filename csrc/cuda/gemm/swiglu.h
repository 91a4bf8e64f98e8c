// SwiGLU and its gradient, and those of gpt-oss, with the roundings of kernels/triton/swiglu.py: products and sums are
// not fused.
#pragma once

#include "cuda/gemm/hopper.h"

namespace moe_comm {
namespace gemm {

// The activation of h. limit 0: silu(gate) * up, h is gate | up. Else clamped: (up + 1) * gate * sigmoid(alpha * gate)
// of a gate of at most `limit` and an up of at most `limit` in size, which alternate in h.
struct Glu {
  float alpha, limit;
  MOE_HD bool clamped() const { return limit != 0.0f; }
};

#ifdef MOE_HOPPER

// silu(gate) * up.
MOE_DEVICE float swiglu(float gate, float up) { return __fmul_rn(__fmul_rn(sigmoid(gate), gate), up); }

// Its value, and its gradients for the gradient `grad` of that value.
struct SwigluGradient {
  float act, gate, up;
};
MOE_DEVICE SwigluGradient swiglu_gradient(float gate, float up, float grad) {
  const float s = sigmoid(gate), silu = __fmul_rn(s, gate);
  const float slope = __fadd_rn(s, __fmul_rn(silu, __fadd_rn(1.0f, -s)));
  return {__fmul_rn(silu, up), __fmul_rn(__fmul_rn(grad, up), slope), __fmul_rn(grad, silu)};
}

// x, but at most `limit`; a NaN stays one.
MOE_DEVICE float at_most(float limit, float x) { return x > limit ? limit : x; }
MOE_DEVICE float clamped_glu(const Glu& of, float gate, float up) {
  const float g = at_most(of.limit, gate), u = -at_most(of.limit, -at_most(of.limit, up));
  return __fmul_rn(__fmul_rn(sigmoid(__fmul_rn(g, of.alpha)), g), __fadd_rn(u, 1.0f));
}
MOE_DEVICE SwigluGradient clamped_gradient(const Glu& of, float gate, float up, float grad) {
  const float g = at_most(of.limit, gate), u = -at_most(of.limit, -at_most(of.limit, up)), more = __fadd_rn(u, 1.0f);
  const float s = sigmoid(__fmul_rn(g, of.alpha)), silu = __fmul_rn(s, g);
  const float slope = __fadd_rn(s, __fmul_rn(of.alpha, __fmul_rn(silu, __fadd_rn(1.0f, -s))));
  return {__fmul_rn(silu, more), gate > of.limit ? 0.0f : __fmul_rn(__fmul_rn(grad, more), slope),
          up > of.limit || up < -of.limit ? 0.0f : __fmul_rn(grad, silu)};
}

// Two words in which gate and up alternate, as a word of two gates and one of two ups; and back.
MOE_DEVICE void separate(uint32_t a, uint32_t b, uint32_t& gate, uint32_t& up) {
  gate = (a & 0xffffu) | b << 16;
  up = a >> 16 | (b & 0xffff0000u);
}

#endif  // MOE_HOPPER

}  // namespace gemm
}  // namespace moe_comm
