// The instructions of hopper.h on a CPU, for tests without a GPU (csrc/tests/gemm). From the PTX ISA 8.7 and from what
// was measured on an H200 (strides of MN-major descriptors).
//
// A block runs as 384 fibers, one for each thread, in one thread of the CPU. A fiber runs until it waits, for others of
// its warp, warp group or block, for an mbarrier, or for copies. Which one runs next is drawn. TMA's copies and wgmma's
// reads of shared memory happen at a drawn time between the instruction and the wait for it, so a missing wait gives
// wrong results. If all fibers wait, the model throws.
//
// Not modelled: proxies (fence_async, barriers_ready), registers (setmaxnreg, wgmma.fence), several blocks at once.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#define MOE_DEVICE inline
#define __shared__
#define __grid_constant__

namespace moe_comm {
namespace gemm {

constexpr int kModelThreads = 384;
constexpr uint32_t kSharedBase = 1024;  // address of the first byte; 0 is no address

alignas(1024) inline unsigned char block_shared[232448];

struct ModelIndex {
  unsigned x = 0;
};
inline ModelIndex threadIdx, blockIdx, gridDim;

// An array in memory with three dimensions, innermost first, and the box that a copy moves. Strides in bytes.
struct ModelMap {
  uint64_t at, sizes[3], strides[2];
  uint32_t box[3], bytes;  // bytes of an element
};
static_assert(sizeof(ModelMap) <= sizeof(TensorMap), "a map has room for its description");

inline void check(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(what);
}

// One thread block.
class ModelBlock {
 public:
  static ModelBlock*& current() {
    static ModelBlock* block = nullptr;
    return block;
  }

  ModelBlock(std::function<void()> kernel, unsigned seed) : kernel_(std::move(kernel)), random_(seed) {
    std::memset(block_shared, 0xff, sizeof block_shared);  // NaN
    for (int t = 0; t < kModelThreads; ++t) fibers_.push_back(std::make_unique<Fiber>());
  }

  void run() {
    current() = this;
    for (auto& fiber : fibers_) {
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.data();
      fiber->context.uc_stack.ss_size = fiber->stack.size();
      fiber->context.uc_link = &main_;
      makecontext(&fiber->context, &ModelBlock::enter, 0);
    }
    int idle = 0;
    for (size_t ended = 0; ended < fibers_.size();) {
      progress_ = false;
      const int first = static_cast<int>(random_() % kModelThreads);
      for (int i = 0; i < kModelThreads; ++i) {
        now_ = (first + i) % kModelThreads;
        if (fibers_[at(now_)]->ended) continue;
        threadIdx.x = static_cast<unsigned>(now_);
        swapcontext(&main_, &fibers_[at(now_)]->context);
        if (error_) std::rethrow_exception(error_);
        ended += fibers_[at(now_)]->ended;
      }
      if (!copies_.empty() && (!progress_ || random_() % 2)) copy_one(random_() % copies_.size());
      idle = progress_ ? 0 : idle + 1;
      check(idle < 1000, "all threads wait");
    }
    check(copies_.empty(), "the block has ended before its copies");
    current() = nullptr;
  }

  int thread() const { return now_; }
  bool coin() { return random_() % 2 != 0; }

  // Let others run until ready().
  template <class Ready>
  void wait(Ready ready) {
    while (!ready()) swapcontext(&fibers_[at(now_)]->context, &main_);
    progress_ = true;
  }

  // Wait for `count` threads that call this with the same key; at most one call of each at a time.
  void meet(int key, int count) {
    Meeting& m = meetings_[key];
    const int64_t mine = m.number;
    if (++m.arrived == count) {
      m.arrived = 0;
      ++m.number;
    }
    wait([&] { return m.number != mine; });
  }

  // What each thread has put here for those of its warp.
  uint32_t words[kModelThreads] = {};

  struct Barrier {
    int64_t arrivals = 0, left = 0, bytes = 0;
    uint32_t phase = 0;
  };
  std::map<uint32_t, Barrier> barriers;

  void settle(Barrier& b) {
    if (b.left == 0 && b.bytes == 0) {
      b.phase ^= 1;
      b.left = b.arrivals;
    }
    progress_ = true;
  }

  // Copies that have been started, in no order.
  void start(std::function<void()> copy) { copies_.push_back(std::move(copy)); }

  // Groups of stores of each thread: stores that have not been made, and the groups that are complete.
  struct Stores {
    int open = 0;
    std::deque<std::shared_ptr<int>> groups;
    std::shared_ptr<int> group = std::make_shared<int>(0);
  };
  Stores stores[kModelThreads];

  // Products that a thread has started: (group, product).
  struct Products {
    std::vector<std::function<void()>> open;
    std::deque<std::vector<std::function<void()>>> groups;
  };
  Products products[kModelThreads];

 private:
  struct Fiber {
    ucontext_t context;
    std::vector<unsigned char> stack = std::vector<unsigned char>(64 << 10);
    bool ended = false;
  };
  struct Meeting {
    int arrived = 0;
    int64_t number = 0;
  };

  static size_t at(int i) { return static_cast<size_t>(i); }

  static void enter() {
    ModelBlock& block = *current();
    const int mine = block.now_;
    try {
      block.kernel_();
    } catch (...) {
      block.error_ = std::current_exception();
    }
    block.fibers_[at(mine)]->ended = true;
    block.progress_ = true;
  }

  void copy_one(size_t which) {
    std::swap(copies_[which], copies_.back());
    const auto copy = std::move(copies_.back());
    copies_.pop_back();
    copy();
    progress_ = true;
  }

  const std::function<void()> kernel_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::function<void()>> copies_;
  std::map<int, Meeting> meetings_;
  std::exception_ptr error_;
  ucontext_t main_;
  int now_ = 0;
  bool progress_ = false;
};

inline ModelBlock& model() { return *ModelBlock::current(); }

// --- CUDA ---

constexpr int kMeetBlock = 0, kMeetGroup = 1, kMeetWarp = 16;

inline void __syncthreads() { model().meet(kMeetBlock, kModelThreads); }
inline void __syncwarp() { model().meet(kMeetWarp + model().thread() / 32, 32); }
inline void group_sync(int group) { model().meet(kMeetGroup + group, 128); }

inline const uint32_t* exchanged(uint32_t mine) {
  __syncwarp();  // all have read the words of the last exchange
  model().words[model().thread()] = mine;
  __syncwarp();
  return model().words + model().thread() / 32 * 32;
}
inline int __shfl_sync(unsigned, int value, int lane) {
  return static_cast<int>(exchanged(static_cast<uint32_t>(value))[lane]);
}
inline bool __any_sync(unsigned, bool value) {
  const uint32_t* words = exchanged(value);
  for (int i = 0; i < 32; ++i) {
    if (words[i]) return true;
  }
  return false;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// --- Shared memory ---

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - block_shared) + kSharedBase;
}
inline unsigned char* shared(uint32_t address, uint32_t bytes) {
  check(address >= kSharedBase && address - kSharedBase + bytes <= sizeof block_shared,
        "an address beyond shared memory");
  check(address % bytes == 0, "an unaligned address in shared memory");
  return block_shared + (address - kSharedBase);
}
// The place of a byte in a tile with 128-byte swizzle: bits 4 to 6 are xor-ed with bits 7 to 9.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 3 & 0x70); }

inline void prefetch_line(const void*) {}
inline void load_shared(uint32_t from, uint32_t (&v)[4]) { std::memcpy(v, shared(from, 16), 16); }
inline void store_global(int64_t to, const uint32_t (&v)[4]) { std::memcpy(reinterpret_cast<void*>(to), v, 16); }
inline void store_shared_zeros(uint32_t to) { std::memset(shared(to, 16), 0, 16); }
inline void add_shared(uint32_t at, float a, float b) {
  float v[2];
  std::memcpy(v, shared(at, 8), 8);
  v[0] += a;
  v[1] += b;
  std::memcpy(shared(at, 8), v, 8);
}

// --- mbarriers ---

inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  model().barriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void barriers_ready() {}
inline void barrier_arrive(uint32_t barrier) {
  auto& b = model().barriers.at(barrier);
  check(b.left > 0, "more arrivals than an mbarrier expects");
  --b.left;
  model().settle(b);
}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  model().barriers.at(barrier).bytes += bytes;
  barrier_arrive(barrier);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  const auto& b = model().barriers.at(barrier);
  model().wait([&] { return b.phase != parity; });
}

// --- TMA ---

inline void prefetch_map(const TensorMap*) {}

// Calls move(offset of an element in the array or -1 outside, its place in the tile at `tile`).
template <class Move>
void each_element(const ModelMap& m, uint32_t tile, int32_t x, int32_t y, int32_t z, Move move) {
  check(tile % 1024 == 0, "a tile does not start at a multiple of 1024 bytes");
  check(m.box[0] * m.bytes == 128, "rows of a tile are not 128 bytes");
  const int64_t first[3] = {x, y, z};
  uint32_t row = 0;
  for (uint32_t c = 0; c < m.box[2]; ++c) {
    for (uint32_t b = 0; b < m.box[1]; ++b, ++row) {
      for (uint32_t a = 0; a < m.box[0]; ++a) {
        const int64_t index[3] = {first[0] + a, first[1] + b, first[2] + c};
        bool inside = true;
        for (int d = 0; d < 3; ++d) inside = inside && index[d] >= 0 && index[d] < static_cast<int64_t>(m.sizes[d]);
        const int64_t offset = index[0] * m.bytes + index[1] * static_cast<int64_t>(m.strides[0]) +
                               index[2] * static_cast<int64_t>(m.strides[1]);
        move(inside ? offset : -1, shared(swizzled(tile + row * 128 + a * m.bytes), m.bytes));
      }
    }
  }
}
inline ModelMap map_of(const TensorMap* map) {
  ModelMap m;
  std::memcpy(&m, map, sizeof m);
  return m;
}
inline void load_3d(uint32_t to, const TensorMap* map, uint32_t barrier, int32_t x, int32_t y, int32_t z) {
  ModelBlock& block = model();
  block.start([=, &block, m = map_of(map)] {
    each_element(m, to, x, y, z, [&](int64_t offset, unsigned char* place) {
      if (offset < 0) {
        std::memset(place, 0, m.bytes);
      } else {
        std::memcpy(place, reinterpret_cast<const char*>(m.at) + offset, m.bytes);
      }
    });
    auto& b = block.barriers.at(barrier);
    b.bytes -= m.box[0] * m.box[1] * m.box[2] * m.bytes;
    block.settle(b);
  });
}
inline void store_3d(const TensorMap* map, uint32_t from, int32_t x, int32_t y, int32_t z) {
  const auto left = model().stores[model().thread()].group;
  ++*left;
  model().start([=, m = map_of(map)] {
    each_element(m, from, x, y, z, [&](int64_t offset, const unsigned char* place) {
      if (offset >= 0) std::memcpy(reinterpret_cast<char*>(m.at) + offset, place, m.bytes);
    });
    --*left;
  });
}
inline void commit_stores() {
  auto& stores = model().stores[model().thread()];
  stores.groups.push_back(stores.group);
  stores.group = std::make_shared<int>(0);
}
template <int kPending>
inline void wait_stores_read() {
  auto& stores = model().stores[model().thread()];
  while (stores.groups.size() > kPending) {
    const auto left = stores.groups.front();
    stores.groups.pop_front();
    model().wait([&] { return *left == 0; });
  }
}
inline void fence_async() {}

// --- Products ---

inline uint64_t descriptor(uint32_t address, uint32_t group_bytes, uint32_t stride_bytes = kSwizzled8Rows) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(group_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}
// Element (mn, k) of a matrix in shared memory, as `descriptor` describes it. major: 1 if MN-major.
inline float element(uint64_t matrix, int major, int mn, int k) {
  check(matrix >> 62 == 1, "a descriptor without 128-byte swizzle");
  const auto start = static_cast<uint32_t>(matrix & 0x3fff) << 4;
  const auto group = static_cast<uint32_t>(matrix >> 16 & 0x3fff) << 4;
  const auto stride = static_cast<uint32_t>(matrix >> 32 & 0x3fff) << 4;
  const auto i = static_cast<uint32_t>(mn), j = static_cast<uint32_t>(k);
  const uint32_t offset =
      major ? i / 64 * group + j / 8 * stride + j % 8 * 128 + i % 64 * 2 : i / 8 * stride + i % 8 * 128 + j * 2;
  uint16_t bits;
  std::memcpy(&bits, shared(swizzled(start + offset), 2), 2);
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
inline void products_begin() {}
inline void products_commit() {
  auto& products = model().products[model().thread()];
  products.groups.push_back(std::move(products.open));
  products.open.clear();
}
template <int kPending>
inline void products_wait() {
  auto& products = model().products[model().thread()];
  while (products.groups.size() > kPending) {
    for (const auto& product : products.groups.front()) product();
    products.groups.pop_front();
  }
}
template <int kCount>
inline void keep_registers(float (&)[kCount]) {}

template <int kA, int kB>
inline void multiply(float (&d)[128], uint64_t a, uint64_t b, int keep) {
  const int t = model().thread() % 128, row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
  const auto product = [=, &d] {
    for (int h = 0; h < 2; ++h) {
      float of_a[16];
      for (int k = 0; k < 16; ++k) of_a[k] = element(a, kA, row + 8 * h, k);
      for (int j = 0; j < 32; ++j) {
        for (int c = 0; c < 2; ++c) {
          float& sum = d[4 * j + 2 * h + c];
          double total = keep ? sum : 0.0;
          for (int k = 0; k < 16; ++k) {
            total += static_cast<double>(of_a[k]) * static_cast<double>(element(b, kB, 8 * j + column + c, k));
          }
          sum = static_cast<float>(total);
        }
      }
    }
  };
  auto& products = model().products[model().thread()];
  if (products.open.empty() && products.groups.empty() && model().coin()) {
    product();
  } else {
    products.open.push_back(product);
  }
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
  const uint32_t* addresses = exchanged(to);
  for (int q = 0; q < 4; ++q) rows[q] = addresses[q * 8 + lane / 4];
  const uint32_t values[4] = {a, b, c, d};
  for (int q = 0; q < 4; ++q) {
    shared(rows[q], 16);  // aligned
    std::memcpy(shared(rows[q] + static_cast<uint32_t>(lane % 4 * 4), 4), values + q, 4);
  }
}
inline float swiglu(float gate, float up) { return gate / (1.0f + std::exp(-gate)) * up; }
inline float float_of(uint32_t pair, int high) { return __uint_as_float(high ? pair & 0xffff0000u : pair << 16); }

}  // namespace gemm
}  // namespace moe_comm
