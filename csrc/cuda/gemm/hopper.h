// Instructions of sm_90a for GEMMs: mbarriers, tensor copies (TMA), matrix products of a warp group (wgmma).
//
// Tiles in shared memory have rows of 128 bytes (64 16-bit elements) with TMA's 128-byte swizzle: the 16-byte word w of
// row r is at word w ^ (r % 8). A tile starts at a multiple of 1024 bytes. An operand whose 64 elements in a row are
// consecutive along K is K-major; one whose elements are consecutive along M or N is MN-major.
#pragma once

#include "layout.h"

namespace moe_comm {
namespace gemm {

// A CUtensorMap, passed as a __grid_constant__ argument.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// Stage number and phase of a ring of kStages buffers.
template <int kStages>
struct Ring {
  uint32_t stage = 0, phase = 0;
  MOE_HD void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

constexpr uint32_t kSwizzled8Rows = 1024;  // bytes of 8 rows of 128 bytes

#if defined(MOE_GEMM_MODEL)
}  // namespace gemm
}  // namespace moe_comm
#include "cuda/gemm/model.h"  // the same functions on a CPU
namespace moe_comm {
namespace gemm {
#define MOE_HOPPER 1
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MOE_HOPPER 1
#define MOE_DEVICE __device__ __forceinline__

MOE_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// --- mbarriers, by shared address ---

MOE_DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to TMA; __syncthreads follows.
MOE_DEVICE void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
MOE_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrive, and let the phase also wait for `bytes` bytes of copies.
MOE_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
MOE_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}\n" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}

// --- TMA ---

MOE_DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}
MOE_DEVICE void load_3d(uint32_t to, const TensorMap* map, uint32_t barrier, int32_t x, int32_t y, int32_t z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
MOE_DEVICE void store_3d(const TensorMap* map, uint32_t from, int32_t x, int32_t y, int32_t z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}
MOE_DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Wait until all but the last `kPending` groups of stores have read shared memory.
template <int kPending>
MOE_DEVICE void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Wait until all but the last `kPending` groups of stores have written, so that this thread can report them.
template <int kPending>
MOE_DEVICE void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
// Order this thread's accesses to shared memory before later ones by TMA and wgmma.
MOE_DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- Words that other blocks and ranks change ---

// Acquires what was written before a release of the word; loads by TMA see it after fence_loads.
MOE_DEVICE int64_t load_system(const int64_t* p) {
  int64_t v;
  asm volatile("ld.acquire.sys.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
MOE_DEVICE void store_system(int64_t* p, int64_t v) {
  asm volatile("st.release.sys.global.b64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Acquires and releases; returns the value before.
MOE_DEVICE int64_t add_system(int64_t* p, int64_t v) {
  int64_t old;
  asm volatile("atom.acq_rel.sys.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}
// Adds 1, and orders nothing; returns the value before.
MOE_DEVICE int64_t count_up(int64_t* p) {
  int64_t old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(old) : "l"(p) : "memory");
  return old;
}
// Stores v where the word is 0; returns the value before.
MOE_DEVICE int64_t store_if_zero(int64_t* p, int64_t v) {
  int64_t old;
  asm volatile("atom.acq_rel.sys.global.cas.b64 %0, [%1], 0, %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}
// Order this thread's accesses to memory before later loads by TMA.
MOE_DEVICE void fence_loads() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
MOE_DEVICE int64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return static_cast<int64_t>(t);
}
MOE_DEVICE void pause() { __nanosleep(64); }

// --- Copies of 16 bytes by each thread ---

// Copies the first `bytes` (0 or 16) of 16 bytes at the address `from`, and zeros behind them.
MOE_DEVICE void copy_16(uint32_t to, int64_t from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
MOE_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until all but the last `kPending` committed groups of this thread are in shared memory. fence_async follows
// where wgmma reads them.
template <int kPending>
MOE_DEVICE void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- Products of a warp group ---

// Descriptor of a matrix in shared memory, 128-byte swizzle. In K-major tiles `group_bytes` has no effect and
// `stride_bytes` is from 8 rows of M or N to the next 8. In MN-major tiles `group_bytes` is from 64 elements of M or N
// to the next 64 and `stride_bytes` from 8 rows of K to the next 8. A step of 16 along K adds 32 bytes to the address
// of a K-major tile, and 16 rows to that of an MN-major one.
MOE_DEVICE uint64_t descriptor(uint32_t address, uint32_t group_bytes, uint32_t stride_bytes = kSwizzled8Rows) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(group_bytes >> 4) << 16 |
         static_cast<uint64_t>(stride_bytes >> 4) << 32 | static_cast<uint64_t>(1) << 62;
}

// Before the first product: registers and shared memory written so far are visible to it.
MOE_DEVICE void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
MOE_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until all but the last `kPending` committed groups have ended.
template <int kPending>
MOE_DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to accumulators across this point.
template <int kCount>
MOE_DEVICE void keep_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The operand list of wgmma: "%0, ... %9, " and so on by tens, and d[i] by eights.
#define MOE_TEN(t) \
  "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define MOE_120 \
  MOE_TEN()     \
  MOE_TEN(1)    \
  MOE_TEN(2) MOE_TEN(3) MOE_TEN(4) MOE_TEN(5) MOE_TEN(6) MOE_TEN(7) MOE_TEN(8) MOE_TEN(9) MOE_TEN(10) MOE_TEN(11)
#define MOE_8(d, i)                                                                                           \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define MOE_64(d, i)                                                                                    \
  MOE_8(d, i), MOE_8(d, i + 8), MOE_8(d, i + 16), MOE_8(d, i + 24), MOE_8(d, i + 32), MOE_8(d, i + 40), \
      MOE_8(d, i + 48), MOE_8(d, i + 56)

// d = a @ b + (keep ? d : 0), bf16 with fp32 sums: a [64, 16], b [256, 16]. kA, kB: 1 if MN-major.
// Thread t of the warp group has rows t / 32 * 16 + t % 32 / 4 + {0, 8} and columns 8 * j + t % 4 * 2 + {0, 1}:
// d[4 * j + 2 * {row} + {column}].
template <int kA, int kB>
MOE_DEVICE void multiply(float (&d)[128], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" MOE_120
      "%120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, p, 1, 1, %131, %132;\n}\n"
      : MOE_64(d, 0), MOE_64(d, 64)
      : "l"(a), "l"(b), "r"(keep), "n"(kA), "n"(kB));
}

// d = a @ b + (keep ? d : 0), e4m3 with the tensor cores' sums: a [64, 32], b [128, 32], both K-major. d as above, with
// 16 groups of 8 columns. A step of 32 along K adds 32 bytes to an address.
MOE_DEVICE void multiply_e4m3(float (&d)[64], uint64_t a, uint64_t b, int keep) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" MOE_TEN()
          MOE_TEN(1) MOE_TEN(2) MOE_TEN(3) MOE_TEN(4) MOE_TEN(5) "%60, %61, %62, %63}, %64, %65, p, 1, 1;\n}\n"
      : MOE_64(d, 0)
      : "l"(a), "l"(b), "r"(keep));
}

// --- Registers of warp groups, and stores of results ---

template <int kRegisters>
MOE_DEVICE void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
MOE_DEVICE void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// Two floats as bf16, rounded to nearest even; `low` comes first in memory.
MOE_DEVICE uint32_t bf16_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Stores four 8x8 matrices of 16-bit elements. Thread t has elements {0, 1} + t % 4 * 2 of row t / 4 of each, and gives
// the address of row t % 8 of matrix t / 8.
MOE_DEVICE void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
// Loads four such matrices, by the same addresses, into the registers from which store_matrices stores them.
MOE_DEVICE void load_matrices(uint32_t from, uint32_t (&v)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(from)
               : "memory");
}

// --- Other accesses to memory, and functions ---

MOE_DEVICE void prefetch_line(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
MOE_DEVICE void load_shared(uint32_t from, uint32_t (&v)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(from)
               : "memory");
}
MOE_DEVICE void load_shared(uint32_t from, uint32_t (&v)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(from) : "memory");
}
MOE_DEVICE void store_shared(uint32_t to, const uint32_t (&v)[2]) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(v[0]), "r"(v[1]) : "memory");
}
MOE_DEVICE void store_global(int64_t to, const uint32_t (&v)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}
MOE_DEVICE uint32_t load_word(int64_t from) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
MOE_DEVICE void store_shared_zeros(uint32_t to) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}
MOE_DEVICE void store_shared(uint32_t to, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}
// Adds to two floats in shared memory.
MOE_DEVICE void add_shared(uint32_t at, float a, float b) {
  float x, y;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(at) : "memory");
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x + a), "f"(y + b) : "memory");
}
// Synchronizes a warp group.
MOE_DEVICE void group_sync(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group) : "memory"); }

// 1 / (1 + exp(-x)), as in Triton: with the GPU's approximations of 2^x and of quotients.
MOE_DEVICE float sigmoid(float x) {
  float power, s;
  asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(-x, 1.4426950408889634f)));
  asm("div.full.f32 %0, %1, %2;" : "=f"(s) : "f"(1.0f), "f"(__fadd_rn(1.0f, power)));
  return s;
}
MOE_DEVICE float float_of(uint32_t pair, int high) { return __uint_as_float(high ? pair & 0xffff0000u : pair << 16); }

#endif  // MOE_HOPPER

}  // namespace gemm
}  // namespace moe_comm
