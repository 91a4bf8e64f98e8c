// The instructions of hopper.h on a CPU, for tests without a GPU (csrc/tests/gemm). From the PTX ISA 8.7 and from what
// was measured on an H200 (strides of MN-major descriptors).
//
// A block runs as 384 fibers, one for each thread, in one thread of the CPU; several blocks run in several. A fiber
// runs until it waits, for others of its warp, warp group or block, for an mbarrier, or for copies. Which one runs next
// is drawn. TMA's copies and wgmma's reads of shared memory happen at a drawn time between the instruction and the wait
// for it, so a missing wait gives wrong results. If all fibers wait, the model throws.
//
// Under ThreadSanitizer each fiber and each copy is a thread (model_order.h), which only mbarriers, bar.sync,
// __syncwarp and waits for copies order. It then finds accesses without such an order in any schedule.
//
// Not modelled: proxies except for copy_16 (fence_async, barriers_ready), registers (setmaxnreg, wgmma.fence).
#pragma once

#include <ucontext.h>

#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <vector>

#include "cuda/gemm/model_order.h"

#define MOE_DEVICE inline
#define __shared__ __thread
#define __grid_constant__

namespace moe_comm {
namespace gemm {

constexpr int kModelThreads = 384;
constexpr uint32_t kSharedBase = 1024;  // address of the first byte; 0 is no address

alignas(1024) inline __thread unsigned char block_shared[232448];

struct ModelIndex {
  unsigned x = 0;
};
inline thread_local ModelIndex threadIdx, blockIdx, gridDim;

// An array in memory with three dimensions, innermost first, and the box that a copy moves. Strides in bytes.
struct ModelMap {
  uint64_t at, sizes[3], strides[2];
  uint32_t box[3], bytes;  // bytes of an element
};
static_assert(sizeof(ModelMap) <= sizeof(TensorMap), "a map has room for its description");

inline void check(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(what);
}

// What a thread copies to an address in shared memory.
struct Copy16 {
  uint32_t to, words[4];
};

constexpr int kMeetBlock = 0, kMeetGroup = 1, kMeetWarp = 16;

// The threads of a block, the products of its warps and its copies, as ThreadSanitizer sees them. They are kept from
// launch to launch: a launch is ordered after the one before it. A copy is drawn one of kCopyAgents, which orders it
// after an earlier one; more would take most of the time of a test.
constexpr int kCopyAgents = 61;
struct BlockAgents {
  BlockAgents() {
    for (Agent& agent : threads) agent = new_agent();
    for (Agent& agent : products) agent = new_agent();
    for (Agent& agent : copies) agent = new_agent();
  }
  Agent threads[kModelThreads], products[kModelThreads / 32], copies[kCopyAgents];

  static BlockAgents& of(int64_t block) {
    static std::mutex mutex;
    static std::map<int64_t, BlockAgents> all;
    const std::lock_guard<std::mutex> lock(mutex);
    return all[block];
  }
};

// One thread block.
class ModelBlock {
 public:
  static ModelBlock*& current() {
    static thread_local ModelBlock* block = nullptr;
    return block;
  }

  // number: of all blocks that may run at the same time.
  ModelBlock(std::function<void()> kernel, unsigned seed, int64_t number = 0)
      : kernel_(std::move(kernel)), random_(seed), agents_(BlockAgents::of(number)) {
    std::memset(block_shared, 0xff, sizeof block_shared);  // NaN
    const Hidden hidden;
    for (int t = 0; t < kModelThreads; ++t) fibers_.push_back(std::make_unique<Fiber>());
  }
  ~ModelBlock() {
    const Hidden hidden;
    fibers_.clear();
    copies_.clear();
  }

  void run() {
    current() = this;
    main_agent_ = this_agent();
    for (auto& fiber : fibers_) {
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get();
      fiber->context.uc_stack.ss_size = Fiber::kStackBytes;
      fiber->context.uc_link = &main_;
      makecontext(&fiber->context, &ModelBlock::enter, 0);
    }
    release(&started_);
    {
      const Hidden hidden;
      run_fibers();
    }
    acquire(&ended_);
    current() = nullptr;
  }

  int thread() const { return now_; }
  bool coin() {
    const Hidden hidden;
    return random_() % 2 != 0;
  }

  // Let others run until ready().
  template <class Ready>
  void wait(Ready ready) {
    const Hidden hidden;
    if (!ready()) {
      Fiber& mine = *fibers_[at(now_)];
      mine.ready = [](const void* asked) { return (*static_cast<const Ready*>(asked))(); };
      mine.asked = &ready;
      leave();
    }
    progress_ = true;
  }

  // Wait for `count` threads that call this with the same key; at most one call of each at a time. ordered: what they
  // did before is ordered before what they do after.
  void meet(int key, int count, bool ordered = true) {
    Meeting* m;
    const char* order;
    {
      const Hidden hidden;
      m = &meetings_[key];
      order = m->orders + m->number % 2;
    }
    if (ordered) release(order);
    {
      const Hidden hidden;
      const int64_t mine = m->number;
      if (++m->arrived == count) {
        m->arrived = 0;
        ++m->number;
      }
      wait([&] { return m->number != mine; });
    }
    if (ordered) acquire(order);
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
  void start(std::function<void()> copy) {
    const Copy* started;
    {
      const Hidden hidden;
      copies_.push_back(std::make_unique<Copy>(Copy{std::move(copy)}));
      started = copies_.back().get();
    }
    release(started);
  }

  // Groups of stores of each thread, those that have been committed and the open one: stores that have not read.
  struct Stores {
    std::deque<std::unique_ptr<int>> groups;
    std::unique_ptr<int> group = std::make_unique<int>(0);
  };
  Stores stores[kModelThreads];
  // The oldest group of this thread if it has more than `pending`, or null.
  const int* oldest_stores(size_t pending) {
    const Hidden hidden;
    const auto& groups = stores[now_].groups;
    return groups.size() > pending ? groups.front().get() : nullptr;
  }
  void forget_stores() {
    const Hidden hidden;
    stores[now_].groups.pop_front();
  }

  // Copies of 16 bytes that a thread has started, by group, and those that it has waited for.
  struct Copies {
    std::vector<Copy16> open, waited;
    std::deque<std::vector<Copy16>> groups;
  };
  Copies copies[kModelThreads];

  // Products that a thread has started, by group.
  struct Products {
    std::vector<std::function<void()>> open;
    std::deque<std::vector<std::function<void()>>> groups;
  };
  Products products[kModelThreads];
  // Make this thread's part of all but the last `pending` groups. Those of its warp are one agent.
  void make_products(size_t pending) {
    const int mine = now_, warp = mine / 32;
    const char* const order = product_orders_ + warp * 2;
    const Agent thread = this_agent();
    release(order);
    become(agents_.products[warp]);
    make_own_products(order, products[mine].groups, pending);
    become(thread);
    meet(kMeetWarp + warp, 32, false);
    acquire(order + 1);
  }

 private:
  struct Fiber {
    ucontext_t context;
    static constexpr size_t kStackBytes = 64 << 10;
    std::unique_ptr<unsigned char[]> stack{new unsigned char[kStackBytes]};
    bool ended = false;
    bool (*ready)(const void* asked) = nullptr;  // what it waits for
    const void* asked = nullptr;
  };
  struct Copy {
    std::function<void()> make;
  };
  struct Meeting {
    int arrived = 0;
    int64_t number = 0;
    char orders[2] = {};
  };

  static size_t at(int i) { return static_cast<size_t>(i); }

  static void enter() {
    ModelBlock* block;
    Fiber* mine;
    Agent main_agent;
    {
      const Hidden hidden;
      block = current();
      mine = block->fibers_[at(block->now_)].get();
      main_agent = block->main_agent_;
    }
    acquire(&block->started_);
    try {
      block->kernel_();
    } catch (...) {
      const Hidden hidden;
      block->error_ = std::current_exception();
    }
    {
      const Hidden hidden;
      mine->ended = true;
      block->progress_ = true;
    }
    release(&block->ended_);
    become(main_agent);
    swapcontext(&mine->context, &block->main_);
  }

  static void make_own_products(const char* order, std::deque<std::vector<std::function<void()>>>& groups,
                                size_t pending) {
    acquire(order);
    for (; groups.size() > pending; groups.pop_front()) {
      for (const auto& product : groups.front()) product();
    }
    release(order + 1);
  }

  // From a fiber to run_fibers.
  void leave() {
    Fiber& mine = *fibers_[at(now_)];
    become(main_agent_);
    swapcontext(&mine.context, &main_);
  }

  void run_fibers() {
    int idle = 0;
    for (size_t ended = 0; ended < fibers_.size();) {
      progress_ = false;
      const int first = static_cast<int>(random_() % kModelThreads);
      for (int i = 0; i < kModelThreads; ++i) {
        now_ = (first + i) % kModelThreads;
        Fiber& fiber = *fibers_[at(now_)];
        if (fiber.ended || (fiber.ready != nullptr && !fiber.ready(fiber.asked))) continue;
        fiber.ready = nullptr;
        threadIdx.x = static_cast<unsigned>(now_);
        become(agents_.threads[now_]);
        swapcontext(&main_, &fiber.context);
        if (error_) std::rethrow_exception(error_);
        ended += fiber.ended;
      }
      if (!copies_.empty() && (!progress_ || random_() % 2)) copy_one(random_() % copies_.size());
      idle = progress_ ? 0 : idle + 1;
      check(idle < 1000, "all threads wait");
    }
    check(copies_.empty(), "the block has ended before its copies");
  }

  void copy_one(size_t which) {
    std::swap(copies_[which], copies_.back());
    const auto copy = std::move(copies_.back());
    copies_.pop_back();
    become(agents_.copies[random_() % kCopyAgents]);
    make(copy.get());
    become(main_agent_);
    progress_ = true;
  }
  void make(const Copy* copy) {
    acquire(copy);
    {
      const Hidden hidden;
      copy->make();
    }
    release(&ended_);
  }

  const std::function<void()> kernel_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::unique_ptr<Copy>> copies_;
  std::map<int, Meeting> meetings_;
  std::exception_ptr error_;
  ucontext_t main_;
  BlockAgents& agents_;
  Agent main_agent_{};
  char started_ = 0, ended_ = 0;  // what orders threads after the launch and its end after them
  char product_orders_[kModelThreads / 32 * 2] = {};
  int now_ = 0;
  bool progress_ = false;
};

inline ModelBlock& model() { return *ModelBlock::current(); }

// --- CUDA ---

inline void __syncthreads() { model().meet(kMeetBlock, kModelThreads); }
inline void __syncwarp() { model().meet(kMeetWarp + model().thread() / 32, 32); }
inline void group_sync(int group) { model().meet(kMeetGroup + group, 128); }

// Exchanges of values do not order accesses to memory.
inline const uint32_t* exchanged(uint32_t mine) {
  const int key = kMeetWarp + model().thread() / 32;
  model().meet(key, 32, false);  // all have read the words of the last exchange
  model().words[model().thread()] = mine;
  model().meet(key, 32, false);
  return model().words + model().thread() / 32 * 32;
}
inline int __shfl_sync(unsigned, int value, int lane) {
  const Hidden hidden;
  return static_cast<int>(exchanged(static_cast<uint32_t>(value))[lane]);
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline float __shfl_xor_sync(unsigned, float value, int lanes) {
  const Hidden hidden;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return __uint_as_float(exchanged(bits)[(model().thread() % 32) ^ lanes]);
}
inline bool __any_sync(unsigned, bool value) {
  const Hidden hidden;
  const uint32_t* words = exchanged(value);
  for (int i = 0; i < 32; ++i) {
    if (words[i]) return true;
  }
  return false;
}

// --- Shared memory ---

// ThreadSanitizer does not see memcpy and memset of few bytes.
typedef uint16_t __attribute__((may_alias)) Half;
typedef uint32_t __attribute__((may_alias)) Word;
typedef float __attribute__((may_alias)) Float;
inline void copy_words(void* to, const void* from) {
  for (int i = 0; i < 4; ++i) static_cast<Word*>(to)[i] = static_cast<const Word*>(from)[i];
}

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
inline void load_shared(uint32_t from, uint32_t (&v)[4]) { copy_words(v, shared(from, 16)); }
inline void store_global(int64_t to, const uint32_t (&v)[4]) { copy_words(reinterpret_cast<void*>(to), v); }
inline uint32_t load_word(int64_t from) { return *reinterpret_cast<const Word*>(from); }
// Both warp groups may write the same zeros. The second then finds them.
inline void store_shared_zeros(uint32_t to) {
  unsigned char* const place = shared(to, 16);
  bool zero = kOrdersAreChecked;
  {
    const Hidden hidden;
    for (int i = 0; i < 16; ++i) zero = zero && place[i] == 0;
  }
  if (zero) {
    acquire(place);
  } else {
    copy_words(place, std::array<uint32_t, 4>{}.data());
    release(place);
  }
}
inline void add_shared(uint32_t at, float a, float b) {
  auto* const v = reinterpret_cast<Float*>(shared(at, 8));
  v[0] += a;
  v[1] += b;
}

// --- mbarriers ---

// What orders the phases of an mbarrier with this parity: a byte of it.
inline const unsigned char* order_of(uint32_t barrier, uint32_t parity) { return shared(barrier, 8) + parity; }
inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  const Hidden hidden;
  model().barriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void barriers_ready() {}
inline uint32_t barrier_phase(uint32_t barrier) {
  const Hidden hidden;
  return model().barriers.at(barrier).phase;
}
inline void barrier_arrive(uint32_t barrier) {
  release(order_of(barrier, barrier_phase(barrier)));
  const Hidden hidden;
  auto& b = model().barriers.at(barrier);
  check(b.left > 0, "more arrivals than an mbarrier expects");
  --b.left;
  model().settle(b);
}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  {
    const Hidden hidden;
    model().barriers.at(barrier).bytes += bytes;
  }
  barrier_arrive(barrier);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  {
    const Hidden hidden;
    const auto& b = model().barriers.at(barrier);
    model().wait([&] { return b.phase != parity; });
  }
  acquire(order_of(barrier, parity));
}

// --- TMA ---

inline void prefetch_map(const TensorMap* map) {
  const Hidden hidden;
  check(map->words[0] != 0, "a tensor map that is not encoded");
}

// Calls move(address of an element or null outside, its place in the tile at `tile`, its bytes).
template <class Move>
void each_element(const ModelMap& m, uint32_t tile, const int32_t (&first)[3], Move move) {
  check(tile % 1024 == 0, "a tile does not start at a multiple of 1024 bytes");
  check(m.box[0] * m.bytes == 128, "rows of a tile are not 128 bytes");
  uint32_t row = 0;
  for (uint32_t c = 0; c < m.box[2]; ++c) {
    for (uint32_t b = 0; b < m.box[1]; ++b, ++row) {
      for (uint32_t a = 0; a < m.box[0]; ++a) {
        const int64_t index[3] = {int64_t{first[0]} + a, int64_t{first[1]} + b, int64_t{first[2]} + c};
        bool inside = true;
        for (int d = 0; d < 3; ++d) inside = inside && index[d] >= 0 && index[d] < static_cast<int64_t>(m.sizes[d]);
        char* const element = reinterpret_cast<char*>(m.at) + index[0] * m.bytes +
                              index[1] * static_cast<int64_t>(m.strides[0]) +
                              index[2] * static_cast<int64_t>(m.strides[1]);
        move(inside ? element : nullptr, shared(swizzled(tile + row * 128 + a * m.bytes), m.bytes), m.bytes);
      }
    }
  }
}
// Accesses of copies, as ThreadSanitizer sees them.
inline uint32_t read_element(const void* from, uint32_t bytes) {
  const Shown shown;
  if (bytes == 4) return *static_cast<const Word*>(from);
  if (bytes == 2) return *static_cast<const Half*>(from);
  return *static_cast<const uint8_t*>(from);
}
inline void write_element(void* to, uint32_t value, uint32_t bytes) {
  const Shown shown;
  if (bytes == 4) {
    *static_cast<Word*>(to) = value;
  } else if (bytes == 2) {
    *static_cast<Half*>(to) = static_cast<uint16_t>(value);
  } else {
    *static_cast<uint8_t*>(to) = static_cast<uint8_t>(value);
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
    each_element(m, to, {x, y, z}, [](const char* element, unsigned char* place, uint32_t bytes) {
      write_element(place, element == nullptr ? 0 : read_element(element, bytes), bytes);
    });
    auto& b = block.barriers.at(barrier);
    {
      const Shown shown;
      release(order_of(barrier, b.phase));
    }
    b.bytes -= m.box[0] * m.box[1] * m.box[2] * m.bytes;
    block.settle(b);
  });
}
inline void store_3d(const TensorMap* map, uint32_t from, int32_t x, int32_t y, int32_t z) {
  int* left;
  {
    const Hidden hidden;
    left = model().stores[model().thread()].group.get();
    ++*left;
  }
  model().start([=, m = map_of(map)] {
    std::vector<uint32_t> values;
    each_element(m, from, {x, y, z}, [&](const char*, const unsigned char* place, uint32_t bytes) {
      values.push_back(read_element(place, bytes));
    });
    {
      const Shown shown;
      release(left);  // wait_stores_read orders reads only
    }
    --*left;
    const uint32_t* next = values.data();
    each_element(m, from, {x, y, z}, [&](char* element, const unsigned char*, uint32_t bytes) {
      if (element != nullptr) write_element(element, *next, bytes);
      ++next;
    });
  });
}
inline void commit_stores() {
  const Hidden hidden;
  auto& stores = model().stores[model().thread()];
  stores.groups.push_back(std::move(stores.group));
  stores.group = std::make_unique<int>(0);
}
template <int kPending>
inline void wait_stores_read() {
  while (const int* left = model().oldest_stores(kPending)) {
    model().wait([&] { return *left == 0; });
    acquire(left);
    model().forget_stores();
  }
}

// --- Copies of 16 bytes by each thread ---

// wgmma sees a copy when its thread has waited for it and called fence_async, or at once: both may happen.
inline void copy_16(uint32_t to, int64_t from, uint32_t bytes) {
  Copy16 copy{to, {}};
  if (bytes) copy_words(copy.words, reinterpret_cast<const void*>(from));
  if (model().coin()) {
    copy_words(shared(to, 16), copy.words);
  } else {
    model().copies[model().thread()].open.push_back(copy);
  }
}
inline void copies_commit() {
  auto& copies = model().copies[model().thread()];
  copies.groups.push_back(std::move(copies.open));
  copies.open.clear();
}
template <int kPending>
inline void copies_wait() {
  auto& copies = model().copies[model().thread()];
  for (; copies.groups.size() > kPending; copies.groups.pop_front()) {
    for (const Copy16& copy : copies.groups.front()) copies.waited.push_back(copy);
  }
}
inline void fence_async() {
  auto& waited = model().copies[model().thread()].waited;
  for (const Copy16& copy : waited) copy_words(shared(copy.to, 16), copy.words);
  waited.clear();
}

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
