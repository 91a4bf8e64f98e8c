#define MOE_ISA neon
#define MOE_ISA_NAME "neon"
#define MOE_VEC 4
#define MOE_TILE_ROWS 8
#define MOE_TILE_VECS 2
#include "engine_impl.inc"
