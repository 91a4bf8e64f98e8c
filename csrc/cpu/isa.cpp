#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>

#include "kernels.h"

namespace moe_comm {

namespace {

#if defined(__x86_64__)
struct Features {
  bool avx2 = false, avx512 = false;
};

// All features that CMakeLists.txt enables for the files of an instruction set, and the registers that the operating
// system saves. Not __builtin_cpu_supports: in the runtime library of zig c++, which builds the wheels, it is always 0.
Features features() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0 || (c & bit_F16C) == 0) return {};
  unsigned saved = 0, upper = 0;
  __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return {};
  const auto all = [](unsigned given, unsigned wanted) { return (given & wanted) == wanted; };
  constexpr unsigned ymm = 0x6, zmm = 0xe6;
  return {all(saved, ymm) && all(b, bit_AVX2 | bit_BMI2),
          all(saved, zmm) && all(b, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ)};
}
#endif

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> all;
#if defined(__x86_64__)
  const Features cpu = features();
  if (cpu.avx512) all.push_back(&avx512::table());
  if (cpu.avx2) all.push_back(&avx2::table());
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
