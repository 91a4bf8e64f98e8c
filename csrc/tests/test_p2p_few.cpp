// Low-latency dispatch: fixed regions, no count exchange.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "cpu/kernels.h"
#include "layout.h"
#include "p2p_ranks.h"

using namespace moe_comm;
using namespace moe_comm::test;
using namespace moe_comm::p2p;

namespace {

struct Few {
  P2pCase c;
  int64_t max_tokens = 12, parts = 1;

  // Place of a slot: its row follows from its index among this rank's slots of the expert. -1 if it has none.
  int64_t place(int source, int64_t slot) const {
    const auto& ids = c.ids[static_cast<size_t>(source)];
    const int64_t id = ids[static_cast<size_t>(slot)];
    if (id < 0 || id >= c.experts()) return kDropped;
    int64_t owner = 0, before = 0;
    while (id >= c.offsets[static_cast<size_t>(owner) + 1]) ++owner;
    for (int64_t i = 0; i < slot; ++i) before += ids[static_cast<size_t>(i)] == id;
    if (before >= max_tokens) return kDropped;
    const int64_t local = id - c.offsets[static_cast<size_t>(owner)];
    return pack_place(owner, (local * c.world + source) * max_tokens + before);
  }
};

void send(P2pRanks& ranks, int rank, const Few& f) {
  P2pRanks::Rank& me = ranks.of(rank);
  const P2pCase& c = f.c;
  const size_t r = static_cast<size_t>(rank);
  me.offers.clear();
  for (int p = 0; p < c.world; ++p) {
    const int64_t offer[] = {ranks.region(p, c, 0), 0, ranks.region(p, c, 2), 0, -1};
    me.offers.insert(me.offers.end(), offer, offer + kOfferWords);
  }
  LlSendArgs a = ranks.args<LlSendArgs>(rank, c);
  a.tokens = c.tokens[r];
  a.top_k = c.top_k;
  a.ids_at = reinterpret_cast<int64_t>(c.ids[r].data());
  a.hidden = c.hidden;
  a.dtype = c.dtype;
  a.x_at = reinterpret_cast<int64_t>(c.x[r].data());
  a.stride = c.hidden * c.element();
  a.offers_at = reinterpret_cast<int64_t>(me.offers.data());
  me.place.assign(c.ids[r].size(), -9);
  a.place_at = reinterpret_cast<int64_t>(me.place.data());
  a.max_tokens = f.max_tokens;
  a.parts = f.parts;
  a.format = c.format;
  a.power_of_two = c.power_of_two;
  run_p2p("ll_send", c.experts() * f.parts, a);
}

std::vector<int64_t> arrive(P2pRanks& ranks, int rank, const Few& f) {
  LlArriveArgs a = ranks.args<LlArriveArgs>(rank, f.c);
  a.parts = f.parts;
  std::vector<int64_t> counts(static_cast<size_t>(f.c.local_experts() * f.c.world), -9), host = counts;
  a.few_counts_at = reinterpret_cast<int64_t>(counts.data());
  a.host_counts_at = reinterpret_cast<int64_t>(host.data());
  run_p2p("ll_arrive", 1, a);
  CHECK(host == counts);
  return counts;
}

void ready(P2pRanks& ranks, int rank, const Few& f) {
  LlReadyArgs a = ranks.args<LlReadyArgs>(rank, f.c);
  a.tokens = f.c.tokens[static_cast<size_t>(rank)];
  a.top_k = f.c.top_k;
  a.place_at = reinterpret_cast<int64_t>(ranks.of(rank).place.data());
  run_p2p("ll_ready", 1, a);
}

// Expert output: an arbitrary function of the place.
void results(const P2pCase& c, int64_t place, char* row) {
  Random random(static_cast<uint64_t>(place) + 5);
  for (int64_t d = 0; d < c.hidden; ++d) {
    test::narrow(c.dtype, static_cast<float>(random.unit() - 0.5), row + d * c.element());
  }
}

// After send: receive the rows and check them.
void receive(P2pRanks& ranks, int rank, const Few& f) {
  const P2pCase& c = f.c;
  const size_t r = static_cast<size_t>(rank);
  P2pRanks::Rank& me = ranks.of(rank);
  const std::vector<int64_t> counts = arrive(ranks, rank, f);
  CHECK_EQ(me.state.fault, int64_t{kNone});
  for (size_t i = 0; i < c.ids[r].size(); ++i) CHECK_EQ(me.place[i], f.place(rank, static_cast<int64_t>(i)));
  std::vector<int64_t> expected(counts.size(), 0);
  const int64_t bytes = row_bytes(c.hidden, c.dtype, c.format), of_scales = 4 * row_scales(c.hidden, c.format);
  for (int s = 0; s < c.world; ++s) {
    for (size_t i = 0; i < c.ids[static_cast<size_t>(s)].size(); ++i) {
      const int64_t place = f.place(s, static_cast<int64_t>(i));
      if (place == kDropped || place_owner(place) != rank) continue;
      const int64_t row = place_row(place);
      ++expected[static_cast<size_t>(row / f.max_tokens)];
      ranks.check_row(c, {0, s, static_cast<int64_t>(i)}, ranks.data(rank, ranks.region(rank, c, 0)) + row * bytes,
                      ranks.data(rank, ranks.region(rank, c, 2)) + row * of_scales);
    }
  }
  CHECK(counts == expected);
  int64_t all = 0;
  for (const int64_t count : counts) all += count;
  CHECK_EQ(me.report.rows, all);
}

// After receive: write this rank's results, sum those of its tokens, and check the sums.
void combine(P2pRanks& ranks, int rank, const Few& f) {
  const P2pCase& c = f.c;
  const size_t r = static_cast<size_t>(rank);
  P2pRanks::Rank& me = ranks.of(rank);
  const int64_t row = c.hidden * c.element(), rows = c.local_experts() * c.world * f.max_tokens;
  for (int64_t i = 0; i < rows; ++i) {
    results(c, pack_place(rank, i), ranks.data(rank, ranks.region(rank, c, 4)) + i * row);
  }
  ready(ranks, rank, f);
  for (int p = 0; p < c.world; ++p) me.offers[static_cast<size_t>(p * kOfferWords)] = ranks.region(p, c, 4);
  Bytes y(static_cast<size_t>(c.tokens[r] * row) + 16, 'y'), expected_y = y;
  ranks.sum(rank, c, true, y.data());
  Bytes all_rows(static_cast<size_t>(row) * c.ids[r].size());
  std::vector<int64_t> dense = me.place;
  for (size_t i = 0; i < dense.size(); ++i) {
    if (dense[i] == kDropped) continue;
    results(c, me.place[i], all_rows.data() + static_cast<int64_t>(i) * row);
    dense[i] = pack_place(0, static_cast<int64_t>(i));
  }
  char* base = all_rows.data();
  const TokenLoop loop = {dense.data(), &base, c.top_k, c.hidden, c.dtype, false};
  kernels().sum(loop, 0, c.tokens[r], expected_y.data(), row, c.weights[r].data());
  CHECK(y == expected_y);
}

void run_few(P2pRanks& ranks, int rank, const Few& f) {
  send(ranks, rank, f);
  receive(ranks, rank, f);
  combine(ranks, rank, f);
}

Few random_few(Random& random, const std::vector<int64_t>& offsets) {
  Few f;
  f.c = random_case(random, offsets);
  while (f.c.hidden > 40) f.c = random_case(random, offsets);
  f.max_tokens = random.between(3, 12);
  f.parts = random.between(1, kMaxParts);
  return f;
}

// Cases with the same regions: successive turns may only use a buffer again if its regions are the same.
std::vector<Few> random_turns(Random& random, const std::vector<int64_t>& offsets, int turns) {
  const Few first = random_few(random, offsets);
  std::vector<Few> all = {first};
  while (static_cast<int>(all.size()) < turns) {
    Few f = random_few(random, offsets);
    P2pCase c;
    c.world = f.c.world;
    c.offsets = offsets;
    c.dtype = first.c.dtype;
    c.hidden = first.c.hidden;
    c.format = first.c.format;
    c.top_k = f.c.top_k;
    c.power_of_two = f.c.power_of_two;
    c.tokens = f.c.tokens;
    fill_case(random, c);
    f.c = c;
    f.max_tokens = first.max_tokens;
    all.push_back(f);
  }
  return all;
}

}  // namespace

TEST(p2p_few_rows_are_at_fixed_positions_over_many_turns) {
  Random random(81);
  for (int round = 0; round < 4 * repeats(); ++round) {
    for (int world = 1; world <= 8; ++world) {
      const std::vector<int64_t> offsets = random_offsets(random, world);
      const std::vector<Few> cases = random_turns(random, offsets, 12);
      for (const int threads : {1, 3, 64}) {
        host_threads = threads;
        P2pRanks ranks(world);
        on_ranks(world, [&](int rank) {
          int64_t turn = 0;
          for (const Few& f : cases) {
            run_few(ranks, rank, f);
            CHECK_EQ(ranks.of(rank).state.turn, ++turn);
          }
        });
      }
      host_threads = 1;
    }
  }
}

TEST(p2p_few_and_many_rows_alternate) {
  Random random(82);
  const std::vector<int64_t> offsets = {0, 2, 3, 5};
  const std::vector<Few> few = random_turns(random, offsets, 10 * repeats());
  std::vector<P2pCase> many;
  for (size_t i = 0; i < few.size(); ++i) many.push_back(random_case(random, offsets));
  P2pRanks ranks(3);
  on_ranks(3, [&](int rank) {
    for (size_t i = 0; i < few.size(); ++i) {
      run_few(ranks, rank, few[i]);
      if (i % 3) ranks.run_and_check(rank, many[i]);
    }
  });
}

TEST(p2p_few_rows_with_bad_ids_and_more_than_fit_are_counted) {
  Random random(83);
  Few f;
  f.c.world = 2;
  f.c.offsets = {0, 1, 2};
  f.c.top_k = 2;
  f.c.tokens = {4, 4};
  fill_case(random, f.c);
  f.c.ids = {{0, 0, 0, 0, 1, 7, -3, -1}, {1, 0, 1, 0, 1, 0, 1, 0}};
  f.max_tokens = 3;
  P2pRanks ranks(2);
  on_ranks(2, [&](int rank) {
    run_few(ranks, rank, f);
    CHECK_EQ(ranks.of(rank).report.bad, int64_t{rank == 0 ? 2 : 0});
    CHECK_EQ(ranks.of(rank).report.overflow, int64_t{rank == 0 ? 1 : 2});
  });
}

TEST(p2p_few_rows_name_the_rank_that_did_not_send) {
  Random random(84);
  Few f = random_few(random, {0, 2, 4, 5});
  P2pRanks ranks(3, 0.05);
  std::atomic<int> sent{0};
  on_ranks(3, [&](int rank) {
    if (rank == 1) return;
    send(ranks, rank, f);
    // Start the timeout only after both ranks have sent; otherwise a late thread could be reported instead of rank 1.
    for (++sent; sent < 2;) std::this_thread::yield();
    arrive(ranks, rank, f);
    CHECK_EQ(ranks.of(rank).report.fault, int64_t{kTimedOut});
    CHECK_EQ(ranks.of(rank).report.who, int64_t{1});
    CHECK_EQ(ranks.of(rank).report.what, int64_t{kSent});
    ready(ranks, rank, f);
    CHECK_EQ(ranks.of(rank).state.turn, int64_t{0});
  });
}

namespace {

// A case in which a token of rank r goes to an expert of the rank to[r]. There is one expert per rank; to[r] < 0: no
// tokens.
Few few_to(Random& random, const std::vector<int64_t>& to) {
  Few f;
  f.c.world = static_cast<int>(to.size());
  for (int64_t e = 0; e <= f.c.world; ++e) f.c.offsets.push_back(e);
  for (const int64_t owner : to) f.c.tokens.push_back(owner < 0 ? 0 : 3);
  fill_case(random, f.c);
  for (size_t r = 0; r < to.size(); ++r) {
    for (int64_t& id : f.c.ids[r]) id = to[r];
  }
  return f;
}

void wait_until(const std::atomic<int>& number, int wanted) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (number < wanted && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  CHECK_EQ(number.load(), wanted);
}

}  // namespace

// Rank 2 neither receives nor computes before ranks 0, 1 and 3 have completed the turn and sent rows of the next one.
TEST(p2p_few_results_are_awaited_only_from_owners_of_own_rows) {
  Random random(85);
  const Few now = few_to(random, {1, 0, 2, -1}), next = few_to(random, {2, 2, 0, 2});
  P2pRanks ranks(4, 10);
  std::atomic<int> ahead{0};
  on_ranks(4, [&](int rank) {
    send(ranks, rank, now);
    if (rank == 2) wait_until(ahead, 3);
    receive(ranks, rank, now);
    combine(ranks, rank, now);
    CHECK_EQ(ranks.of(rank).state.turn, int64_t{1});
    send(ranks, rank, next);
    ++ahead;
    receive(ranks, rank, next);
    combine(ranks, rank, next);
    CHECK_EQ(ranks.of(rank).state.turn, int64_t{2});
  });
}

TEST(p2p_few_results_name_the_owner_that_did_not_compute) {
  Random random(86);
  const Few f = few_to(random, {2, 0, 1});
  P2pRanks ranks(3, 0.1);
  std::atomic<int> received{0};
  on_ranks(3, [&](int rank) {
    send(ranks, rank, f);
    receive(ranks, rank, f);
    ++received;
    wait_until(received, 3);
    if (rank == 2) return;
    ready(ranks, rank, f);
    CHECK_EQ(ranks.of(rank).report.fault, int64_t{rank == 0 ? kTimedOut : kNone});
    if (rank == 1) return;
    CHECK_EQ(ranks.of(rank).report.who, int64_t{2});
    CHECK_EQ(ranks.of(rank).report.what, int64_t{kResults});
  });
}

// Ranks without experts, without tokens or without each other's rows run apart by up to a turn.
TEST(p2p_few_rows_survive_random_delays_over_many_turns) {
  Random random(87);
  for (const std::vector<int64_t>& offsets : {std::vector<int64_t>{0, 1, 1, 3, 4}, std::vector<int64_t>{0, 0, 2, 2},
                                              std::vector<int64_t>{0, 1, 2, 3, 4, 5}}) {
    const int world = static_cast<int>(offsets.size()) - 1;
    std::vector<Few> cases = random_turns(random, offsets, 60 * repeats());
    std::vector<std::vector<int64_t>> delays;
    for (Few& f : cases) {
      // Most ranks use one expert, so most pairs of ranks exchange no rows.
      for (auto& ids : f.c.ids) {
        const int64_t expert = random.below(f.c.experts());
        for (int64_t& id : ids) id = random.chance(0.9) ? expert : -1;
      }
      delays.emplace_back();
      for (int d = 0; d < 3 * world; ++d) delays.back().push_back(random.chance(0.15) ? random.between(100, 3000) : 0);
    }
    P2pRanks ranks(world);
    on_ranks(world, [&](int rank) {
      for (size_t i = 0; i < cases.size(); ++i) {
        const int64_t* delay = delays[i].data() + 3 * rank;
        const auto sleep = [](int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); };
        sleep(delay[0]);
        send(ranks, rank, cases[i]);
        sleep(delay[1]);
        receive(ranks, rank, cases[i]);
        sleep(delay[2]);
        combine(ranks, rank, cases[i]);
        CHECK_EQ(ranks.of(rank).state.turn, static_cast<int64_t>(i) + 1);
      }
    });
  }
}
