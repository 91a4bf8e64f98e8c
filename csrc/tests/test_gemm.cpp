// Grouped GEMMs against double precision, with memory of the exact size, so that sanitizers see reads beyond it.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/gemm/gemm.h"
#include "cpu/kernels.h"
#include "layout.h"

using namespace moe_comm;

namespace {

uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

// Elements of fp32 or bf16 in memory of their own.
struct Matrix {
  Matrix(int64_t rows, int64_t columns, bool bf16, std::mt19937_64& random)
      : width(columns), element(bf16 ? 2 : 4), bytes(new char[static_cast<size_t>(rows * columns * element)]) {
    for (int64_t i = 0; i < rows * columns; ++i) {
      const float x = static_cast<float>(static_cast<int>(random() % 512) - 256) / 128;  // exact in bf16
      const uint32_t u = bits_of(x) >> (bf16 ? 16 : 0);
      std::memcpy(&bytes[static_cast<size_t>(i * element)], &u, static_cast<size_t>(element));
    }
  }
  double at(int64_t row, int64_t column) const {
    uint32_t u = 0;
    std::memcpy(&u, &bytes[static_cast<size_t>((row * width + column) * element)], static_cast<size_t>(element));
    if (element == 2) u <<= 16;
    float x;
    std::memcpy(&x, &u, sizeof x);
    return x;
  }
  uintptr_t base() const { return reinterpret_cast<uintptr_t>(bytes.get()); }

  int64_t width, element;
  std::unique_ptr<char[]> bytes;
};

bool close(double a, double b, bool bf16) { return std::abs(a - b) <= (bf16 ? 0.02 : 1e-4) * (1 + std::abs(b)); }

}  // namespace

TEST(gemm_reads_and_writes_its_operands_only) {
  std::mt19937_64 random(1);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int trial = 0; trial < 60 * test::repeats(); ++trial) {
    const bool bf16 = trial % 2 == 1, across = trial % 4 >= 2, listed = trial % 3 == 0, wide = trial == 15;
    const int dtype = bf16 ? kBFloat16 : kFloat32;
    int64_t experts = 1 + below(3), n = 1 + below(80), k = 1 + below(trial % 5 == 0 ? 1200 : 90);
    std::vector<int64_t> sizes;
    for (int64_t e = 0; e < experts; ++e) sizes.push_back(below(4) == 0 ? 0 : below(40));
    if (wide) {  // blocks of wide products of AMX
      experts = 1;
      n = k = 193;
      sizes = {195};
    }
    int64_t total = 0;
    for (int64_t s : sizes) total += s;
    const Matrix one(total + 1, k, bf16, random), two(3, k, bf16, random), y(total + 1, n, bf16, random);
    const Matrix w(experts * (across ? k : n), across ? n : k, bf16, random);
    Matrix out(total + 1, n, bf16, random);
    std::vector<int64_t> place;
    for (int64_t i = 0; i < total; ++i) place.push_back(below(2) ? pack_place(1, below(3)) : pack_place(0, i));
    gemm::Rows x{{one.base()}, {total + 1}, k * one.element, nullptr, total, k, nullptr};
    if (listed) x = {{one.base(), two.base()}, {total + 1, 3}, k * one.element, place.data(), total, k, nullptr};
    const auto value = [&](int64_t r, int64_t j) {
      if (!listed) return one.at(r, j);
      const int64_t p = place[static_cast<size_t>(r)];
      return (place_owner(p) ? two : one).at(place_row(p), j);
    };
    const gemm::Groups groups{sizes.data(), experts, dtype, 1 + trial % 2};
    const gemm::Stack stack = across ? gemm::Stack{w.base(), n * k * w.element, w.element, n * w.element}
                                     : gemm::Stack{w.base(), n * k * w.element, k * w.element, w.element};
    for (const std::string& isa : gemm::isa_names(dtype)) {
      CHECK(gemm::set_isa(dtype, isa));
      gemm::rows(groups, x, stack, n, {}, {out.base(), n * out.element, false});
      std::vector<float> grad(static_cast<size_t>(experts * n * k), 7.0f);
      const gemm::Rows left{{y.base()}, {total + 1}, n * y.element, nullptr, total, n, nullptr};
      const gemm::Stack into{reinterpret_cast<uintptr_t>(grad.data()), n * k * 4, k * 4, 4};
      gemm::weights(groups, left, x, into, kFloat32, trial % 7 == 0);
      for (int check = 0; check < 60; ++check) {
        int64_t e = below(experts), first = 0;
        const int64_t i = below(n), j = below(k);
        for (int64_t before = 0; before < e; ++before) first += sizes[static_cast<size_t>(before)];
        const int64_t size = sizes[static_cast<size_t>(e)];
        double sum = trial % 7 == 0 ? 7 : 0;
        for (int64_t r = first; r < first + size; ++r) sum += y.at(r, i) * value(r, j);
        CHECK(close(grad[static_cast<size_t>((e * n + i) * k + j)], sum, false));
        if (size == 0) continue;
        const int64_t r = first + below(size);
        sum = 0;
        for (int64_t c = 0; c < k; ++c) sum += value(r, c) * (across ? w.at(e * k + c, i) : w.at(e * n + i, c));
        CHECK(close(out.at(r, i), sum, bf16));
      }
    }
    CHECK(gemm::set_isa(dtype, gemm::isa_names(dtype).front()));
  }
}

TEST(gemm_refuses_row_lists_that_are_out_of_range) {
  std::mt19937_64 random(2);
  const Matrix one(5, 8, false, random), two(2, 8, false, random), w(4, 8, false, random);
  Matrix out(6, 4, false, random);
  const int64_t sizes[] = {2, 4};
  for (int trial = 0; trial < 300 * test::repeats(); ++trial) {
    std::vector<int64_t> place;
    bool valid = true;
    for (int i = 0; i < 6; ++i) {
      const int64_t owner = static_cast<int64_t>(random() % 22) == 0 ? static_cast<int64_t>(random() % 5) - 1
                                                                     : static_cast<int64_t>(random() % 2);
      const int64_t row =
          random() % 11 == 0 ? static_cast<int64_t>(random() >> 16) : static_cast<int64_t>(random() % 2);
      place.push_back(static_cast<int64_t>(static_cast<uint64_t>(owner) << kOwnerShift) | (row & kRowMask));
      valid = valid && (owner == 0 || owner == 1) && (row & kRowMask) < (owner == 0 ? 5 : 2);
    }
    bool refused = false;
    try {
      gemm::rows({sizes, 2, kFloat32, 1}, {{one.base(), two.base()}, {5, 2}, 32, place.data(), 6, 8, nullptr},
                 {w.base(), 0, 32, 4}, 4, {}, {out.base(), 16, false});
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused != valid);
  }
}

namespace {

// Elements with all bits of the mantissa, so that each order of additions has its own result. Those of line 0 are so
// small that results are denormals.
std::vector<uint16_t> mixed(int64_t lines, int64_t width, int dtype, test::Random& random) {
  std::vector<uint16_t> words;
  for (int64_t i = 0; i < lines * width; ++i) {
    const uint64_t bits = random.next();
    const bool zero = random.below(16) == 0;
    const uint32_t sign = static_cast<uint32_t>(bits >> 63), exponent = static_cast<uint32_t>(bits >> 32) % 12;
    const uint32_t mantissa = static_cast<uint32_t>(bits) & 0x7fffff;
    if (dtype == kFloat16) {
      words.push_back(static_cast<uint16_t>(zero ? 0 : sign << 15 | (8 + exponent) << 10 | mantissa >> 13));
      continue;
    }
    const uint32_t u = zero ? 0 : sign << 31 | ((i < width ? 0 : 121) + exponent) << 23 | mantissa;
    if (dtype == kFloat32) words.push_back(static_cast<uint16_t>(u));
    words.push_back(static_cast<uint16_t>(u >> 16));
  }
  return words;
}

uint64_t hashed(uint64_t hash, const void* data, size_t bytes) {  // FNV-1a
  const auto* at = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 0x100000001b3ull;
  return hash;
}

template <class T>
uintptr_t address(T& values) {
  return reinterpret_cast<uintptr_t>(values.data());
}

// A hash of products and gradients of weights in many shapes.
uint64_t hash_of_results(int dtype) {
  test::Random random(3);
  uint64_t hash = 0xcbf29ce484222325ull;
  const int64_t element = dtype == kFloat32 ? 4 : 2;
  const std::vector<int64_t> batches[] = {{1, 0, 37}, {2, 5, 14}, {300, 9}};
  const std::pair<int64_t, int64_t> widths[] = {{45, 70}, {33, 1100}, {513, 31}, {64, 64}};
  for (const std::vector<int64_t>& sizes : batches) {
    for (const auto& [n, k] : widths) {
      const auto experts = static_cast<int64_t>(sizes.size());
      int64_t total = 0;
      for (int64_t s : sizes) total += s;
      const auto x = mixed(total, k, dtype, random), y = mixed(total, n, dtype, random);
      const auto w = mixed(experts * n, k, dtype, random), bias = mixed(experts, n, dtype, random);
      std::vector<int64_t> place;
      std::vector<float> scale;
      for (int64_t i = 0; i < total; ++i) place.push_back(pack_place(0, i > 0 ? random.below(total) : 0));
      for (int64_t i = 0; i < total; ++i) scale.push_back(static_cast<float>(random.unit()));
      const gemm::Groups groups{sizes.data(), experts, dtype, 1};
      const gemm::Rows in_order{{address(x)}, {total}, k * element, nullptr, total, k, nullptr};
      const gemm::Rows listed{{address(x)}, {total}, k * element, place.data(), total, k, scale.data()};
      const gemm::Rows left{{address(y)}, {total}, n * element, nullptr, total, n, nullptr};
      for (const gemm::Rows& rows : {in_order, listed}) {
        for (bool across : {false, true}) {
          auto out = mixed(total, n, dtype, random);
          const gemm::Stack stack = across ? gemm::Stack{address(w), n * k * element, element, n * element}
                                           : gemm::Stack{address(w), n * k * element, k * element, element};
          const gemm::Stack added{address(bias), n * element, 0, element};
          gemm::rows(groups, rows, stack, n, across ? gemm::Stack{} : added, {address(out), n * element, across});
          hash = hashed(hash, out.data(), out.size() * 2);
        }
        for (bool accumulate : {false, true}) {
          auto sums = mixed(experts * n, k, kFloat32, random);
          gemm::weights(groups, left, rows, {address(sums), n * k * 4, k * 4, 4}, kFloat32, accumulate);
          hash = hashed(hash, sums.data(), sums.size() * 2);
        }
      }
    }
  }
  return hash;
}

}  // namespace

// `make neon` and `make sanitize` compare the results on aarch64 and x86-64 with the same numbers.
TEST(gemm_bits_are_those_of_every_other_processor) {
  const std::pair<int, uint64_t> expected[] = {
      {kFloat32, 14306214906491322504ull}, {kFloat16, 3152036703115237969ull}, {kBFloat16, 4106715706814136730ull}};
  for (const auto& [dtype, hash] : expected) {
    for (const std::string& isa : gemm::isa_names(dtype)) {
      if (isa == "avx512_bf16") continue;  // has an order of its own
      CHECK(gemm::set_isa(dtype, isa));
      CHECK_EQ(hash_of_results(dtype), hash);
    }
    CHECK(gemm::set_isa(dtype, gemm::isa_names(dtype).front()));
  }
}
