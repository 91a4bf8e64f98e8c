// Dispatch, combine and backward of peer_to_peer on the host: row positions, values and error reports.
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>

#include "cuda/convert.h"
#include "p2p_ranks.h"

using namespace moe_comm;
using namespace moe_comm::test;
using namespace moe_comm::p2p;

namespace {

// Ranks run all cases without synchronizing between them: hundreds of turns, and flags are never reset.
void run_all(const std::vector<P2pCase>& cases) {
  for (const int threads : {1, 3, 64}) {
    host_threads = threads;
    P2pRanks ranks(cases[0].world);
    on_ranks(cases[0].world, [&](int rank) {
      for (const P2pCase& c : cases) ranks.run_and_check(rank, c);
    });
  }
  host_threads = 1;
}

P2pCase small_case(Random& random, int world, int64_t tokens = 5) {
  P2pCase c;
  c.world = world;
  c.hidden = 8;
  c.top_k = 2;
  c.chunk = 4;
  c.offsets = {0};
  for (int r = 0; r < world; ++r) c.offsets.push_back(2 * (r + 1));
  c.tokens.assign(static_cast<size_t>(world), tokens);
  fill_case(random, c);
  return c;
}

void counts_and_offers(P2pRanks& ranks, int rank, const P2pCase& c) {
  ranks.count(rank, c, ranks.dispatch_offer(rank, c));
}

}  // namespace

TEST(p2p_random_routings_have_the_positions_of_the_contract_and_the_bits_of_the_cpu) {
  Random random(61);
  for (int round = 0; round < 4 * repeats(); ++round) {
    for (int world = 1; world <= 8; ++world) {
      const std::vector<int64_t> offsets = random_offsets(random, world);
      std::vector<P2pCase> cases;
      for (int i = 0; i < 12; ++i) cases.push_back(random_case(random, offsets));
      run_all(cases);
    }
  }
}

TEST(p2p_all_slots_to_one_expert) {
  Random random(62);
  std::vector<P2pCase> cases;
  for (const bool relay : {false, true}) {
    P2pCase c;
    c.world = 4;
    c.offsets = {0, 0, 3, 4, 4};
    c.hidden = 24;
    c.top_k = 3;
    c.chunk = 6;
    c.dtype = 1;
    c.relay = relay;
    c.tokens = {7, 0, 9, 1};
    fill_case(random, c);
    P2pCase one = c;
    one.ids.clear(), one.weights.clear(), one.x.clear(), one.g.clear(), one.out.clear(), one.places.clear();
    one.dropped.clear(), one.overflow.clear();
    one.room = 11;
    fill_case(random, one);
    cases.push_back(c);
    cases.push_back(one);
  }
  run_all(cases);
}

TEST(p2p_many_experts_and_chunks) {
  Random random(63);
  P2pCase c;
  c.world = 2;
  c.offsets = {0, 17, 40};
  c.hidden = 264;
  c.top_k = 8;
  c.chunk = 16;
  c.dtype = 1;
  c.tokens = {20, 13};
  fill_case(random, c);
  P2pCase narrow = c;
  narrow.format = 1;
  narrow.relay = true;
  run_all({c, narrow, c});
}

TEST(p2p_rows_by_expert_have_a_flag_for_each_tile) {
  Random random(70);
  P2pCase c;
  c.world = 2;
  c.offsets = {0, 2, 3};
  c.hidden = 4;
  c.top_k = 2;
  c.chunk = 64;
  c.push_blocks = 3;
  c.by_expert = true;
  c.tokens = {700, 1600};
  std::vector<P2pCase> cases;
  for (int i = 0; i < 6; ++i) {
    cases.push_back(c);
    cases.back().bulk = i % 2 == 0;
    cases.back().room = i % 3 == 2 ? 333 : -1;
    fill_case(random, cases.back());
  }
  run_all(cases);
}

TEST(p2p_a_missing_rank_is_named_and_later_kernels_do_nothing) {
  Random random(64);
  const P2pCase c = small_case(random, 4);
  P2pRanks ranks(4, 0.5);  // seconds; threads on a busy machine start late
  on_ranks(4, [&](int rank) {
    if (rank == 2) return;
    counts_and_offers(ranks, rank, c);
    P2pRanks::Rank& me = ranks.of(rank);
    CHECK_EQ(me.state.fault, int64_t{kTimedOut});
    CHECK_EQ(me.report.fault, int64_t{kTimedOut});
    CHECK_EQ(me.report.who, int64_t{2});
    CHECK_EQ(me.report.what, int64_t{kPosted});
    CHECK_EQ(me.report.expected, int64_t{1});
    CHECK_EQ(me.report.value, int64_t{0});
    CHECK_EQ(me.report.turn, int64_t{1});
    const std::vector<int64_t> counted = me.place;
    ranks.push(rank, c);
    ranks.arrive(rank, c);
    ranks.done(rank, c);
    Bytes y(8 * 4 * 5, 'y');
    ranks.sum(rank, c, true, y.data());
    CHECK(y == Bytes(8 * 4 * 5, 'y'));
    CHECK(me.place == counted);
    CHECK_EQ(me.report.what, int64_t{kPosted});
  });
}

TEST(p2p_a_rank_that_does_not_send_is_named_by_those_who_wait_for_its_rows) {
  Random random(65);
  P2pCase c = small_case(random, 3, 20);
  P2pRanks ranks(3, 0.5);
  on_ranks(3, [&](int rank) {
    counts_and_offers(ranks, rank, c);
    if (rank == 1) return;
    ranks.push(rank, c);
    ranks.arrive(rank, c);
    CHECK_EQ(ranks.of(rank).report.fault, int64_t{kTimedOut});
    CHECK_EQ(ranks.of(rank).report.who, int64_t{1});
    CHECK_EQ(ranks.of(rank).report.what, int64_t{kArrived});
  });
}

TEST(p2p_a_header_mismatch_is_reported_on_all_ranks_and_the_next_call_succeeds) {
  Random random(66);
  const P2pCase c = small_case(random, 4);
  P2pRanks ranks(4);
  on_ranks(4, [&](int rank) {
    P2pRanks::Rank& me = ranks.of(rank);
    me.header[3] = rank == 1 ? 99 : 7;
    me.header[20] = rank;  // the text part is not compared
    counts_and_offers(ranks, rank, c);
    CHECK_EQ(me.state.fault, int64_t{kDisagree});
    CHECK_EQ(me.report.who, int64_t{rank == 1 ? 0 : 1});
    for (int p = 0; p < 4; ++p) {
      CHECK_EQ(me.all_headers[static_cast<size_t>(p * p2p::kHeaderWords + 3)], int64_t{p == 1 ? 99 : 7});
      CHECK_EQ(me.all_headers[static_cast<size_t>(p * p2p::kHeaderWords + 20)], int64_t{p});
    }
    me.state.fault = kNone;
    me.header[3] = 7;
    me.header[p2p::kFaultWord] = rank == 3 ? 2 : 0;
    counts_and_offers(ranks, rank, c);
    CHECK_EQ(me.state.fault, int64_t{kDisagree});
    CHECK_EQ(me.report.who, int64_t{3});
    me.state.fault = kNone;
    me.header[p2p::kFaultWord] = 0;
    me.digest = (int64_t{1} << 40) + (int64_t{rank == 2} << 30);
    counts_and_offers(ranks, rank, c);
    CHECK_EQ(me.state.fault, int64_t{kDisagree});
    CHECK_EQ(me.report.who, int64_t{rank == 2 ? 0 : 2});
    me.state.fault = kNone;
    me.digest = int64_t{1} << 40;
    ranks.run_and_check(rank, c);
  });
}

TEST(p2p_bad_ids_of_one_rank_fail_on_all_before_rows_move) {
  Random random(67);
  const P2pCase good = small_case(random, 3);
  P2pCase bad = good;
  bad.ids[1][6] = 6;
  bad.ids[1][9] = -2;
  P2pRanks ranks(3);
  on_ranks(3, [&](int rank) {
    P2pRanks::Rank& me = ranks.of(rank);
    counts_and_offers(ranks, rank, bad);
    CHECK_EQ(me.report.fault, int64_t{rank == 1 ? kBadIds : kDisagree});
    CHECK_EQ(me.report.who, int64_t{rank == 1 ? 6 : 1});
    if (rank == 1) CHECK_EQ(me.report.value, int64_t{6});
    const int64_t* words = me.all_headers.data() + p2p::kHeaderWords + p2p::kFaultWord;
    CHECK_EQ(words[0], kBadIdsWord);
    CHECK_EQ(words[1], int64_t{6});
    CHECK_EQ(words[2], int64_t{6});
    CHECK_EQ(words[3], int64_t{2});
    me.state.fault = kNone;
    ranks.run_and_check(rank, good);
  });
}

TEST(p2p_a_rank_without_memory_stops_all_ranks) {
  Random random(68);
  const P2pCase c = small_case(random, 3);
  P2pRanks ranks(3);
  on_ranks(3, [&](int rank) {
    P2pRanks::Rank& me = ranks.of(rank);
    CHECK(!ranks.meet(rank, c, false, {rank == 2 ? kNowhere : 0, 0, 0, 0, -1}));
    CHECK_EQ(me.report.fault, int64_t{kNoRoom});
    CHECK_EQ(me.report.who, int64_t{2});
    me.state.fault = kNone;
    ranks.run_and_check(rank, c);
  });
}

TEST(p2p_the_abort_word_of_the_host_ends_a_wait) {
  Random random(69);
  const P2pCase c = small_case(random, 2);
  P2pRanks ranks(2);
  std::thread host([&] {
    std::this_thread::yield();
    __atomic_store_n(&ranks.of(0).abort, int64_t{1}, __ATOMIC_RELEASE);
  });
  counts_and_offers(ranks, 0, c);
  host.join();
  CHECK_EQ(ranks.of(0).report.fault, int64_t{kAborted});
  CHECK_EQ(ranks.of(0).report.who, int64_t{1});
}

TEST(p2p_parts_of_the_control_area_do_not_overlap) {
  for (const int64_t world : {1, 3, 8}) {
    for (const int64_t experts : {1, 7, 64}) {
      const p2p::Control c{world, experts, experts};
      const int64_t starts[] = {c.posted(0),        c.header(0, 0),     c.offer(0, 0),  c.counts(0, 0),  c.done(0),
                                c.arrived(0, 0, 0), c.sent(0, 0, 0, 0), c.staged(0, 0), c.results(0, 0), c.bytes() / 8};
      const int64_t sizes[] = {world,
                               2 * world * p2p::kHeaderWords,
                               2 * world * kOfferWords,
                               2 * world * experts,
                               world,
                               experts * world * kTileFlags,
                               2 * experts * world * kMaxParts,
                               2 * world,
                               p2p::kMaxSlices * world};
      for (int i = 0; i < 9; ++i) CHECK(starts[i] + sizes[i] <= starts[i + 1]);
      CHECK_EQ(c.header(1, world - 1) + p2p::kHeaderWords, c.offer(0, 0));
      CHECK_EQ(c.sent(1, experts - 1, world - 1, kMaxParts - 1) + 1, starts[6] + sizes[6]);
      CHECK_EQ(c.bytes() % 256, int64_t{0});
    }
  }
}

// --- number formats ---

TEST(p2p_e4m3_is_the_nearest_number_for_every_16_bit_float_and_its_neighbours) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    for (const float f : {p2p::widen<kBf16>(h), p2p::widen<kFp16>(h)}) {
      if (std::isnan(f)) {
        CHECK_EQ(narrow_e4m3(f), 0x7fu);
        continue;
      }
      for (const float near : {f, std::nextafter(f, 1e30f), std::nextafter(f, -1e30f)}) {
        if (narrow_e4m3(near) != e4m3_by_search(near)) CHECK_EQ(near, -1.0f);
      }
    }
  }
  for (uint32_t b = 0; b < 256; ++b) {
    if ((b & 0x7f) == 0x7f) {
      CHECK(std::isnan(widen_e4m3(b)));
      continue;
    }
    CHECK_EQ(widen_e4m3(b), e4m3_value(static_cast<int>(b)));
    CHECK_EQ(narrow_e4m3(widen_e4m3(b)), b);
  }
  const float four[] = {1.0f, -448.0f, 0.0f, 1e-3f};
  const uint32_t together = narrow_e4m3x4(four);
  for (int i = 0; i < 4; ++i) CHECK_EQ((together >> (8 * i)) & 0xff, narrow_e4m3(four[i]));
}

// A divisor multiplies by the reciprocal: values beside rounding boundaries, small ones, zeros and NaN.
TEST(p2p_e4m3_of_products_with_reciprocals_is_that_of_quotients) {
  Random random(11);
  for (int round = 0; round < 40000 * repeats(); ++round) {
    const bool power_of_two = random.chance(0.2);
    const float scale = scale_for(static_cast<uint32_t>(random.below(0x7f800000)), power_of_two);
    const Divisor by(scale, power_of_two);
    float f[4] = {0.0f, -0.0f, from_bits(static_cast<uint32_t>(random.below(0x7f800000))), 0.0f};
    for (int b = 0; b < 4; ++b) {
      const auto low = static_cast<uint32_t>(random.below(0x7e));
      const float middle = (widen_e4m3(low) + widen_e4m3(low + 1)) / 2 * scale;
      f[3] = from_bits(to_bits(middle) + static_cast<uint32_t>(random.below(9)) - 4);
      if (!std::isfinite(f[3])) f[3] = scale;
      float quotients[4];
      for (int i = 0; i < 4; ++i) quotients[i] = f[i] / scale;
      CHECK_EQ(by.quotients_e4m3x4(f), narrow_e4m3x4(quotients));
    }
  }
  const float one[4] = {1.0f, 0.0f, -1.0f, 448.0f}, nan = std::nanf("");
  CHECK_EQ(Divisor(nan, false).quotients_e4m3x4(one), 0x7f7f7f7fu);
}

TEST(p2p_16_bit_floats_are_those_of_the_reference) {
  const auto compare = [](float f) {
    if (std::isnan(f)) return;
    char expected[4] = {};
    uint16_t bits;
    test::narrow(1, f, expected);
    std::memcpy(&bits, expected, 2);
    CHECK_EQ(p2p::narrow<kBf16>(f), uint32_t{bits});
    test::narrow(2, f, expected);
    std::memcpy(&bits, expected, 2);
    CHECK_EQ(p2p::narrow<kFp16>(f), uint32_t{bits});
  };
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const uint16_t bits = static_cast<uint16_t>(h);
    const float bf16 = p2p::widen<kBf16>(h), fp16 = p2p::widen<kFp16>(h);
    if (std::isnan(fp16) || std::isnan(bf16)) continue;
    CHECK_EQ(bf16, test::widen(1, reinterpret_cast<const char*>(&bits)));
    CHECK_EQ(fp16, test::widen(2, reinterpret_cast<const char*>(&bits)));
    CHECK_EQ(p2p::narrow<kBf16>(bf16), h);
    CHECK_EQ(p2p::narrow<kFp16>(fp16), h);
    if (std::isinf(bf16) || std::isinf(fp16)) continue;
    compare(p2p::from_bits(h << 16 | 0x8000));                            // a tie of bf16
    compare((fp16 + p2p::widen<kFp16>(h & 0x8000 ? h - 1 : h + 1)) / 2);  // mostly a tie of fp16
    compare(std::nextafter(fp16, 1e30f));
  }
}

TEST(p2p_scales_are_those_of_the_wire_dtypes) {
  CHECK_EQ(scale_for(to_bits(448.0f), false), 1.0f);
  CHECK_EQ(scale_for(to_bits(449.0f), true), 2.0f);
  CHECK_EQ(scale_for(to_bits(448.0f), true), 1.0f);
  CHECK_EQ(scale_for(0, false), std::ldexp(1.0f, -126));
  CHECK_EQ(scale_for(1, true), std::ldexp(1.0f, -126));
  CHECK(std::isnan(scale_for(0x7f800000, false)));
  CHECK(std::isnan(scale_for(0x7fc00000, true)));
}

TEST(p2p_a_row_with_infinity_arrives_as_nan_and_its_padding_as_zeros) {
  Random random(70);
  P2pCase c = small_case(random, 1, 1);
  c.hidden = 5;
  c.format = kRowScales;
  c.top_k = 1;
  c.ids = {{1}};
  c.tokens = {1};
  const float row[] = {1.0f, -2.0f, INFINITY, 0.5f, 0.0f};
  c.x[0].assign(reinterpret_cast<const char*>(row), reinterpret_cast<const char*>(row) + sizeof row);
  P2pRanks ranks(1);
  counts_and_offers(ranks, 0, c);
  ranks.push(0, c);
  ranks.arrive(0, c);
  const char* received = ranks.data(0, ranks.region(0, c, 0));
  float scale;
  std::memcpy(&scale, ranks.data(0, ranks.region(0, c, 2)), 4);
  CHECK(std::isnan(scale));
  for (int d = 0; d < 16; ++d) CHECK_EQ(int{received[d]}, d < 5 ? 0x7f : 0);
}
