// A block of the model (model.h): its fibers, what they wait for, its copies and products.
#pragma once

#include <ucontext.h>

#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
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

  // The same from a copy: the second step of it.
  void start_later(std::function<void()> copy) {
    copies_.push_back(std::make_unique<Copy>(Copy{std::move(copy)}));
    const Copy* const started = copies_.back().get();
    const Shown shown;
    release(started);
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

  // Groups of stores of each thread, those that have been committed and the open one: stores that have not read, and
  // those that have not written. The block may end before the latter.
  struct StoreGroup {
    int to_read = 0, to_write = 0;
  };
  struct Stores {
    std::deque<std::shared_ptr<StoreGroup>> groups;
    size_t read = 0;  // of groups, the number of those that this thread has waited for until they have read
    std::shared_ptr<StoreGroup> group = std::make_shared<StoreGroup>();
  };
  Stores stores[kModelThreads];
  // The next group of this thread before the last `pending` ones, after `index` others; or null.
  std::shared_ptr<StoreGroup> older_stores(size_t pending, size_t index) {
    const Hidden hidden;
    const auto& groups = stores[now_].groups;
    return groups.size() > pending + index ? groups[index] : nullptr;
  }
  int late_writes = 0;  // stores that have read

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
    check(copies_.size() == static_cast<size_t>(late_writes), "the block has ended before its copies");
    while (!copies_.empty()) copy_one(0);
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

}  // namespace gemm
}  // namespace moe_comm
