// A CUDA driver whose GEMMs run in the model of Hopper's instructions, on memory of the CPU. So Python code that
// launches them can be tested with their results, without a GPU.
//
//   c++ -std=c++17 -O2 -shared -fPIC -DMOE_GEMM_MODEL -I csrc csrc/tests/gemm/driver.cpp csrc/cuda/gemm/launch.cpp
#include <cstdio>
#include <string>

#include "tests/gemm/kernels.h"

namespace {

thread_local void* current = nullptr;
unsigned launches = 0;

}  // namespace

extern "C" {

int cuInit(unsigned) { return 0; }
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &launches;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current = context;
  return 0;
}
int cuModuleLoadData(void** module, const void*) {
  *module = &launches;
  return 0;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
  const auto names = moe_comm::gemm::kernel_names();
  for (size_t i = 0; i < names.size(); ++i) {
    if (std::string("gemm_") + names[i] == name) {
      *function = reinterpret_cast<void*>(i + 1);
      return 0;
    }
  }
  return 500;
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuLaunchKernel(void* function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                   unsigned shared, void*, void** arguments, void**) {
  try {
    const auto kernel = static_cast<int>(reinterpret_cast<intptr_t>(function)) - 1;
    moe_comm::gemm::run_kernel(kernel, arguments[0], blocks, threads, shared, ++launches);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 719;
  }
}
int cuTensorMapEncodeTiled(void* map, int dtype, unsigned rank, void* at, const uint64_t* sizes,
                           const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                           int swizzle, int promotion, int fill) {
  return moe_comm::gemm::encode_map(map, dtype, rank, at, sizes, strides, box, steps, interleave, swizzle, promotion,
                                    fill);
}
int cuGetErrorName(int, const char** text) {
  *text = "MODEL";
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "the model of the instructions failed";
  return 0;
}
}
