// Shared memory, mbarriers, TMA and other copies of the model (model.h).
#pragma once

#include "cuda/gemm/model_block.h"

namespace moe_comm {
namespace gemm {

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
inline uint32_t __shfl_sync(unsigned, uint32_t value, int lane) {
  const Hidden hidden;
  return exchanged(value)[lane];
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
inline void load_shared(uint32_t from, uint32_t (&v)[2]) {
  for (int i = 0; i < 2; ++i) v[i] = reinterpret_cast<const Word*>(shared(from, 8))[i];
}
inline void store_shared(uint32_t to, const uint32_t (&v)[2]) {
  for (int i = 0; i < 2; ++i) reinterpret_cast<Word*>(shared(to, 8))[i] = v[i];
}
inline void store_global(int64_t to, const uint32_t (&v)[4]) { copy_words(reinterpret_cast<void*>(to), v); }
inline void store_shared(uint32_t to, const uint32_t (&v)[4]) { copy_words(shared(to, 16), v); }
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
  std::shared_ptr<ModelBlock::StoreGroup> group;
  {
    const Hidden hidden;
    group = model().stores[model().thread()].group;
    ++group->to_read;
    ++group->to_write;
  }
  ModelBlock& block = model();
  block.start([=, &block, m = map_of(map)] {
    std::vector<uint32_t> values;
    each_element(m, from, {x, y, z}, [&](const char*, const unsigned char* place, uint32_t bytes) {
      values.push_back(read_element(place, bytes));
    });
    {
      const Shown shown;
      release(&group->to_read);
    }
    --group->to_read;
    ++block.late_writes;
    block.start_later([=, &block] {
      const uint32_t* next = values.data();
      each_element(m, from, {x, y, z}, [&](char* element, const unsigned char*, uint32_t bytes) {
        if (element != nullptr) write_element(element, *next, bytes);
        ++next;
      });
      {
        const Shown shown;
        release(&group->to_write);
      }
      --group->to_write;
      --block.late_writes;
    });
  });
}
inline void commit_stores() {
  const Hidden hidden;
  auto& stores = model().stores[model().thread()];
  stores.groups.push_back(std::move(stores.group));
  stores.group = std::make_shared<ModelBlock::StoreGroup>();
}
template <int kPending>
inline void wait_stores_read() {
  size_t& read = model().stores[model().thread()].read;
  for (; const auto group = model().older_stores(kPending, read); ++read) {
    model().wait([&] { return group->to_read == 0; });
    acquire(&group->to_read);
  }
}
template <int kPending>
inline void wait_stores() {
  while (const auto group = model().older_stores(kPending, 0)) {
    model().wait([&] { return group->to_write == 0; });
    acquire(&group->to_write);
    const Hidden hidden;
    auto& stores = model().stores[model().thread()];
    stores.groups.pop_front();
    if (stores.read > 0) --stores.read;
  }
}

// --- Words that other blocks and ranks change ---

inline int64_t load_system(const int64_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
inline void store_system(int64_t* p, int64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
inline int64_t add_system(int64_t* p, int64_t v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
inline int64_t count_up(int64_t* p) { return __atomic_fetch_add(p, 1, __ATOMIC_RELAXED); }
inline int64_t store_if_zero(int64_t* p, int64_t v) {
  int64_t old = 0;
  __atomic_compare_exchange_n(p, &old, v, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return old;
}
inline void fence_loads() {}
inline int64_t now_ns() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(t).count();
}
// Lets the other threads of the block run, and other blocks: there may be more than cores.
inline void pause() {
  bool left = false;
  model().wait([&left] { return std::exchange(left, true); });
  std::this_thread::yield();
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

}  // namespace gemm
}  // namespace moe_comm
