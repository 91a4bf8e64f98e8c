// AVX-512 BF16: each instruction adds two products to every result, the one of the odd k first, rounding after each.
#define MOE_VEC 16
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "select.h"

namespace moe_comm {
namespace gemm {
namespace avx512_bf16 {
namespace {

#include "../vectors.inc"
#include "floats.inc"
#include "words.inc"

constexpr int kRows = 14, kVecs = 2, kColumns = 32, kStrideA = 16, kUnit = 2;

template <int M>
void tile_of(const char* a, const char* b, int64_t depth, float* c, int64_t stride, bool load, Ahead& ahead) {
  __m512 t[M][kVecs];
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < kVecs; ++j) t[i][j] = load ? _mm512_loadu_ps(c + i * stride + j * 16) : _mm512_setzero_ps();
  }
  for (int64_t k = 0; k < depth; k += kUnit, a += kStrideA * 4, b += kColumns * 4) {
    if (k % 4 == 0) ahead.fetch(ahead.per_tile);
    const __m512bh one = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b));
    const __m512bh two = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + 64));
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      int32_t pair;
      std::memcpy(&pair, a + i * 4, 4);
      const __m512bh row = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      t[i][0] = _mm512_dpbf16_ps(t[i][0], row, one);
      t[i][1] = _mm512_dpbf16_ps(t[i][1], row, two);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    for (int j = 0; j < kVecs; ++j) _mm512_storeu_ps(c + i * stride + j * 16, t[i][j]);
  }
}

void tile(int m, int n, const char* a, const char* b, int64_t depth, float* c, int64_t stride, bool load,
          Ahead& ahead) {
  typedef void (*Function)(const char*, const char*, int64_t, float*, int64_t, bool, Ahead&);
  static constexpr Function functions[kRows] = {tile_of<1>,  tile_of<2>,  tile_of<3>,  tile_of<4>, tile_of<5>,
                                                tile_of<6>,  tile_of<7>,  tile_of<8>,  tile_of<9>, tile_of<10>,
                                                tile_of<11>, tile_of<12>, tile_of<13>, tile_of<14>};
  if (n == kColumns) {
    functions[m - 1](a, b, depth, c, stride, load, ahead);
    return;
  }
  float whole[kRows * kColumns] = {};
  const size_t bytes = static_cast<size_t>(n) * sizeof(float);
  for (int i = 0; load && i < m; ++i) std::memcpy(whole + i * kColumns, c + i * stride, bytes);
  functions[m - 1](a, b, depth, whole, kColumns, load, ahead);
  for (int i = 0; i < m; ++i) std::memcpy(c + i * stride, whole + i * kColumns, bytes);
}

}  // namespace

const Engine& in_dot_products() {
  static const Engine table = {"avx512_bf16",
                               kRows,
                               kColumns,
                               1,
                               kUnit,
                               kStrideA * 2,
                               kColumns * 2,
                               pack_words<kStrideA, kUnit>,
                               pack_words<kColumns, kUnit>,
                               tile,
                               nullptr,
                               finish,
                               start,
                               enter_flushing,
                               leave_flushing};
  return table;
}

}  // namespace avx512_bf16
}  // namespace gemm
}  // namespace moe_comm
