// Starting a kernel of peer_to_peer dispatch by its number: on a GPU, or on the calling thread.
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
  int device = -1;  // that the stream belongs to; -1: the current one
};

// Their number in MOE_P2P_KERNELS, -1 if there is none of that name, and back; bytes of its arguments.
int kernel_number(const std::string& name);
const char* kernel_name(int kernel);
int64_t argument_bytes(int kernel);

// Of a block, where nobody says otherwise: what waits has one large block.
int64_t usual_threads(int kernel);

// What blocks of `threads` threads need; see cuda/shared.h.
int64_t shared_bytes(int kernel, const void* args, int64_t threads);

// Runs all blocks, one after the other, on this thread, as if they had `threads` threads.
void run_on_host(int kernel, int64_t blocks, const void* args, int threads = 1);

// In builds with CUDA. Why the kernel was not launched, or an empty string.
std::string launch_cuda(int kernel, const Launch& launch, const void* args);

struct LaunchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Whatever starts kernels, from any thread.
class Starter {
 public:
  virtual ~Starter() = default;
  // Throws LaunchError if the kernel was not launched. `blocks` is at least 1.
  virtual void start(int kernel, const Launch& launch, const void* args) = 0;
};

}  // namespace p2p
}  // namespace moe_comm
