// What the CPU and the operating system support of what CMakeLists.txt enables for the files of an instruction set.
#pragma once

namespace moe_comm {

struct CpuFeatures {
  bool avx2 = false, avx512 = false, avx512_bf16 = false, amx_bf16 = false;
};

CpuFeatures cpu_features();

}  // namespace moe_comm
