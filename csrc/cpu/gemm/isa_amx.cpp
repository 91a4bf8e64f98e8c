// AMX: tiles of 16 x 16 results; an instruction adds 32 products to each. Per 32 k it sums the even and the odd k in
// one sequence each, from zero, and adds their sum to the result.
#define MOE_VEC 16
#define MOE_INLINE_MEMBER inline __attribute__((always_inline))
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "product.h"
#include "select.h"

namespace moe_comm {
namespace gemm {
namespace amx {
namespace {

#include "../vectors.inc"
// swiglu.inc needs vectors.inc, and words_amx.inc all of them.
#include "../swiglu.inc"
#include "floats.inc"
#include "words.inc"
#include "words_amx.inc"

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void configure() {
  static const Config config;
  __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

uint64_t enter() {
  configure();
  return enter_flushing();
}

// SwiGLU keeps denormals.
uint64_t enter_activated() {
  configure();
  return enter_plain();
}

void leave(uint64_t before) {
  __asm__ volatile("tilerelease" ::: "memory");
  _mm_sfence();  // results that were written around the caches
  leave_flushing(before);
}

// Not the compiler's intrinsics: those of gcc 12 do not say that they read and write memory.
#define MOE_TILE_LOAD(tile, address, stride) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(address), "r"(stride) : "memory")
// For the operand that passes, while a panel of the other one stays in L1.
#define MOE_TILE_STREAM(tile, address, stride) \
  __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile::"r"(address), "r"(stride) : "memory")
#define MOE_TILE_LOAD_AS(stream, tile, address, stride) \
  do {                                                  \
    if (stream) {                                       \
      MOE_TILE_STREAM(tile, address, stride);           \
    } else {                                            \
      MOE_TILE_LOAD(tile, address, stride);             \
    }                                                   \
  } while (0)
#define MOE_TILE_STORE(tile, address) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(address), "r"(int64_t{64}) : "memory")
#define MOE_TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile::)
#define MOE_TILE_DOT(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)

// A panel of left operands: in tiles, or where the matrix lies.
struct Left {
  const char* at;
  int64_t stride, half, step;  // bytes between rows, between the two registers of rows, and per 32 k
};

// What runs between the instructions for tiles, which leave the other units of the core idle: prefetching the next
// block, packing the next panel and rounding the results before.
struct Side {
  Ahead ahead;
  Packing packing;
  int pairs = 0;  // to pack per 32 k
  Finishing finishing;
  int parts = 0;  // to finish per 32 k
  // Results of this tile, to prefetch.
  struct {
    char* at;
    int64_t stride;
  } results[3] = {};
  int row_lines = 0, rows = 0, rows_per_step = 0;

  void prefetch_results(const TileResults& to, int64_t steps) {
    row_lines = 0;
    if (to.out) results[row_lines++] = {to.out, to.stride};
    if (to.out && to.act) results[row_lines++] = {to.out + to.pair, to.stride};
    if (to.act) results[row_lines++] = {to.act, to.act_stride};
    rows = to.rows;
    rows_per_step = static_cast<int>((to.rows + steps - 1) / steps);
  }
  MOE_INLINE_MEMBER void step() {
    ahead.fetch(ahead.per_tile);
    for (int i = 0; i < rows_per_step && rows > 0; ++i, --rows) {
      for (int j = 0; j < row_lines; results[j].at += results[j].stride, ++j) __builtin_prefetch(results[j].at, 1);
    }
    if (packing.at < packing.end) packing.some(pairs);
    if (finishing.left > 0) finishing.some(parts);
  }
};

enum class Passing { kNone, kLeft, kRight };

// Tile registers: 0 to 3 results, 4 and 5 the left operand, 6 and 7 the right one. rows, columns: registers of them.
template <int rows, int columns, Passing passing>
MOE_INLINE void multiply(const Left& left, const char* right, int64_t steps, char* c, bool load, Side& side) {
  const char *a = left.at, *b = right;
  const int64_t stride = left.stride, half = left.half, step = left.step, b_stride = kRightStride;
  if (load) {
    MOE_TILE_LOAD(0, c, int64_t{64});
    if (columns == 2) MOE_TILE_LOAD(1, c + kTileBytes, int64_t{64});
    if (rows == 2) MOE_TILE_LOAD(2, c + 2 * kTileBytes, int64_t{64});
    if (rows == 2 && columns == 2) MOE_TILE_LOAD(3, c + 3 * kTileBytes, int64_t{64});
  } else {
    MOE_TILE_ZERO(0);
    if (columns == 2) MOE_TILE_ZERO(1);
    if (rows == 2) MOE_TILE_ZERO(2);
    if (rows == 2 && columns == 2) MOE_TILE_ZERO(3);
  }
  for (; steps > 0; --steps, a += step, b += 2 * kTileBytes) {
    side.step();
    MOE_TILE_LOAD_AS(passing == Passing::kRight, 6, b, b_stride);
    MOE_TILE_LOAD_AS(passing == Passing::kLeft, 4, a, stride);
    if (columns == 2) MOE_TILE_LOAD_AS(passing == Passing::kRight, 7, b + 64, b_stride);
    MOE_TILE_DOT(0, 4, 6);
    if (columns == 2) MOE_TILE_DOT(1, 4, 7);
    if (rows == 2) {
      MOE_TILE_LOAD_AS(passing == Passing::kLeft, 5, a + half, stride);
      MOE_TILE_DOT(2, 5, 6);
      if (columns == 2) MOE_TILE_DOT(3, 5, 7);
    }
  }
  MOE_TILE_STORE(0, c);
  if (columns == 2) MOE_TILE_STORE(1, c + kTileBytes);
  if (rows == 2) MOE_TILE_STORE(2, c + 2 * kTileBytes);
  if (rows == 2 && columns == 2) MOE_TILE_STORE(3, c + 3 * kTileBytes);
}

template <Passing passing>
void multiply_panels(int rows, int columns, const Left& left, const char* right, int64_t steps, char* c, bool load,
                     Side& side) {
  if (rows > kSide) {
    if (columns > kSide) {
      multiply<2, 2, passing>(left, right, steps, c, load, side);
    } else {
      multiply<2, 1, passing>(left, right, steps, c, load, side);
    }
  } else if (columns > kSide) {
    multiply<1, 2, passing>(left, right, steps, c, load, side);
  } else {
    multiply<1, 1, passing>(left, right, steps, c, load, side);
  }
}

constexpr int64_t kResultsBytes = 768 << 10;  // of a block
constexpr int64_t kMostDepth = 4096;          // of a block, if lines run along k
// If lines run across k. A panel of kAcrossDepth stays in L1. With fewer rows or k than kMany, memory limits the rate:
// blocks of up to kBlockBytes have more columns and fewer k, and the next one is prefetched.
constexpr int64_t kAcrossDepth = 512, kMany = 192, kFewDepth = 256, kLeastDepth = 64;
constexpr int64_t kBlockBytes = 128 << 10;
constexpr int64_t kRowBytes = 1 << 20;  // packed rows
constexpr int64_t kLeastRows = 128, kMostRows = 512;
constexpr int64_t kAroundBytes = 1 << 20;  // results of an expert that are written around the caches

struct Buffers {
  Scratch rows, columns, results;
};
Buffers& buffers() {
  static thread_local Buffers all;
  return all;
}

int64_t parts(int64_t x, int64_t of) { return (x + of - 1) / of; }

// The right operand is packed in pairs of k, and the left one is not, if its lines run along k. So weights whose lines
// run along k are the left operand, and results are transposed; otherwise rows are the left operand.
class Blocks {
 public:
  Blocks(const Product& p, const Following* following) : p_(p), following_(following), swapped_(!p.b.across) {
    const int64_t whole = parts(p.depth, kUnit) * kUnit;
    const int64_t rows = std::min<int64_t>(std::max<int64_t>(kRowBytes / (whole * 2), kLeastRows), kMostRows);
    rows_ = parts(parts(p.m, parts(p.m, rows)), kPanel) * kPanel;
    // Lines along k are read whole, over one panel of columns, because each piece of a page needs a translation.
    ahead_ = swapped_ || std::min(p.m, p.depth) < kMany;
    const int64_t most = swapped_ ? kMostDepth : kAcrossDepth;
    depth_ = parts(parts(whole, parts(whole, most)), kUnit) * kUnit;
    panels_ = swapped_ ? 1 : std::min(parts(p.columns, kPanel), kResultsBytes / (rows_ * kPanel * 4));
    panels_ = std::max<int64_t>(panels_, 1);
    if (ahead_ && !swapped_ && whole > 2 * kFewDepth) {
      depth_ = std::clamp(kBlockBytes / (panels_ * kPanel * 2), kLeastDepth, kFewDepth) / kUnit * kUnit;
    }
    side_.packing.fetch = !ahead_;
    row_bytes_ = whole * kPanel * 2;
    in_place_ = swapped_ && (!p.b.place || p.activated.width);
    around_ = p.out_dtype == kBFloat16 && !p.accumulate && p.m * p.columns * 2 >= kAroundBytes && !swapped_ &&
              p.a.across && reinterpret_cast<uintptr_t>(p.out) % 64 == 0 && p.out_stride % 64 == 0 &&
              p.column_first % kPanel == 0;
  }

  void run() {
    Ahead none;
    for (first_row_ = 0; first_row_ < p_.m; first_row_ += rows_) {
      last_row_ = std::min(p_.m, first_row_ + rows_);
      packed_rows_ = buffers().rows.get(parts(last_row_ - first_row_, kPanel) * row_bytes_);
      for (int64_t r = first_row_; r < last_row_; r += kPanel) {
        (swapped_ ? pack_right : pack_left)(p_.a, r, count(r, last_row_), 0, p_.depth, rows_at(r, 0), none);
      }
      for (int64_t n = 0; n < p_.columns; n += panels_ * kPanel) {
        for (int64_t k = 0; k < p_.depth; k += depth_) block(n, k);
      }
      side_.finishing.rest();
      packed_ = nullptr;
    }
  }

 private:
  static int count(int64_t at, int64_t last) { return static_cast<int>(std::min<int64_t>(kPanel, last - at)); }
  char* rows_at(int64_t row, int64_t k) const {
    return packed_rows_ + (row - first_row_) / kPanel * row_bytes_ + k * kPanel * 2;
  }

  // What the block after (n, k) reads.
  Ahead after(int64_t n, int64_t k) const {
    Ahead ahead;
    const Lines* lines = &p_.b;
    int64_t column = p_.column_first, columns = p_.columns, depth = p_.depth;
    k += depth_;
    if (k >= p_.depth) {
      k = 0;
      n += panels_ * kPanel;
    }
    if (n >= p_.columns) {
      n = 0;
      if (last_row_ == p_.m) {
        if (!following_) return ahead;
        lines = &following_->b;
        column = following_->column_first;
        columns = following_->columns;
        depth = following_->depth;
      }
    }
    const int64_t wide = std::min(panels_ * kPanel, columns - n), deep = std::min(depth_, depth - k);
    ahead.lines = *lines;
    ahead.line = swapped_ ? column + n : k;
    ahead.last = ahead.line + (swapped_ ? wide : deep);
    ahead.from = (swapped_ ? k : column + n) * 2;
    ahead.bytes = (swapped_ ? deep : wide) * 2;
    return ahead;
  }

  // Start to pack columns [n + j panels] and k from k0.
  void pack(int64_t n, int64_t k0, int64_t j) {
    const int64_t first = n + j * kPanel, depth = std::min(depth_, p_.depth - k0);
    const int64_t bytes = depth_padded() * kPanel * 2;
    char* memory = buffers().columns.get(2 * bytes);
    packed_ = memory + (packed_ == memory ? bytes : 0);
    side_.packing.start(p_.b, p_.column_first + first, count(first, p_.columns), k0, depth, packed_);
  }
  int64_t depth_padded() const { return parts(depth_, kUnit) * kUnit; }

  // Columns from n and k from k0, for all packed rows.
  void block(int64_t n, int64_t k0) {
    const int64_t last = std::min(p_.columns, n + panels_ * kPanel), depth = std::min(depth_, p_.depth - k0);
    const int64_t steps = parts(depth, kUnit), panels = parts(last - n, kPanel);
    const int64_t row_panels = parts(last_row_ - first_row_, kPanel);
    whole_ = depth == p_.depth;
    results_ = buffers().results.get((whole_ ? 2 : row_panels * panels) * kResultBytes);
    side_.ahead = ahead_ ? after(n, k0) : Ahead{};
    side_.ahead.per_tile = static_cast<int>(
        parts((side_.ahead.last - side_.ahead.line) * parts(side_.ahead.bytes, 64), row_panels * panels * steps));
    if (swapped_) {
      pass_rows(n, k0, last, depth);
      return;
    }
    // Of a tile that is finished at once: not the memory of the tile before.
    const auto result = [&](int64_t i, int64_t j) {
      return results_ + (whole_ ? ++tiles_ % 2 : i * panels + j) * kResultBytes;
    };
    for (int64_t j = 0; j < panels; ++j) {
      if (!packed_) {
        pack(n, k0, j);
        side_.packing.rest();
      }
      const char* right = packed_;
      // The panel after this one.
      int64_t next_n = n, next_k = k0, next_j = j + 1;
      if (next_j == panels) {
        next_j = 0;
        next_k += depth_;
        if (next_k >= p_.depth) {
          next_k = 0;
          next_n += panels_ * kPanel;
        }
      }
      if (next_n < p_.columns) {
        pack(next_n, next_k, next_j);
        side_.pairs = static_cast<int>(parts((side_.packing.end - side_.packing.at) / 2, row_panels * steps));
      } else {
        packed_ = nullptr;
      }
      for (int64_t i = 0; i < row_panels; ++i) {
        const Left left{rows_at(first_row_ + i * kPanel, k0), 64, kTileBytes, 2 * kTileBytes};
        tile(first_row_ + i * kPanel, n + j * kPanel, k0, steps, left, right, result(i, j));
      }
      side_.packing.rest();
    }
  }

  // One panel of columns whose lines run along k.
  void pass_rows(int64_t n, int64_t k0, int64_t last, int64_t depth) {
    const int64_t first = p_.column_first + n, steps = parts(depth, kUnit);
    const int64_t half = p_.activated.width ? p_.activated.width : kSide;
    Left columns{p_.b.line(first) + k0 * 2, p_.b.stride, p_.b.stride * half, 64};
    if (!in_place_ || depth % kUnit != 0 || n + kPanel > last) {
      char* packed = buffers().columns.get(steps * 2 * kTileBytes);
      pack_left(p_.b, first, count(n, last), k0, depth, packed, side_.ahead);
      columns = {packed, 64, kTileBytes, 2 * kTileBytes};
    }
    for (int64_t row = first_row_, i = 0; row < last_row_; row += kPanel, ++i) {
      const int64_t at = whole_ ? ++tiles_ % 2 : i;
      tile(row, n, k0, steps, columns, rows_at(row, k0), results_ + at * kResultBytes);
    }
  }

  void tile(int64_t row, int64_t column, int64_t k0, int64_t steps, const Left& left, const char* right,
            char* results) {
    const int m = count(row, last_row_), n = count(column, p_.columns);
    const int64_t element = dtype_bytes(p_.out_dtype), width = p_.activated.width;
    const int64_t at = (p_.column_first + column) / (width ? 2 : 1) * element;
    const TileResults to{p_.out ? p_.out + row * p_.out_stride + at : nullptr,
                         p_.out_stride,
                         p_.bias ? p_.bias + at : nullptr,
                         m,
                         n,
                         p_.out_dtype,
                         around_,
                         width * element,
                         width ? p_.activated.act + row * p_.activated.stride + at : nullptr,
                         p_.activated.stride};
    float* c = reinterpret_cast<float*>(results);
    if (k0 == 0 && p_.accumulate) {
      if (side_.finishing.c == c) side_.finishing.rest();  // blocks of one tile share their memory
      (swapped_ ? start_columns_of : start_rows_of)(to, c);
    }
    const bool last = k0 + steps * kUnit >= p_.depth;
    side_.rows = 0;
    if (last && !around_) side_.prefetch_results(to, steps);
    side_.parts = static_cast<int>(parts(side_.finishing.left, steps));
    const bool load = k0 > 0 || p_.accumulate, one_panel = last_row_ - first_row_ <= kPanel;
    const auto multiply = !swapped_   ? (ahead_ ? multiply_panels<Passing::kNone> : multiply_panels<Passing::kLeft>)
                          : one_panel ? multiply_panels<Passing::kLeft>
                                      : multiply_panels<Passing::kRight>;
    multiply(swapped_ ? n : m, swapped_ ? m : kPanel, left, right, steps, results, load, side_);
    side_.finishing.rest();
    if (last) side_.finishing.start(c, to, swapped_);
  }

  const Product& p_;
  const Following* following_;
  const bool swapped_;
  bool in_place_, around_, ahead_;
  int64_t depth_, panels_, rows_, row_bytes_;
  int64_t first_row_ = 0, last_row_ = 0;
  char* packed_rows_ = nullptr;
  char* packed_ = nullptr;  // the next panel of columns
  char* results_ = nullptr;
  bool whole_ = false;
  int64_t tiles_ = 0;
  Side side_;
};

void product(const Product& p, const Following* following) { Blocks(p, following).run(); }

}  // namespace

const Engine& in_pairs() {
  static const Engine activated = {"amx",   kPanel,  kPanel,  1,       kUnit,  0,     0,
                                   nullptr, nullptr, nullptr, nullptr, finish, start, enter_activated,
                                   leave,   product, 0,       nullptr, kSide};
  static const Engine table = {"amx",   kPanel,  kPanel, 1,     kUnit, 0,     0,       nullptr, nullptr,
                               nullptr, nullptr, finish, start, enter, leave, product, 0,       &activated};
  return table;
}

bool permitted() {
  constexpr long request = 0x1023,
                 tile_data = 18;  // ARCH_REQ_XCOMP_PERM, for all threads of the process
  return syscall(SYS_arch_prctl, request, tile_data) == 0;
}

}  // namespace amx
}  // namespace gemm
}  // namespace moe_comm
