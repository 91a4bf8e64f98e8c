// What tests of the GEMMs share: a launcher of the model, matrices of small whole numbers, and checks.
#pragma once

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>

#include "tests/gemm/kernels.h"

namespace moe_comm {
namespace gemm {

class ModelStarter : public p2p::Starter {
 public:
  explicit ModelStarter(unsigned seed, int64_t first = 0) : seed_(seed), first_(first) {}

  void start(int kernel, const p2p::Launch& how, const void* args) override {
    run_kernel(kernel, args, how.blocks, how.threads, how.shared_bytes, seed_, first_);
  }

 private:
  const unsigned seed_;
  const int64_t first_;
};

// Rows of a buffer. The driver describes no empty matrix, and nothing is launched for one, so without rows of any
// expert a buffer has room for one.
inline int64_t buffer_rows(int64_t rows) { return std::max<int64_t>(rows, 1); }

// A matrix of 16-bit numbers for each expert, with rows that are further apart than they are wide.
struct Numbers {
  // parts: of a row. TMA describes them if they are as far apart as a row is long, or a fraction of it.
  Numbers(int64_t experts, int64_t rows, int64_t columns, std::mt19937* random, int64_t parts = 1)
      : rows(rows), columns(columns), stride(parts > 1 ? columns / parts * (parts + 1) : columns + 8) {
    values.assign(static_cast<size_t>(experts * rows * stride + 8), 0x7fc1);
    start = (16 - reinterpret_cast<uintptr_t>(values.data()) % 16) % 16 / 2;
    for (int64_t e = 0; random != nullptr && e < experts; ++e) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) at(e, r, c) = to_bits(static_cast<int>((*random)() % 9) - 4);
      }
    }
  }
  static uint16_t to_bits(double x) { return static_cast<uint16_t>(bf16_bits(static_cast<float>(x))); }
  uint16_t& at(int64_t e, int64_t r, int64_t c) {
    return values[start + static_cast<size_t>((e * rows + r) * stride + c)];
  }
  double number(int64_t e, int64_t r, int64_t c) { return float_of(at(e, r, c), 0); }
  Matrices matrices() {
    return {reinterpret_cast<int64_t>(values.data() + start), buffer_rows(rows), columns, stride,
            buffer_rows(rows) * stride};
  }

  const int64_t rows, columns, stride;
  std::vector<uint16_t> values;
  size_t start = 0;
};

inline int failures = 0;

inline void expect(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  if (failures < 10) std::printf("FAILED %s\n", what.c_str());
}

}  // namespace gemm
}  // namespace moe_comm
