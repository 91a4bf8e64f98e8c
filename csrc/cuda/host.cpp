// Runs the kernels on the host, and provides their names, argument sizes and default block sizes.
#include <cstring>
#include <vector>

#include "cuda/combine.h"
#include "cuda/few.h"
#include "cuda/launch.h"
#include "cuda/lend.h"
#include "cuda/meet.h"
#include "cuda/push.h"

namespace moe_comm {
namespace p2p {

namespace {

struct Entry {
  const char* name;
  int64_t bytes;
  int64_t threads;
  int64_t (*shared)(const void* args, int64_t threads);
  void (*run)(Machine& m, const void* args);
};

template <class Args>
Args read(const void* args) {
  Args a;
  std::memcpy(&a, args, sizeof a);
  return a;
}

// Must not exceed the launch bounds in kernels.cu.
constexpr int64_t threads_of(Kernel kernel) {
  switch (kernel) {
    case k_count:
    case k_order:
    case k_assign:
      return 256;
    case k_push:
    case k_push_tiles:
    case k_push_fp8:
    case k_fan_out:
    case k_sum:
    case k_sum_reduced:
    case k_weigh:
    case k_reduce:
    case k_spread:
    case k_spread_tiles:
    case k_ll_send:
    case k_lend:
    case k_pull:
    case k_collect:
      return 512;
    default:
      return 1024;
  }
}

#define MOE_P2P_ENTRY(name, Args, words)                                                                      \
  Entry{#name, sizeof(Args), threads_of(k_##name),                                                            \
        [](const void* args, int64_t threads) -> int64_t { return shared_bytes(read<Args>(args), threads); }, \
        [](Machine& m, const void* args) { name(m, read<Args>(args)); }},
const Entry entries[] = {MOE_P2P_KERNELS(MOE_P2P_ENTRY)};

}  // namespace

int kernel_number(const std::string& name) {
  int number = 0;
  for (const Entry& entry : entries) {
    if (name == entry.name) return number;
    ++number;
  }
  return -1;
}

const char* kernel_name(int kernel) { return entries[kernel].name; }

int64_t usual_threads(int kernel) { return entries[kernel].threads; }

int64_t argument_bytes(int kernel) { return entries[kernel].bytes; }

int64_t shared_bytes(int kernel, const void* args, int64_t threads) { return entries[kernel].shared(args, threads); }

void run_on_host(int kernel, int64_t blocks, const void* args, int threads) {
  const int64_t bytes = shared_bytes(kernel, args, threads);
  std::vector<Words16> memory(static_cast<size_t>(bytes / 16 + 1));
  for (int64_t block = 0; block < blocks; ++block) {
    Machine m(block, blocks, reinterpret_cast<char*>(memory.data()), bytes, threads);
    entries[kernel].run(m, args);
  }
}

}  // namespace p2p
}  // namespace moe_comm
