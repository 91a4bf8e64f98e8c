// Products of a warp group, and stores of their results, in the model (model.h).
#pragma once

#include "cuda/gemm/model_memory.h"

namespace moe_comm {
namespace gemm {

// --- Products ---

inline uint64_t descriptor(uint32_t address, uint32_t group_bytes, uint32_t stride_bytes = kSwizzled8Rows) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(group_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}
// Elements (mn, 0) to (mn, 15) of a matrix in shared memory, as `descriptor` describes it. major: 1 if MN-major.
inline void load_elements(uint64_t matrix, int major, int mn, float (&v)[16]) {
  check(matrix >> 62 == 1, "a descriptor without 128-byte swizzle");
  const auto start = static_cast<uint32_t>(matrix & 0x3fff) << 4;
  const auto group = static_cast<uint32_t>(matrix >> 16 & 0x3fff) << 4;
  const auto stride = static_cast<uint32_t>(matrix >> 32 & 0x3fff) << 4;
  const auto i = static_cast<uint32_t>(mn);
  uint16_t bits[16];
  for (uint32_t k = 0; k < 16 && major; ++k) {
    const uint32_t offset = i / 64 * group + k / 8 * stride + k % 8 * 128 + i % 64 * 2;
    bits[k] = *reinterpret_cast<const Half*>(shared(swizzled(start + offset), 2));
  }
  for (uint32_t k = 0; k < 16 && !major; k += 8) {
    copy_words(bits + k, shared(swizzled(start + i / 8 * stride + i % 8 * 128 + k * 2), 16));
  }
  for (int k = 0; k < 16; ++k) v[k] = __uint_as_float(static_cast<uint32_t>(bits[k]) << 16);
}
inline void products_begin() {}
inline void products_commit() {
  auto& products = model().products[model().thread()];
  products.groups.push_back(std::move(products.open));
  products.open.clear();
}
template <int kPending>
inline void products_wait() {
  if (model().products[model().thread()].groups.size() > kPending) model().make_products(kPending);
}
template <int kCount>
inline void keep_registers(float (&)[kCount]) {}

// Adds the products of two rows with a column to d[0] and d[2].
template <int kInner>
void add_products(const float (&a)[2][kInner], const float (&b)[kInner], int keep, float* d) {
  const Hidden hidden;  // registers
  for (int h = 0; h < 2; ++h) {
    double total = keep ? d[2 * h] : 0.0;
    for (int k = 0; k < kInner; ++k) total += static_cast<double>(a[h][k]) * static_cast<double>(b[k]);
    d[2 * h] = static_cast<float>(total);
  }
}
// Makes a product at once, if it may, or when its thread waits.
template <class Product>
void start_product(Product product) {
  auto& products = model().products[model().thread()];
  if (!kOrdersAreChecked && products.open.empty() && products.groups.empty() && model().coin()) {
    product();
  } else {
    products.open.push_back(product);
  }
}
template <int kA, int kB>
inline void multiply(float (&d)[128], uint64_t a, uint64_t b, int keep) {
  const int t = model().thread() % 128, row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
  start_product([=, &d] {
    float of_a[2][16], of_b[16];
    for (int h = 0; h < 2; ++h) load_elements(a, kA, row + 8 * h, of_a[h]);
    for (int j = 0; j < 32; ++j) {
      for (int c = 0; c < 2; ++c) {
        load_elements(b, kB, 8 * j + column + c, of_b);
        add_products(of_a, of_b, keep, d + 4 * j + c);
      }
    }
  });
}

// The value of e4m3 bits: 4 bits of exponent, 3 of fraction, no infinity.
inline float e4m3(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 3 & 15), fraction = static_cast<int>(bits & 7);
  if (exponent == 15 && fraction == 7) return std::nanf("");
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                   : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return bits & 0x80 ? -size : size;
}
// Elements (mn, 0) to (mn, 31) of a K-major matrix of bytes.
inline void load_e4m3(uint64_t matrix, int mn, float (&v)[32]) {
  check(matrix >> 62 == 1, "a descriptor without 128-byte swizzle");
  const auto start = static_cast<uint32_t>(matrix & 0x3fff) << 4;
  const auto stride = static_cast<uint32_t>(matrix >> 32 & 0x3fff) << 4;
  const auto i = static_cast<uint32_t>(mn);
  uint32_t words[8];
  for (uint32_t k = 0; k < 32; k += 16) {
    copy_words(words + k / 4, shared(swizzled(start + i / 8 * stride + i % 8 * 128 + k), 16));
  }
  for (int k = 0; k < 32; ++k) v[k] = e4m3(words[k / 4] >> (k % 4 * 8) & 0xff);
}
inline void multiply_e4m3(float (&d)[64], uint64_t a, uint64_t b, int keep) {
  const int t = model().thread() % 128, row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
  start_product([=, &d] {
    float of_a[2][32], of_b[32];
    for (int h = 0; h < 2; ++h) load_e4m3(a, row + 8 * h, of_a[h]);
    for (int j = 0; j < 16; ++j) {
      for (int c = 0; c < 2; ++c) {
        load_e4m3(b, 8 * j + column + c, of_b);
        add_products(of_a, of_b, keep, d + 4 * j + c);
      }
    }
  });
}

// --- Registers, and stores of results ---

template <int kRegisters>
inline void fewer_registers() {}
template <int kRegisters>
inline void more_registers() {}
inline uint32_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t bf16_pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const int lane = model().thread() % 32;
  uint32_t rows[4];
  {
    const Hidden hidden;
    const uint32_t* addresses = exchanged(to);
    for (int q = 0; q < 4; ++q) rows[q] = addresses[q * 8 + lane / 4];
  }
  const uint32_t values[4] = {a, b, c, d};
  for (int q = 0; q < 4; ++q) {
    shared(rows[q], 16);  // aligned
    *reinterpret_cast<Word*>(shared(rows[q] + static_cast<uint32_t>(lane % 4 * 4), 4)) = values[q];
  }
}
inline void load_matrices(uint32_t from, uint32_t (&v)[4]) {
  const int lane = model().thread() % 32;
  uint32_t rows[4];
  {
    const Hidden hidden;
    const uint32_t* addresses = exchanged(from);
    for (int q = 0; q < 4; ++q) rows[q] = addresses[q * 8 + lane / 4];
  }
  for (int q = 0; q < 4; ++q) {
    shared(rows[q], 16);  // aligned
    v[q] = *reinterpret_cast<Word*>(shared(rows[q] + static_cast<uint32_t>(lane % 4 * 4), 4));
  }
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float float_of(uint32_t pair, int high) { return __uint_as_float(high ? pair & 0xffff0000u : pair << 16); }

}  // namespace gemm
}  // namespace moe_comm
