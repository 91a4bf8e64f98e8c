// Launching kernels of peer_to_peer dispatch by number, on a GPU or on the calling host thread.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/args.h"

namespace moe_comm {
namespace p2p {

#define MOE_P2P_NUMBER(name, Args, words) k_##name,
enum Kernel : int { MOE_P2P_KERNELS(MOE_P2P_NUMBER) kKernels };

struct Launch {
  int64_t blocks = 1, threads = 1, shared_bytes = 0;
  uintptr_t stream = 0;
  int device = -1;  // device of the stream; -1: the current device
};

// Kernel number in MOE_P2P_KERNELS (-1 for an unknown name), its name, and the size of its arguments in bytes.
int kernel_number(const std::string& name);
const char* kernel_name(int kernel);
int64_t argument_bytes(int kernel);

// Default number of threads per block. Kernels that wait run one large block.
int64_t usual_threads(int kernel);

// Shared memory that a block of `threads` threads needs; see cuda/shared.h.
int64_t shared_bytes(int kernel, const void* args, int64_t threads);

// Run all blocks serially on this thread, emulating `threads` threads per block.
void run_on_host(int kernel, int64_t blocks, const void* args, int threads = 1);

// Only in builds with CUDA. Returns the reason why the kernel was not launched, or an empty string.
std::string launch_cuda(int kernel, const Launch& launch, const void* args);

struct LaunchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Interface for launching kernels. Thread-safe.
class Starter {
 public:
  virtual ~Starter() = default;
  // Throws LaunchError if the kernel was not launched. `blocks` is at least 1.
  virtual void start(int kernel, const Launch& launch, const void* args) = 0;
};

}  // namespace p2p
}  // namespace moe_comm
