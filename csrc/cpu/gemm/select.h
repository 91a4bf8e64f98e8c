// The engine of a dtype on this machine.
#pragma once

#include "engine.h"

namespace moe_comm {
namespace gemm {

const Engine& engine(int dtype);

#define MOE_ENGINES(isa)       \
  namespace isa {              \
  const Engine& in_sequence(); \
  const Engine& in_pairs();    \
  }
MOE_ENGINES(baseline)
MOE_ENGINES(avx2)
MOE_ENGINES(avx512)
MOE_ENGINES(neon)
#undef MOE_ENGINES
namespace amx {
const Engine& in_pairs();
bool permitted();  // ask the operating system for the tile registers
}  // namespace amx
namespace avx512_bf16 {
const Engine& in_dot_products();
}

}  // namespace gemm
}  // namespace moe_comm
