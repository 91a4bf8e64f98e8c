// One product of two operands on one thread, in blocks.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "engine.h"

namespace moe_comm {
namespace gemm {

// Memory of one thread, reused by its later calls.
class Scratch {
 public:
  char* get(int64_t bytes);

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t bytes_ = 0;
};

// SwiGLU in the epilogue of a product: columns are [gate | up], each of `width`, and so is `out`, which may be null. A
// panel has columns of both: `paired_lines`.
struct Activated {
  int64_t width = 0;    // 0: none
  char* act = nullptr;  // of row 0
  int64_t stride = 0;   // bytes
};

// out [m, columns] (+)= a * b over depth, plus bias. Outer indices of `a` start at 0, those of `b` at column_first.
struct Product {
  Lines a, b;
  int a_dtype;
  int64_t m, column_first, columns, depth;
  const char* bias;  // of column 0, or null
  char* out;         // of row 0 and column 0
  int64_t out_stride;
  int out_dtype;
  bool accumulate;
  Activated activated{};
};

// Columns of b that the thread multiplies after this product; their first block is prefetched.
struct Following {
  Lines b;
  int64_t m, column_first, columns, depth;
};

void multiply(const Engine& e, const Product& p, const Following* following);

}  // namespace gemm
}  // namespace moe_comm
