// Kernels that start and end a turn or its stages: count, scan, meet, arrive, ready, stage, done.
#pragma once

#include "cuda/machine.h"
#include "cuda/shared.h"

namespace moe_comm {
namespace p2p {

// Number of slots in a chunk; the last chunk may be shorter.
MOE_BLOCK int chunk_slots(int64_t tokens, int64_t top_k, int64_t chunk, int64_t block) {
  const int64_t left = tokens * top_k - block * chunk;
  return static_cast<int>(left < chunk ? left : chunk);
}

// Number of slots of a chunk with the same expert as a slot: before it, and in total. In place_at until push.
struct ChunkRank {
  int32_t before, all;

  MOE_BLOCK int64_t packed() const { return int64_t{all} << 32 | before; }
  static MOE_BLOCK ChunkRank of(int64_t packed) {
    return {static_cast<int32_t>(packed & 0x7fffffff), static_cast<int32_t>(packed >> 32)};
  }
};

// Each thread reads the whole chunk: the cost does not depend on the number of experts, neighbouring threads read the
// same words, and the order is deterministic. `ids` has n words and is filled with -1 to a multiple of kRankWords.
MOE_BLOCK ChunkRank rank_in_chunk(const int32_t* ids, int n, int i) {
  const int32_t id = ids[i];
  ChunkRank rank = {0, 0};
  for (int first = 0; first < n; first += kRankWords) {
    int32_t words[kRankWords];  // read together
    MOE_UNROLL
    for (int j = 0; j < kRankWords; ++j) words[j] = ids[first + j];
    MOE_UNROLL
    for (int j = 0; j < kRankWords; ++j) {
      const int same = words[j] == id;
      rank.all += same;
      rank.before += same & (first + j < i);
    }
  }
  return rank;
}

template <class M>
MOE_BLOCK void count(M& m, const CountArgs& a) {
  if (failed(a)) return;
  const int n = chunk_slots(a.tokens, a.top_k, a.chunk, m.block());
  const int64_t* given = at<const int64_t>(a.ids_at) + m.block() * a.chunk;
  int64_t* counts = at<int64_t>(a.counts_at) + m.block() * a.experts;
  int32_t* ids = m.template shared<int32_t>(a.chunk + kRankWords);
  int64_t* totals = m.template shared<int64_t>(4);  // dropped, bad, index of the first bad slot
  m.each(static_cast<int>(a.experts), [&](int e) { counts[e] = 0; });
  m.each(3, [&](int i) { totals[i] = i == 2 ? n : 0; });
  m.each(kRankWords, [&](int i) { ids[n + i] = -1; });
  m.sync();
  m.each(n, [&](int i) {
    const int64_t id = given[i];
    ids[i] = id >= 0 && id < a.ids ? static_cast<int32_t>(id) : -1;
    if (id == kDropped) m.add(&totals[0], 1);
    if (id < kDropped || id >= a.ids) {
      m.add(&totals[1], 1);
      m.lowest(&totals[2], i);
    }
  });
  m.sync();
  int64_t* places = at<int64_t>(a.place_at) + m.block() * a.chunk;
  m.each(n, [&](int i) {
    places[i] = kDropped;
    if (ids[i] < 0) return;
    const ChunkRank rank = rank_in_chunk(ids, n, i);
    places[i] = rank.packed();
    if (rank.before == 0) counts[ids[i]] = rank.all;
  });
  m.each(1, [&](int) {
    int64_t* bad = at<int64_t>(a.bad_at) + m.block() * 4;
    bad[0] = totals[0];
    bad[1] = totals[1];
    bad[2] = totals[1] ? m.block() * a.chunk + totals[2] : -1;
    bad[3] = totals[1] ? given[totals[2]] : 0;
  });
}

// Each block sums the counts of kScanExperts experts. Its threads divide the chunks into segments: they sum each
// segment, then the segments, and then replace each count by the sum of those before it.
template <class M>
MOE_BLOCK void scan_counts(M& m, const ScanArgs& a) {
  constexpr int at_once = 8;  // counts that a thread loads before the first store
  const int64_t first_expert = m.block() * kScanExperts, left = a.experts - first_expert;
  const int experts = static_cast<int>(left < kScanExperts ? left : kScanExperts), chunks = static_cast<int>(a.chunks);
  const int segments = static_cast<int>(scan_segments(a.experts, a.chunks, m.threads()));
  const int per = (chunks + segments - 1) / segments;
  int64_t* counts = at<int64_t>(a.counts_at) + first_expert;
  int64_t* sums = m.template shared<int64_t>(segments * kScanExperts);
  const auto end_of = [&](int first) { return first + per < chunks ? first + per : chunks; };
  m.each(segments * experts, [&](int i) {
    const int first = i / experts * per, end = end_of(first);
    int64_t sum = 0;
    MOE_UNROLL_BY(8)
    for (int c = first; c < end; ++c) sum += counts[c * a.experts + i % experts];
    sums[i] = sum;
  });
  m.sync();
  m.each(experts, [&](int e) {
    int64_t sum = 0;
    for (int s = 0; s < segments; ++s) {
      const int64_t of_segment = sums[s * experts + e];
      sums[s * experts + e] = sum;
      sum += of_segment;
    }
    at<int64_t>(a.expert_rows_at)[first_expert + e] = sum;
  });
  m.sync();
  m.each(segments * experts, [&](int i) {
    const int first = i / experts * per, end = end_of(first);
    int64_t before = sums[i];
    for (int c = first; c < end; c += at_once) {
      int64_t slots[at_once];
      MOE_UNROLL
      for (int u = 0; u < at_once; ++u) slots[u] = c + u < end ? counts[(c + u) * a.experts + i % experts] : 0;
      MOE_UNROLL
      for (int u = 0; u < at_once; ++u) {
        if (c + u < end) counts[(c + u) * a.experts + i % experts] = before;
        before += slots[u];
      }
    }
  });
}

// Intermediate results of meet, in shared memory.
struct MeetScratch {
  int64_t* header;  // [49]
  int64_t*
      totals;    // dropped, bad, first chunk with bad ids, first rank with a mismatch, first without memory, overflow
  int64_t* own;  // [E] this rank's slots
  int64_t* earlier;  // [E] slots of the ranks before this one
  int64_t* sums;     // [E + 1]
  int64_t* more;     // [E + 1]
};

// Read this rank's counts, and report bad ids in its header.
template <class M, class Args>
MOE_BLOCK void meet_add_up(M& m, const Args& a, MeetScratch& x) {
  const int64_t* bad = at<const int64_t>(a.bad_at);
  m.each(static_cast<int>(a.experts), [&](int e) { x.own[e] = at<const int64_t>(a.expert_rows_at)[e]; });
  m.each(static_cast<int>(a.chunks), [&](int c) {
    if (bad[c * 4]) m.add(&x.totals[0], bad[c * 4]);
    if (bad[c * 4 + 1]) {
      m.add(&x.totals[1], bad[c * 4 + 1]);
      m.lowest(&x.totals[2], c);
    }
  });
  m.sync();
  m.each(1, [&](int) {
    if (!x.totals[1] || x.header[kFaultWord]) return;
    x.header[kFaultWord] = kBadIdsWord;
    x.header[kFaultWord + 1] = bad[x.totals[2] * 4 + 2];
    x.header[kFaultWord + 2] = bad[x.totals[2] * 4 + 3];
    x.header[kFaultWord + 3] = x.totals[1];
  });
}

// The number of this rank's experts whose counts are written to own_counts_at.
template <class Args>
MOE_BLOCK int counted_experts(const Args& a) {
  if (!a.with_counts || a.own_counts_at == 0) return 0;
  const int64_t* offsets = at<const int64_t>(a.offsets_at);
  return static_cast<int>(offsets[a.rank + 1] - offsets[a.rank]);
}

// All ranks' counts have been received. Compute the first row of this rank's slots of each expert, and the overflow.
template <class M, class Args>
MOE_BLOCK void meet_lay_out(M& m, const Args& a, const Blocks& blocks, int64_t parity, MeetScratch& x) {
  const int experts = static_cast<int>(a.experts), world = static_cast<int>(a.world);
  const int64_t* offsets = at<const int64_t>(a.offsets_at);
  const int64_t* all_ranks = blocks.words(a.rank) + blocks.control.counts(parity, 0);
  int64_t* all_counts = at<int64_t>(a.all_counts_at);
  m.each(world * experts, [&](int i) {
    all_counts[i] = all_ranks[i];
    if (a.host_counts_at) at<int64_t>(a.host_counts_at)[i] = all_ranks[i];
  });
  m.each(1, [&](int) { x.sums[0] = 0; });
  m.each(experts, [&](int e) {
    int64_t all = 0, earlier = 0;
    for (int s = 0; s < world; ++s) {
      if (s == a.rank) earlier = all;
      all += all_ranks[s * experts + e];
    }
    x.sums[e + 1] = all;
    x.earlier[e] = earlier;
  });
  const int64_t* upto = running_sums(m, x.sums, x.more, experts + 1);
  const int64_t* offers = at<const int64_t>(a.offers_at);
  m.each(a.strict ? world : 0, [&](int p) {
    const int64_t room = offers[p * kOfferWords + kRoom];
    if (room >= 0 && upto[offsets[p + 1]] - upto[offsets[p]] > room) m.lowest(&x.totals[4], p);
  });
  m.each(experts, [&](int e) {
    const int64_t owner = owner_of(offsets, world, e), room = offers[owner * kOfferWords + kRoom];
    const int64_t row = upto[e] - upto[offsets[owner]] + x.earlier[e];
    at<int64_t>(a.expert_rows_at)[e] = row;
    if (room < 0) return;
    const int64_t beyond = row + x.own[e] - room;
    if (beyond > 0) m.add(&x.totals[5], beyond < x.own[e] ? beyond : x.own[e]);
  });
  const int64_t mine = offsets[a.rank], end = offsets[a.rank + 1];
  const auto first_row = [&](int i) {
    const int64_t row = upto[mine + i < end ? mine + i : end] - upto[mine], room = a.offer_4;
    return room >= 0 && room < row ? room : row;
  };
  m.each(static_cast<int>(a.local_experts) + 1, [&](int i) { at<int64_t>(a.summary_at)[i] = first_row(i); });
  m.each(counted_experts(a), [&](int i) { at<int64_t>(a.own_counts_at)[i] = first_row(i + 1) - first_row(i); });
  m.sync();
  m.each(1, [&](int) {
    Report* report = at<Report>(a.report_at);
    report->rows = upto[end] - upto[mine];
    report->dropped = x.totals[0];
    report->overflow = x.totals[5];
  });
}

template <class M, class Args>
MOE_BLOCK void meet_ranks(M& m, const Args& a) {
  const State state = *at<const State>(a.state_at);  // read together with the header, which is in host memory
  const Group g = group_of(a);
  const Blocks blocks(a);
  const int world = static_cast<int>(a.world), experts = static_cast<int>(a.experts);
  const int64_t turn = state.turn + 1, parity = turn % 2;
  MeetScratch x;
  x.header = m.template shared<int64_t>(kHeaderWords);
  x.totals = m.template shared<int64_t>(6);
  m.each(static_cast<int>(kHeaderWords), [&](int i) { x.header[i] = at<const int64_t>(a.header_at)[i]; });
  m.each(6, [&](int i) { x.totals[i] = i == 2 ? a.chunks : i == 3 || i == 4 ? world : 0; });
  m.each(a.with_counts ? static_cast<int>(a.local_experts) + 1 : 0, [&](int i) { at<int64_t>(a.summary_at)[i] = 0; });
  m.each(counted_experts(a), [&](int i) { at<int64_t>(a.own_counts_at)[i] = 0; });
  if (state.fault != kNone) return;
  m.sync();
  if (a.with_counts) {
    m.each(a.digest_at != 0, [&](int) {
      const auto digest = static_cast<uint64_t>(*at<const int64_t>(a.digest_at));
      x.header[kDigestWord] ^= static_cast<int64_t>(digest >> 24 << kDigestShift);
    });
    x.own = m.template shared<int64_t>(a.experts);
    x.earlier = m.template shared<int64_t>(a.experts);
    x.sums = m.template shared<int64_t>(a.experts + 1);
    x.more = m.template shared<int64_t>(a.experts + 1);
    meet_add_up(m, a, x);
    m.sync();
  }

  const int64_t offer[kOfferWords] = {a.offer_0, a.offer_1, a.offer_2, a.offer_3, a.offer_4};
  const int header_words = static_cast<int>(kHeaderWords), offer_words = static_cast<int>(kOfferWords);
  m.each(world * header_words, [&](int i) {
    const int word = i % header_words;
    blocks.words(i / header_words)[blocks.control.header(parity, a.rank) + word] = x.header[word];
  });
  m.each(world, [&](int p) {
    int64_t* to = blocks.words(p) + blocks.control.offer(parity, a.rank);
    MOE_UNROLL
    for (int i = 0; i < offer_words; ++i) to[i] = offer[i];
  });
  if (a.with_counts) {
    m.each(world * experts, [&](int i) {
      blocks.words(i / experts)[blocks.control.counts(parity, a.rank) + i % experts] = x.own[i % experts];
    });
  }
  m.sync();
  m.each(world, [&](int p) { m.store_release(blocks.words(p) + blocks.control.posted(a.rank), turn); });
  m.each(1, [&](int) { at<State>(a.state_at)->turn = turn; });
  const int64_t* mine = blocks.words(a.rank);
  if (!wait_all(m, g, world, kPosted, turn, 0, [&](int p) { return Word{mine + blocks.control.posted(p), p}; })) return;

  // Copy the data to private memory for the kernels that follow.
  m.each(world, [&](int p) {
    const int64_t* header = mine + blocks.control.header(parity, p);
    const int64_t* from = mine + blocks.control.offer(parity, p);
    bool differs = header[kFaultWord] != 0, nowhere = false;
    for (int i = 0; i < kComparedWords; ++i) differs = differs || header[i] != x.header[i];
    for (int i = 0; i < offer_words; ++i) {
      at<int64_t>(a.offers_at)[p * offer_words + i] = from[i];
      nowhere = nowhere || (i != kRoom && from[i] == kNowhere);
    }
    if (differs) m.lowest(&x.totals[3], p);
    if (nowhere) m.lowest(&x.totals[4], p);
  });
  if (a.all_headers_at) {
    m.each(world * header_words,
           [&](int i) { at<int64_t>(a.all_headers_at)[i] = mine[blocks.control.header(parity, 0) + i]; });
  }
  m.sync();
  const bool bad_ids = x.header[kFaultWord] == kBadIdsWord;
  if (x.totals[3] < world || x.totals[4] < world) {
    m.each(1, [&](int) {
      if (bad_ids) {
        fail(m, g, turn, {kBadIds, x.header[kFaultWord + 1], kPosted, 0, x.header[kFaultWord + 2]});
      } else if (x.totals[3] < world) {
        fail(m, g, turn, {kDisagree, x.totals[3], kPosted, 0, 0});
      } else {
        fail(m, g, turn, {kNoRoom, x.totals[4], kPosted, 0, 0});
      }
    });
    return;
  }
  if (a.with_counts) meet_lay_out(m, a, blocks, parity, x);
  m.sync();
  if (a.strict && x.totals[4] < world) {
    m.each(static_cast<int>(a.local_experts) + 1, [&](int i) { at<int64_t>(a.summary_at)[i] = 0; });
    m.each(counted_experts(a), [&](int i) { at<int64_t>(a.own_counts_at)[i] = 0; });
    m.each(1, [&](int) { fail(m, g, turn, {kNoRoom, x.totals[4], kPosted, 0, 0}); });
    return;
  }
  m.each(1, [&](int) { m.store_release(&at<Report>(a.report_at)->turn, turn); });
}

template <class M>
MOE_BLOCK void meet(M& m, const MeetArgs& a) {
  meet_ranks(m, a);
}

template <class M>
MOE_BLOCK void scan(M& m, const ScanArgs& a) {
  M counting = m;  // meet uses the same shared memory again
  if (!failed(a)) scan_counts(counting, a);
  if (a.meets && is_last_block(m, a)) meet_ranks(m, a);
}

// Called by one thread, after a sync that follows the writes: sets the flag of a tile at the expert's owner.
template <class M, class Args>
MOE_BLOCK void raise_tile(M& m, const Args& a, const Blocks& blocks, int64_t id, int64_t tile) {
  const int64_t* offsets = at<const int64_t>(a.offsets_at);
  const int64_t owner = owner_of(offsets, a.world, id);
  m.store_release(blocks.words(owner) + blocks.control.arrived(id - offsets[owner], a.rank, tile),
                  at<const State>(a.state_at)->turn);
}

// Called by one thread, after a sync that follows the writes. Counts `written` rows of this rank for expert `id`, and
// sets its flags after the last of `all`.
template <class M, class Args>
MOE_BLOCK void count_written(M& m, const Args& a, const Blocks& blocks, int64_t id, int64_t written, int64_t all) {
  int64_t* left = at<int64_t>(a.left_at) + id;
  if (m.fetch_add(left, written) + written != all) return;
  *left = 0;
  for (int64_t tile = 0; tile < num_flags(all); ++tile) raise_tile(m, a, blocks, id, tile);
}

template <class M, class Args>
MOE_BLOCK void await_rows(M& m, const Args& a, int64_t first_source, int64_t num_sources) {
  const Blocks blocks(a);
  const int64_t* offsets = at<const int64_t>(a.offsets_at);
  const int64_t first = offsets[a.rank];
  const int sources = static_cast<int>(num_sources), pairs = static_cast<int>(offsets[a.rank + 1] - first) * sources;
  const int64_t* counts = at<const int64_t>(a.all_counts_at);
  // The first tiles of all pairs of an expert and a source, then the second ones.
  const int count = pairs * static_cast<int>(kTileFlags);
  wait_all(m, group_of(a), count, kArrived, at<const State>(a.state_at)->turn, 0, [&](int i) {
    const int64_t expert = i % pairs / sources, from = first_source + i % sources, tile = i / pairs;
    const bool any = tile < num_flags(counts[from * a.experts + first + expert]);
    return Word{any ? blocks.words(a.rank) + blocks.control.arrived(expert, from, tile) : nullptr, from};
  });
}

template <class M>
MOE_BLOCK void arrive(M& m, const ArriveArgs& a) {
  if (!failed(a)) await_rows(m, a, a.first_source, a.sources);
}

template <class M>
MOE_BLOCK void ready(M& m, const ReadyArgs& a) {
  if (failed(a)) return;
  const Blocks blocks(a);
  const int64_t* mine = blocks.words(a.rank) + blocks.control.results(a.slice, 0);
  wait_all(m, group_of(a), static_cast<int>(a.world), kResults, at<const State>(a.state_at)->turn, 0,
           [&](int p) { return Word{mine + p, p}; });
}

template <class M>
MOE_BLOCK void stage(M& m, const StageArgs& a) {
  if (failed(a)) return;
  const Blocks blocks(a);
  const int world = static_cast<int>(a.world);
  const int64_t turn = at<const State>(a.state_at)->turn;
  m.each(world, [&](int p) { m.store_release(blocks.words(p) + blocks.control.staged(a.stage, a.rank), turn); });
  const int64_t* mine = blocks.words(a.rank) + blocks.control.staged(a.stage, 0);
  wait_all(m, group_of(a), world, kStaged, turn, 0, [&](int p) { return Word{mine + p, p}; });
}

template <class M, class Args>
MOE_BLOCK void end_turn(M& m, const Args& a) {
  const Blocks blocks(a);
  const int world = static_cast<int>(a.world);
  const int64_t turn = at<const State>(a.state_at)->turn;
  m.each(world, [&](int p) { m.store_release(blocks.words(p) + blocks.control.done(a.rank), turn); });
  const int64_t* mine = blocks.words(a.rank) + blocks.control.done(0);
  wait_all(m, group_of(a), world, kDone, turn, 0, [&](int p) { return Word{mine + p, p}; });
}

template <class M>
MOE_BLOCK void done(M& m, const DoneArgs& a) {
  if (!failed(a)) end_turn(m, a);
}

}  // namespace p2p
}  // namespace moe_comm
