#define MOE_ISA neon
#define MOE_ISA_NAME "neon"
#define MOE_VEC 4
#include "kernels_impl.inc"
