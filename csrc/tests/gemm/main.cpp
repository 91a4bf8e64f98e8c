// Runs the kernels of csrc/cuda/gemm in the model of Hopper's instructions (cuda/gemm/model.h) against float64.
//
//   c++ -std=c++17 -O2 -DMOE_GEMM_MODEL -I csrc csrc/tests/gemm/main.cpp csrc/cuda/gemm/launch.cpp -o gemm_model
//   gemm_model [seed of routings that are drawn; 0: one case]
//
// Operands are small whole numbers, so sums are exact and results have to be equal. Rows beyond those of all experts
// are NaN and must not be read as numbers; memory beyond the results must not change.
#include <algorithm>
#include <cstdio>
#include <string>

#include "tests/gemm/kernels.h"
#include "tests/gemm/numbers.h"
#include "tests/gemm/ranks.h"

namespace moe_comm {
namespace gemm {
namespace {

struct Case {
  std::vector<int64_t> counts;
  int64_t columns, inner, blocks;
  int64_t total() const {
    int64_t sum = 0;
    for (const int64_t n : counts) sum += n;
    return sum;
  }
  int64_t experts() const { return static_cast<int64_t>(counts.size()); }
};

// gpt-oss's activation and its gradient in float64, of gate, up and the gradient of the activation.
constexpr Glu kClamped = {1.702f, 7.0f};
struct Exact {
  double act, gate, up;
};
Exact clamped_exact(double gate, double up, double grad) {
  const double alpha = kClamped.alpha, limit = kClamped.limit;
  const double g = std::min(gate, limit), u = std::max(std::min(up, limit), -limit), s = 1 / (1 + std::exp(-alpha * g));
  return {(u + 1) * g * s, gate > limit ? 0 : grad * (u + 1) * s * (1 + alpha * g * (1 - s)),
          std::abs(up) > limit ? 0 : grad * g * s};
}
// Of a value that was rounded to bf16.
bool near(double value, double exact) { return std::abs(value - exact) <= std::abs(exact) * 0.005 + 1e-4; }

// kind: 0 plain, 1 transposed, 2 SwiGLU, 3 SwiGLU of taken rows; 4, 5: as 2, 3 with gpt-oss's activation
void test_rows(const Case& c, int kind, bool biased, unsigned seed) {
  std::mt19937 random(seed);
  const bool clamped = kind >= 4;
  if (clamped) kind -= 2;
  const int64_t rows = c.total(), beyond = 5, width = c.columns, all = kind >= 2 ? 2 * width : width;
  const int64_t top_k = kind == 3 ? 3 : 1;
  Numbers x(1, rows, c.inner, &random), out(1, rows + beyond, all, nullptr, all / width),
      act(1, rows + beyond, width, nullptr);
  Numbers w(c.experts(), kind == 1 ? c.inner : all, kind == 1 ? all : c.inner, &random);
  Numbers bias(1, c.experts(), all, &random);
  RowsProduct p;
  p.rows = x.matrices();
  p.w = w.matrices();
  p.out = out.matrices();
  p.out.rows = buffer_rows(rows);
  if (kind >= 2) {
    p.act = act.matrices();
    p.act.rows = buffer_rows(rows);
  }
  std::vector<int64_t> slots;
  for (int64_t r = 0; r < rows; ++r) slots.push_back(kind == 3 ? static_cast<int64_t>(random() % (rows * top_k)) : r);
  if (kind == 3) {
    p.slots_at = reinterpret_cast<int64_t>(slots.data());
    p.top_k = top_k;
  }
  p.counts_at = reinterpret_cast<int64_t>(c.counts.data());
  p.experts = c.experts();
  p.transposed = kind == 1;
  if (biased) {
    p.bias_at = bias.matrices().at;
    p.bias_stride = bias.stride;
  }
  if (clamped) p.alpha = kClamped.alpha, p.limit = kClamped.limit;
  Launcher(std::make_shared<ModelStarter>(seed), reinterpret_cast<uintptr_t>(&encode_map), c.blocks).rows(p, 0);
  const std::string name = "rows, kind " + std::to_string(kind) + (clamped ? " clamped" : "") +
                           (biased ? " with biases, " : ", ") + std::to_string(rows) + " x " + std::to_string(width) +
                           " x " + std::to_string(c.inner);
  int64_t row = 0;
  for (int64_t e = 0; e < c.experts(); ++e) {
    for (int64_t r = 0; r < c.counts[static_cast<size_t>(e)]; ++r, ++row) {
      for (int64_t n = 0; n < all; ++n) {
        double sum = biased ? bias.number(0, e, n) : 0;
        for (int64_t k = 0; k < c.inner; ++k) {
          sum += x.number(0, slots[static_cast<size_t>(row)] / top_k, k) *
                 (kind == 1 ? w.number(e, k, n) : w.number(e, n, k));
        }
        expect(out.at(0, row, n) == Numbers::to_bits(sum), name);
      }
      for (int64_t n = 0; kind >= 2 && n < width; ++n) {
        const auto gate = static_cast<float>(out.number(0, row, clamped ? 2 * n : n));
        const auto up = static_cast<float>(out.number(0, row, clamped ? 2 * n + 1 : width + n));
        const float value = clamped ? clamped_glu(kClamped, gate, up) : swiglu(gate, up);
        expect(act.at(0, row, n) == Numbers::to_bits(value), name + ", act");
        expect(!clamped || near(act.number(0, row, n), clamped_exact(gate, up, 0).act), name + ", formula");
      }
    }
  }
  for (int64_t r = rows; r < rows + beyond; ++r) {
    for (int64_t n = 0; n < out.stride; ++n) expect(out.at(0, r, n) == 0x7fc1, name + ", beyond the rows");
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = all; n < out.stride; ++n) expect(out.at(0, r, n) == 0x7fc1, name + ", beyond the columns");
  }
}

// The sum of a row over a section of 256 columns, in the order of the contract.
float sum_of_section(const std::vector<float>& products, int64_t section) {
  float lanes[32] = {};
  for (int64_t n = section * 256; n < std::min<int64_t>(section * 256 + 256, products.size()); ++n) {
    lanes[n % 32] += products[static_cast<size_t>(n)];
  }
  for (int half = 16; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// weighted: by routing weights, whose gradients are computed as well. placed: rows are in another order than slots.
void test_gradient(const Case& c, bool weighted, bool placed, bool clamped, unsigned seed) {
  std::mt19937 random(seed);
  const int64_t rows = c.total(), beyond = 5, width = c.columns, sections = (width + 255) / 256;
  Numbers grad(1, rows, c.inner, &random), w(c.experts(), c.inner, width, &random), h(1, rows, 2 * width, &random, 2);
  Numbers grad_h(1, rows + beyond, 2 * width, nullptr, 2), act(1, rows + beyond, width, nullptr);
  for (int64_t r = 0; r < rows; ++r) {  // of many magnitudes, so that the order of additions shows
    for (int64_t n = 0; n < 2 * width; ++n) {
      const int power = -static_cast<int>(random() % 16);
      h.at(0, r, n) = Numbers::to_bits(std::ldexp(h.number(0, r, n), clamped ? power / 2 + 2 : power));
    }
  }
  std::vector<int64_t> slots(static_cast<size_t>(rows));
  std::vector<float> weights(static_cast<size_t>(rows)), sums(static_cast<size_t>(sections * rows) + 1, -7.0f);
  for (size_t r = 0; r < slots.size(); ++r) {
    slots[r] = placed ? static_cast<int64_t>(slots.size() - 1 - r) : static_cast<int64_t>(r);
    weights[r] = static_cast<float>(random() % 1000) / 1000;
  }
  GradientProduct p;
  p.grad = grad.matrices();
  p.w = w.matrices();
  p.h = h.matrices();
  p.grad_h = grad_h.matrices();
  p.act = act.matrices();
  p.grad_h.rows = p.act.rows = buffer_rows(rows);
  p.counts_at = reinterpret_cast<int64_t>(c.counts.data());
  p.experts = c.experts();
  if (weighted) p.weights_at = reinterpret_cast<int64_t>(weights.data());
  if (weighted) p.sections_at = reinterpret_cast<int64_t>(sums.data());
  if (placed) p.slots_at = reinterpret_cast<int64_t>(slots.data());
  if (clamped) p.alpha = kClamped.alpha, p.limit = kClamped.limit;
  Launcher(std::make_shared<ModelStarter>(seed), reinterpret_cast<uintptr_t>(&encode_map), c.blocks)
      .swiglu_gradient(p, 0);
  const std::string name = std::string("gradient of SwiGLU") + (clamped ? ", clamped" : "") +
                           (weighted ? ", weighted, " : ", ") + std::to_string(rows) + " x " + std::to_string(width) +
                           " x " + std::to_string(c.inner);
  const auto round = [](double x) { return static_cast<float>(float_of(Numbers::to_bits(x), 0)); };
  int64_t row = 0;
  for (int64_t e = 0; e < c.experts(); ++e) {
    for (int64_t r = 0; r < c.counts[static_cast<size_t>(e)]; ++r, ++row) {
      const float weight = weighted ? weights[static_cast<size_t>(slots[static_cast<size_t>(row)])] : 1.0f;
      std::vector<float> products;
      for (int64_t n = 0; n < width; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < c.inner; ++k) sum += grad.number(0, row, k) * w.number(e, k, n);
        const int64_t of_gate = clamped ? 2 * n : n, of_up = clamped ? 2 * n + 1 : width + n;
        const auto gate = static_cast<float>(h.number(0, row, of_gate)),
                   up = static_cast<float>(h.number(0, row, of_up));
        const SwigluGradient v =
            clamped ? clamped_gradient(kClamped, gate, up, round(sum)) : swiglu_gradient(gate, up, round(sum));
        products.push_back(round(v.act) * round(sum));
        expect(act.at(0, row, n) == Numbers::to_bits(round(v.act) * weight), name + ", act");
        expect(grad_h.at(0, row, of_gate) == Numbers::to_bits(round(v.gate) * weight), name + ", gate");
        expect(grad_h.at(0, row, of_up) == Numbers::to_bits(round(v.up) * weight), name + ", up");
        // The formula itself, in float64.
        if (clamped) {
          const Exact e64 = clamped_exact(gate, up, round(sum));
          expect(near(v.act, e64.act) && near(v.gate, e64.gate) && near(v.up, e64.up), name + ", formula");
          continue;
        }
        const double s = 1 / (1 + std::exp(-static_cast<double>(gate))), exact = sum * up * s * (1 + gate * (1 - s));
        expect(std::abs(v.gate - exact) <= std::abs(exact) * 0.01 + 1e-4, name + ", formula");
      }
      for (int64_t s = 0; weighted && s < sections; ++s) {
        expect(sums[static_cast<size_t>(s * rows + row)] == sum_of_section(products, s), name + ", sums");
      }
    }
  }
  expect(sums.back() == -7.0f && (weighted || sums.front() == -7.0f), name + ", beyond the sums");
  for (int64_t r = 0; r < rows + beyond; ++r) {
    for (int64_t n = r < rows ? 2 * width : 0; n < grad_h.stride; ++n) {
      expect(grad_h.at(0, r, n) == 0x7fc1, name + ", grad_h outside");
    }
    for (int64_t n = r < rows ? width : 0; n < act.stride; ++n) {
      expect(act.at(0, r, n) == 0x7fc1, name + ", act outside");
    }
  }
}

void test_weights(const Case& c, bool add, unsigned seed) {
  std::mt19937 random(seed);
  const int64_t rows = c.total(), experts = c.experts(), m = c.columns, n = c.inner, beyond = 7;
  Numbers a(1, rows, m, &random), b(1, rows, n, &random), out(experts, m, n, nullptr);
  Numbers more_a(1, rows + beyond, m, nullptr), more_b(1, rows + beyond, n, nullptr);  // NaN beyond the rows
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < m; ++i) more_a.at(0, r, i) = a.at(0, r, i);
    for (int64_t i = 0; i < n; ++i) more_b.at(0, r, i) = b.at(0, r, i);
  }
  std::vector<float> sums(static_cast<size_t>(experts * m * n) + 4);
  for (size_t i = 0; i < sums.size(); ++i) sums[i] = static_cast<float>(i % 7);
  WeightsProduct p;
  p.a = more_a.matrices();
  p.b = more_b.matrices();
  p.out = out.matrices();
  if (add) p.out = {reinterpret_cast<int64_t>(sums.data()), m, n, n, m * n};
  p.counts_at = reinterpret_cast<int64_t>(c.counts.data());
  p.experts = experts;
  p.add = add;
  Launcher(std::make_shared<ModelStarter>(seed), reinterpret_cast<uintptr_t>(&encode_map), c.blocks).weights(p, 0);
  const std::string name = std::string("weights") + (add ? ", added, " : ", ") + std::to_string(m) + " x " +
                           std::to_string(n) + " from " + std::to_string(rows) + " rows";
  int64_t first = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t count = c.counts[static_cast<size_t>(e)];
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (int64_t r = first; r < first + count; ++r) sum += a.number(0, r, i) * b.number(0, r, j);
        const auto index = static_cast<size_t>((e * m + i) * n + j);
        if (add) {
          expect(sums[index] == static_cast<float>(sum + static_cast<double>(index % 7)), name);
        } else {
          expect(out.at(e, i, j) == Numbers::to_bits(sum), name);
        }
      }
    }
    first += count;
  }
}

// e4m3 values are whole numbers, so that the sum of a block is exact, and the order of blocks and of multiplications by
// scales gives the bits of the result. sources: blocks of rows of each expert, which are not full; 0: none.
void test_fp8(const Case& c, int64_t blocks_of_rows, unsigned seed) {
  const int64_t sources = std::max<int64_t>(blocks_of_rows, 1);
  const bool blocked = blocks_of_rows > 0;
  std::mt19937 random(seed);
  const int64_t width = c.columns, inner = (c.inner * 2 + 15) / 16 * 16, beyond = 5, experts = c.experts();
  const int64_t blocks = (inner + 127) / 128, w_blocks = (width + 127) / 128;
  int64_t room = 0;
  std::vector<int64_t> counts, starts;
  for (const int64_t n : c.counts) room = std::max(room, n);
  for (const int64_t n : c.counts) {
    for (int64_t s = 0; s < sources; ++s) counts.push_back(blocked ? n * (s + 1) / 3 : n);
  }
  int64_t total = 0;
  for (size_t g = 0; g < counts.size(); ++g) {
    starts.push_back(total);
    total += blocked ? room : counts[g];
  }
  const auto size = [](int64_t n) { return static_cast<size_t>(n); };
  const int64_t stride = inner + 16;
  std::vector<uint8_t> store(size((total + beyond + experts * width) * stride + 32), 0x7f);  // NaN
  uint8_t* const x = store.data() + (16 - reinterpret_cast<uintptr_t>(store.data()) % 16) % 16;
  uint8_t* const w = x + (total + beyond) * stride;
  // 0, and e4m3 numbers from 1 to 3.5 of both signs
  const auto draw = [&] { return static_cast<uint8_t>(random() % 8 ? 0x38 + random() % 14 + random() % 2 * 128 : 0); };
  std::vector<float> scales(size(std::max<int64_t>(total, 1) * (blocks + 1))),
      w_scales(size(experts * w_blocks * blocks));
  for (auto& s : scales) s = static_cast<float>(1 + random() % 1000) / 700;
  for (auto& s : w_scales) s = static_cast<float>(1 + random() % 1000) / 900;
  for (size_t g = 0; g < counts.size(); ++g) {
    for (int64_t r = starts[g]; r < starts[g] + counts[g]; ++r) {
      for (int64_t k = 0; k < inner; ++k) x[r * stride + k] = draw();
    }
  }
  for (int64_t n = 0; n < experts * width; ++n) {
    for (int64_t k = 0; k < inner; ++k) w[n * stride + k] = draw();
  }
  Numbers out(1, total + beyond, width, nullptr);
  Fp8Product p;
  p.rows = {reinterpret_cast<int64_t>(x), buffer_rows(total), inner, stride, 0};
  p.w = {reinterpret_cast<int64_t>(w), width, inner, stride, width * stride};
  p.out = out.matrices();
  p.out.rows = buffer_rows(total);
  p.scales_at = reinterpret_cast<int64_t>(scales.data());
  p.scale_stride = blocks + 1;
  p.scale_step = 1;
  p.w_scales_at = reinterpret_cast<int64_t>(w_scales.data());
  p.w_scale_expert_stride = w_blocks * blocks;
  p.w_scale_stride = blocks;
  p.counts_at = reinterpret_cast<int64_t>(counts.data());
  p.experts = experts;
  p.sources = sources;
  p.block_rows = blocked ? room : 0;
  Launcher(std::make_shared<ModelStarter>(seed), reinterpret_cast<uintptr_t>(&encode_map), c.blocks).rows_fp8(p, 0);
  const std::string name = "fp8, " + std::to_string(blocks_of_rows) + " sources, " + std::to_string(total) + " x " +
                           std::to_string(width) + " x " + std::to_string(inner);
  for (size_t g = 0; g < counts.size(); ++g) {
    const auto e = static_cast<int64_t>(g) / sources;
    for (int64_t r = starts[g]; r < starts[g] + (blocked ? room : counts[g]); ++r) {
      for (int64_t n = 0; n < width; ++n) {
        if (r >= starts[g] + counts[g]) {
          expect(out.at(0, r, n) == 0x7fc1, name + ", a row without a token");
          continue;
        }
        float sum = 0;
        double exact = 0, size_of_sum = 0;
        for (int64_t b = 0; b < blocks; ++b) {
          double block = 0;
          const float scale =
              scales[size(r * (blocks + 1) + b)] * w_scales[size((e * w_blocks + n / 128) * blocks + b)];
          for (int64_t k = b * 128; k < std::min(inner, b * 128 + 128); ++k) {
            block += static_cast<double>(e4m3(x[r * stride + k])) * e4m3(w[(e * width + n) * stride + k]);
          }
          sum = std::fmaf(static_cast<float>(block), scale, sum);
          exact += block * scale;
          size_of_sum += std::abs(block * scale);
        }
        expect(out.at(0, r, n) == Numbers::to_bits(sum), name);
        expect(std::abs(out.number(0, r, n) - exact) <= std::abs(exact) * 0.004 + size_of_sum * 1e-6,
               name + ", float64");
      }
    }
  }
  for (int64_t r = total; r < total + beyond; ++r) {
    for (int64_t n = 0; n < out.stride; ++n) expect(out.at(0, r, n) == 0x7fc1, name + ", beyond the rows");
  }
}

// Routing and widths that are drawn: empty experts, few rows, some more, or all rows of one expert.
Case random_case(std::mt19937& random) {
  const auto below = [&](unsigned n) { return static_cast<int64_t>(random() % n); };
  Case c{{}, 8 * (1 + below(40)), 8 * (1 + below(24)), 1 + below(3)};
  const int64_t experts = 1 + below(6), only = below(4) ? -1 : below(static_cast<unsigned>(experts));
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t rows = only < 0 ? below(3) * below(80) : e == only ? below(300) : 0;
    c.counts.push_back(rows);
  }
  return c;
}

// seed 0: one case, for ThreadSanitizer in tests.
int run(unsigned seed) {
  // Empty experts, one row, ends of tiles and of groups of 16 rows; widths that end inside a tile.
  std::vector<Case> cases = {
      {{0, 1, 130, 0, 17, 0}, 72, 136, 2},
      {{70, 0, 64, 5}, 264, 64, 3},
      {{0, 0}, 64, 64, 1},
      {{129}, 136, 200, 1},
  };
  const bool one = seed == 0;
  std::mt19937 random(seed);
  if (one) cases = {{{0, 1, 150, 0, 17}, 72, 264, 2}};
  for (int i = 0; i < 3 && !one; ++i) cases.push_back(random_case(random));
  int biased = 0;
  for (const Case& c : cases) {
    for (int kind = 0; kind < 6; ++kind) test_rows(c, kind, (kind + biased) % 2, ++seed);
    ++biased;
    for (int kind = 0; kind < 5; ++kind) test_gradient(c, kind % 3 > 0, kind % 3 > 1, kind > 2, ++seed);
    for (const bool add : {false, true}) test_weights(c, add, ++seed);
    for (const int64_t sources : {0, 1, 2}) test_fp8(c, sources, ++seed);
  }
  for (const int world : one ? std::vector<int>{3} : std::vector<int>{1, 2, 3, 8}) {
    test_ranks(world, ++seed);
    test_linear(world, ++seed);
  }
  test_late_rank(++seed);
  return failures;
}

}  // namespace
}  // namespace gemm
}  // namespace moe_comm

int main(int count, char** words) {
  try {
    const int failures = moe_comm::gemm::run(count > 1 ? static_cast<unsigned>(std::stoul(words[1])) : 1);
    std::printf("%d failures\n", failures);
    return failures != 0;
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n", error.what());
    return 1;
  }
}
