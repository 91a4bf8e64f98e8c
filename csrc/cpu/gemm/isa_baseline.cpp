#define MOE_SCALAR
#define MOE_ISA baseline
#define MOE_ISA_NAME "baseline"
#define MOE_VEC 4
#define MOE_TILE_ROWS 8
#define MOE_TILE_VECS 2
#include "engine_impl.inc"
