#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>

#include "isa.h"
#include "kernels.h"

namespace moe_comm {

namespace {

std::vector<const Kernels*> usable() {
  std::vector<const Kernels*> all;
#if defined(__x86_64__)
  const CpuFeatures cpu = cpu_features();
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

// Not __builtin_cpu_supports: in the runtime library of zig c++, which builds the wheels, it is always 0.
CpuFeatures cpu_features() {
  CpuFeatures cpu;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const auto all = [](unsigned given, unsigned wanted) { return (given & wanted) == wanted; };
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || !all(c, bit_OSXSAVE | bit_F16C | bit_FMA)) return cpu;
  unsigned saved = 0, upper = 0;
  __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
  const unsigned last = __get_cpuid_max(0, nullptr);
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return cpu;
  constexpr unsigned ymm = 0x6, zmm = 0xe6, tiles = 0x60000, amx = 1u << 24 | 1u << 22, bf16 = 1u << 5;
  cpu.avx2 = all(saved, ymm) && all(b, bit_AVX2 | bit_BMI2);
  cpu.avx512 = all(saved, zmm) && all(b, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ);
  const bool may_have_tiles = all(saved, tiles) && all(d, amx);
  if (cpu.avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) cpu.avx512_bf16 = all(a, bf16);
  // Some virtual machines advertise AMX, but hide the leaf that describes the palettes, and tiles of 16 rows of 64
  // bytes then fail with SIGILL.
  constexpr unsigned palettes = 0x1d;
  if (may_have_tiles && last >= palettes && __get_cpuid_count(palettes, 1, &a, &b, &c, &d) != 0) {
    cpu.amx_bf16 = (b & 0xffff) == 64 && b >> 16 >= 8 && (c & 0xffff) == 16;
  }
#endif
  return cpu;
}

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
