#include "gemm.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../pool.h"
#include "product.h"
#include "select.h"

namespace moe_comm {
namespace gemm {

namespace {

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
int64_t parts(int64_t x, int64_t of) { return (x + of - 1) / of; }

// Copies of operands that packing cannot read in place.
struct Copies {
  Scratch a, b;
};
Copies& copies() {
  static thread_local Copies all;
  return all;
}

class InMode {
 public:
  explicit InMode(const Engine& e) : engine_(e), before_(e.enter()) {}
  ~InMode() { engine_.leave(before_); }

 private:
  const Engine& engine_;
  uint64_t before_;
};

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
    if (count > 0 && (x.base.size() != 1 || count > x.rows[0])) {
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

  bool copied() const { return rows_.scale != nullptr; }

  // `base` holds the address of the first line, if that is not one of the sources.
  Lines in_place(int64_t first, int64_t count, bool across, const char*& base) const {
    const int64_t outer = across ? rows_.width : count, depth = across ? count : rows_.width;
    if (rows_.place) return {base_.data(), rows_.place + first, rows_.stride, across, outer, depth};
    base = base_[0] + first * rows_.stride;
    return {&base, nullptr, rows_.stride, across, outer, depth};
  }

  Lines lines(int64_t first, int64_t count, bool across, int dtype, Scratch& memory, const char*& base) const {
    const Lines all = in_place(first, count, across, base);
    if (!copied()) return all;
    const int64_t bytes = rows_.width * dtype_bytes(dtype);
    char* to = memory.get(std::max<int64_t>(count * bytes, 1));
    const Kernels& k = kernels();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = 0;
      char* const row[] = {to + i * bytes};
      const TokenLoop loop{&place, nullptr, 1, rows_.width, dtype, false};
      k.spread(loop, 0, 1, all.line(i), bytes, rows_.scale + first + i, row, nullptr);
    }
    base = to;
    return {&base, nullptr, bytes, across, all.outer, all.depth};
  }

 private:
  const Rows& rows_;
  std::vector<const char*> base_;
};

// A matrix [outer, k] in memory, as an operand. False if neither stride is one element.
bool matrix_in_place(const char*& base, const Stack& w, int64_t outer, int64_t depth, int64_t element, Lines& lines) {
  const bool along = w.element == element || depth <= 1;
  lines = {&base, nullptr, along ? w.row : w.element, !along, outer, depth};
  return along || w.row == element || outer <= 1;
}

// The same, of a copy if necessary.
Lines matrix(const char*& base, const Stack& w, int64_t outer, int64_t depth, int64_t element, Scratch& memory) {
  Lines lines{};
  if (matrix_in_place(base, w, outer, depth, element, lines)) return lines;
  char* to = memory.get(outer * depth * element);
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t k = 0; k < depth; ++k) {
      std::memcpy(to + (o * depth + k) * element, base + o * w.row + k * w.element, static_cast<size_t>(element));
    }
  }
  base = to;
  return {&base, nullptr, depth * element, false, outer, depth};
}

// Columns of one expert.
struct Task {
  int64_t expert, line, column, columns;
};

// Call body(task, the next task of the thread or null) for all experts with rows (or all of them), with columns divided
// so that all threads have work.
template <class Body>
void over_experts(const Groups& groups, int64_t columns, int64_t step, bool empty, const Body& body) {
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
    const Task* all = tasks.data();
    for (int64_t i = first; i < last; ++i) body(all[i], i + 1 < last ? all + i + 1 : nullptr);
  });
}

// The columns of a stack whose gate and up columns alternate in groups of `group`.
std::vector<int64_t> paired_lines(int64_t width, int64_t group) {
  std::vector<int64_t> lines;
  for (int64_t first = 0; first < width; first += group) {
    for (int64_t i = 0; i < 2 * group; ++i) lines.push_back(first + (i < group ? i : width + i - group));
  }
  return lines;
}

// Of `activated`, the results are `out` too, or null.
void multiply_rows(const Engine& e, const Groups& groups, const Rows& x, const Stack& w, int64_t columns,
                   const Stack& bias, const Results& out, const Activated& activated) {
  const int64_t total = check_groups(groups), element = dtype_bytes(groups.dtype);
  check_rows("x", x, total, element);
  if (total == 0 || columns <= 0) return;
  const Operand operand(x);
  const std::vector<int64_t> pairs = paired_lines(activated.width, std::max(e.paired, 1));
  over_experts(groups, columns, e.panel_b, false, [&](const Task& task, const Task* next) {
    const InMode mode(e);
    const char *base_a = nullptr, *base_b = reinterpret_cast<const char*>(w.base + task.expert * w.expert);
    Product p{};
    p.m = groups.sizes[task.expert];
    p.a = operand.lines(task.line, p.m, false, groups.dtype, copies().a, base_a);
    p.b = matrix(base_b, w, columns, x.width, element, copies().b);
    p.a_dtype = p.out_dtype = groups.dtype;
    p.column_first = task.column;
    p.columns = task.columns;
    p.depth = x.width;
    p.bias = bias.base ? reinterpret_cast<const char*>(bias.base + task.expert * bias.expert) : nullptr;
    p.out = out.base ? reinterpret_cast<char*>(out.base) + task.line * out.stride : nullptr;
    p.out_stride = out.stride;
    p.accumulate = out.accumulate;
    Following following{};
    const char* next_b = next ? reinterpret_cast<const char*>(w.base + next->expert * w.expert) : nullptr;
    const bool known = next && matrix_in_place(next_b, w, columns, x.width, element, following.b);
    if (known) following = {following.b, groups.sizes[next->expert], next->column, next->columns, x.width};
    if (activated.width) {
      p.b.place = following.b.place = pairs.data();
      p.activated = {activated.width, activated.act + task.line * activated.stride, activated.stride};
    }
    multiply(e, p, known ? &following : nullptr);
  });
}

}  // namespace

void rows(const Groups& groups, const Rows& x, const Stack& w, int64_t columns, const Stack& bias, const Results& out) {
  multiply_rows(engine(groups.dtype), groups, x, w, columns, bias, out, {});
}

void activated_rows(const Groups& groups, const Rows& x, const Stack& w, int64_t width, const Stack& bias,
                    const Activations& out) {
  const Engine& e = engine(groups.dtype);
  const int64_t element = dtype_bytes(groups.dtype), row = width * element;
  char *const h = reinterpret_cast<char*>(out.h), *const act = reinterpret_cast<char*>(out.act);
  if (e.activated && width % e.activated->paired == 0 && x.width > 0 && w.element == element) {
    multiply_rows(*e.activated, groups, x, w, 2 * width, bias, {out.keep_h ? out.h : 0, 2 * row, false},
                  {width, act, row});
    return;
  }
  multiply_rows(e, groups, x, w, 2 * width, bias, {out.h, 2 * row, false}, {});
  parallel_for(x.count, 64, groups.threads, [&](int64_t first, int64_t last) {
    kernels().swiglu(h + first * 2 * row, 2 * width, act + first * row, last - first, width, groups.dtype);
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
  over_experts(groups, x.width, e.panel_b, !accumulate, [&](const Task& task, const Task* next) {
    const InMode mode(e);
    const char *base_y = nullptr, *base_x = nullptr, *base_next = nullptr;
    const int64_t count = groups.sizes[task.expert];
    Product p{};
    p.a = left.lines(task.line, count, true, groups.dtype, copies().a, base_y);
    p.b = right.lines(task.line, count, true, groups.dtype, copies().b, base_x);
    p.a_dtype = groups.dtype;
    p.out_dtype = out_dtype;
    p.m = y.width;
    p.column_first = task.column;
    p.columns = task.columns;
    p.depth = count;
    p.out = reinterpret_cast<char*>(out.base + task.expert * out.expert);
    p.out_stride = out.row;
    p.accumulate = accumulate;
    Following following{};
    const bool known = next && !right.copied();
    if (known) {
      const int64_t more = groups.sizes[next->expert];
      following = {right.in_place(next->line, more, true, base_next), y.width, next->column, next->columns, more};
    }
    multiply(e, p, known ? &following : nullptr);
  });
}

}  // namespace gemm
}  // namespace moe_comm
