// Conversions between fp32 and 16-bit and 8-bit floats by bit arithmetic, so that a GPU and a CPU produce the same
// bits. The GPU's conversion instructions are used where they give the same result.
#pragma once

#include "cuda/machine.h"

namespace moe_comm {
namespace p2p {

MOE_BLOCK float from_bits(uint32_t u) {
#if defined(__CUDACC__)
  return __uint_as_float(u);
#else
  float f;
  std::memcpy(&f, &u, 4);
  return f;
#endif
}
MOE_BLOCK uint32_t to_bits(float f) {
#if defined(__CUDACC__)
  return __float_as_uint(f);
#else
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
#endif
}

// Multiply and add are rounded separately and never contracted to FMA. (The host is compiled with -ffp-contract=off.)
MOE_BLOCK float times(float a, float b) {
#if defined(__CUDACC__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
MOE_BLOCK float plus(float a, float b) {
#if defined(__CUDACC__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
MOE_BLOCK float divided(float a, float b) {
#if defined(__CUDACC__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

constexpr int64_t kFp32 = 0, kBf16 = 1, kFp16 = 2;

// Storage type of an element, and the number of elements in 16 bytes.
template <int64_t dtype>
struct Element {
  typedef uint16_t Bits;
};
template <>
struct Element<kFp32> {
  typedef uint32_t Bits;
};
template <int64_t dtype>
constexpr int kPerVector = static_cast<int>(16 / sizeof(typename Element<dtype>::Bits));

template <int64_t dtype>
MOE_BLOCK float widen(uint32_t h) {
  if constexpr (dtype == kFp32) {
    return from_bits(h);
  } else if constexpr (dtype == kBf16) {
    return from_bits(h << 16);
  } else {
#if defined(__CUDACC__)
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(static_cast<uint16_t>(h)));
    return f;
#else
    const uint32_t sign = (h & 0x8000) << 16, exponent = (h >> 10) & 0x1f, fraction = h & 0x3ff;
    if (exponent == 31) return from_bits(sign | 0x7f800000 | (fraction ? (fraction << 13) | 0x400000 : 0));
    if (exponent) return from_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
    return from_bits(to_bits(static_cast<float>(fraction) * 5.9604644775390625e-8f) | sign);  // 2^-24, exact
#endif
  }
}

// Round to nearest, ties to even. NaN becomes the same NaN that the CPU kernels write.
template <int64_t dtype>
MOE_BLOCK uint32_t narrow(float f) {
  const uint32_t u = to_bits(f);
  if constexpr (dtype == kFp32) {
    return u;
  } else if constexpr (dtype == kBf16) {
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  } else {
    const uint32_t sign = (u >> 16) & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return sign | 0x7e00 | ((rest >> 13) & 0x3ff);
    if (rest >= 0x477ff000) return sign | 0x7c00;  // 65520 and larger round to infinity
    if (rest >= 0x38800000) return sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13);
    // Below 2^-14, adding 0.5 leaves the value in units of 2^-24 in the low bits, rounded by the hardware.
    return sign | (to_bits(plus(from_bits(rest), 0.5f)) - 0x3f000000);
  }
}

// e4m3: 4 exponent bits, 3 fraction bits, no infinity. The maximum is 448; larger values saturate to 448. NaN is 0x7f.
MOE_BLOCK uint32_t narrow_e4m3(float f) {
  const uint32_t u = to_bits(f), sign = (u >> 24) & 0x80, rest = u & 0x7fffffff;
  if (rest > 0x7f800000) return 0x7f;
  if (rest >= 0x43e00000) return sign | 0x7e;
  if (rest >= 0x3c800000) {  // 2^-6 and larger: round the fraction to 3 bits; a carry can reach 448 but not exceed it
    return sign | ((rest - 0x3c000000 + 0x7ffff + ((rest >> 20) & 1)) >> 20);
  }
  // Adding 2^14 leaves the value in units of 2^-9 in the low bits.
  return sign | (to_bits(plus(from_bits(rest), 16384.0f)) - 0x46800000);
}
MOE_BLOCK float widen_e4m3(uint32_t b) {
  const uint32_t sign = (b & 0x80) << 24, exponent = (b >> 3) & 15, fraction = b & 7;
  if ((b & 0x7f) == 0x7f) return from_bits(sign | 0x7fc00000);
  if (exponent) return from_bits(sign | ((exponent + 120) << 23) | (fraction << 20));
  return from_bits(to_bits(static_cast<float>(fraction) * 0.001953125f) | sign);  // 2^-9, exact
}

// Convert four values; the first goes to the lowest byte.
MOE_BLOCK uint32_t narrow_e4m3x4(const float* f) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(f[1]), "f"(f[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(f[3]), "f"(f[2]));
  return static_cast<uint32_t>(high) << 16 | low;
#else
  return narrow_e4m3(f[0]) | narrow_e4m3(f[1]) << 8 | narrow_e4m3(f[2]) << 16 | narrow_e4m3(f[3]) << 24;
#endif
}

// Scale for values with largest magnitude `most` (as bits): magnitude / 448, at least 2^-126; NaN if the magnitude is
// NaN or infinite. Matches scales_for in dispatch/wire_dtype.py.
MOE_BLOCK float scale_for(uint32_t most, bool power_of_two) {
  if (most >= 0x7f800000) return from_bits(0x7fc00000);
  uint32_t scale = to_bits(divided(from_bits(most), 448.0f));
  if (scale < 0x00800000) scale = 0x00800000;
  if (power_of_two) scale = (scale + 0x7fffff) & ~0x7fffffu;
  return from_bits(scale);
}

// Division of values by their scale. A product with the reciprocal differs from the quotient by at most 2 units in the
// last place, so both round to the same e4m3 number unless the product is next to a rounding boundary of e4m3: then the
// values are divided. Products with the reciprocal of a power of two are exact.
class Divisor {
 public:
  MOE_BLOCK Divisor(float scale, bool power_of_two)
      : scale_(scale), reciprocal_(divided(1.0f, scale)), exact_(power_of_two) {}

  // As narrow_e4m3x4 of the four quotients.
  MOE_BLOCK uint32_t quotients_e4m3x4(const float* f) const {
    float q[4];
    bool divide = false;
    MOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      q[i] = times(f[i], reciprocal_);
      divide = divide || beside_boundary(q[i]);
    }
    if (divide && !exact_) {
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) q[i] = divided(f[i], scale_);
    }
    return narrow_e4m3x4(q);
  }

 private:
  // Whether a number is within 2 units in the last place of the middle of two e4m3 numbers, or below 2^-6, where the
  // spacing of e4m3 numbers is constant. Zeros are next to no boundary.
  static MOE_BLOCK bool beside_boundary(float q) {
    const uint32_t magnitude = to_bits(q) & 0x7fffffff;
    return ((magnitude + 0x80002) & 0xfffff) <= 4 || magnitude - 1 < 0x3c800010;
  }

  float scale_, reciprocal_;
  bool exact_;
};

// Convert 16 bytes to floats and back.
template <int64_t dtype>
MOE_BLOCK void widen_vector(const Words16& v, float* f) {
  MOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (dtype == kFp32) {
      f[i] = from_bits(v.w[i]);
    } else {
      f[2 * i] = widen<dtype>(v.w[i] & 0xffff);
      f[2 * i + 1] = widen<dtype>(v.w[i] >> 16);
    }
  }
}
template <int64_t dtype>
MOE_BLOCK Words16 narrow_vector(const float* f) {
  Words16 v;
  MOE_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (dtype == kFp32) {
      v.w[i] = to_bits(f[i]);
    } else {
      v.w[i] = narrow<dtype>(f[2 * i]) | narrow<dtype>(f[2 * i + 1]) << 16;
    }
  }
  return v;
}

// A piece as it is in memory.
template <int64_t dtype, bool vectors>
struct RawPiece {
  typedef Words16 Type;
};
template <int64_t dtype>
struct RawPiece<dtype, false> {
  typedef typename Element<dtype>::Bits Type;
};

// Element loops are compiled for 16-byte vectors, if all rows are 16-byte aligned, and for single elements.
template <int64_t dtype, bool vectors>
struct Piece {
  typedef typename Element<dtype>::Bits Bits;
  static constexpr int kSize = vectors ? kPerVector<dtype> : 1;

  typedef typename RawPiece<dtype, vectors>::Type Raw;

  // Through the L1 cache, unlike load.
  MOE_BLOCK static Raw raw(const void* p) {
    if constexpr (vectors) {
      return load16_through_l1(p);
    } else {
      return *reinterpret_cast<const Bits*>(p);
    }
  }
  MOE_BLOCK static void widen(const Raw& raw, float* f) {
    if constexpr (vectors) {
      widen_vector<dtype>(raw, f);
    } else {
      f[0] = p2p::widen<dtype>(raw);
    }
  }
  MOE_BLOCK static void load(const void* p, float* f) {
    if constexpr (vectors) {
      widen_vector<dtype>(load16(p), f);
    } else {
      widen(raw(p), f);
    }
  }
  MOE_BLOCK static void store(void* p, const float* f) {
    if constexpr (vectors) {
      store16(p, narrow_vector<dtype>(f));
    } else {
      *reinterpret_cast<Bits*>(p) = static_cast<Bits>(narrow<dtype>(f[0]));
    }
  }
};

// Call f(Piece<dtype, vectors>()) for the runtime values of dtype and vectors.
template <class F>
MOE_BLOCK void by_piece(int64_t dtype, bool vectors, F f) {
  if (dtype == kFp32) {
    vectors ? f(Piece<kFp32, true>()) : f(Piece<kFp32, false>());
  } else if (dtype == kBf16) {
    vectors ? f(Piece<kBf16, true>()) : f(Piece<kBf16, false>());
  } else {
    vectors ? f(Piece<kFp16, true>()) : f(Piece<kFp16, false>());
  }
}

}  // namespace p2p
}  // namespace moe_comm
