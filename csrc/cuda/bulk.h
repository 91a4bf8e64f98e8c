// Copies of whole rows through shared memory by the hardware of the multiprocessor (cp.async.bulk, sm_90 and newer).
// The data pass through no register, so few multiprocessors suffice. One thread of each warp controls its copies:
//
//   piece      0        1        2        3        4          kBulkBytes of a row, in buffer (piece % kBulkBuffers);
//                                                             the warps of a block take the pieces of its rows in turn
//   load       ├──────┤ ├──────┤ ├──────┤ ├──────┤            global memory -> shared memory; an mbarrier tells its end
//   store                        ├─ ─ ─┤  ├─ ─ ─┤  ├─ ─ ─┤    shared memory -> each destination; a bulk group per piece
//
// kBulkAhead loads are in flight before the first store. A buffer is loaded again when its stores have read it.
#pragma once

#include "cuda/machine.h"
#include "cuda/shared.h"

namespace moe_comm {
namespace p2p {

#if defined(__CUDACC__)

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MOE_BULK 1
#endif

class BulkCopies {
 public:
  // Called by the whole block; allocates shared memory if `enabled`.
  MOE_BLOCK BulkCopies(Machine& m, bool enabled) {
#ifdef MOE_BULK
    if (!enabled) return;
    char* buffers = m.shared<char>(kBulkWarps * kBulkBuffers * kBulkBytes);
    int64_t* barriers = m.shared<int64_t>(kBulkWarps * kBulkBuffers);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x % 32 != 0 || warp >= kBulkWarps) return;
    buffers_ = static_cast<uint32_t>(__cvta_generic_to_shared(buffers)) + warp * kBulkBuffers * kBulkBytes;
    barriers_ = static_cast<uint32_t>(__cvta_generic_to_shared(barriers)) + warp * kBulkBuffers * 8;
    for (int b = 0; b < kBulkBuffers; ++b) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers_ + b * 8) : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    (void)m;
    (void)enabled;
#endif
  }

  MOE_BLOCK bool usable(bool enabled) const {
#ifdef MOE_BULK
    return enabled;
#else
    (void)enabled;
    return false;
#endif
  }

  // Called by the whole block. Copies row i from source(i) to those of target(i, 0) to target(i, targets - 1) that are
  // not null. All addresses and row_bytes are multiples of 16. Returns before the copies have ended; see finish.
  template <class Source, class Target>
  MOE_BLOCK void copy(int rows, int64_t row_bytes, int targets, Source source, Target target) {
#ifdef MOE_BULK
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (threadIdx.x % 32 != 0 || warp >= kBulkWarps) return;
    const int warps = blockDim.x / 32 < kBulkWarps ? static_cast<int>(blockDim.x) / 32 : kBulkWarps;
    const int per_row = static_cast<int>((row_bytes + kBulkBytes - 1) / kBulkBytes);
    const int all = rows * per_row, pieces = warp < all ? (all - warp - 1) / warps + 1 : 0;
    const auto row_of = [&](int piece) { return (warp + piece * warps) / per_row; };
    const auto first_of = [&](int piece) {
      return static_cast<int64_t>((warp + piece * warps) % per_row) * kBulkBytes;
    };
    const auto bytes_of = [&](int piece) {
      const int64_t left = row_bytes - first_of(piece);
      return static_cast<uint32_t>(left < kBulkBytes ? left : kBulkBytes);
    };
    for (int piece = 0; piece < pieces + kBulkAhead; ++piece) {
      if (piece < pieces) {
        wait_until_read();
        load(source(row_of(piece)) + first_of(piece), bytes_of(piece), next_ + piece);
      }
      const int loaded = piece - kBulkAhead;
      if (loaded < 0 || loaded >= pieces) continue;
      wait_until_loaded(next_ + loaded);
      const uint32_t from = buffer_of(next_ + loaded);
      for (int k = 0; k < targets; ++k) {
        char* to = target(row_of(loaded), k);
        if (to == nullptr) continue;
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + first_of(loaded)),
                     "r"(from), "r"(bytes_of(loaded))
                     : "memory");
      }
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    next_ += pieces;
#else
    (void)rows, (void)row_bytes, (void)targets, (void)source, (void)target;
#endif
  }

  // Called by the whole block before the sync after which other threads may set flags. Waits until the rows are
  // written.
  MOE_BLOCK void finish() const {
#ifdef MOE_BULK
    if (threadIdx.x % 32 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
  }

#ifdef MOE_BULK
 private:
  MOE_BLOCK uint32_t buffer_of(int piece) const { return buffers_ + piece % kBulkBuffers * kBulkBytes; }
  MOE_BLOCK uint32_t barrier_of(int piece) const { return barriers_ + piece % kBulkBuffers * 8; }

  // Wait until the stores of the piece that had the next buffer have read it: all groups but the latest ones.
  MOE_BLOCK void wait_until_read() const {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kBulkBuffers - kBulkAhead - 1) : "memory");
  }
  MOE_BLOCK void load(const char* from, uint32_t bytes, int piece) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_of(piece)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     buffer_of(piece)),
                 "l"(from), "r"(bytes), "r"(barrier_of(piece))
                 : "memory");
  }
  MOE_BLOCK void wait_until_loaded(int piece) const {
    const uint32_t parity = static_cast<uint32_t>(piece / kBulkBuffers) & 1;
    uint32_t loaded = 0;
    while (!loaded) {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}"
          : "=r"(loaded)
          : "r"(barrier_of(piece)), "r"(parity)
          : "memory");
    }
  }

  uint32_t buffers_ = 0, barriers_ = 0;  // of this warp, in the address space of shared memory
  int next_ = 0;                         // number of pieces so far
#endif
};

#else

class BulkCopies {
 public:
  BulkCopies(Machine& m, bool enabled) {
    if (!enabled) return;
    m.shared<char>(kBulkWarps * kBulkBuffers * kBulkBytes);
    m.shared<int64_t>(kBulkWarps * kBulkBuffers);
  }
  bool usable(bool enabled) const { return enabled; }
  template <class Source, class Target>
  void copy(int rows, int64_t row_bytes, int targets, Source source, Target target) const {
    for (int i = 0; i < rows; ++i) {
      for (int k = 0; k < targets; ++k) {
        if (char* to = target(i, k)) std::memcpy(to, source(i), static_cast<size_t>(row_bytes));
      }
    }
  }
  void finish() const {}
};

#endif

}  // namespace p2p
}  // namespace moe_comm
