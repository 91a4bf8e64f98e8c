// The machine code of kernels.cu for sm_90a, if nvcc compiled it in this build.
#include <cstddef>
#include <string>

#include "cuda/gemm/launch.h"

#ifdef MOE_GEMM_CUBIN
asm(".pushsection .rodata\n"
    ".balign 64\n"
    "moe_gemm_cubin:\n"
    ".incbin \"" MOE_GEMM_CUBIN
    "\"\n"
    "moe_gemm_cubin_end:\n"
    ".popsection\n");
extern "C" __attribute__((visibility("hidden"))) const char moe_gemm_cubin[], moe_gemm_cubin_end[];
#endif

namespace moe_comm {
namespace gemm {

std::string compiled_kernels() {
#ifdef MOE_GEMM_CUBIN
  return std::string(moe_gemm_cubin, static_cast<size_t>(moe_gemm_cubin_end - moe_gemm_cubin));
#else
  return "";
#endif
}

}  // namespace gemm
}  // namespace moe_comm
