// Operations as sequences of launches: launch order, argument words, turn counting, and launchers.
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/plan.h"
#include "cuda/starters.h"

using namespace moe_comm;
using namespace moe_comm::test;
using namespace moe_comm::p2p;

namespace {

int64_t address_of(const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p)); }

// Records all launches, and rejects one chosen kernel.
struct Recorder : Starter {
  struct Call {
    int kernel;
    Launch how;
    std::vector<int64_t> words;
  };
  std::vector<Call> launches;
  int rejected = -1;

  void start(int kernel, const Launch& how, const void* args) override {
    if (kernel == rejected) throw LaunchError(kernel_name(kernel));
    std::vector<int64_t> words(static_cast<size_t>(argument_bytes(kernel) / 8));
    std::memcpy(words.data(), args, words.size() * 8);
    launches.push_back({kernel, how, std::move(words)});
  }
  std::string names() {
    std::string all;
    for (const Call& call : launches) all += std::string(kernel_name(call.kernel)) + " ";
    launches.clear();
    return all;
  }
};

// A group of one rank with `experts` experts.
struct OneRank {
  static constexpr int64_t kSlots = 4;

  explicit OneRank(int64_t experts)
      : control{1, experts, experts},
        block(static_cast<size_t>(control.bytes() / 8 + 512)),
        headers(kSlots * kHeaderWords),
        all_headers(kHeaderWords),
        counts(static_cast<size_t>(experts)),
        left(static_cast<size_t>(experts)),
        peers{address_of(block.data())},
        offsets{0, experts},
        header(kHeaderWords, 7) {
    header[kFaultWord] = 0;
    home.group = {1,
                  0,
                  experts,
                  experts,
                  address_of(peers.data()),
                  address_of(offsets.data()),
                  address_of(&state),
                  address_of(&report),
                  address_of(&abort),
                  0};
    home.offsets = offsets;
    home.headers_at = address_of(headers.data());
    home.all_headers_at = address_of(all_headers.data());
    home.host_counts_at = address_of(counts.data());
    home.left_at = address_of(left.data());
  }
  MeetInput meet_args(int64_t slot, int64_t rows_at = 0) {
    MeetInput t;
    t.header = reinterpret_cast<const char*>(header.data());
    t.slot = slot;
    t.offer[kRowsAt] = rows_at;
    t.offer[kRoom] = -1;
    return t;
  }

  Control control;
  std::vector<int64_t> block, headers, all_headers, counts, left, peers, offsets, header;
  State state{};
  Report report{};
  int64_t abort = 0;
  RankConstants home;
};

constexpr int64_t kSecond = 1000000000;

}  // namespace

TEST(p2p_plan_a_dispatch_and_a_combine_return_every_token_weighted) {
  OneRank rank(3);
  Plan plan(std::make_shared<HostStarter>(), rank.home);
  const int64_t tokens = 4, top_k = 2, hidden = 8;
  const std::vector<int64_t> ids{0, 2, 2, 1, -1, 0, 1, 2};
  std::vector<int64_t> counts(4 * 3), bad(4 * 4), expert_rows(3), offers(kOfferWords), all_counts(3), summary(4),
      place(8);
  std::vector<float> x(static_cast<size_t>(tokens * hidden)), y(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) - 11;
  const std::vector<float> weights{1, 2, 4, 8, 16, 32, 64, 128};
  plan.use({address_of(counts.data()), address_of(bad.data()), address_of(expert_rows.data()),
            address_of(offers.data()), address_of(all_counts.data()), address_of(summary.data())});
  for (int64_t round = 1; round <= 3; ++round) {
    const int64_t before = plan.turn;
    plan.begin(0, kSecond, false);
    const int64_t rows_at = rank.control.bytes();
    plan.dispatch(rank.meet_args(0, rows_at), {{tokens, top_k}, address_of(ids.data()), address_of(place.data()), 2},
                  {address_of(x.data()), hidden * 4, hidden, 0}, {2}, {});
    CHECK(plan.wait(plan.turn, kSecond) && !plan.failed());
    const Counted counted = plan.counted(5);
    CHECK(counted.own == (std::vector<int64_t>{2, 2, 3}) && counted.rows == std::vector<int64_t>{7});
    CHECK(counted.header_words == std::vector<int64_t>{7});
    CHECK_EQ(counted.dropped, int64_t{1});
    plan.begin(0, kSecond, false);
    plan.combine(rank.meet_args(2, rows_at), 2, {tokens, top_k}, {address_of(y.data()), 0, hidden, 0},
                 {address_of(place.data()), address_of(weights.data())});
    CHECK_EQ(plan.turn, before + 2);
    CHECK_EQ(plan.turn, rank.state.turn);
    for (int64_t t = 0; t < tokens; ++t) {
      const float factor = (ids[static_cast<size_t>(2 * t)] < 0 ? 0 : weights[static_cast<size_t>(2 * t)]) +
                           weights[static_cast<size_t>(2 * t + 1)];
      for (int64_t h = 0; h < hidden; ++h) {
        const auto i = static_cast<size_t>(t * hidden + h);
        CHECK_EQ(y[i], x[i] * factor);
      }
    }
  }
}

TEST(p2p_plan_operations_launch_these_kernels_with_the_words_of_the_group) {
  OneRank rank(2);
  const auto recorder = std::make_shared<Recorder>();
  Plan plan(recorder, rank.home);
  plan.use({11, 12, 13, 14, 15, 16});
  plan.begin(99, 5 * kSecond, false);
  plan.dispatch(rank.meet_args(3), {{6, 2}, 1000, 4, 4}, {1, 2, 3, 0}, {2}, {5, 6, 7, 100, 8});
  CHECK_EQ(recorder->launches.at(0).how.blocks, int64_t{3});
  CHECK_EQ(recorder->launches.at(2).how.blocks, int64_t{2});
  CHECK_EQ(recorder->launches.back().how.blocks, int64_t{8});
  for (const Recorder::Call& call : recorder->launches) {
    CHECK_EQ(call.how.stream, uintptr_t{99});
    CHECK_EQ(call.how.threads, usual_threads(call.kernel));
    CHECK_EQ(call.how.shared_bytes, shared_bytes(call.kernel, call.words.data(), call.how.threads));
    CHECK_EQ(call.words[9], 5 * kSecond);
    if (call.kernel != k_arrive && call.kernel != k_fan_out) CHECK_EQ(call.words[12], int64_t{1000});
  }
  CHECK_EQ(rank.headers[3 * kHeaderWords], int64_t{7});
  CHECK(recorder->names() == "count scan push arrive fan_out ");
  plan.dispatch(rank.meet_args(0), {{0, 2}, 1000, 4, 4}, {1, 2, 3, 0}, {2}, {5, 6, 7, 0, 8});
  CHECK(recorder->names() == "scan arrive ");
  for (const int64_t by_expert : {0, 1}) {
    for (const int64_t format : {int64_t{kSame}, int64_t{kRowScales}}) {
      plan.dispatch(rank.meet_args(0), {{6, 2}, 1000, 4, 4}, {1, 2, 3, 0}, {2, format, 0, 0, 0, 77, by_expert}, {});
      const bool tiles = by_expert == 1 && format == kSame;
      const std::string push = tiles ? "push_tiles " : format == kSame ? "push " : "push_fp8 ";
      CHECK(recorder->names() == "count scan order meet " + push);
    }
  }
  const MeetInput meets = rank.meet_args(0);
  plan.send(meets, 9, {6, 2}, {1, 2, 3, 0}, {4, 5}, 6, 77, false);
  CHECK(recorder->names() == "meet spread_tiles ");
  plan.send(meets, 9, {6, 2}, {1, 2, 3, 0}, {4, 5}, 6, 77);
  CHECK(recorder->names() == "meet spread_tiles done ");
  plan.send(meets, 9, {6, 2}, {1, 2, 3, 0}, {4, 5, 7});
  CHECK_EQ(recorder->launches.back().how.blocks, int64_t{6});
  CHECK(recorder->names() == "meet spread ");
  plan.send(meets, 9, {0, 2}, {1, 2, 3, 0}, {4, 5});
  plan.combine(meets, 9, {0, 2}, {1, 2, 3, 0}, {4, 5});
  CHECK(recorder->names() == "meet done meet done ");
  plan.combine(meets, 9, {6, 2}, {1, 2, 3, 0}, {4, 5});
  CHECK(recorder->names() == "meet sum ");
  plan.lend(meets, {{6, 2}, 1000, 4, 4}, {1, 77, 1, 78}, {1000, 0, 1, 0, 79, 80});
  CHECK_EQ(recorder->launches.at(0).words.back(), int64_t{1});  // ids are below the number of experts
  CHECK_EQ(recorder->launches.back().how.blocks, int64_t{3});
  CHECK(recorder->names() == "count scan lend assign ");
  plan.pull({1, 77, 1, 78}, {8, 8, 0, 0}, 80, 2, 9);
  plan.collect(meets, {1, 77, 1, 78}, {8, 8, 0, 0}, {81, 82, 0, 0}, 1, 9);
  CHECK_EQ(recorder->launches.back().how.blocks, int64_t{9});
  CHECK(recorder->names() == "pull meet collect ");
  plan.sum_slices(9, {6, 2}, {1, 0, 520, 1}, 4, 5);
  CHECK(recorder->names() == "ready sum ready sum ready sum ");
  plan.sum_few(9, {6, 2}, {1, 2, 3, 0}, 4, 5, 77);
  CHECK(recorder->names() == "ll_ready sum ");
}

TEST(p2p_plan_turns_are_counted_when_launched_and_not_when_captured) {
  OneRank rank(2);
  const auto recorder = std::make_shared<Recorder>();
  Plan plan(recorder, rank.home);
  plan.begin(0, kSecond, false);
  for (const int kernel :
       {static_cast<int>(k_count), static_cast<int>(k_scan), static_cast<int>(k_meet), static_cast<int>(k_ll_ready)}) {
    recorder->rejected = kernel;
    std::string message;
    try {
      if (kernel == k_ll_ready) {
        plan.sum_few(1, {1, 1}, {}, 0, 0, 0);
      } else {
        plan.dispatch(rank.meet_args(0), {{1, 1}, 0, 0, 1}, {}, {1, 0, 0, 0, 0, 77}, {});
      }
    } catch (const LaunchError& e) {
      message = e.what();
    }
    CHECK(message == kernel_name(kernel));
    CHECK_EQ(plan.turn, int64_t{0});
  }
  recorder->rejected = k_sum;
  try {
    plan.sum_few(1, {1, 1}, {}, 0, 0, 0);
  } catch (const LaunchError&) {
  }
  CHECK_EQ(plan.turn, int64_t{1});
  plan.begin(0, kSecond, true);
  plan.meet(rank.meet_args(0));
  CHECK_EQ(plan.turn, int64_t{1});
}

TEST(p2p_plan_a_wait_ends_at_its_turn_a_fault_or_the_timeout) {
  OneRank rank(2);
  Plan plan(std::make_shared<Recorder>(), rank.home);
  rank.report.turn = 4;
  CHECK(plan.wait(4, 0));
  CHECK(!plan.wait(5, 1000));
  rank.report.fault = kTimedOut;
  CHECK(plan.wait(5, 0) && plan.failed());
}
