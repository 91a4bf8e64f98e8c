// The GEMMs of this folder, for sm_90a only. Compiled by nvcc for the wheel, or by NVRTC.
#include "cuda/gemm/gradient.h"
#include "cuda/gemm/listed.h"
#include "cuda/gemm/rows.h"
#include "cuda/gemm/rows_fp8.h"
#include "cuda/gemm/weights.h"

#define MOE_ROWS_KERNEL(name, transposed, swiglu, taken)                    \
  extern "C" __global__ void __launch_bounds__(moe_comm::gemm::kThreads, 1) \
      gemm_##name(const __grid_constant__ moe_comm::gemm::RowsArgs a) {     \
    using namespace moe_comm::gemm;                                         \
    multiply_rows<transposed, swiglu, taken>(a);                            \
  }

MOE_ROWS_KERNEL(rows, 0, false, false)
MOE_ROWS_KERNEL(rows_transposed, 1, false, false)
MOE_ROWS_KERNEL(rows_swiglu, 0, true, false)
MOE_ROWS_KERNEL(taken_swiglu, 0, true, true)

#define MOE_LISTED_KERNEL(name, transposed, swiglu, published)              \
  extern "C" __global__ void __launch_bounds__(moe_comm::gemm::kThreads, 1) \
      gemm_##name(const __grid_constant__ moe_comm::gemm::ListedArgs a) {   \
    using namespace moe_comm::gemm;                                         \
    multiply_listed<transposed, swiglu, published>(a);                      \
  }

MOE_LISTED_KERNEL(arrived, 0, false, false)
MOE_LISTED_KERNEL(arrived_transposed, 1, false, false)
MOE_LISTED_KERNEL(arrived_swiglu, 0, true, false)
MOE_LISTED_KERNEL(published, 0, false, true)
MOE_LISTED_KERNEL(published_transposed, 1, false, true)

#define MOE_WEIGHTS_KERNEL(name, add, stages, slots)                        \
  extern "C" __global__ void __launch_bounds__(moe_comm::gemm::kThreads, 1) \
      gemm_##name(const __grid_constant__ moe_comm::gemm::WeightsArgs a) {  \
    using namespace moe_comm::gemm;                                         \
    weight_gradients<add, stages, slots>(a);                                \
  }

MOE_WEIGHTS_KERNEL(weights, false, kGradStages, kGradSlots)
MOE_WEIGHTS_KERNEL(weights_added, true, kAddedStages, kAddedSlots)

extern "C" __global__ void __launch_bounds__(moe_comm::gemm::kThreads, 1)
    gemm_swiglu_gradient(const __grid_constant__ moe_comm::gemm::GradientArgs a) {
  moe_comm::gemm::activation_gradient(a);
}

extern "C" __global__ void __launch_bounds__(moe_comm::gemm::kThreads, 1)
    gemm_rows_fp8(const __grid_constant__ moe_comm::gemm::Fp8Args a) {
  moe_comm::gemm::multiply_rows_fp8(a);
}
