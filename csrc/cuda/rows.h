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
template <class P>
MOE_BLOCK void load_group(const char* row, int first, int hidden, float* f) {
  const typename P::Bits* from = reinterpret_cast<const typename P::Bits*>(row) + first;
  MOE_UNROLL
  for (int c = 0; c < static_cast<int>(kGroup); c += P::kSize) {
    if (first + c < hidden) {  // hidden is a multiple of kSize
      P::load(from + c, f + c);
    } else {
      MOE_UNROLL
      for (int i = c; i < c + P::kSize; ++i) f[i] = 0.0f;
    }
  }
}

// Memory of rows with one scale per row: the largest magnitude of each row, and its scale.
struct Scratch {
  uint32_t* most;
  float* scales;
};

template <class M>
MOE_BLOCK Scratch quantise_scratch(M& m, int64_t rows, int64_t format) {
  if (format != kRowScales) return {nullptr, nullptr};
  Scratch s;
  s.most = m.template shared<uint32_t>(rows);
  s.scales = m.template shared<float>(rows);
  return s;
}

// The channels of a block of kScaleChannels that a thread of a team quantises, in groups. The groups of the threads
// alternate.
template <class P, class M>
struct TeamChannels {
  static constexpr int kGroups = static_cast<int>(kScaleChannels / kGroup) / M::kTeam;
  float f[kGroups][kGroup];
  int first, hidden;  // the first channel, and the number of channels of the row

  MOE_BLOCK int channel(int g) const { return first + g * M::kTeam * static_cast<int>(kGroup); }

  MOE_BLOCK void load(const Source& from, int64_t row, int block, int member) {
    first = block * static_cast<int>(kScaleChannels) + member * static_cast<int>(kGroup);
    hidden = static_cast<int>(from.hidden);
    MOE_UNROLL
    for (int g = 0; g < kGroups; ++g) load_group<P>(from.x + row * from.stride, channel(g), hidden, f[g]);
  }

  // The largest magnitude of the block. Magnitudes are compared as bits: the order equals that of floats, with infinity
  // and NaN largest.
  MOE_BLOCK uint32_t most(const M& m) const {
    uint32_t most = 0;
    MOE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      MOE_UNROLL
      for (int c = 0; c < static_cast<int>(kGroup); ++c) {
        const uint32_t magnitude = to_bits(f[g][c]) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
      }
    }
    return m.team_max(most);
  }

  MOE_BLOCK void store(char* const* rows, int top_k, const Divisor& by) const {
    MOE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const int used = hidden - channel(g);
      if (used <= 0) return;
      Words16 v;
      MOE_UNROLL
      for (int w = 0; w < 4; ++w) v.w[w] = by.quotients_e4m3x4(f[g] + 4 * w);
      if (used < static_cast<int>(kGroup)) {  // channels beyond the row are zeros, even if the scale is NaN
        MOE_UNROLL
        for (int c = 0; c < static_cast<int>(kGroup); ++c) {
          if (c >= used) v.w[c / 4] &= ~(0xffu << (c % 4 * 8));
        }
      }
      for (int k = 0; k < top_k; ++k) {
        if (rows[k] != nullptr) store16(rows[k] + channel(g), v);
      }
    }
  }
};

// Quantise n rows and write them to their destinations, in one pass. scales: of the rows; null if each block has one.
// at_once: blocks that a team loads before the first store.
template <class P, int at_once, class M, class RowOf>
MOE_BLOCK void quantise_blocks(M& m, const Source& from, int n, const Destinations& to, const float* scales,
                               RowOf row_of) {
  const int blocks = static_cast<int>(quantise_blocks(from.hidden)), parts = (blocks + at_once - 1) / at_once;
  m.teams(n * parts, [&](int i, int member) {
    const int row = i / parts, first = i % parts * at_once;
    char* const* rows = to.rows + row * to.top_k;
    TeamChannels<P, M> x[at_once];
    MOE_UNROLL
    for (int u = 0; u < at_once; ++u) x[u].load(from, row_of(row), first + u, member);
    MOE_UNROLL
    for (int u = 0; u < at_once; ++u) {
      if (first + u >= blocks) return;
      const float scale = scales ? scales[row] : scale_for(x[u].most(m), from.power_of_two);
      if (!scales) {
        for (int k = member; k < to.top_k; k += M::kTeam) {
          char* there = to.scales[row * to.top_k + k];
          if (there != nullptr) reinterpret_cast<float*>(there)[first + u] = scale;
        }
      }
      x[u].store(rows, to.top_k, Divisor(scale, from.power_of_two));
    }
  });
}

// Compute the scales of n rows with one scale each, and write them to their destinations.
template <class P, class M, class RowOf>
MOE_BLOCK void scale_rows(M& m, const Source& from, int n, const Destinations& to, const Scratch& s, RowOf row_of) {
  const int blocks = static_cast<int>(quantise_blocks(from.hidden));
  m.each(n, [&](int i) { s.most[i] = 0; });
  m.sync();
  m.teams(n * blocks, [&](int i, int member) {
    TeamChannels<P, M> x;
    x.load(from, row_of(i / blocks), i % blocks, member);
    const uint32_t most = x.most(m);
    if (member == 0) m.highest(&s.most[i / blocks], most);
  });
  m.sync();
  m.each(n, [&](int i) {
    s.scales[i] = scale_for(s.most[i], from.power_of_two);
    for (int k = 0; k < to.top_k; ++k) {
      char* there = to.scales[i * to.top_k + k];
      if (there != nullptr) *reinterpret_cast<float*>(there) = s.scales[i];
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

// Quantise n rows and write them to their destinations. s has memory for n rows. Does not sync at the end.
template <int at_once, class M, class RowOf>
MOE_BLOCK void quantise_rows(M& m, const Source& from, int n, const Destinations& to, const Scratch& s, RowOf row_of) {
  by_piece(from.dtype, from.vectors, [&](auto piece) {
    typedef decltype(piece) P;
    if (s.scales) scale_rows<P>(m, from, n, to, s, row_of);
    quantise_blocks<P, P::kSize == 8 ? at_once : 1>(m, from, n, to, s.scales, row_of);
  });
}

}  // namespace p2p
}  // namespace moe_comm
