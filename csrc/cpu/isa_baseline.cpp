#define MOE_ISA baseline
#define MOE_ISA_NAME "baseline"
#define MOE_VEC 4
#include "kernels_impl.inc"
