// Sending rows: copied unchanged, or quantised to e4m3 with scales.
#pragma once

#include "cuda/convert.h"
#include "cuda/shared.h"

namespace moe_comm {
namespace p2p {

// The source rows and their wire format.
struct Source {
  const char* x;
  int64_t stride, hidden, dtype, format;
  bool power_of_two, vectors;  // vectors: all addresses are 16-byte aligned, so 16 bytes are moved at a time
};

// Return whether all row addresses are 16-byte aligned: this rank's rows and the destination blocks.
MOE_BLOCK bool all_on_16(const int64_t* offers, int64_t world, int64_t which, int64_t more) {
  int64_t bits = more;
  for (int64_t p = 0; p < world; ++p) bits |= offers[p * kOfferWords + which];
  return (bits & 15) == 0;
}

// Destinations of n rows of x: `top_k` pointers per row, null if absent.
struct Destinations {
  char* const* rows;    // [n, K]
  char* const* scales;  // [n, K]
  int top_k;
};

// Copy rows without conversion, in words of type T.
template <class T, class M, class RowOf>
MOE_BLOCK void copy_rows(M& m, const Source& from, int n, const Destinations& to, RowOf row_of) {
  const int words = static_cast<int>(from.hidden * element_bytes(from.dtype) / static_cast<int64_t>(sizeof(T)));
  m.template move_rows<4>(
      n, words, [&](int row, int word) { return reinterpret_cast<const T*>(from.x + row_of(row) * from.stride)[word]; },
      [&](int row, int word, const T& v) {
        char* const* rows = to.rows + row * to.top_k;
        for (int k = 0; k < to.top_k; ++k) {
          if (rows[k] != nullptr) reinterpret_cast<T*>(rows[k])[word] = v;
        }
      });
}

// Load channels [first, first + 16) of a row of x as floats, with zeros beyond the row.
template <int64_t dtype>
MOE_BLOCK void load_group_of(const char* row, bool vectors, int first, int hidden, float* f) {
  typedef Piece<dtype, true> Vector;
  typedef typename Vector::Bits Bits;
  const Bits* from = reinterpret_cast<const Bits*>(row) + first;
  MOE_UNROLL
  for (int c = 0; c < static_cast<int>(kGroup); c += Vector::kSize) {
    if (vectors && first + c < hidden) {  // in this case hidden is a multiple of kSize
      Vector::load(from + c, f + c);
    } else {
      MOE_UNROLL
      for (int i = c; i < c + Vector::kSize; ++i) f[i] = first + i < hidden ? widen<dtype>(from[i]) : 0.0f;
    }
  }
}
MOE_BLOCK void load_group(const Source& from, int64_t index, int group, float* f) {
  const char* row = from.x + index * from.stride;
  const int first = group * static_cast<int>(kGroup), hidden = static_cast<int>(from.hidden);
  if (from.dtype == kBf16) {
    load_group_of<kBf16>(row, from.vectors, first, hidden, f);
  } else if (from.dtype == kFp16) {
    load_group_of<kFp16>(row, from.vectors, first, hidden, f);
  } else {
    load_group_of<kFp32>(row, from.vectors, first, hidden, f);
  }
}

struct Scratch {
  uint32_t* most_of_group;
  uint32_t* most_of_block;
  float* scales;
};

template <class M>
MOE_BLOCK Scratch quantise_scratch(M& m, int64_t hidden, int64_t format) {
  if (format == kSame) return {nullptr, nullptr, nullptr};
  Scratch s;
  s.most_of_group = m.template shared<uint32_t>(kBatch * quantise_groups(hidden));
  s.most_of_block = m.template shared<uint32_t>(kBatch * quantise_blocks(hidden));
  s.scales = m.template shared<float>(kBatch * row_scales(hidden, format));
  return s;
}

// Quantise up to kBatch rows. Magnitudes are compared as bits: the order equals that of floats, with infinity and NaN
// largest.
template <class M, class RowOf>
MOE_BLOCK void quantise_batch(M& m, const Source& from, int n, const Destinations& to, const Scratch& s, RowOf row_of) {
  const int groups = static_cast<int>(quantise_groups(from.hidden));
  const int per_row = static_cast<int>(quantise_blocks(from.hidden));
  const int scales = static_cast<int>(row_scales(from.hidden, from.format));
  constexpr int groups_of_block = static_cast<int>(kScaleChannels / kGroup);
  m.each(n * groups, [&](int i) {
    float f[kGroup];
    load_group(from, row_of(i / groups), i % groups, f);
    uint32_t most = 0;
    MOE_UNROLL
    for (int c = 0; c < static_cast<int>(kGroup); ++c) {
      const uint32_t magnitude = to_bits(f[c]) & 0x7fffffff;
      most = magnitude > most ? magnitude : most;
    }
    s.most_of_group[i] = most;
  });
  m.sync();
  m.each(n * per_row, [&](int i) {
    const int row = i / per_row, first = i % per_row * groups_of_block;
    uint32_t most = 0;
    for (int j = first; j < first + groups_of_block && j < groups; ++j) {
      const uint32_t of_group = s.most_of_group[row * groups + j];
      most = of_group > most ? of_group : most;
    }
    s.most_of_block[i] = most;
  });
  m.sync();
  m.each(n * scales, [&](int i) {
    uint32_t most = s.most_of_block[i];
    if (from.format == kRowScales) {
      most = 0;
      for (int j = i * per_row; j < (i + 1) * per_row; ++j) {
        most = s.most_of_block[j] > most ? s.most_of_block[j] : most;
      }
    }
    s.scales[i] = scale_for(most, from.power_of_two);
    for (int k = 0; k < to.top_k; ++k) {
      char* there = to.scales[i / scales * to.top_k + k];
      if (there != nullptr) reinterpret_cast<float*>(there)[i % scales] = s.scales[i];
    }
  });
  m.sync();
  m.each(n * groups, [&](int i) {
    const int row = i / groups, group = i % groups;
    const float scale = s.scales[row * scales + (scales == 1 ? 0 : group / groups_of_block)];
    float f[kGroup];
    load_group(from, row_of(row), group, f);
    Words16 v;
    MOE_UNROLL
    for (int w = 0; w < 4; ++w) {
      MOE_UNROLL
      for (int c = 4 * w; c < 4 * w + 4; ++c) f[c] = divided(f[c], scale);
      v.w[w] = narrow_e4m3x4(f + 4 * w);
    }
    // Channels beyond the row are zeros, even if the scale is NaN.
    const int used = static_cast<int>(from.hidden) - group * static_cast<int>(kGroup);
    if (used < static_cast<int>(kGroup)) {
      MOE_UNROLL
      for (int c = 0; c < static_cast<int>(kGroup); ++c) {
        if (c >= used) v.w[c / 4] &= ~(0xffu << (c % 4 * 8));
      }
    }
    for (int k = 0; k < to.top_k; ++k) {
      char* there = to.rows[row * to.top_k + k];
      if (there != nullptr) store16(there + group * kGroup, v);
    }
  });
  m.sync();
}

// Copy n rows to their destinations. row_of(i) is the index in x of the i-th row. Does not sync at the end.
template <class M, class RowOf>
MOE_BLOCK void copy_all_rows(M& m, const Source& from, int n, const Destinations& to, RowOf row_of) {
  if (from.vectors) {
    copy_rows<Words16>(m, from, n, to, row_of);
  } else if (from.dtype == kFp32) {
    copy_rows<uint32_t>(m, from, n, to, row_of);
  } else {
    copy_rows<uint16_t>(m, from, n, to, row_of);
  }
}

// Quantise n rows and write them to their destinations.
template <class M, class RowOf>
MOE_BLOCK void quantise_rows(M& m, const Source& from, int n, const Destinations& to, const Scratch& s, RowOf row_of) {
  for (int first = 0; first < n; first += static_cast<int>(kBatch)) {
    const int some = n - first < static_cast<int>(kBatch) ? n - first : static_cast<int>(kBatch);
    const Destinations there = {to.rows + first * to.top_k, to.scales + first * to.top_k, to.top_k};
    quantise_batch(m, from, some, there, s, [&](int i) { return row_of(first + i); });
  }
}

}  // namespace p2p
}  // namespace moe_comm
