// SwiGLU and its gradient, with the roundings of kernels/triton/swiglu.py: products and sums are not fused.
#pragma once

#include "cuda/gemm/hopper.h"

namespace moe_comm {
namespace gemm {

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

#endif  // MOE_HOPPER

}  // namespace gemm
}  // namespace moe_comm
