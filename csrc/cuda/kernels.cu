// The kernels of peer_to_peer dispatch: cuda/*.h instantiated for the GPU. Compiled by nvcc for the wheel, or by NVRTC.
#include "cuda/combine.h"
#include "cuda/few.h"
#include "cuda/lend.h"
#include "cuda/meet.h"
#include "cuda/push.h"

// Kernels that wait have one block of the maximum size. Kernels that move rows need several blocks per multiprocessor.
#define MOE_P2P_KERNEL(name, Args, threads, resident)             \
  extern "C" __global__ void __launch_bounds__(threads, resident) \
      p2p_##name(const __grid_constant__ moe_comm::p2p::Args a) { \
    moe_comm::p2p::Machine m;                                     \
    moe_comm::p2p::name(m, a);                                    \
  }

MOE_P2P_KERNEL(count, CountArgs, 1024, 1)
MOE_P2P_KERNEL(scan, ScanArgs, 1024, 1)
MOE_P2P_KERNEL(order, OrderArgs, 256, 1)
MOE_P2P_KERNEL(meet, MeetArgs, 1024, 1)
MOE_P2P_KERNEL(push, PushArgs, 512, 2)
MOE_P2P_KERNEL(push_tiles, PushTilesArgs, 512, 2)
MOE_P2P_KERNEL(push_fp8, PushFp8Args, 512, 2)
MOE_P2P_KERNEL(arrive, ArriveArgs, 1024, 1)
MOE_P2P_KERNEL(fan_out, FanOutArgs, 512, 2)
MOE_P2P_KERNEL(sum, SumArgs, 512, 1)
MOE_P2P_KERNEL(ready, ReadyArgs, 1024, 1)
MOE_P2P_KERNEL(weigh, WeighArgs, 512, 2)
MOE_P2P_KERNEL(stage, StageArgs, 1024, 1)
MOE_P2P_KERNEL(reduce, ReduceArgs, 512, 2)
MOE_P2P_KERNEL(sum_reduced, SumReducedArgs, 512, 1)
MOE_P2P_KERNEL(spread, SpreadArgs, 512, 2)
MOE_P2P_KERNEL(spread_tiles, SpreadTilesArgs, 512, 2)
MOE_P2P_KERNEL(done, DoneArgs, 1024, 1)
MOE_P2P_KERNEL(ll_send, LlSendArgs, 512, 2)
MOE_P2P_KERNEL(ll_arrive, LlArriveArgs, 1024, 1)
MOE_P2P_KERNEL(ll_ready, LlReadyArgs, 1024, 1)
MOE_P2P_KERNEL(lend, LendArgs, 512, 1)
MOE_P2P_KERNEL(assign, AssignArgs, 256, 1)
MOE_P2P_KERNEL(pull, PullArgs, 512, 2)
MOE_P2P_KERNEL(collect, CollectArgs, 512, 1)

#if !defined(__CUDACC_RTC__)
#include <cuda_runtime_api.h>

#include "cuda/launch.h"

namespace moe_comm {
namespace p2p {

std::string launch_cuda(int kernel, const Launch& launch, const void* args) {
#define MOE_P2P_FUNCTION(name, Args, words) reinterpret_cast<const void*>(&p2p_##name),
  static const void* const functions[] = {MOE_P2P_KERNELS(MOE_P2P_FUNCTION)};
  const void* function = functions[kernel];
  const int64_t usual = 48 << 10;  // larger shared memory sizes must be requested
  // Stream 0 belongs to the current device, which may differ from the device of the arguments' memory.
  int before = launch.device;
  cudaError_t status = launch.device < 0 ? cudaSuccess : cudaGetDevice(&before);
  const bool away = status == cudaSuccess && before != launch.device;
  if (away) status = cudaSetDevice(launch.device);
  if (status == cudaSuccess && launch.shared_bytes > usual) {
    status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(launch.shared_bytes));
  }
  void* parameters[] = {const_cast<void*>(args)};
  if (status == cudaSuccess) {
    status = cudaLaunchKernel(function, dim3(static_cast<unsigned>(launch.blocks)),
                              dim3(static_cast<unsigned>(launch.threads)), parameters,
                              static_cast<size_t>(launch.shared_bytes), reinterpret_cast<cudaStream_t>(launch.stream));
  }
  if (away) {
    const cudaError_t back = cudaSetDevice(before);
    if (status == cudaSuccess) status = back;
  }
  if (status == cudaSuccess) return "";
  cudaGetLastError();  // an error that is not cleared would appear in the caller's next CUDA call
  return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
}

}  // namespace p2p
}  // namespace moe_comm
#endif
