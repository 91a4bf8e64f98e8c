// Where kernels are started: on the calling thread, by the CUDA runtime that nvcc's kernels came with, or by the
// driver.
#pragma once

#include <atomic>

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

// The driver's functions by address, so that it need not be linked, and what it has made of NVRTC's code.
struct Driver {
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                void* stream, void** arguments, void** extra) = nullptr;
  int (*set_attribute)(void* function, int attribute, int value) = nullptr;
  int (*get_context)(void** context) = nullptr;
  int (*set_context)(void* context) = nullptr;
  int (*error_name)(int status, const char** text) = nullptr;
  int (*error_words)(int status, const char** text) = nullptr;
  void* context = nullptr;
  void* functions[kKernels] = {};  // by number
};

// Launches in the driver's context, and gives the thread back the one it had.
class DriverStarter : public Starter {
 public:
  explicit DriverStarter(const Driver& driver);
  void start(int kernel, const Launch& launch, const void* args) override;

 private:
  void check(const char* name, int status) const;

  const Driver driver_;
  std::atomic<int64_t> shared_[kKernels];  // bytes of shared memory that a block may have, as far as asked for
};

}  // namespace p2p
}  // namespace moe_comm
