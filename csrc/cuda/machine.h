// The execution model of the kernels. Each kernel is written once, for one block, in phases: m.each(n, f) calls f(0) to
// f(n - 1) in any order, distributed over the block's threads, and m.sync() ends a phase. The same source runs on a GPU
// and, block by block, on a host thread, where tests run it under sanitizers. Kernels that wait have one block, so the
// serial host execution cannot deadlock.
#pragma once

#include "cuda/args.h"
#include "planner.h"

#if defined(__CUDACC__)
#define MOE_PRAGMA(text) _Pragma(#text)
#define MOE_UNROLL MOE_PRAGMA(unroll)
#define MOE_UNROLL_BY(n) MOE_PRAGMA(unroll n)
#else
#include <sched.h>
#include <time.h>

#include <chrono>
#include <cstring>
#define MOE_UNROLL
#define MOE_UNROLL_BY(n)
#endif

namespace moe_comm {
namespace p2p {

struct alignas(16) Words16 {
  uint32_t w[4];
};

template <class T>
MOE_BLOCK T* at(int64_t address) {
  return reinterpret_cast<T*>(address);
}

#if defined(__CUDACC__)

extern __shared__ Words16 block_memory[];

class Machine {
 public:
  MOE_BLOCK int64_t block() const { return blockIdx.x; }
  MOE_BLOCK int64_t blocks() const { return gridDim.x; }
  MOE_BLOCK int threads() const { return static_cast<int>(blockDim.x); }

  template <class F>
  MOE_BLOCK void each(int n, F f) const {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) f(i);
  }
  // Calls store(row, word, load(row, word)) for all words of all rows. A warp moves a part of a row at a time, and
  // issues `kAtOnce` loads before the first store.
  template <int kAtOnce, class Load, class Store>
  MOE_BLOCK void move_rows(int rows, int words, Load load, Store store) const {
    const int lane = static_cast<int>(threadIdx.x % 32), warps = static_cast<int>(blockDim.x / 32);
    const int parts = (words + 32 * kAtOnce - 1) / (32 * kAtOnce);
    for (int i = static_cast<int>(threadIdx.x / 32); i < rows * parts; i += warps) {
      const int row = i / parts, first = i % parts * 32 * kAtOnce + lane;
      decltype(load(0, 0)) v[kAtOnce];
      MOE_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        if (first + u * 32 < words) v[u] = load(row, first + u * 32);
      }
      MOE_UNROLL
      for (int u = 0; u < kAtOnce; ++u) {
        if (first + u * 32 < words) store(row, first + u * 32, v[u]);
      }
    }
  }
  // Calls f(i, member) for i = 0 to n - 1 and all members of a team of kTeam neighbouring threads. The members of a
  // team call team_max together.
  static constexpr int kTeam = 8;
  template <class F>
  MOE_BLOCK void teams(int n, F f) const {
    const int member = static_cast<int>(threadIdx.x) % kTeam, teams = static_cast<int>(blockDim.x) / kTeam;
    for (int i = static_cast<int>(threadIdx.x) / kTeam; i < n; i += teams) f(i, member);
  }
  MOE_BLOCK uint32_t team_max(uint32_t v) const {
    const uint32_t members = ((1u << kTeam) - 1) << (threadIdx.x % 32 / kTeam * kTeam);
    MOE_UNROLL
    for (int other = kTeam / 2; other > 0; other /= 2) v = max(v, __shfl_xor_sync(members, v, other));
    return v;
  }
  // The number of this warp among all warps of the grid, those of other blocks first, and of this lane in the warp.
  static constexpr int kLanes = 32;
  MOE_BLOCK int warp() const { return static_cast<int>(threadIdx.x / kLanes * gridDim.x + blockIdx.x); }
  MOE_BLOCK int warps() const { return static_cast<int>(blockDim.x / kLanes * gridDim.x); }
  MOE_BLOCK int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
  // The value of another lane. Called by all lanes of a warp.
  template <class T>
  MOE_BLOCK T* from_lane(T* v, int lane) const {
    return reinterpret_cast<T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(v), lane));
  }
  MOE_BLOCK float from_lane(float v, int lane) const { return __shfl_sync(~0u, v, lane); }
  MOE_BLOCK void sync() const { __syncthreads(); }

  // The lanes of this warp, and the warps of the block, as teams.
  struct Warp {
    static constexpr int kLanes = Machine::kLanes;
    MOE_BLOCK int lane() const { return static_cast<int>(threadIdx.x) % kLanes; }
    MOE_BLOCK int64_t team() const { return threadIdx.x / kLanes; }
    MOE_BLOCK int64_t teams() const { return blockDim.x / kLanes; }
    MOE_BLOCK void sync() const { __syncwarp(); }
    MOE_BLOCK int64_t from(int64_t v, int lane) const { return __shfl_sync(~0u, v, lane); }
  };
  using WarpTeam = Team<Warp>;

  // Allocate shared memory of the block, in call order. cuda/shared.h computes the total size.
  template <class T>
  MOE_BLOCK T* shared(int64_t count) {
    T* p = reinterpret_cast<T*>(reinterpret_cast<char*>(block_memory) + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return p;
  }

  MOE_BLOCK int64_t load_acquire(const int64_t* p) const {
    int64_t v;
    asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
  }
  // Release store at system scope: all writes of this block before its last sync() become visible before *p == v,
  // because sync() orders them before this thread's release, and a release is cumulative.
  MOE_BLOCK void store_release(int64_t* p, int64_t v) const {
    asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
  }
  // Add to a counter in device memory and return the previous value. Ordered after all writes of this block before its
  // last sync(), at system scope: the thread that adds last sets a flag that a peer reads.
  MOE_BLOCK int64_t fetch_add(int64_t* p, int64_t v) const {
    int64_t old;
    asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
    return old;
  }
  // Unordered atomics on words of the block (or of the report).
  MOE_BLOCK void add(int64_t* p, int64_t v) const {
    atomicAdd_system(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(v));
  }
  MOE_BLOCK void lowest(int64_t* p, int64_t v) const { atomicMin(reinterpret_cast<long long*>(p), v); }
  MOE_BLOCK void highest(uint32_t* p, uint32_t v) const { atomicMax(p, v); }

  MOE_BLOCK int64_t now_ns() const {
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return static_cast<int64_t>(t);
  }
  MOE_BLOCK void pause() const { __nanosleep(64); }

 private:
  int64_t used_ = 0;
};

// Volatile, so that several loads stay ahead of the first use. Rows that are read once need no place in the L1 cache,
// but on an H200 sum is 4% faster if its rows go through it.
MOE_BLOCK Words16 load16(const void* p) {
  Words16 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}
MOE_BLOCK Words16 load16_through_l1(const void* p) {
  Words16 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}
MOE_BLOCK void store16(void* p, const Words16& v) {
  *reinterpret_cast<uint4*>(p) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
}

#else

class Machine {
 public:
  // threads: the emulated number of threads per block. They run serially, the last thread first.
  Machine(int64_t block, int64_t blocks, char* memory, int64_t bytes, int threads = 1)
      : block_(block), blocks_(blocks), memory_(memory), bytes_(bytes), threads_(threads) {}

  int64_t block() const { return block_; }
  int64_t blocks() const { return blocks_; }
  int threads() const { return threads_; }

  template <class F>
  void each(int n, F f) const {
    for (int t = threads_ - 1; t >= 0; --t) {
      for (int i = t; i < n; i += threads_) f(i);
    }
  }
  template <int kAtOnce, class Load, class Store>
  void move_rows(int rows, int words, Load load, Store store) const {
    each(rows * words, [&](int i) { store(i / words, i % words, load(i / words, i % words)); });
  }
  static constexpr int kTeam = 1;
  template <class F>
  void teams(int n, F f) const {
    each(n, [&](int i) { f(i, 0); });
  }
  uint32_t team_max(uint32_t v) const { return v; }
  // One warp of one lane for each block.
  static constexpr int kLanes = 1;
  int warp() const { return static_cast<int>(block_); }
  int warps() const { return static_cast<int>(blocks_); }
  int lane() const { return 0; }
  template <class T>
  T from_lane(T v, int) const {
    return v;
  }
  void sync() const {}
  using WarpTeam = Team<OneLane>;

  template <class T>
  T* shared(int64_t count) {
    T* p = reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    if (used_ > bytes_) __builtin_trap();  // cuda/shared.h and the kernel disagree
    return p;
  }

  int64_t load_acquire(const int64_t* p) const { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
  void store_release(int64_t* p, int64_t v) const { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
  int64_t fetch_add(int64_t* p, int64_t v) const { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
  void add(int64_t* p, int64_t v) const { __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
  void lowest(int64_t* p, int64_t v) const {
    if (v < *p) *p = v;
  }
  void highest(uint32_t* p, uint32_t v) const {
    if (v > *p) *p = v;
  }

  int64_t now_ns() const {
    const auto t = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(t).count();
  }
  // There may be more ranks than cores. A rank that waits long sleeps, so that other ranks can run.
  void pause() const {
    constexpr int kYields = 1000;
    constexpr timespec kNap = {0, 50000};
    if (++pauses_ < kYields) {
      sched_yield();
    } else {
      clock_nanosleep(CLOCK_MONOTONIC, 0, &kNap, nullptr);
    }
  }

 private:
  int64_t block_, blocks_;
  char* memory_;
  int64_t bytes_, used_ = 0;
  int threads_;
  mutable int pauses_ = 0;
};

inline Words16 load16(const void* p) {
  Words16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline Words16 load16_through_l1(const void* p) { return load16(p); }
inline void store16(void* p, const Words16& v) { std::memcpy(p, &v, sizeof v); }

#endif

// --- common start of all kernels ---

template <class Args>
MOE_BLOCK Group group_of(const Args& a) {
#define MOE_P2P_COPY(name) a.name,
  return {MOE_P2P_GROUP(MOE_P2P_COPY)};
#undef MOE_P2P_COPY
}

template <class Args>
MOE_BLOCK bool failed(const Args& a) {
  return at<const State>(a.state_at)->fault != kNone;
}

// The control areas of this rank and its peers.
struct Blocks {
  char* const* peers;
  Control control;

  template <class Args>
  MOE_BLOCK explicit Blocks(const Args& a)
      : peers(at<char* const>(a.peers_at)), control{a.world, a.experts, a.local_experts} {}
  MOE_BLOCK int64_t* words(int64_t rank) const { return reinterpret_cast<int64_t*>(peers[rank]); }
};

MOE_BLOCK int64_t owner_of(const int64_t* offsets, int64_t world, int64_t expert) {
  int64_t low = 0, high = world;  // invariant: the owner is in [low, high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (offsets[middle] <= expert) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

struct Failure {
  int64_t fault, who, what, expected, value;
};

// Called by one thread. Records the failure; this and every later kernel of this rank then returns.
template <class M>
MOE_BLOCK void fail(M& m, const Group& g, int64_t turn, const Failure& f) {
  Report* report = at<Report>(g.report_at);
  report->fault = f.fault;
  report->who = f.who;
  report->what = f.what;
  report->expected = f.expected;
  report->value = f.value;
  at<State>(g.state_at)->fault = f.fault;
  m.store_release(&report->turn, turn);
}

struct Word {
  const int64_t* at;  // null: no wait
  int64_t who;
};

// Called by the whole block. Waits until each of `count` words, shifted right by `shift`, is at least `turn`. word(i)
// returns the i-th word. On a timeout or abort, reports the first word that is still behind and returns false.
template <class M, class WordOf>
MOE_BLOCK bool wait_all(M& m, const Group& g, int count, Wait what, int64_t turn, int shift, WordOf word) {
  int64_t* late = m.template shared<int64_t>(1);
  m.each(1, [&](int) { *late = count; });
  m.sync();
  const int64_t deadline = m.now_ns() + g.timeout_ns;
  const int64_t* stop = at<const int64_t>(g.abort_at);
  m.each(count, [&](int i) {
    const Word w = word(i);
    if (w.at == nullptr) return;
    for (int64_t spins = 1; (m.load_acquire(w.at) >> shift) < turn; ++spins) {
      // The abort word is in host memory and slow to read. Check it and the clock every 64 spins.
      if (spins % 64 == 0 && (m.load_acquire(stop) != 0 || m.now_ns() > deadline)) {
        m.lowest(late, i);
        return;
      }
      if (spins > 64) m.pause();
    }
  });
  m.sync();
  const bool good = *late == count;
  if (!good) {
    m.each(1, [&](int) {
      const Word w = word(static_cast<int>(*late));
      const int64_t fault = m.load_acquire(stop) != 0 ? kAborted : kTimedOut;
      fail(m, g, turn, {fault, w.who, what, turn, m.load_acquire(w.at) >> shift});
    });
  }
  return good;
}

// Called by the whole block, after its last write. Returns whether it is the last block of the kernel to do so; the
// writes of the other blocks are then visible to it.
template <class M, class Args>
MOE_BLOCK bool is_last_block(M& m, const Args& a) {
  int64_t* last = m.template shared<int64_t>(1);
  m.sync();
  m.each(1, [&](int) {
    int64_t* ended = &at<State>(a.state_at)->ended;
    *last = m.fetch_add(ended, 1) + 1 == m.blocks();
    if (*last) *ended = 0;
  });
  m.sync();
  return *last != 0;
}

}  // namespace p2p
}  // namespace moe_comm
