#include "doubles.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "../pool.h"

namespace moe_comm {
namespace gemm {

namespace {

constexpr int64_t kColumns = 64;  // of a block, whose weights are copied

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void check(const Rows& x, int64_t count) {
  if (x.base.size() != 1 || x.place || x.scale) throw std::invalid_argument("gemm: float64 rows need one source");
  if (x.count != count || x.rows[0] < count) throw std::invalid_argument("gemm: rows and experts differ in number");
}

int64_t total(const Groups& groups) {
  int64_t sum = 0;
  for (int64_t e = 0; e < groups.experts; ++e) {
    if (groups.sizes[e] < 0) throw std::invalid_argument("gemm: an expert has a negative number of rows");
    sum += groups.sizes[e];
  }
  return sum;
}

// to += factor * from
void add_scaled(double factor, const double* from, int64_t count, double* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

}  // namespace

void rows_of_doubles(const Groups& groups, const Rows& x, const Stack& w, int64_t columns, const Stack& bias,
                     const Results& out) {
  check(x, total(groups));
  const int64_t blocks = (columns + kColumns - 1) / kColumns;
  parallel_for(blocks, 1, groups.threads, [&](int64_t first, int64_t last) {
    std::vector<double> block(static_cast<size_t>(std::max<int64_t>(x.width, 1) * kColumns));
    for (int64_t n = first * kColumns; n < std::min(last * kColumns, columns); n += kColumns) {
      const int64_t width = std::min(kColumns, columns - n);
      for (int64_t e = 0, r = 0; e < groups.experts; ++e) {
        const uintptr_t from = w.base + e * w.expert + n * w.row;
        for (int64_t k = 0; groups.sizes[e] && k < x.width; ++k) {
          for (int64_t i = 0; i < width; ++i) block[k * width + i] = *at<double>(from + i * w.row + k * w.element);
        }
        for (const int64_t end = r + groups.sizes[e]; r < end; ++r) {
          double sums[kColumns] = {};
          double* result = at<double>(out.base + r * out.stride) + n;
          if (out.accumulate) std::copy_n(result, width, sums);
          const double* row = at<double>(x.base[0] + r * x.stride);
          for (int64_t k = 0; k < x.width; ++k) add_scaled(row[k], &block[k * width], width, sums);
          if (bias.base) add_scaled(1.0, at<double>(bias.base + e * bias.expert) + n, width, sums);
          std::copy_n(sums, width, result);
        }
      }
    }
  });
}

void weights_of_doubles(const Groups& groups, const Rows& y, const Rows& x, const Stack& out, bool accumulate) {
  const int64_t count = total(groups);
  check(y, count);
  check(x, count);
  parallel_for(y.width, 1, groups.threads, [&](int64_t first, int64_t last) {
    for (int64_t e = 0, r = 0; e < groups.experts; r += groups.sizes[e], ++e) {
      for (int64_t n = first; n < last; ++n) {
        double* to = at<double>(out.base + e * out.expert + n * out.row);
        if (!accumulate) std::fill_n(to, x.width, 0.0);
        for (int64_t i = r; i < r + groups.sizes[e]; ++i) {
          add_scaled(at<double>(y.base[0] + i * y.stride)[n], at<double>(x.base[0] + i * x.stride), x.width, to);
        }
      }
    }
  });
}

}  // namespace gemm
}  // namespace moe_comm
