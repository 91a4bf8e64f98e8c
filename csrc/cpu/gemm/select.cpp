#include "select.h"

#include <atomic>

#include "../isa.h"
#include "gemm.h"

namespace moe_comm {
namespace gemm {

namespace {

// Best first. bf16 has the same bits in all of them but avx512_bf16, which is used on request only: its instruction has
// another order, and half the rate of fp32 on Intel.
std::vector<const Engine*> usable(bool bf16) {
  std::vector<const Engine*> all;
#if defined(__x86_64__)
  const CpuFeatures cpu = cpu_features();
  if (bf16 && cpu.avx512 && cpu.avx512_bf16 && cpu.amx_bf16 && amx::permitted()) all.push_back(&amx::in_pairs());
  if (cpu.avx512) all.push_back(bf16 ? &avx512::in_pairs() : &avx512::in_sequence());
  if (cpu.avx2) all.push_back(bf16 ? &avx2::in_pairs() : &avx2::in_sequence());
#elif defined(__aarch64__)
  all.push_back(bf16 ? &neon::in_pairs() : &neon::in_sequence());
#endif
  all.push_back(bf16 ? &baseline::in_pairs() : &baseline::in_sequence());
#if defined(__x86_64__)
  if (bf16 && cpu.avx512 && cpu.avx512_bf16) all.push_back(&avx512_bf16::in_dot_products());
#endif
  return all;
}

const std::vector<const Engine*>& engines(int dtype) {
  static const std::vector<const Engine*> all[] = {usable(false), usable(true)};
  return all[dtype == kBFloat16];
}

std::atomic<const Engine*> chosen[2];

}  // namespace

const Engine& engine(int dtype) {
  const Engine* e = chosen[dtype == kBFloat16].load(std::memory_order_acquire);
  return e ? *e : *engines(dtype).front();
}

std::vector<std::string> isa_names(int dtype) {
  std::vector<std::string> names;
  for (const Engine* e : engines(dtype)) names.emplace_back(e->name);
  return names;
}

std::string isa(int dtype) { return engine(dtype).name; }

bool set_isa(int dtype, const std::string& name) {
  for (const Engine* e : engines(dtype)) {
    if (name == e->name) {
      chosen[dtype == kBFloat16].store(e, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace gemm
}  // namespace moe_comm
