// Low-latency dispatch. No count exchange is needed, because every expert has a fixed region for the rows of each rank.
#pragma once

#include "cuda/meet.h"
#include "cuda/rows.h"

namespace moe_comm {
namespace p2p {

constexpr int kCountBits = 16;

template <class M>
MOE_BLOCK void ll_send(M& m, const LlSendArgs& a) {
  if (failed(a)) return;
  const Blocks blocks(a);
  const int64_t expert = m.block() / a.parts, part = m.block() % a.parts;
  const int64_t* offsets = at<const int64_t>(a.offsets_at);
  const int64_t* offers = at<const int64_t>(a.offers_at);
  const int64_t* ids = at<const int64_t>(a.ids_at);
  const int64_t owner = owner_of(offsets, a.world, expert), local = expert - offsets[owner];
  const int64_t bytes = row_bytes(a.hidden, a.dtype, a.format), scales = row_scales(a.hidden, a.format);
  const int64_t base = (local * a.world + a.rank) * a.max_tokens;
  const int slots = static_cast<int>(a.tokens * a.top_k), threads = m.threads();
  const int per = (slots + threads - 1) / threads;
  int64_t* counts = m.template shared<int64_t>(threads);
  int64_t* more = m.template shared<int64_t>(threads);
  int32_t* tokens = m.template shared<int32_t>(a.max_tokens);  // tokens sent by this part
  char** rows = m.template shared<char*>(a.max_tokens);
  char** scale_rows = m.template shared<char*>(a.max_tokens);
  int64_t* totals = m.template shared<int64_t>(2);  // number of bad ids; slots of this expert
  const Scratch scratch = quantise_scratch(m, a.max_tokens, a.format);

  m.each(2, [&](int i) { totals[i] = 0; });
  m.sync();
  m.each(threads, [&](int i) {
    int64_t count = 0;
    for (int s = i * per; s < (i + 1) * per && s < slots; ++s) {
      const int64_t id = ids[s];
      count += id == expert;
      if (m.block() == 0 && (id < 0 || id >= a.experts)) {
        at<int64_t>(a.place_at)[s] = kDropped;
        if (id != kDropped) m.add(&totals[0], 1);
      }
    }
    counts[i] = count;
  });
  const int64_t* upto = running_sums(m, counts, more, threads);
  m.each(threads, [&](int i) {
    int64_t place = i ? upto[i - 1] : 0;
    for (int s = i * per; s < (i + 1) * per && s < slots; ++s) {
      if (ids[s] != expert) continue;
      const bool room = place < a.max_tokens;
      if (part == 0) at<int64_t>(a.place_at)[s] = room ? pack_place(owner, base + place) : kDropped;
      if (room && place % a.parts == part) {
        const int64_t mine = place / a.parts;
        const int64_t* offer = offers + owner * kOfferWords;
        tokens[mine] = static_cast<int32_t>(s / a.top_k);
        rows[mine] = blocks.peers[owner] + offer[kRowsAt] + (base + place) * bytes;
        scale_rows[mine] = scales ? blocks.peers[owner] + offer[kScalesAt] + (base + place) * scales * 4 : nullptr;
      }
      ++place;
    }
  });
  m.each(1, [&](int) { totals[1] = upto[threads - 1]; });
  m.sync();
  const auto sent = [&] { return totals[1] < a.max_tokens ? totals[1] : a.max_tokens; };
  const int mine = static_cast<int>((sent() - part + a.parts - 1) / a.parts);

  const int64_t own = a.x_at | a.stride | (a.hidden * element_bytes(a.dtype));
  const Source from = {at<const char>(a.x_at),
                       a.stride,
                       a.hidden,
                       a.dtype,
                       a.format,
                       a.power_of_two != 0,
                       all_on_16(offers, a.world, kRowsAt, own)};
  if (a.hidden > 0) {
    const auto row_of = [&](int i) { return int64_t{tokens[i]}; };
    if (a.format == kSame) {
      copy_all_rows(m, from, mine, {rows, scale_rows, 1}, row_of);
    } else {
      quantise_rows<1>(m, from, mine, {rows, scale_rows, 1}, scratch, row_of);
    }
  }
  m.sync();
  const int64_t turn = at<const State>(a.state_at)->turn + 1;
  m.each(1, [&](int) {
    Report* report = at<Report>(a.report_at);
    if (totals[0]) m.add(&report->bad, totals[0]);
    if (part == 0 && totals[1] > sent()) m.add(&report->overflow, totals[1] - sent());
    int64_t* flag = blocks.words(owner) + blocks.control.sent(turn % 2, local, a.rank, part);
    m.store_release(flag, turn << kCountBits | sent());
  });
  if (m.block() != 0) return;
  m.each(static_cast<int>(a.world), [&](int p) {
    if (offsets[p] != offsets[p + 1]) return;
    m.store_release(blocks.words(p) + blocks.control.sent(turn % 2, 0, a.rank, 0), turn << kCountBits);
  });
}

template <class M>
MOE_BLOCK void ll_arrive(M& m, const LlArriveArgs& a) {
  if (failed(a)) return;
  const Blocks blocks(a);
  const int64_t* offsets = at<const int64_t>(a.offsets_at);
  const int64_t* mine = blocks.words(a.rank);
  const int64_t turn = at<const State>(a.state_at)->turn + 1;
  const int world = static_cast<int>(a.world), parts = static_cast<int>(a.parts);
  const int experts = static_cast<int>(offsets[a.rank + 1] - offsets[a.rank]);
  const int words = experts > 0 ? experts * world * parts : world, each = experts > 0 ? parts : 1;
  const bool good = wait_all(m, group_of(a), words, kSent, turn, kCountBits, [&](int i) {
    const int pair = i / each;
    return Word{mine + blocks.control.sent(turn % 2, pair / world, pair % world, i % each), pair % world};
  });
  if (!good) return;
  int64_t* rows = m.template shared<int64_t>(1);
  m.each(1, [&](int) { *rows = 0; });
  m.sync();
  m.each(static_cast<int>(a.local_experts) * world, [&](int i) {
    const int64_t* sent = mine + blocks.control.sent(turn % 2, i / world, i % world, 0);
    const int64_t word = i < experts * world ? m.load_acquire(sent) : 0;
    const int64_t count = word & ((int64_t{1} << kCountBits) - 1);
    at<int64_t>(a.few_counts_at)[i] = count;
    if (a.host_counts_at) at<int64_t>(a.host_counts_at)[i] = count;
    m.add(rows, count);
  });
  m.sync();
  m.each(1, [&](int) {
    Report* report = at<Report>(a.report_at);
    report->rows = *rows;
    m.store_release(&report->turn, turn);
  });
}

template <class M>
MOE_BLOCK void ll_ready(M& m, const LlReadyArgs& a) {
  if (failed(a)) return;
  const int64_t turn = at<const State>(a.state_at)->turn + 1;
  const Blocks blocks(a);
  const int64_t* places = at<const int64_t>(a.place_at);
  const int world = static_cast<int>(a.world);
  int32_t* needed = m.template shared<int32_t>(a.world);
  m.each(world, [&](int p) {
    needed[p] = 0;
    m.store_release(blocks.words(p) + blocks.control.done(a.rank), turn);
  });
  m.sync();
  m.each(static_cast<int>(a.tokens * a.top_k), [&](int i) {
    if (places[i] != kDropped) needed[place_owner(places[i])] = 1;
  });
  m.sync();
  const int64_t* mine = blocks.words(a.rank);
  const bool good = wait_all(m, group_of(a), world, kResults, turn, 0,
                             [&](int p) { return Word{needed[p] ? mine + blocks.control.done(p) : nullptr, p}; });
  if (good) m.each(1, [&](int) { at<State>(a.state_at)->turn = turn; });
}

}  // namespace p2p
}  // namespace moe_comm
