#define MOE_ISA avx2
#define MOE_ISA_NAME "avx2"
#define MOE_VEC 8
#define MOE_TILE_ROWS 6
#define MOE_TILE_VECS 2
#include "engine_impl.inc"
