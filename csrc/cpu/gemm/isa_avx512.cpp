#define MOE_ISA avx512
#define MOE_ISA_NAME "avx512"
#define MOE_VEC 16
#define MOE_TILE_ROWS 14
#define MOE_TILE_VECS 2
#include "engine_impl.inc"
