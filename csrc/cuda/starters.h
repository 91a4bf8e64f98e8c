// Kernel launchers: on the calling host thread, through the CUDA runtime (kernels compiled by nvcc), or through the
// driver API (kernels compiled by NVRTC).
#pragma once

#include <atomic>
#include <vector>

#include "cuda/launch.h"

namespace moe_comm {
namespace p2p {

class HostStarter : public Starter {
 public:
  void start(int kernel, const Launch& launch, const void* args) override;
};

#ifdef MOE_COMM_WITH_CUDA
class CudaStarter : public Starter {
 public:
  explicit CudaStarter(int device) : device_(device) {}
  void start(int kernel, const Launch& launch, const void* args) override;

 private:
  const int device_;
};
#endif

// Addresses of driver API functions, so that libcuda need not be linked, and the kernel functions loaded from NVRTC's
// output.
struct Driver {
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                void* stream, void** arguments, void** extra) = nullptr;
  int (*set_attribute)(void* function, int attribute, int value) = nullptr;
  int (*get_context)(void** context) = nullptr;
  int (*set_context)(void* context) = nullptr;
  int (*error_name)(int status, const char** text) = nullptr;
  int (*error_words)(int status, const char** text) = nullptr;
  void* context = nullptr;
  std::vector<void*> functions;  // indexed by kernel number
};

// Launches in the given context and restores the calling thread's context.
class DriverStarter : public Starter {
 public:
  explicit DriverStarter(const Driver& driver);
  void start(int kernel, const Launch& launch, const void* args) override;

 private:
  void check(const char* name, int status) const;

  const Driver driver_;
  std::vector<std::atomic<int64_t>> shared_;  // largest dynamic shared memory size requested so far, per kernel
};

}  // namespace p2p
}  // namespace moe_comm
