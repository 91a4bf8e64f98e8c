// Kernel launchers: on the calling host thread, through the CUDA runtime (kernels compiled by nvcc), or through the
// driver API (kernels compiled by NVRTC).
#pragma once

#include <array>
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

// Throws LaunchError with the driver's words if `status` of the function `name` is an error.
void check_driver(const Driver& driver, const char* name, int status);

// Makes the driver's context current on the calling thread, and then the previous one again. A thread without a context
// keeps this one; torch would set the same.
class InContext {
 public:
  explicit InContext(const Driver& driver);
  ~InContext();
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;
  // Restore the context now. Throws LaunchError.
  void leave();

 private:
  int restore();

  const Driver& driver_;
  void* before_ = nullptr;
};

using Grid = std::array<unsigned, 3>;

// Launch a function in the current context. Throws LaunchError.
void launch_kernel(const Driver& driver, void* function, const Grid& grid, unsigned threads, unsigned shared_bytes,
                   uintptr_t stream, void** arguments);

// Launches in the given context and restores the calling thread's context.
class DriverStarter : public Starter {
 public:
  explicit DriverStarter(const Driver& driver);
  void start(int kernel, const Launch& launch, const void* args) override;

 private:
  const Driver driver_;
  std::vector<std::atomic<int64_t>> shared_;  // largest dynamic shared memory size requested so far, per kernel
};

}  // namespace p2p
}  // namespace moe_comm
