// The inner loops of the GEMMs, one table per instruction set and order of additions (see README.md).
//
// An operand is a matrix of [outer, k] elements that is stored as lines: lines run along k, or across k. Packing reads
// lines from anywhere and writes panels, so the tiles read contiguous memory only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../layout.h"
#include "../kernels.h"

namespace moe_comm {
namespace gemm {

// Lines in the memory of one or several sources. Elements of a line are contiguous.
struct Lines {
  const char* const* base;  // per source
  const int64_t* place;     // packed places (layout.h) of the lines; null: line i is row i of source 0
  int64_t stride;           // bytes between the rows of a source
  bool across;              // lines run across k: line i holds k = i of all outer indices
  int64_t outer, depth;

  const char* line(int64_t i) const {
    return place ? base[place_owner(place[i])] + place_row(place[i]) * stride : base[0] + i * stride;
  }
};

// Memory that the next block reads. The inner loops prefetch it into L2 step by step, so that it arrives while they
// compute. Rows of `bytes` from byte `from` of lines [line, last).
struct Ahead {
  Lines lines{};
  int64_t line = 0, last = 0, from = 0, bytes = 0;
  int per_pack = 0;  // cache lines per four vectors of packed columns
  int per_tile = 0;  // cache lines per `every` times four k of a tile
  int every = 1, wait = 0;
  const char *at = nullptr, *end = nullptr;
  // Results that the next tile is added to.
  const char* result = nullptr;
  int64_t result_stride = 0;
  int result_rows = 0;
  // Packed rows of the next tiles.
  const char *rows = nullptr, *rows_end = nullptr;

  __attribute__((always_inline)) void fetch(int count) {
    for (; count > 0; --count) {
      if (at >= end) {
        if (line >= last) return;
        at = lines.line(line++) + from;
        end = at + bytes;
      }
      __builtin_prefetch(at, 0, 2);
      at += 64;
    }
  }
};

struct Product;
struct Following;

struct Engine {
  const char* name;
  int panel_a, panel_b;  // rows and columns of a tile, at most
  int row_unit;          // a tile's cost grows in steps of so many rows
  int unit;              // blocks of k are multiples of this; the last one is padded with zeros
  // Bytes of a panel per k, of A and B.
  int bytes_a, bytes_b;
  // Pack outer indices [first, first + count) and k in [k0, k0 + depth), with depth padded to a multiple of `unit`.
  void (*pack_a)(const Lines&, int dtype, int64_t first, int count, int64_t k0, int64_t depth, char* panel,
                 Ahead& ahead);
  void (*pack_b)(const Lines&, int dtype, int64_t first, int count, int64_t k0, int64_t depth, char* panel,
                 Ahead& ahead);
  // c [m, n] += a * b over `depth`; if `load` is false, c starts at zero. c_stride in elements.
  void (*tile)(int m, int n, const char* a, const char* b, int64_t depth, float* c, int64_t c_stride, bool load,
               Ahead& ahead);
  // The same for all of c's columns [first, first + n), of the lines of B, without packing them. For few rows: across
  // k, c is loaded again for every four k; along k, in fp32 only, the sums of up to `few` rows are in registers. Null
  // if the order is not one sequence.
  void (*sweep)(const Lines& b, int dtype, int m, const char* a, int64_t first, int64_t n, float* c, int64_t c_stride,
                bool load);
  // out[r] = c[r] + bias, rounded once to dtype. bias may be null; out_stride in bytes.
  void (*finish)(const float* c, int64_t c_stride, const char* bias, char* out, int64_t out_stride, int64_t rows,
                 int64_t columns, int dtype);
  // c = out in fp32.
  void (*start)(float* c, int64_t c_stride, const char* out, int64_t out_stride, int64_t rows, int64_t columns,
                int dtype);
  // Called on each thread around all of the above.
  uint64_t (*enter)();
  void (*leave)(uint64_t);
  // The whole product, instead of the functions for packing and tiles; or null.
  void (*product)(const Product&, const Following*) = nullptr;
  int few = 0;  // of `sweep`
  // For products with SwiGLU in their epilogue (Activated), of columns whose lines run along k; or null.
  const Engine* activated = nullptr;
  int paired = 0;  // of that: so many columns of gate are beside as many of up; a width must be a multiple
};

}  // namespace gemm
}  // namespace moe_comm
