#include "gemm.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "../pool.h"
#include "engine.h"
#include "select.h"

namespace moe_comm {
namespace gemm {

namespace {

constexpr int64_t kDepth = 512;            // k per block
constexpr int64_t kColumnBytes = 1 << 20;  // packed columns per block: half of a usual L2
constexpr int64_t kRowBytes = 8 << 20;     // packed rows per block
constexpr int64_t kFewPanels = 1;          // with so few panels of rows, columns are packed panel by panel
constexpr int64_t kLine = 64;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
int64_t parts(int64_t x, int64_t of) { return (x + of - 1) / of; }

// Memory of one thread, reused by its later calls.
class Scratch {
 public:
  char* get(int64_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      memory_.reset(static_cast<char*>(std::aligned_alloc(kLine, static_cast<size_t>(round_up(bytes, 1 << 16)))));
      if (!memory_) throw std::bad_alloc();
      bytes_ = round_up(bytes, 1 << 16);
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t bytes_ = 0;
};

struct Scratches {
  Scratch a, b, c, dense_a, dense_b;
};
Scratches& scratches() {
  static thread_local Scratches all;
  return all;
}

// One product [m, n] over depth, for outer indices of `a` and `b` that start at 0 and column_first.
struct Product {
  Lines a, b;
  int a_dtype;
  int64_t m, column_first, columns, depth;
  const char* bias;  // of column 0, or null
  char* out;         // of row 0 and column 0
  int64_t out_stride;
  int out_dtype;
  bool accumulate;
};

class InMode {
 public:
  explicit InMode(const Engine& e) : engine_(e), before_(e.enter()) {}
  ~InMode() { engine_.leave(before_); }

 private:
  const Engine& engine_;
  uint64_t before_;
};

void multiply(const Engine& e, const Product& p) {
  Scratches& memory = scratches();
  const int64_t row_bytes = std::max<int64_t>(1, round_up(p.depth, e.unit)) * e.bytes_a;  // of a panel, all k
  const int64_t block_panels = std::max<int64_t>(1, kRowBytes / row_bytes);
  const int64_t panels = parts(p.m, e.panel_a);
  for (int64_t first_panel = 0; first_panel < panels; first_panel += block_panels) {
    // Rows are divided evenly among the panels.
    const int64_t last_panel = std::min(panels, first_panel + block_panels), count = last_panel - first_panel;
    const auto row_of = [&](int64_t panel) { return p.m * panel / panels; };
    const int64_t row0 = row_of(first_panel), rows = row_of(last_panel) - row0;
    char* packed_a = memory.a.get(count * row_bytes + kLine);
    // A panel of all k, block of k after block of k.
    for (int64_t i = 0; i < count; ++i) {
      const int64_t first = row_of(first_panel + i), m = row_of(first_panel + i + 1) - first;
      for (int64_t k = 0; k < p.depth; k += kDepth) {
        e.pack_a(p.a, p.a_dtype, first, static_cast<int>(m), k, std::min(kDepth, p.depth - k),
                 packed_a + i * row_bytes + k * e.bytes_a);
      }
    }
    const int64_t widest =
        count <= kFewPanels ? e.panel_b : std::max<int64_t>(e.panel_b, kColumnBytes / (kDepth * e.bytes_b) * e.panel_b);
    const bool direct = p.out_dtype == kFloat32 && p.out_stride % 4 == 0;
    for (int64_t n0 = 0; n0 < p.columns; n0 += widest) {
      const int64_t n_block = std::min(widest, p.columns - n0);
      char* out = p.out + row0 * p.out_stride + (p.column_first + n0) * dtype_bytes(p.out_dtype);
      float* c = reinterpret_cast<float*>(out);
      int64_t c_stride = p.out_stride / 4;
      if (!direct) {
        c_stride = round_up(n_block, e.panel_b);
        c = reinterpret_cast<float*>(memory.c.get(rows * c_stride * 4));
        if (p.accumulate) e.start(c, c_stride, out, p.out_stride, rows, n_block, p.out_dtype);
      }
      char* packed_b = memory.b.get(parts(n_block, e.panel_b) * kDepth * e.bytes_b + kLine);
      for (int64_t r = 0; p.depth == 0 && !p.accumulate && r < rows; ++r) std::fill_n(c + r * c_stride, n_block, 0.0f);
      for (int64_t k = 0; k < p.depth; k += kDepth) {
        const int64_t depth = std::min(kDepth, p.depth - k), whole = round_up(depth, e.unit);
        for (int64_t n = 0; n < n_block; n += e.panel_b) {
          e.pack_b(p.b, p.a_dtype, p.column_first + n0 + n, static_cast<int>(std::min<int64_t>(e.panel_b, n_block - n)),
                   k, depth, packed_b + n / e.panel_b * whole * e.bytes_b);
        }
        for (int64_t i = 0; i < count; ++i) {
          const int64_t first = row_of(first_panel + i), m = row_of(first_panel + i + 1) - first;
          for (int64_t n = 0; n < n_block; n += e.panel_b) {
            e.tile(static_cast<int>(m), static_cast<int>(std::min<int64_t>(e.panel_b, n_block - n)),
                   packed_a + i * row_bytes + k * e.bytes_a, packed_b + n / e.panel_b * whole * e.bytes_b, whole,
                   c + (first - row0) * c_stride + n, c_stride, k > 0 || p.accumulate);
          }
        }
      }
      if (!direct || p.bias) {
        const char* bias = p.bias ? p.bias + (p.column_first + n0) * dtype_bytes(p.out_dtype) : nullptr;
        e.finish(c, c_stride, bias, out, p.out_stride, rows, n_block, p.out_dtype);
      }
    }
  }
}

[[noreturn]] void invalid(const std::string& what) { throw std::invalid_argument("gemm: " + what); }

void check_rows(const char* name, const Rows& x, int64_t count, int64_t element) {
  if (x.base.empty() || x.base.size() != x.rows.size())
    invalid(std::string(name) + " needs one number of rows per source");
  if (x.count != count) {
    invalid(std::string(name) + " has " + std::to_string(x.count) + " rows, and the experts " + std::to_string(count));
  }
  if (x.width < 0) invalid(std::string(name) + " has a negative width");
  if (x.stride < x.width * element && x.stride != 0) {
    invalid(std::string(name) + " has rows of " + std::to_string(x.width) + " elements that are " +
            std::to_string(x.stride) + " bytes apart");
  }
  if (!x.place) {
    if (x.base.size() != 1 || count > x.rows[0]) {
      invalid(std::string(name) + " has " + std::to_string(x.rows[0]) + " rows and needs " + std::to_string(count));
    }
    return;
  }
  const int64_t sources = static_cast<int64_t>(x.base.size());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t owner = place_owner(x.place[i]);
    if (owner < 0 || owner >= sources || place_row(x.place[i]) >= x.rows[static_cast<size_t>(owner)]) {
      invalid("entry " + std::to_string(i) + " of the row list of " + name + " is row " +
              std::to_string(place_row(x.place[i])) + " of source " + std::to_string(owner) +
              ", which is out of range");
    }
  }
}

int64_t check_groups(const Groups& groups) {
  if (groups.dtype < kFloat32 || groups.dtype > kFloat16) invalid("unknown dtype " + std::to_string(groups.dtype));
  int64_t total = 0;
  for (int64_t e = 0; e < groups.experts; ++e) {
    if (groups.sizes[e] < 0) invalid("expert " + std::to_string(e) + " has a negative number of rows");
    total += groups.sizes[e];
  }
  return total;
}

// Lines [first, first + count) of x, as an operand. Scaled lines are copied to `memory`.
class Operand {
 public:
  Operand(const Rows& x) : rows_(x) {  // NOLINT
    for (uintptr_t b : x.base) base_.push_back(reinterpret_cast<const char*>(b));
  }

  Lines lines(int64_t first, int64_t count, bool across, int dtype, Scratch& memory, const char*& copied) const {
    const int64_t outer = across ? rows_.width : count, depth = across ? count : rows_.width;
    Lines all{base_.data(), rows_.place ? rows_.place + first : nullptr, rows_.stride, across, outer, depth};
    if (!rows_.place) {
      copied = base_[0] + first * rows_.stride;
      all.base = &copied;
    }
    if (!rows_.scale) return all;
    const int64_t bytes = rows_.width * dtype_bytes(dtype);
    char* to = memory.get(std::max<int64_t>(count * bytes, 1));
    const Kernels& k = kernels();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = 0;
      char* const row[] = {to + i * bytes};
      const TokenLoop loop{&place, nullptr, 1, rows_.width, dtype, false};
      k.spread(loop, 0, 1, all.line(i), bytes, rows_.scale + first + i, row, nullptr);
    }
    copied = to;
    return {&copied, nullptr, bytes, across, outer, depth};
  }

 private:
  const Rows& rows_;
  std::vector<const char*> base_;
};

// A matrix [outer, k] in memory, as an operand. If neither stride is one element, it is copied.
Lines matrix(const char*& base, int64_t outer_stride, int64_t k_stride, int64_t outer, int64_t depth, int64_t element,
             Scratch& memory) {
  if (k_stride == element || depth <= 1) return {&base, nullptr, outer_stride, false, outer, depth};
  if (outer_stride == element || outer <= 1) return {&base, nullptr, k_stride, true, outer, depth};
  char* to = memory.get(std::max<int64_t>(outer * depth * element, 1));
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t k = 0; k < depth; ++k) {
      std::memcpy(to + (o * depth + k) * element, base + o * outer_stride + k * k_stride, static_cast<size_t>(element));
    }
  }
  base = to;
  return {&base, nullptr, depth * element, false, outer, depth};
}

// Call body(expert, first line, first column, columns) for all experts with rows (or all of them), with columns divided
// so that all threads have work.
template <class Body>
void over_experts(const Groups& groups, int64_t columns, int64_t step, bool empty, const Body& body) {
  struct Task {
    int64_t expert, line, column, columns;
  };
  std::vector<Task> tasks;
  int64_t busy = 0, line = 0;
  for (int64_t e = 0; e < groups.experts; ++e) busy += groups.sizes[e] > 0 || empty;
  const int64_t cuts =
      groups.threads <= 1 || busy >= 4 * groups.threads ? 1 : parts(4 * groups.threads, std::max<int64_t>(busy, 1));
  const int64_t width = std::max(step, round_up(parts(columns, cuts), step));
  for (int64_t e = 0; e < groups.experts; line += groups.sizes[e], ++e) {
    if (groups.sizes[e] == 0 && !empty) continue;
    for (int64_t n = 0; n < columns; n += width) tasks.push_back({e, line, n, std::min(width, columns - n)});
  }
  parallel_for(static_cast<int64_t>(tasks.size()), 1, groups.threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) body(tasks[i].expert, tasks[i].line, tasks[i].column, tasks[i].columns);
  });
}

}  // namespace

void rows(const Groups& groups, const Rows& x, const Stack& w, int64_t columns, const Stack& bias, uintptr_t out,
          int64_t out_stride) {
  const int64_t total = check_groups(groups), element = dtype_bytes(groups.dtype);
  check_rows("x", x, total, element);
  if (total == 0 || columns <= 0) return;
  const Engine& e = engine(groups.dtype);
  const Operand operand(x);
  over_experts(groups, columns, e.panel_b, false, [&](int64_t expert, int64_t line, int64_t column, int64_t count) {
    const InMode mode(e);
    const char* copied = nullptr;
    const char* base = reinterpret_cast<const char*>(w.base + expert * w.expert);
    Product p{};
    p.a = operand.lines(line, groups.sizes[expert], false, groups.dtype, scratches().dense_a, copied);
    p.b = matrix(base, w.row, w.element, columns, x.width, element, scratches().dense_b);
    p.a_dtype = p.out_dtype = groups.dtype;
    p.m = groups.sizes[expert];
    p.column_first = column;
    p.columns = count;
    p.depth = x.width;
    p.bias = bias.base ? reinterpret_cast<const char*>(bias.base + expert * bias.expert) : nullptr;
    p.out = reinterpret_cast<char*>(out) + line * out_stride;
    p.out_stride = out_stride;
    multiply(e, p);
  });
}

void weights(const Groups& groups, const Rows& y, const Rows& x, const Stack& out, int out_dtype, bool accumulate) {
  const int64_t total = check_groups(groups), element = dtype_bytes(groups.dtype);
  check_rows("y", y, total, element);
  check_rows("x", x, total, element);
  if (out.element != dtype_bytes(out_dtype)) invalid("gradients of weights need contiguous rows");
  if (y.width == 0 || x.width == 0) return;
  const Engine& e = engine(groups.dtype);
  const Operand left(y), right(x);
  over_experts(groups, x.width, e.panel_b, !accumulate,
               [&](int64_t expert, int64_t line, int64_t column, int64_t count) {
                 const InMode mode(e);
                 const char *copied_y = nullptr, *copied_x = nullptr;
                 Product p{};
                 p.a = left.lines(line, groups.sizes[expert], true, groups.dtype, scratches().dense_a, copied_y);
                 p.b = right.lines(line, groups.sizes[expert], true, groups.dtype, scratches().dense_b, copied_x);
                 p.a_dtype = groups.dtype;
                 p.out_dtype = out_dtype;
                 p.m = y.width;
                 p.column_first = column;
                 p.columns = count;
                 p.depth = groups.sizes[expert];
                 p.out = reinterpret_cast<char*>(out.base + expert * out.expert);
                 p.out_stride = out.row;
                 p.accumulate = accumulate;
                 multiply(e, p);
               });
}

}  // namespace gemm
}  // namespace moe_comm
