// Combine and its backward. Rows are read from, and gradients are written to, the owners' blocks directly.
#pragma once

#include "cuda/convert.h"
#include "cuda/shared.h"

namespace moe_comm {
namespace p2p {

constexpr int kAtOnce = 4;  // rows of a token that are loaded before the first is added

template <class P, class M>
MOE_BLOCK void sum_pieces(M& m, const SumArgs& a, const Blocks& blocks) {
  const int64_t* offers = at<const int64_t>(a.offers_at);
  const int64_t* places = at<const int64_t>(a.place_at);
  const float* weights = at<const float>(a.weights_at);
  const int top_k = static_cast<int>(a.top_k), batch = static_cast<int>(kBatch);
  const int pieces = static_cast<int>(a.hidden) / P::kSize;
  constexpr int size = static_cast<int>(sizeof(typename P::Bits));
  const int64_t bytes = a.hidden * size;
  const char** rows = m.template shared<const char*>(batch * a.top_k);
  float* factors = m.template shared<float>(batch * a.top_k);
  int32_t* live = m.template shared<int32_t>(batch);
  for (int64_t first = m.block() * batch; first < a.tokens; first += m.blocks() * batch) {
    const int n = static_cast<int>(a.tokens - first < batch ? a.tokens - first : batch);
    m.sync();
    // One thread for each slot. Rows of slots without a place are left out, so each token's rows are consecutive.
    m.each(n * top_k, [&](int i) {
      const int t = i / top_k;
      const int64_t* of_batch = places + first * top_k;
      int before = 0;
      for (int j = t * top_k; j < i; ++j) before += of_batch[j] != kDropped;
      const int64_t place = of_batch[i];
      if (place != kDropped) {
        const int64_t owner = place_owner(place);
        rows[t * top_k + before] =
            blocks.peers[owner] + offers[owner * kOfferWords + kRowsAt] + place_row(place) * bytes;
        factors[t * top_k + before] = weights ? weights[first * top_k + i] : 1.0f;
      }
      if (i % top_k == top_k - 1) live[t] = before + (place != kDropped);
    });
    m.sync();
    m.each(n * pieces, [&](int i) {
      const int t = i / pieces, at_byte = i % pieces * P::kSize * size;
      const char* const* from = rows + t * top_k;
      const float* factor = factors + t * top_k;
      float total[P::kSize];
      MOE_UNROLL
      for (int c = 0; c < P::kSize; ++c) total[c] = 0.0f;
      const int count = live[t];
      int k = 0;
      for (; k + kAtOnce <= count; k += kAtOnce) {
        float value[kAtOnce][P::kSize];
        MOE_UNROLL
        for (int u = 0; u < kAtOnce; ++u) P::load(from[k + u] + at_byte, value[u]);
        MOE_UNROLL
        for (int u = 0; u < kAtOnce; ++u) {
          MOE_UNROLL
          for (int c = 0; c < P::kSize; ++c) total[c] = plus(total[c], times(value[u][c], factor[k + u]));
        }
      }
      for (; k < count; ++k) {
        float value[P::kSize];
        P::load(from[k] + at_byte, value);
        MOE_UNROLL
        for (int c = 0; c < P::kSize; ++c) total[c] = plus(total[c], times(value[c], factor[k]));
      }
      P::store(at<char>(a.y_at) + (first + t) * bytes + at_byte, total);
    });
  }
}

template <class M>
MOE_BLOCK void sum(M& m, const SumArgs& a) {
  if (failed(a)) return;
  const Blocks blocks(a);
  int64_t bits = a.y_at | (a.hidden * element_bytes(a.dtype));
  const int64_t* offers = at<const int64_t>(a.offers_at);
  for (int64_t p = 0; p < a.world; ++p) bits |= offers[p * kOfferWords + kRowsAt];
  by_piece(a.dtype, (bits & 15) == 0, [&](auto piece) { sum_pieces<decltype(piece)>(m, a, blocks); });
}

// Lane l of a dot product takes elements l, l + 32, ... The thread that reads a piece accumulates the lanes of its
// elements.
template <class P, bool with_dots, class M>
MOE_BLOCK void spread_pieces(M& m, const SpreadArgs& a, const Blocks& blocks) {
  const int64_t* offers = at<const int64_t>(a.offers_at);
  const int64_t* places = at<const int64_t>(a.place_at);
  const float* weights = at<const float>(a.weights_at);
  constexpr int size = static_cast<int>(sizeof(typename P::Bits)), lanes = static_cast<int>(kLanes);
  constexpr int batch = static_cast<int>(kSpreadBatch), readers = lanes / P::kSize;
  const int64_t bytes = a.hidden * size, slots = a.tokens * a.top_k;
  char** to = m.template shared<char*>(batch);
  const char** from = m.template shared<const char*>(batch);
  float* sums = m.template shared<float>(batch * (lanes + 1));  // padded by one element to avoid bank conflicts
  for (int64_t first = m.block() * batch; first < slots; first += m.blocks() * batch) {
    const int n = static_cast<int>(slots - first < batch ? slots - first : batch);
    m.sync();
    m.each(n, [&](int i) {
      const int64_t place = places[first + i];
      to[i] = nullptr;
      from[i] = nullptr;
      if (place == kDropped) return;
      const int64_t owner = place_owner(place), row = place_row(place) * bytes;
      to[i] = blocks.peers[owner] + offers[owner * kOfferWords + kBlockAt] + row;
      from[i] = blocks.peers[owner] + offers[owner * kOfferWords + kRowsAt] + row;
    });
    m.sync();
    m.each(n * readers, [&](int i) {
      const int s = i / readers, reader = i % readers;
      float lane[P::kSize];
      MOE_UNROLL
      for (int c = 0; c < P::kSize; ++c) lane[c] = 0.0f;
      if (to[s] != nullptr) {
        const float weight = weights ? weights[first + s] : 1.0f;
        const char* grad = at<const char>(a.grad_at) + (first + s) / a.top_k * a.stride;
        char* out = to[s];
        const char* row = from[s];
        MOE_UNROLL_BY(4)
        for (int64_t d = reader * P::kSize; d < a.hidden; d += lanes) {
          float g[P::kSize], v[P::kSize];
          P::load(grad + d * size, g);
          if constexpr (with_dots) {
            P::load(row + d * size, v);
            MOE_UNROLL
            for (int c = 0; c < P::kSize; ++c) lane[c] = plus(lane[c], times(g[c], v[c]));
          }
          MOE_UNROLL
          for (int c = 0; c < P::kSize; ++c) g[c] = times(g[c], weight);
          P::store(out + d * size, g);
        }
      }
      if constexpr (with_dots) {
        MOE_UNROLL
        for (int c = 0; c < P::kSize; ++c) sums[s * (lanes + 1) + reader * P::kSize + c] = lane[c];
      }
    });
    if constexpr (with_dots) {
      m.sync();
      m.each(n, [&](int s) {
        float* lane = sums + s * (lanes + 1);
        for (int half = lanes / 2; half > 0; half /= 2) {
          for (int l = 0; l < half; ++l) lane[l] = plus(lane[l], lane[l + half]);
        }
        at<float>(a.dots_at)[first + s] = lane[0];
      });
    }
  }
}

template <class M>
MOE_BLOCK void spread(M& m, const SpreadArgs& a) {
  if (failed(a)) return;
  const Blocks blocks(a);
  int64_t bits = a.grad_at | a.stride | (a.hidden * element_bytes(a.dtype));
  const int64_t* offers = at<const int64_t>(a.offers_at);
  for (int64_t p = 0; p < a.world; ++p) {
    bits |= offers[p * kOfferWords + kBlockAt];
    if (a.dots_at) bits |= offers[p * kOfferWords + kRowsAt];
  }
  by_piece(a.dtype, (bits & 15) == 0, [&](auto piece) {
    if (a.dots_at) {
      spread_pieces<decltype(piece), true>(m, a, blocks);
    } else {
      spread_pieces<decltype(piece), false>(m, a, blocks);
    }
  });
}

}  // namespace p2p
}  // namespace moe_comm
