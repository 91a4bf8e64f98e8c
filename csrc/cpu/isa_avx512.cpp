#define MOE_ISA avx512
#define MOE_ISA_NAME "avx512"
#define MOE_VEC 16
#include "kernels_impl.inc"
