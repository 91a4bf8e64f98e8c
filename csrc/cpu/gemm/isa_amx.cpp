// AMX: tiles of 16 x 16 results; an instruction adds 32 products to each. Per 32 k it sums the even and the odd k in
// one sequence each, from zero, and adds their sum to the result.
#define MOE_VEC 16
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "select.h"

namespace moe_comm {
namespace gemm {
namespace amx {
namespace {

#include "../vectors.inc"
#include "floats.inc"
#include "words.inc"

constexpr int kSide = 16;          // rows and columns of a tile register
constexpr int kPanel = 2 * kSide;  // rows and columns of a tile of this file: 2 x 2 registers
constexpr int kUnit = 32;
constexpr int64_t kTileBytes = 1024;

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

uint64_t enter() {
  static const Config config;
  __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
  return enter_flushing();
}

void leave(uint64_t before) {
  __asm__ volatile("tilerelease" ::: "memory");
  leave_flushing(before);
}

// Not the compiler's intrinsics: those of gcc 12 do not say that they read and write memory.
#define MOE_TILE_LOAD(tile, address, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(address), "r"(stride) : "memory")
#define MOE_TILE_STORE(tile, address, stride) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(address), "r"(stride) : "memory")
#define MOE_TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile::)
#define MOE_TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)

// A: [k / 32][2][16 rows][32 k]. Rows from count on hold arbitrary values.
void pack_a(const Lines& lines, int, int64_t first, int count, int64_t k0, int64_t depth, char* panel, Ahead& ahead) {
  if (lines.across) {
    alignas(64) char words[kUnit / 2][kSide * 4];
    const char* from[kSide];
    for (int i = 0; i < kSide; ++i) from[i] = words[i];
    for (int64_t k = 0; k < depth; k += kUnit) {
      const int64_t valid = depth - k < kUnit ? depth - k : kUnit;
      for (int r = 0; r < count; r += kSide) {
        const int some = count - r < kSide ? count - r : kSide;
        words_across<kSide>(lines, first + r, some, k0 + k, valid, kUnit, words[0], ahead);
        float* to = reinterpret_cast<float*>(panel + (k / kUnit * 2 + r / kSide) * kTileBytes);
        Vec columns[kSide];
        transpose(from, 0, columns);
#pragma GCC unroll 16
        for (int i = 0; i < kSide; ++i) F32::store(to + i * kSide, columns[i]);
      }
    }
    return;
  }
  for (int r = 0; r < count; ++r) {
    const char* from = lines.line(first + r) + k0 * 2;
    char* to = panel + r / kSide * kTileBytes + r % kSide * 64;
    int64_t k = 0;
    for (; k + kUnit <= depth; k += kUnit, to += 2 * kTileBytes) {
      _mm512_store_si512(to, _mm512_loadu_si512(from + k * 2));
    }
    if (k < depth) {
      std::memset(to, 0, 64);
      std::memcpy(to, from + k * 2, static_cast<size_t>(depth - k) * 2);
    }
  }
}

// Tile registers: 0 to 3 results, 4 and 5 rows, 6 and 7 columns. `both`: two registers of rows.
template <bool both>
MOE_INLINE void multiply(const char* a, const char* b, int64_t depth, float* c, int64_t stride, bool load,
                         Ahead& ahead) {
  constexpr int64_t b_stride = kPanel * 4;
  const int64_t c_stride = stride * 4;
  char* c0 = reinterpret_cast<char*>(c);
  char* c1 = c0 + kSide * c_stride;
  if (load) {
    MOE_TILE_LOAD(0, c0, c_stride);
    MOE_TILE_LOAD(1, c0 + 64, c_stride);
    if (both) {
      MOE_TILE_LOAD(2, c1, c_stride);
      MOE_TILE_LOAD(3, c1 + 64, c_stride);
    }
  } else {
    MOE_TILE_ZERO(0);
    MOE_TILE_ZERO(1);
    if (both) {
      MOE_TILE_ZERO(2);
      MOE_TILE_ZERO(3);
    }
  }
  for (int64_t k = 0; k < depth; k += kUnit, a += 2 * kTileBytes, b += 2 * kTileBytes) {
    ahead.fetch(8 * ahead.per_tile);
    MOE_TILE_LOAD(6, b, b_stride);
    MOE_TILE_LOAD(4, a, int64_t{64});
    MOE_TILE_LOAD(7, b + 64, b_stride);
    MOE_TILE_DOT(0, 4, 6);
    MOE_TILE_DOT(1, 4, 7);
    if (both) {
      MOE_TILE_LOAD(5, a + kTileBytes, int64_t{64});
      MOE_TILE_DOT(2, 5, 6);
      MOE_TILE_DOT(3, 5, 7);
    }
  }
  MOE_TILE_STORE(0, c0, c_stride);
  MOE_TILE_STORE(1, c0 + 64, c_stride);
  if (both) {
    MOE_TILE_STORE(2, c1, c_stride);
    MOE_TILE_STORE(3, c1 + 64, c_stride);
  }
}

void tile(int m, int n, const char* a, const char* b, int64_t depth, float* c, int64_t stride, bool load,
          Ahead& ahead) {
  if (n == kPanel && (m == kPanel || m == kSide)) {
    if (m == kPanel) {
      multiply<true>(a, b, depth, c, stride, load, ahead);
    } else {
      multiply<false>(a, b, depth, c, stride, load, ahead);
    }
    return;
  }
  alignas(64) float whole[kPanel * kPanel];
  const size_t bytes = static_cast<size_t>(n) * sizeof(float);
  for (int i = 0; load && i < m; ++i) std::memcpy(whole + i * kPanel, c + i * stride, bytes);
  if (m > kSide) {
    multiply<true>(a, b, depth, whole, kPanel, load, ahead);
  } else {
    multiply<false>(a, b, depth, whole, kPanel, load, ahead);
  }
  for (int i = 0; i < m; ++i) std::memcpy(c + i * stride, whole + i * kPanel, bytes);
}

}  // namespace

const Engine& in_pairs() {
  static const Engine table = {
      "amx", kPanel,  kPanel, kSide, kUnit, kPanel * 2, kPanel * 2, pack_a, pack_words<kPanel, kUnit>,
      tile,  nullptr, finish, start, enter, leave};
  return table;
}

bool permitted() {
  constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, for all threads of the process
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

}  // namespace amx
}  // namespace gemm
}  // namespace moe_comm
