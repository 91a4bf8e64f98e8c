// Combine and its backward. Rows are read from, and gradients are written to, the owners' blocks directly.
#pragma once

#include "cuda/convert.h"
#include "cuda/order.h"
#include "cuda/shared.h"

namespace moe_comm {
namespace p2p {

constexpr int kAtOnce = 4;     // rows that reduce loads before the first is added
constexpr int kSumAtOnce = 8;  // the same of sum, which
constexpr int kSumPieces = 2;  // loads as many pieces of each

// Up to `most` rows for each of n sums: their addresses and weights.
struct Addends {
  const char** rows;  // [n, most]
  float* factors;     // [n, most]
  int32_t* live;      // [n] number of rows
  int most;

  template <class M>
  MOE_BLOCK Addends(M& m, int64_t n, int64_t most)
      : rows(m.template shared<const char*>(n * most)),
        factors(m.template shared<float>(n * most)),
        live(m.template shared<int32_t>(n)),
        most(static_cast<int>(most)) {}
};

// Write n sums in pieces. to(i) is the address of the i-th.
template <class P, class M, class To>
MOE_BLOCK void add_rows(M& m, int n, int64_t hidden, const Addends& x, To to) {
  constexpr int size = static_cast<int>(sizeof(typename P::Bits));
  const int pieces = static_cast<int>(hidden) / P::kSize;
  m.each(n * pieces, [&](int i) {
    const int t = i / pieces, at_byte = i % pieces * P::kSize * size;
    const char* const* from = x.rows + t * x.most;
    const float* factor = x.factors + t * x.most;
    float total[P::kSize];
    MOE_UNROLL
    for (int c = 0; c < P::kSize; ++c) total[c] = 0.0f;
    const int count = x.live[t];
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
    P::store(to(t) + at_byte, total);
  });
}

// The words that a rank offers, one for each row.
MOE_BLOCK uint32_t* words_of(const Blocks& blocks, const int64_t* offers, int64_t owner) {
  return reinterpret_cast<uint32_t*>(blocks.peers[owner] + offers[owner * kOfferWords + kScalesAt]);
}

// The slots of a token with the same owner as slot k: whether one is before k, and the first one after k or K.
struct SameOwner {
  bool before;
  int next;
};
MOE_BLOCK SameOwner same_owner(const int64_t* places, int top_k, int k) {
  const auto same = [&](int j) { return places[j] != kDropped && place_owner(places[j]) == place_owner(places[k]); };
  SameOwner slots = {false, k + 1};
  for (int j = 0; j < k; ++j) slots.before = slots.before || same(j);
  while (slots.next < top_k && !same(slots.next)) ++slots.next;
  return slots;
}

// The row that a slot contributes to its token's sum, or null, and its weight.
struct Addend {
  const char* row;
  float factor;
};

template <bool reduced, class Args>
MOE_BLOCK Addend addend_of(const Args& a, const Blocks& blocks, int64_t token, int slot, int64_t place) {
  if (place == kDropped) return {nullptr, 0.0f};
  bool linked = false;
  if constexpr (reduced) {
    const int top_k = static_cast<int>(a.top_k);
    const SameOwner same = same_owner(at<const int64_t>(a.place_at) + token * top_k, top_k, slot);
    if (same.before) return {nullptr, 0.0f};
    linked = same.next < top_k;
  }
  const int64_t owner = place_owner(place);
  const int64_t offset = at<const int64_t>(a.offers_at)[owner * kOfferWords + (linked ? kBlockAt : kRowsAt)];
  const float* weights = at<const float>(a.weights_at);
  return {blocks.peers[owner] + offset + (place_row(place) * a.hidden + a.first_column) * element_bytes(a.dtype),
          weights && !linked ? weights[token * a.top_k + slot] : 1.0f};
}

// A warp sums kSumPieces pieces per lane of a token. The places of the next token are loaded together with the rows of
// this one.
template <class P, bool reduced, class M, class Args>
MOE_BLOCK void sum_pieces(M& m, const Args& a, const Blocks& blocks) {
  constexpr int lanes = M::kLanes, size = static_cast<int>(sizeof(typename P::Bits));
  const int top_k = static_cast<int>(a.top_k), pieces = static_cast<int>(a.columns) / P::kSize;
  const int parts = (pieces + lanes * kSumPieces - 1) / (lanes * kSumPieces), tokens = static_cast<int>(a.tokens);
  if (parts == 0) return;
  const auto place_of = [&](int token, int slot) {
    return token < tokens && slot < top_k ? at<const int64_t>(a.place_at)[int64_t{token} * top_k + slot] : kDropped;
  };
  const int more_tokens = m.warps() / parts, more_parts = m.warps() % parts;
  int token = m.warp() / parts, part = m.warp() % parts;
  int64_t next = place_of(token, m.lane());
  while (token < tokens) {
    const int piece = part * lanes * kSumPieces + m.lane(), of_token = token;
    token += more_tokens;
    part += more_parts;
    if (part >= parts) {
      part -= parts;
      ++token;
    }
    float total[kSumPieces][P::kSize];
    MOE_UNROLL
    for (int i = 0; i < kSumPieces * P::kSize; ++i) total[i / P::kSize][i % P::kSize] = 0.0f;
    for (int first = 0; first < top_k; first += lanes) {
      const int slot = first + m.lane();
      const Addend mine = addend_of<reduced>(a, blocks, of_token, slot, first == 0 ? next : place_of(of_token, slot));
      const int n = top_k - first < lanes ? top_k - first : lanes;
      for (int k = 0; k < n; k += kSumAtOnce) {
        typename P::Raw raw[kSumAtOnce][kSumPieces];
        MOE_UNROLL
        for (int u = 0; u < kSumAtOnce; ++u) {
          const char* row = k + u < n ? m.from_lane(mine.row, k + u) : nullptr;
          MOE_UNROLL
          for (int i = 0; i < kSumPieces; ++i) {
            raw[u][i] = {};  // adding zeros for a slot without a row changes no bits, as no sum is -0
            if (row != nullptr && piece + i * lanes < pieces)
              raw[u][i] = P::raw(row + (piece + i * lanes) * P::kSize * size);
          }
        }
        if (first + k == 0) next = place_of(token, m.lane());
        MOE_UNROLL
        for (int u = 0; u < kSumAtOnce; ++u) {
          if (k + u >= n) continue;
          const float factor = m.from_lane(mine.factor, k + u);
          MOE_UNROLL
          for (int i = 0; i < kSumPieces; ++i) {
            float value[P::kSize];
            P::widen(raw[u][i], value);
            MOE_UNROLL
            for (int c = 0; c < P::kSize; ++c) total[i][c] = plus(total[i][c], times(value[c], factor));
          }
        }
      }
    }
    char* to = at<char>(a.y_at) + (of_token * a.hidden + a.first_column) * size;
    MOE_UNROLL
    for (int i = 0; i < kSumPieces; ++i) {
      if (piece + i * lanes < pieces) P::store(to + (piece + i * lanes) * P::kSize * size, total[i]);
    }
  }
}

template <bool reduced, class M, class Args>
MOE_BLOCK void sum_rows(M& m, const Args& a) {
  const Blocks blocks(a);
  int64_t bits = a.y_at | ((a.hidden | a.first_column | a.columns) * element_bytes(a.dtype));
  const int64_t* offers = at<const int64_t>(a.offers_at);
  for (int64_t p = 0; p < a.world; ++p) {
    bits |= offers[p * kOfferWords + kRowsAt];
    if (reduced) bits |= offers[p * kOfferWords + kBlockAt];
  }
  by_piece(a.dtype, (bits & 15) == 0, [&](auto piece) { sum_pieces<decltype(piece), reduced>(m, a, blocks); });
}

// Copy the word of the row of each slot.
template <class M>
MOE_BLOCK void take_words(M& m, const SumArgs& a) {
  const Blocks blocks(a);
  const int64_t* offers = at<const int64_t>(a.offers_at);
  const int64_t* places = at<const int64_t>(a.place_at);
  const int64_t slots = a.tokens * a.top_k, batch = m.threads();
  for (int64_t first = m.block() * batch; first < slots; first += m.blocks() * batch) {
    m.each(static_cast<int>(slots - first < batch ? slots - first : batch), [&](int i) {
      const int64_t place = places[first + i], owner = place_owner(place);
      uint32_t word = 0;
      if (place != kDropped) word = words_of(blocks, offers, owner)[place_row(place)];
      at<uint32_t>(a.words_at)[first + i] = word;
    });
  }
}

template <class M>
MOE_BLOCK void sum(M& m, const SumArgs& a) {
  if (failed(a)) return;
  sum_rows<false>(m, a);
  if (a.words_at) take_words(m, a);
  if (a.ends && is_last_block(m, a)) end_turn(m, a);
}
template <class M>
MOE_BLOCK void sum_reduced(M& m, const SumReducedArgs& a) {
  if (!failed(a)) sum_rows<true>(m, a);
}

template <class M>
MOE_BLOCK void weigh(M& m, const WeighArgs& a) {
  if (failed(a)) return;
  const Blocks blocks(a);
  const int64_t* offers = at<const int64_t>(a.offers_at);
  const int64_t* places = at<const int64_t>(a.place_at);
  const int64_t slots = a.tokens * a.top_k, batch = m.threads();
  const int top_k = static_cast<int>(a.top_k);
  for (int64_t first = m.block() * batch; first < slots; first += m.blocks() * batch) {
    m.each(static_cast<int>(slots - first < batch ? slots - first : batch), [&](int i) {
      const int64_t slot = first + i;
      const int64_t* of_token = places + slot / top_k * top_k;
      const int k = static_cast<int>(slot % top_k);
      if (of_token[k] == kDropped) return;
      const SameOwner same = same_owner(of_token, top_k, k);
      if (!same.before && same.next == top_k) return;
      const int64_t owner = place_owner(of_token[k]);
      RowLink* links = reinterpret_cast<RowLink*>(blocks.peers[owner] + offers[owner * kOfferWords + kLinksAt]);
      links[place_row(of_token[k])] = {same.next < top_k ? place_row(of_token[same.next]) : -1,
                                       at<const float>(a.weights_at)[slot], !same.before};
    });
  }
}

template <class P, class M>
MOE_BLOCK void reduce_pieces(M& m, const ReduceArgs& a) {
  const RowLink* links = at<const RowLink>(a.links_at);
  const int64_t bytes = a.hidden * static_cast<int64_t>(sizeof(typename P::Bits));
  const int top_k = static_cast<int>(a.top_k), batch = static_cast<int>(kReduceBatch);
  const Addends x(m, kReduceBatch, a.top_k);
  int64_t* sum_of = m.template shared<int64_t>(kReduceBatch);  // row of each sum
  int64_t* sums = m.template shared<int64_t>(1);
  for (int64_t first = m.block() * batch; first < a.rows; first += m.blocks() * batch) {
    const int n = static_cast<int>(a.rows - first < batch ? a.rows - first : batch);
    m.sync();
    m.each(1, [&](int) { *sums = 0; });
    m.sync();
    m.each(n, [&](int i) {
      if (!links[first + i].first) return;
      int before = 0;
      for (int j = 0; j < i; ++j) before += links[first + j].first;
      sum_of[before] = first + i;
      int count = 0;
      for (int64_t row = first + i; row >= 0 && count < top_k; row = links[row].next) {
        x.rows[before * top_k + count] = at<const char>(a.rows_at) + row * bytes;
        x.factors[before * top_k + count++] = links[row].weight;
      }
      x.live[before] = count;
      m.add(sums, 1);
    });
    m.sync();
    add_rows<P>(m, static_cast<int>(*sums), a.hidden, x,
                [&](int i) { return at<char>(a.reduced_at) + sum_of[i] * bytes; });
  }
}

template <class M>
MOE_BLOCK void reduce(M& m, const ReduceArgs& a) {
  if (failed(a)) return;
  const int64_t bits = a.rows_at | a.reduced_at | (a.hidden * element_bytes(a.dtype));
  by_piece(a.dtype, (bits & 15) == 0, [&](auto piece) { reduce_pieces<decltype(piece)>(m, a); });
}

// Lane l of a dot product takes elements l, l + 32, ... The thread that reads a piece accumulates the lanes of its
// elements.
template <class P, bool with_dots, bool by_expert, class M, class Args>
MOE_BLOCK void spread_pieces(M& m, const Args& a, const Blocks& blocks) {
  const int64_t* offers = at<const int64_t>(a.offers_at);
  const int64_t* places = at<const int64_t>(a.place_at);
  const float* weights = at<const float>(a.weights_at);
  const uint32_t* words = by_expert ? nullptr : at<const uint32_t>(a.words_at);
  constexpr int size = static_cast<int>(sizeof(typename P::Bits)), lanes = static_cast<int>(kLanes);
  constexpr int batch = static_cast<int>(kSpreadBatch), readers = lanes / P::kSize;
  const int hidden = static_cast<int>(a.hidden);
  const int64_t bytes = a.hidden * size, slots = a.tokens * a.top_k;
  char** to = m.template shared<char*>(batch);
  const char** from = m.template shared<const char*>(batch);
  float* sums = m.template shared<float>(batch * (lanes + 1));  // padded by one element to avoid bank conflicts
  uint32_t* slots_of = by_expert ? m.template shared<uint32_t>(batch) : nullptr;
  SendOrder order(a.order_at, slots, a.experts, m.blocks());
  if (by_expert) order.read_group();
  // Without an order, a batch is the next slots; its `tile` is their number in units of a batch.
  const int all = by_expert ? order.tiles() : static_cast<int>((slots + batch - 1) / batch);
  if (with_dots && by_expert) {  // dropped slots, some of which are in no tile
    const int64_t per = (slots + m.blocks() - 1) / m.blocks(), from_slot = m.block() * per;
    const int64_t left = slots - from_slot;
    m.each(static_cast<int>(left < per ? left : per), [&](int i) {
      if (places[from_slot + i] == kDropped) at<float>(a.dots_at)[from_slot + i] = 0.0f;
    });
  }
  TileRows now = by_expert ? order.first_of_block(m.block()) : TileRows{static_cast<int>(m.block()), 0};
  while (now.tile < all) {
    const int64_t first = int64_t{now.tile} * batch, listed = by_expert ? order.tile[now.tile].listed + now.first : 0;
    const auto slot_of = [&](int i) -> int64_t {
      if constexpr (by_expert) return slots_of[i];
      return first + i;
    };
    const auto token_of = [&](int i) -> int64_t {
      if constexpr (by_expert) return slots_of[i] / static_cast<uint32_t>(a.top_k);  // 32 bits: no spills
      return (first + i) / a.top_k;
    };
    const int n = by_expert ? order.count(now) : static_cast<int>(slots - first < batch ? slots - first : batch);
    m.sync();
    m.each(n, [&](int i) {
      if constexpr (by_expert) slots_of[i] = static_cast<uint32_t>(order.slots[listed + i]);
      const int64_t place = places[slot_of(i)];
      to[i] = nullptr;
      from[i] = nullptr;
      if (place == kDropped) return;
      const int64_t owner = place_owner(place), row = place_row(place) * bytes;
      to[i] = blocks.peers[owner] + offers[owner * kOfferWords + kBlockAt] + row;
      from[i] = blocks.peers[owner] + offers[owner * kOfferWords + kRowsAt] + row;
      if (words != nullptr) words_of(blocks, offers, owner)[place_row(place)] = words[slot_of(i)];
    });
    m.sync();
    m.each(n * readers, [&](int i) {
      const int s = i / readers, reader = i % readers;
      float lane[P::kSize];
      MOE_UNROLL
      for (int c = 0; c < P::kSize; ++c) lane[c] = 0.0f;
      if (to[s] != nullptr) {
        const float weight = weights ? weights[slot_of(s)] : 1.0f;
        const char* grad = at<const char>(a.grad_at) + token_of(s) * a.stride;
        char* out = to[s];
        const char* row = from[s];
        MOE_UNROLL_BY(4)
        for (int d = reader * P::kSize; d < hidden; d += lanes) {
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
        if (by_expert && to[s] == nullptr) return;  // dropped: set to 0 above
        float* lane = sums + s * (lanes + 1);
        for (int half = lanes / 2; half > 0; half /= 2) {
          for (int l = 0; l < half; ++l) lane[l] = plus(lane[l], lane[l + half]);
        }
        at<float>(a.dots_at)[slot_of(s)] = lane[0];
      });
    }
    const TileRows next = by_expert ? order.next(now) : TileRows{now.tile + static_cast<int>(m.blocks()), 0};
    if (by_expert && order.group_of(next) != order.group_of(now)) raise_group(m, a, blocks, order, now);
    now = next;
  }
}

template <bool by_expert, class M, class Args>
MOE_BLOCK void spread_rows(M& m, const Args& a) {
  const Blocks blocks(a);
  int64_t bits = a.grad_at | a.stride | (a.hidden * element_bytes(a.dtype));
  const int64_t* offers = at<const int64_t>(a.offers_at);
  for (int64_t p = 0; p < a.world; ++p) {
    bits |= offers[p * kOfferWords + kBlockAt];
    if (a.dots_at) bits |= offers[p * kOfferWords + kRowsAt];
  }
  by_piece(a.dtype, (bits & 15) == 0, [&](auto piece) {
    if (a.dots_at) {
      spread_pieces<decltype(piece), true, by_expert>(m, a, blocks);
    } else {
      spread_pieces<decltype(piece), false, by_expert>(m, a, blocks);
    }
  });
}

template <class M>
MOE_BLOCK void spread(M& m, const SpreadArgs& a) {
  if (failed(a)) return;
  spread_rows<false>(m, a);
  if (a.ends && is_last_block(m, a)) end_turn(m, a);
}
template <class M>
MOE_BLOCK void spread_tiles(M& m, const SpreadTilesArgs& a) {
  if (!failed(a)) spread_rows<true>(m, a);
}

}  // namespace p2p
}  // namespace moe_comm
