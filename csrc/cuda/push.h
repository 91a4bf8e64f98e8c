// Dispatch: each row is written directly to its place at the owner.
#pragma once

#include "cuda/bulk.h"
#include "cuda/order.h"
#include "cuda/rows.h"

namespace moe_comm {
namespace p2p {

// Per-slot data of a chunk, in kSlotBytes bytes of shared memory per slot.
struct ChunkSlots {
  char* memory;
  int64_t chunk;

  MOE_BLOCK int64_t* places() const { return reinterpret_cast<int64_t*>(memory); }
  MOE_BLOCK char** rows() const { return reinterpret_cast<char**>(memory + 8 * chunk); }
  MOE_BLOCK char** scales() const { return reinterpret_cast<char**>(memory + 16 * chunk); }
  MOE_BLOCK int32_t* ids() const { return reinterpret_cast<int32_t*>(memory + 24 * chunk); }
  // At the first slot of each expert, the number of slots of that expert in this chunk; otherwise 0.
  MOE_BLOCK int32_t* together() const { return reinterpret_cast<int32_t*>(memory + 28 * chunk); }
};

// If several slots of a token have the same owner, the first slot carries the row and the others link to it.
template <class M, class Args>
MOE_BLOCK void link_slots(M& m, const Args& a, const Blocks& blocks, int n, const ChunkSlots& s) {
  const int64_t* offers = at<const int64_t>(a.offers_at);
  const int top_k = static_cast<int>(a.top_k);
  m.each(n, [&](int i) {
    const int64_t place = s.places()[i];
    if (place == kDropped) return;
    const int64_t owner = place_owner(place);
    int first = i / top_k * top_k;
    while (s.places()[first] == kDropped || place_owner(s.places()[first]) != owner) ++first;
    int64_t* links = reinterpret_cast<int64_t*>(blocks.peers[owner] + offers[owner * kOfferWords + kLinksAt]);
    links[place_row(place)] = first == i ? -1 : place_row(s.places()[first]);
    if (first != i) s.rows()[i] = s.scales()[i] = nullptr;
  });
}

// Look up where the rows of a chunk go.
template <class M, class Args>
MOE_BLOCK void place_chunk(M& m, const Args& a, const Blocks& blocks, int64_t chunk, const ChunkSlots& s) {
  const int n = chunk_slots(a.tokens, a.top_k, a.chunk, chunk);
  const int64_t first_slot = chunk * a.chunk;
  const int64_t* offsets = at<const int64_t>(a.offsets_at);
  const int64_t* offers = at<const int64_t>(a.offers_at);
  const int64_t* before_chunk = at<const int64_t>(a.counts_at) + chunk * a.experts;
  const int64_t* expert_rows = at<const int64_t>(a.expert_rows_at);
  int64_t* places = at<int64_t>(a.place_at) + first_slot;
  const int64_t bytes = row_bytes(a.hidden, a.dtype, a.format), scales = row_scales(a.hidden, a.format);
  m.each(n, [&](int i) {
    const int32_t id = static_cast<int32_t>(at<const int64_t>(a.ids_at)[first_slot + i]);
    s.ids()[i] = id;
    s.together()[i] = 0;
    s.places()[i] = kDropped;
    s.rows()[i] = s.scales()[i] = nullptr;
    if (id >= 0) {
      const ChunkRank rank = ChunkRank::of(places[i]);
      const int64_t owner = owner_of(offsets, a.world, id), row = expert_rows[id] + before_chunk[id] + rank.before;
      const int64_t* offer = offers + owner * kOfferWords;
      if (rank.before == 0) s.together()[i] = rank.all;
      if (offer[kRoom] < 0 || row < offer[kRoom]) {
        s.places()[i] = pack_place(owner, row);
        s.rows()[i] = blocks.peers[owner] + offer[kRowsAt] + row * bytes;
        if (scales) s.scales()[i] = blocks.peers[owner] + offer[kScalesAt] + row * scales * 4;
      }
    }
    places[i] = s.places()[i];
  });
  if (a.relay) {
    m.sync();
    link_slots(m, a, blocks, n, s);
  }
}

// Write the rows of the chunks of this block. send(slots, first token, number of tokens) sends those of a chunk;
// finish() waits until asynchronous copies have ended. The places of the next chunk are looked up while rows are
// written.
template <class M, class Args, class Send, class Finish>
MOE_BLOCK void push_chunks(M& m, const Args& a, char* memory, Send send, Finish finish) {
  const Blocks blocks(a);
  const int step = static_cast<int>(m.blocks());
  int odd = 0;
  const auto slots = [&](int odd_chunk) { return ChunkSlots{memory + odd_chunk * a.chunk * kSlotBytes, a.chunk}; };
  const auto place = [&](int chunk, int odd_chunk) {
    if (chunk < a.chunks) place_chunk(m, a, blocks, chunk, slots(odd_chunk));
  };
  const auto slots_of = [&](int chunk) { return chunk_slots(a.tokens, a.top_k, a.chunk, chunk); };
  place(static_cast<int>(m.block()), odd);
  for (int chunk = static_cast<int>(m.block()); chunk < a.chunks; chunk += step) {
    m.sync();
    if (a.hidden > 0) {
      const int top_k = static_cast<int>(a.top_k);
      send(slots(odd), chunk * a.chunk / top_k, slots_of(chunk) / top_k);
    }
    place(chunk + step, 1 - odd);
    finish();
    // The block that sends the last row for an expert sets the flag at the expert's owner.
    m.sync();
    m.each(slots_of(chunk), [&](int i) {
      const int64_t written = slots(odd).together()[i], id = slots(odd).ids()[i];
      if (written == 0) return;
      count_written(m, a, blocks, id, written, at<const int64_t>(a.all_counts_at)[a.rank * a.experts + id]);
    });
    odd = 1 - odd;
  }
}

template <class Args>
MOE_BLOCK Source source_of(const Args& a) {
  const int64_t own = a.x_at | a.stride | (a.hidden * element_bytes(a.dtype));
  const bool vectors = all_on_16(at<const int64_t>(a.offers_at), a.world, kRowsAt, own);
  return {at<const char>(a.x_at), a.stride, a.hidden, a.dtype, a.format, a.power_of_two != 0, vectors};
}

template <class M>
MOE_BLOCK void push(M& m, const PushArgs& a) {
  if (failed(a)) return;
  char* memory = m.template shared<char>(2 * a.chunk * kSlotBytes);
  BulkCopies bulk(m, a.bulk != 0);
  const Source from = source_of(a);
  const bool in_bulk = from.vectors && bulk.usable(a.bulk != 0);
  const auto send = [&](const ChunkSlots& s, int64_t first, int n) {
    const int top_k = static_cast<int>(a.top_k);
    if (in_bulk) {
      bulk.copy(
          n, row_bytes(a.hidden, a.dtype, kSame), top_k, [&](int i) { return from.x + (first + i) * from.stride; },
          [&](int i, int k) { return s.rows()[i * top_k + k]; });
    } else {
      copy_all_rows(m, from, n, {s.rows(), s.scales(), top_k}, [&](int i) { return first + i; });
    }
  };
  push_chunks(m, a, memory, send, [&] {
    if (in_bulk) bulk.finish();
  });
}

// The rows of a tile that a block sends next: their tokens, and their places.
struct TileSlots {
  int64_t* tokens;
  char** rows;
  int* count;  // without rows beyond the owner's capacity
};

// Write the rows of this block's tiles, and set the flag of each at its owner. send(slots) sends the next rows. The
// places of those that follow are looked up meanwhile; there is one fence for each group of tiles.
template <class M, class Send, class Finish>
MOE_BLOCK void send_tiles(M& m, const PushTilesArgs& a, char* memory, Send send, Finish finish) {
  const Blocks blocks(a);
  SendOrder order(a.order_at, a.tokens * a.top_k, a.experts, m.blocks());
  order.read_group();
  const int tiles = order.tiles();
  const int64_t bytes = row_bytes(a.hidden, a.dtype, kSame);
  const auto slots = [&](int odd) {
    char* of = memory + odd * kTileBytes;
    return TileSlots{reinterpret_cast<int64_t*>(of), reinterpret_cast<char**>(of + kTileRows * 8),
                     reinterpret_cast<int*>(of + kTileRows * 16)};
  };
  const auto place = [&](TileRows batch, int odd) {
    if (batch.tile >= tiles) return;
    const SendTile tile = order.tile[batch.tile];
    const int n = order.count(batch);
    const int64_t owner = owner_of(at<const int64_t>(a.offsets_at), a.world, tile.expert);
    const int64_t* offer = at<const int64_t>(a.offers_at) + owner * kOfferWords;
    const int64_t row = at<const int64_t>(a.expert_rows_at)[tile.expert] + tile.first + batch.first;
    const int64_t room = offer[kRoom] < 0 ? n : offer[kRoom] - row;
    const TileSlots s = slots(odd);
    m.each(1, [&](int) { *s.count = static_cast<int>(room < 0 ? 0 : room < n ? room : n); });
    m.each(n, [&](int i) {
      const int64_t slot = order.slots[tile.listed + batch.first + i];
      s.tokens[i] = slot / a.top_k;
      s.rows[i] = blocks.peers[owner] + offer[kRowsAt] + (row + i) * bytes;
      at<int64_t>(a.place_at)[slot] = i < room ? pack_place(owner, row + i) : kDropped;
    });
  };
  int odd = 0;
  TileRows now = order.first_of_block(m.block());
  place(now, odd);
  while (now.tile < tiles) {
    m.sync();
    if (a.hidden > 0) send(slots(odd));
    const TileRows next = order.next(now);
    place(next, 1 - odd);
    if (order.group_of(next) != order.group_of(now)) {
      finish();
      raise_group(m, a, blocks, order, now);
    }
    now = next;
    odd = 1 - odd;
  }
}

template <class M>
MOE_BLOCK void push_tiles(M& m, const PushTilesArgs& a) {
  if (failed(a)) return;
  char* memory = m.template shared<char>(2 * kTileBytes);
  BulkCopies bulk(m, a.bulk != 0);
  const Source from = source_of(a);
  const bool in_bulk = from.vectors && bulk.usable(a.bulk != 0);
  const auto send = [&](const TileSlots& s) {
    const auto token_of = [&](int i) { return s.tokens[i]; };
    if (in_bulk) {
      bulk.copy(
          *s.count, row_bytes(a.hidden, a.dtype, kSame), 1, [&](int i) { return from.x + token_of(i) * from.stride; },
          [&](int i, int) { return s.rows[i]; });
    } else {
      copy_all_rows(m, from, *s.count, {s.rows, nullptr, 1}, token_of);
    }
  };
  send_tiles(m, a, memory, send, [&] {
    if (in_bulk) bulk.finish();
  });
}

template <class M>
MOE_BLOCK void push_fp8(M& m, const PushFp8Args& a) {
  if (failed(a)) return;
  char* memory = m.template shared<char>(2 * a.chunk * kSlotBytes);
  const Scratch scratch = quantise_scratch(m, a.chunk, a.format);
  const Source from = source_of(a);
  const auto send = [&](const ChunkSlots& s, int64_t first, int n) {
    const Destinations to = {s.rows(), s.scales(), static_cast<int>(a.top_k)};
    quantise_rows<1>(m, from, n, to, scratch, [&](int i) { return first + i; });
  };
  push_chunks(m, a, memory, send, [] {});
}

// Copy relayed rows to the other experts of this rank.
template <class M>
MOE_BLOCK void fan_out(M& m, const FanOutArgs& a) {
  if (failed(a)) return;
  const int64_t* summary = at<const int64_t>(a.summary_at);
  const int64_t* links = at<const int64_t>(a.links_at);
  const int64_t rows = summary[a.local_experts] < a.rows ? summary[a.local_experts] : a.rows;
  const int64_t bytes = row_bytes(a.hidden, a.dtype, a.format), scales = row_scales(a.hidden, a.format);
  char* data = at<char>(a.rows_at);
  float* scale = at<float>(a.scales_at);
  int64_t* row_of = m.template shared<int64_t>(kLinkBatch);
  int64_t* link_of = m.template shared<int64_t>(kLinkBatch);
  int64_t* num_links = m.template shared<int64_t>(1);
  const int batch = static_cast<int>(kLinkBatch);
  const int64_t element = element_bytes(a.dtype);
  for (int64_t first = m.block() * batch; first < rows; first += m.blocks() * batch) {
    const int n = static_cast<int>(rows - first < batch ? rows - first : batch);
    m.each(1, [&](int) { *num_links = 0; });
    m.sync();
    m.each(n, [&](int i) {
      if (links[first + i] < 0) return;
      int before = 0;
      for (int j = 0; j < i; ++j) before += links[first + j] >= 0;
      row_of[before] = first + i;
      link_of[before] = links[first + i];
      m.add(num_links, 1);
    });
    m.sync();
    const int copies = static_cast<int>(*num_links);
    const auto copy = [&](auto word, int64_t length) {
      typedef decltype(word) T;
      const int words = static_cast<int>(length / static_cast<int64_t>(sizeof(T)));
      m.template move_rows<4>(
          copies, words, [&](int c, int word) { return reinterpret_cast<const T*>(data + link_of[c] * length)[word]; },
          [&](int c, int word, const T& v) { reinterpret_cast<T*>(data + row_of[c] * length)[word] = v; });
    };
    if (bytes > 0) {
      if (((a.rows_at | bytes) & 15) == 0) {
        copy(Words16(), bytes);
      } else if (element == 4) {
        copy(uint32_t(), bytes);
      } else {
        copy(uint16_t(), bytes);
      }
    }
    m.each(copies * static_cast<int>(scales), [&](int i) {
      const int64_t c = i / scales, channel = i % scales;
      scale[row_of[c] * scales + channel] = scale[link_of[c] * scales + channel];
    });
    m.sync();
  }
}

}  // namespace p2p
}  // namespace moe_comm
