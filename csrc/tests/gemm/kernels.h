// The kernels of csrc/cuda/gemm in the model of Hopper's instructions (cuda/gemm/model.h).
#pragma once

#include <thread>

#include "cuda/gemm/gradient.h"
#include "cuda/gemm/launch.h"
#include "cuda/gemm/listed.h"
#include "cuda/gemm/rows.h"
#include "cuda/gemm/rows_fp8.h"
#include "cuda/gemm/weights.h"

namespace moe_comm {
namespace gemm {

// cuTensorMapEncodeTiled, with its documented limits for swizzled boxes.
inline int encode_map(void* map, int dtype, uint32_t rank, void* at, const uint64_t* sizes, const uint64_t* strides,
                      const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion,
                      int fill) {
  ModelMap m{};
  bool ok = rank == 3 && interleave == 0 && swizzle == 3 && promotion >= 0 && promotion <= 3 && fill == 0;
  for (int i = 0; i < 3; ++i) {
    ok = ok && sizes[i] > 0 && sizes[i] <= uint64_t{1} << 32 && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
  }
  m.at = reinterpret_cast<uint64_t>(at);
  for (int i = 0; i < 3; ++i) {
    m.sizes[i] = sizes[i];
    m.box[i] = box[i];
  }
  m.strides[0] = strides[0];
  m.strides[1] = strides[1];
  m.bytes = dtype == 7 ? 4 : dtype == 0 ? 1 : 2;
  ok = ok && reinterpret_cast<uintptr_t>(map) % 64 == 0 && box[0] * m.bytes <= 128 && box[0] * m.bytes % 16 == 0;
  for (const uint64_t stride : m.strides) ok = ok && stride % 16 == 0 && stride < uint64_t{1} << 40;
  if (!ok || m.at % 16 || m.strides[1] % m.strides[0]) return 1;
  std::memcpy(map, &m, sizeof m);
  return 0;
}

// Runs one thread of a kernel.
inline void run_thread(int kernel, const void* args) {
  const auto& rows = *static_cast<const RowsArgs*>(args);
  const auto& listed = *static_cast<const ListedArgs*>(args);
  const auto& weights = *static_cast<const WeightsArgs*>(args);
  if (kernel == k_rows) multiply_rows<0, false, false>(rows);
  if (kernel == k_rows_transposed) multiply_rows<1, false, false>(rows);
  if (kernel == k_rows_swiglu) multiply_rows<0, true, false>(rows);
  if (kernel == k_taken_swiglu) multiply_rows<0, true, true>(rows);
  if (kernel == k_arrived) multiply_listed<0, false, false>(listed);
  if (kernel == k_arrived_transposed) multiply_listed<1, false, false>(listed);
  if (kernel == k_arrived_swiglu) multiply_listed<0, true, false>(listed);
  if (kernel == k_published) multiply_listed<0, false, true>(listed);
  if (kernel == k_published_transposed) multiply_listed<1, false, true>(listed);
  if (kernel == k_swiglu_gradient) activation_gradient(*static_cast<const GradientArgs*>(args));
  if (kernel == k_rows_fp8) multiply_rows_fp8(*static_cast<const Fp8Args*>(args));
  if (kernel == k_weights) weight_gradients<false, kGradStages, kGradSlots>(weights);
  if (kernel == k_weights_added) weight_gradients<true, kAddedStages, kAddedSlots>(weights);
}

// Runs all blocks at the same time. first: the number of the first one among all that run at the same time.
inline void run_kernel(int kernel, const void* args, int64_t blocks, int64_t threads, int64_t shared_bytes,
                       unsigned seed, int64_t first = 0) {
  check(threads == kModelThreads, "another number of threads");
  check(shared_bytes <= static_cast<int64_t>(sizeof block_shared), "too much shared memory");
  const auto count = static_cast<unsigned>(blocks);
  std::vector<std::exception_ptr> errors(count);
  std::vector<std::thread> running;
  for (unsigned block = 0; block < count; ++block) {
    running.emplace_back([=, &errors] {
      gridDim.x = count;
      blockIdx.x = block;
      try {
        ModelBlock([=] { run_thread(kernel, args); }, seed + block, first + block).run();
      } catch (...) {
        errors[block] = std::current_exception();
      }
    });
  }
  for (auto& thread : running) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace gemm
}  // namespace moe_comm
