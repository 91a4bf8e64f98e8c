#include "product.h"

#include <unistd.h>

#include <algorithm>
#include <new>

namespace moe_comm {
namespace gemm {

namespace {

constexpr int64_t kDepth = 512;  // k per block, at most
constexpr int64_t kFewRows = 128;
constexpr int64_t kShallow = 128;        // the least for columns whose lines run across k
constexpr int64_t kShallowest = 32;      // the same for results in fp32
constexpr int64_t kRowBytes = 8 << 20;   // packed rows per block
constexpr int64_t kKeptBytes = 4 << 20;  // packed columns that several blocks of rows use
constexpr int64_t kWidest = 1024;        // columns of a block of few rows, if their lines run across k
constexpr int64_t kPiece = 32;           // lines across k that are packed over all panels before the next ones
constexpr int64_t kSwept = 1024;         // columns of a sweep
constexpr int64_t kLine = 64;

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
int64_t parts(int64_t x, int64_t of) { return (x + of - 1) / of; }
int64_t even(int64_t x, int64_t most) { return round_up(parts(x, parts(x, most)), 4); }  // x > 0

// Packed columns per block: an eighth of L2, because the next block arrives there while this one is used.
int64_t column_bytes() {
  static const int64_t bytes = [] {
    const int64_t cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return std::min<int64_t>(std::max<int64_t>(cache / 8, 64 << 10), 256 << 10);
  }();
  return bytes;
}

struct Buffers {
  Scratch a, b, c;
};
Buffers& buffers() {
  static thread_local Buffers all;
  return all;
}

// Columns [first, first + count) and k in [k, k + depth) of b.
struct Block {
  int64_t first, count, k, depth;
};

// How operands are cut into blocks. Memory is read in long pieces, because the tables of pages are read for each one.
// Lines along k are read whole, so blocks have few columns. Lines across k are read in part, so blocks have little k,
// unless many rows use a block that has all k: results are loaded again for each block of k.
//
// With many rows, blocks of k are the outermost (`by_depth`). A block of rows stays in L2 while columns along k pass, a
// panel at a time. Across k, a block of columns stays there while rows pass.
struct Cut {
  int64_t columns, depth;         // per block
  int64_t fetched;                // depth of what is prefetched
  int64_t row_bytes = kRowBytes;  // of packed rows per block
  bool by_depth;

  Cut(const Engine& e, const Lines& b, int64_t m, int64_t all_columns, int64_t all_depth, bool direct) {
    const bool across = b.across;
    by_depth = direct && e.unit == 1 && m > kFewRows;
    if (by_depth) {
      depth = even(std::max<int64_t>(all_depth, 1), across ? 256 : 1024);
      const int64_t panels = parts(all_columns, e.panel_b);
      const int64_t most = across ? std::max<int64_t>(1, 2 * column_bytes() / (depth * e.bytes_b)) : 1;
      columns = parts(panels, parts(panels, most)) * e.panel_b;
      fetched = depth;
      if (!across) row_bytes = 2 * column_bytes();
      return;
    }
    const int64_t least = e.unit == 1 ? kShallowest : kShallow;
    const int64_t whole = std::max<int64_t>(e.unit, round_up(all_depth, e.unit)), room = column_bytes() / e.bytes_b;
    const int64_t widest = e.unit == 1 ? std::min(all_columns, kWidest) : all_columns;
    const int64_t panels = parts(widest, e.panel_b);
    depth = std::min(kDepth, whole);
    if (across && (m <= kFewRows || whole > kDepth))
      depth = std::max(std::min(depth, least), std::min(depth, room / panels / least * least));
    columns = std::max<int64_t>(1, room / (across ? depth : whole)) * e.panel_b;
    fetched = across ? depth : all_depth;
  }
};

// Fetch the part `of` of `parts` of a block.
Ahead ahead_of(const Lines& b, const Block& next, int64_t element, int64_t part, int64_t of) {
  Ahead ahead;
  const int64_t first = b.across ? next.k : next.first, count = b.across ? next.depth : next.count;
  ahead.lines = b;
  ahead.line = first + count * part / of;
  ahead.last = first + count * (part + 1) / of;
  ahead.from = (b.across ? next.first : next.k) * element;
  ahead.bytes = (b.across ? next.count : next.depth) * element;
  return ahead;
}

class Blocks {
 public:
  Blocks(const Engine& e, const Product& p, const Following* following)
      : e_(e),
        p_(p),
        following_(following),
        panels_(parts(p.m, e.panel_a)),
        direct_(p.out_dtype == kFloat32 && p.out_stride % 4 == 0),
        cut_(e, p.b, p.m, p.columns, p.depth, direct_) {
    row_bytes_ = round_up(cut_.by_depth ? cut_.depth : p.depth, e.unit) * e.bytes_a;
  }

  void run() {
    const int64_t most = std::max<int64_t>(1, cut_.row_bytes / row_bytes_);
    if (cut_.by_depth) return run_by_depth(parts(panels_, parts(panels_, most)));
    for (int64_t first = 0; first < panels_; first += most) {
      first_panel_ = first;
      last_panel_ = std::min(panels_, first + most);
      pack_rows();
      if (panels_ == 1 && sweeps()) return sweep();
      for (int64_t n = 0; n < p_.columns; n += cut_.columns) {
        for (int64_t k = 0; k < p_.depth; k += cut_.depth)
          block({n, std::min(cut_.columns, p_.columns - n), k, depth_at(k)});
      }
    }
  }

 private:
  void run_by_depth(int64_t most) {
    // If several blocks of rows use columns, these are packed once.
    const int64_t panel_bytes = cut_.depth * e_.bytes_b;
    int64_t kept = p_.columns;
    if (most < panels_ && !p_.b.across) {
      const int64_t panels = std::min(parts(p_.columns, e_.panel_b), std::max<int64_t>(1, kKeptBytes / panel_bytes));
      kept = panels * e_.panel_b;
      kept_ = buffers().b.get(panels * panel_bytes + kLine);
    }
    for (int64_t k = 0; k < p_.depth; k += cut_.depth) {
      for (kept_first_ = 0; kept_first_ < p_.columns; kept_first_ = kept_last_) {
        kept_last_ = std::min(p_.columns, kept_first_ + kept);
        for (first_panel_ = 0; first_panel_ < panels_; first_panel_ += most) {
          last_panel_ = std::min(panels_, first_panel_ + most);
          pack_rows_at(k);
          for (int64_t n = kept_first_; n < kept_last_; n += cut_.columns)
            block({n, std::min(cut_.columns, p_.columns - n), k, depth_at(k)});
        }
      }
    }
  }

  // Packed columns from b.first on.
  char* kept_at(int64_t first) const { return kept_ + (first - kept_first_) / e_.panel_b * cut_.depth * e_.bytes_b; }

  int64_t depth_at(int64_t k) const { return std::min(cut_.depth, p_.depth - k); }

  // Rows are divided evenly among the panels.
  int64_t row_of(int64_t panel) const { return std::min(p_.m, round_up(p_.m * panel / panels_, e_.row_unit)); }

  // A panel of all k, block of k after block of k.
  void pack_rows() {
    packed_a_ = buffers().a.get((last_panel_ - first_panel_) * row_bytes_ + kLine);
    Ahead none;
    for (int64_t i = first_panel_; i < last_panel_; ++i) {
      const int64_t first = row_of(i), m = row_of(i + 1) - first;
      for (int64_t k = 0; k < p_.depth; k += cut_.depth) {
        e_.pack_a(p_.a, p_.a_dtype, first, static_cast<int>(m), k, depth_at(k), rows_at(i, k), none);
      }
    }
  }

  // A block of k of all panels. Lines across k are read over all panels, a few at a time.
  void pack_rows_at(int64_t k) {
    packed_a_ = buffers().a.get((last_panel_ - first_panel_) * row_bytes_ + kLine);
    const int64_t depth = depth_at(k), step = p_.a.across ? kPiece : depth;
    Ahead none;
    for (int64_t d = 0; d < depth; d += step) {
      for (int64_t i = first_panel_; i < last_panel_; ++i) {
        const int64_t first = row_of(i);
        e_.pack_a(p_.a, p_.a_dtype, first, static_cast<int>(row_of(i + 1) - first), k + d, std::min(step, depth - d),
                  packed_a_ + (i - first_panel_) * row_bytes_ + d * e_.bytes_a, none);
      }
    }
  }

  char* rows_at(int64_t panel, int64_t k) const {
    return packed_a_ + (panel - first_panel_) * row_bytes_ + (cut_.by_depth ? 0 : k * e_.bytes_a);
  }

  bool sweeps() const { return e_.sweep && (p_.b.across || (p_.a_dtype == kFloat32 && p_.m <= e_.few)); }

  // A panel has all its rows at once, and the memory of columns is read once.
  void sweep() {
    const int64_t element = dtype_bytes(p_.out_dtype);
    for (int64_t n = 0; n < p_.columns; n += kSwept) {
      const int64_t count = std::min(kSwept, p_.columns - n), column = p_.column_first + n;
      char* out = p_.out + column * element;
      float* c = reinterpret_cast<float*>(direct_ ? out : buffers().c.get(p_.m * kSwept * 4));
      const int64_t stride = direct_ ? p_.out_stride / 4 : kSwept;
      if (!direct_ && p_.accumulate) e_.start(c, stride, out, p_.out_stride, p_.m, count, p_.out_dtype);
      e_.sweep(p_.b, p_.a_dtype, static_cast<int>(p_.m), packed_a_, column, count, c, stride, p_.accumulate);
      if (direct_ && !p_.bias) continue;
      e_.finish(c, stride, p_.bias ? p_.bias + column * element : nullptr, out, p_.out_stride, p_.m, count,
                p_.out_dtype);
    }
  }

  // Lines along k: the whole depth of the next columns, over all blocks of these columns.
  Ahead after(const Block& b) const {
    const bool by_block = p_.b.across || cut_.by_depth;
    const int64_t element = dtype_bytes(p_.a_dtype), of = by_block ? 1 : parts(p_.depth, cut_.depth);
    const int64_t part = by_block ? 0 : b.k / cut_.depth;
    Block next{b.first, 0, b.k, 0};
    bool last = false, again = false;  // the last block of all; a block that is packed already
    if (cut_.by_depth) {
      next.first += cut_.columns;
      again = first_panel_ > 0;
      if (next.first >= kept_last_) {
        again = last_panel_ < panels_;
        next.first = again ? kept_first_ : kept_last_;
      }
      if (next.first >= p_.columns) {
        next.first = 0;
        next.k += cut_.depth;
        last = next.k >= p_.depth;
      }
    } else {
      next.k += cut_.depth;
      if (next.k >= p_.depth || !p_.b.across) {
        next.k = 0;
        next.first += cut_.columns;
      }
      if (next.first >= p_.columns) {
        next.first = 0;
        last = last_panel_ == panels_;
      }
    }
    if (last) {
      if (!following_) return {};
      const Following& f = *following_;
      const Cut cut(e_, f.b, f.m, f.columns, f.depth, direct_);
      const int64_t count = std::min(cut.columns, f.columns);
      return ahead_of(f.b, {f.column_first, count, 0, std::min(cut.fetched, f.depth)}, element, part, of);
    }
    if (again && kept_) {
      Ahead ahead;
      ahead.at = kept_at(next.first);
      ahead.end = ahead.at + depth_at(next.k) * e_.bytes_b;
      return ahead;
    }
    next.count = std::min(cut_.columns, p_.columns - next.first);
    next.depth = by_block ? depth_at(next.k) : p_.depth;
    next.first += p_.column_first;
    return ahead_of(p_.b, next, element, part, of);
  }

  void block(const Block& b) {
    const int64_t whole = round_up(b.depth, e_.unit), panel_bytes = whole * e_.bytes_b;
    const int64_t rows = last_panel_ - first_panel_, columns = parts(b.count, e_.panel_b);
    char* packed = kept_ ? kept_at(b.first) : buffers().b.get(columns * panel_bytes + kLine);
    Ahead ahead = after(b);
    // With few rows, packing takes most of the time, and prefetches most of the next block.
    const int64_t m = row_of(last_panel_) - row_of(first_panel_);
    ahead.per_pack = m <= 2 ? 3 : m <= 8 ? 2 : m <= 16 ? 1 : 0;
    const int64_t lines = (ahead.last - ahead.line) * parts(ahead.bytes, kLine) + (ahead.end - ahead.at) / kLine;
    const int64_t steps = rows * columns * parts(b.depth, 4);
    ahead.per_tile = static_cast<int>(parts(lines, steps));
    ahead.every = static_cast<int>(std::max<int64_t>(1, steps / std::max<int64_t>(lines, 1)));
    const int64_t piece = p_.b.across && e_.unit == 1 && rows > 1 ? kPiece : b.depth;
    const bool again = kept_ && first_panel_ > 0;  // the block is packed already
    for (int64_t k = again ? b.depth : 0; k < b.depth; k += piece) {
      for (int64_t n = 0; n < columns; ++n) {
        const int64_t first = n * e_.panel_b;
        e_.pack_b(p_.b, p_.a_dtype, p_.column_first + b.first + first,
                  static_cast<int>(std::min<int64_t>(e_.panel_b, b.count - first)), b.k + k,
                  std::min(piece, b.depth - k), packed + n * panel_bytes + k * e_.bytes_b, ahead);
        if (rows == 1) tile(first_panel_, b, n, packed + n * panel_bytes, whole, ahead);
      }
    }
    for (int64_t i = first_panel_; (again || rows > 1) && i < last_panel_; ++i) {
      for (int64_t n = 0; n < columns; ++n) {
        if (cut_.by_depth && p_.b.across && i + 1 < last_panel_) {
          const char* next = rows_at(i + 1, b.k);
          const int64_t bytes = b.depth * e_.bytes_a;
          ahead.rows = next + bytes * n / columns;
          ahead.rows_end = next + bytes * (n + 1) / columns;
        }
        tile(i, b, n, packed + n * panel_bytes, whole, ahead);
      }
    }
  }

  void tile(int64_t panel, const Block& b, int64_t n, const char* packed, int64_t whole, Ahead& ahead) {
    const int64_t row = row_of(panel), m = row_of(panel + 1) - row;
    const int64_t column = b.first + n * e_.panel_b, count = std::min<int64_t>(e_.panel_b, p_.columns - column);
    const int64_t element = dtype_bytes(p_.out_dtype);
    char* out = p_.out + row * p_.out_stride + (p_.column_first + column) * element;
    float* c = reinterpret_cast<float*>(out);
    int64_t stride = p_.out_stride / 4;
    const bool first = b.k == 0, last = b.k + b.depth == p_.depth;
    if (!direct_) {
      // One tile if it is finished at once, otherwise the rows of this block.
      const bool one = first && last;
      stride = one ? e_.panel_b : round_up(std::min(cut_.columns, p_.columns), e_.panel_b);
      const int64_t row0 = one ? row : row_of(first_panel_);
      c = reinterpret_cast<float*>(buffers().c.get((one ? m : row_of(last_panel_) - row0) * stride * 4));
      c += (row - row0) * stride + (one ? 0 : n * e_.panel_b);
      if (first && p_.accumulate) e_.start(c, stride, out, p_.out_stride, m, count, p_.out_dtype);
    }
    if (direct_) {
      int64_t next = column + e_.panel_b, of = panel;
      if (next >= b.first + b.count) {
        of = of + 1 < last_panel_ ? of + 1 : first_panel_;
        if (of > first_panel_) next = b.first;
      }
      const int64_t to = row_of(of);
      ahead.result = p_.out + to * p_.out_stride + (p_.column_first + next) * element;
      ahead.result_stride = p_.out_stride;
      ahead.result_rows = next < p_.columns ? static_cast<int>(row_of(of + 1) - to) : 0;
    }
    e_.tile(static_cast<int>(m), static_cast<int>(count), rows_at(panel, b.k), packed, whole, c, stride,
            !first || p_.accumulate, ahead);
    if (last && (!direct_ || p_.bias)) {
      const char* bias = p_.bias ? p_.bias + (p_.column_first + column) * element : nullptr;
      e_.finish(c, stride, bias, out, p_.out_stride, m, count, p_.out_dtype);
    }
  }

  const Engine& e_;
  const Product& p_;
  const Following* following_;
  const int64_t panels_;  // of rows
  const bool direct_;     // results are accumulated in `out`
  const Cut cut_;
  int64_t row_bytes_;  // of a panel of rows, all k
  int64_t first_panel_ = 0, last_panel_ = 0;
  char* packed_a_ = nullptr;
  char* kept_ = nullptr;  // packed columns [kept_first_, kept_last_)
  int64_t kept_first_ = 0, kept_last_ = 0;
};

}  // namespace

char* Scratch::get(int64_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    bytes_ = 0;
    const int64_t whole = round_up(bytes, 1 << 16);
    memory_.reset(static_cast<char*>(std::aligned_alloc(kLine, static_cast<size_t>(whole))));
    if (!memory_) throw std::bad_alloc();
    bytes_ = whole;
  }
  return memory_.get();
}

void multiply(const Engine& e, const Product& p, const Following* following) {
  if (p.m == 0 || p.columns == 0) return;
  if (p.depth > 0 && e.product) {
    e.product(p, following);
  } else if (p.depth > 0) {
    Blocks(e, p, following).run();
  } else if (!p.accumulate) {
    float* zeros = reinterpret_cast<float*>(buffers().c.get(p.columns * 4));
    std::fill_n(zeros, p.columns, 0.0f);
    const int64_t offset = p.column_first * dtype_bytes(p.out_dtype);
    e.finish(zeros, 0, p.bias ? p.bias + offset : nullptr, p.out + offset, p.out_stride, p.m, p.columns, p.out_dtype);
  }
}

}  // namespace gemm
}  // namespace moe_comm
