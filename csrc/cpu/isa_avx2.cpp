#define MOE_ISA avx2
#define MOE_ISA_NAME "avx2"
#define MOE_VEC 8
#include "kernels_impl.inc"
