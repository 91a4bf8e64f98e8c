#include <atomic>

#include "kernels.h"

namespace moe_comm {

namespace {

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> all;
#if defined(__x86_64__)
  // All features that CMakeLists.txt enables for that file.
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c")) {
    all.push_back(&avx512::table());
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2")) {
    all.push_back(&avx2::table());
  }
#elif defined(__aarch64__)
  all.push_back(&neon::table());
#endif
  all.push_back(&baseline::table());
  return all;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* table = chosen.load(std::memory_order_acquire);
  if (table == nullptr) {
    table = usable().front();
    chosen.store(table, std::memory_order_release);
  }
  return *table;
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Kernels* k : usable()) names.emplace_back(k->name);
  return names;
}

bool set_isa(const std::string& name) {
  for (const Kernels* k : usable()) {
    if (name == k->name) {
      chosen.store(k, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace moe_comm
