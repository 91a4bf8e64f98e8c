#include <atomic>
#include <cstring>

#include "check.h"
#include "cpu/errors.h"
#include "cpu/kernels.h"
#include "layout.h"
#include "reference.h"

using namespace moe_comm;
using namespace moe_comm::test;

namespace {

void run_random(Ranks& ranks, Random& random, int plans, const Limits& limits, int threads = 1) {
  std::vector<Plan> all;
  for (int i = 0; i < plans; ++i) all.push_back(random_plan(random, ranks.world(), limits));
  static std::atomic<int64_t> calls{0};
  const int64_t first_call = calls.fetch_add(1000000);
  on_ranks(ranks.world(), [&](int rank) {
    int64_t call = first_call;
    for (const Plan& plan : all) {
      BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets, threads);
      run_and_check(plan, rank, transfer, call);
    }
  });
  for (auto& heap : ranks.heaps) CHECK_EQ(heap->used(), int64_t{0});
}

}  // namespace

TEST(transfer_gives_the_reference_bits_on_2_4_8_ranks) {
  for (const int world : {1, 2, 4, 8}) {
    for (const double spin : {0.0, 50.0}) {
      Communicator::Options options = long_timeout();
      options.spin_us = spin;
      Ranks ranks(world, options);
      Random random(static_cast<uint64_t>(world) * 100 + static_cast<uint64_t>(spin));
      run_random(ranks, random, (world == 8 ? 20 : 40) * repeats(), Limits());
    }
  }
}

// More ranks than a table of 32 peers holds, and not a power of two.
TEST(transfer_gives_the_reference_bits_on_67_ranks) {
  Communicator::Options options = long_timeout();
  options.spin_us = 0.0;
  Ranks ranks(67, options);
  Random random(67);
  run_random(ranks, random, 2, Limits());
}

TEST(transfer_gives_the_reference_bits_through_named_shared_memory) {
  Ranks ranks = Ranks::named(3, long_timeout(), {int64_t{1} << 30, int64_t{1} << 30, int64_t{1} << 30});
  Random random(3);
  run_random(ranks, random, 10 * repeats(), Limits());
  // Growth: peers map the new part when they first access it.
  run_random(ranks, random, 2, {600, 512, 6});
  run_random(ranks, random, 2, {1200, 512, 6});
}

TEST(transfer_without_peers_gives_the_reference_bits) {
  Random random(17);
  auto heap = std::make_shared<Heap>("", 0, 0, int64_t{1} << 30);
  for (int i = 0; i < 60 * repeats(); ++i) {
    const Plan plan = random_plan(random, 1, Limits());
    BlockingTransfer transfer(nullptr, heap, plan.expert_offsets, 1);
    int64_t call = 0;
    run_and_check(plan, 0, transfer, call);
  }
  CHECK_EQ(heap->used(), int64_t{0});
}

// The rows that experts read in place are those that a dispatch sends, also after other operations, until each rank has
// released its tokens.
TEST(shared_tokens_are_the_rows_of_a_dispatch) {
  for (const int world : {1, 2, 4, 8}) {
    Ranks ranks(world, long_timeout());
    Random random(static_cast<uint64_t>(world) * 31);
    std::vector<Plan> plans;
    for (int i = 0; i < 20 * repeats(); ++i) plans.push_back(random_plan(random, world, Limits()));
    on_ranks(world, [&](int rank) {
      const size_t r = static_cast<size_t>(rank);
      int64_t call = 0;
      std::vector<std::shared_ptr<SharedTokens>> kept(3);  // ranks release the tokens of a plan at different times
      for (size_t i = 0; i < plans.size(); ++i) {
        const Plan& plan = plans[i];
        BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
        const Rows x{plan.x[r].data(), plan.stride()};
        const Shape shape{plan.tokens[r], plan.top_k, plan.hidden, plan.dtype};
        const Shared shared = transfer.share(op_of(plan, 0, ++call), x, plan.ids[r].data(), shape);
        CHECK(shared.layout->rows_per_expert == plan.per_expert[r]);
        const Sent sent = transfer.send(op_of(plan, 0, ++call), x, plan.ids[r].data(), shape);
        CHECK(shared.layout->place == sent.layout->place);
        transfer.heap().free(sent.block);
        CHECK_EQ(static_cast<int64_t>(shared.layout->token.size()), plan.rows[r]);
        const auto check = [&](const SharedTokens& tokens) {
          for (int64_t row = 0; row < plan.rows[r] && plan.row_bytes(); ++row) {
            const int64_t place = shared.layout->token[static_cast<size_t>(row)];
            const size_t source = static_cast<size_t>(place_owner(place));
            CHECK(place_row(place) < tokens.tokens[source]);
            for (const SharedTokens::Part& part : tokens.parts) {
              const auto* token = reinterpret_cast<const char*>(part.base[source]) + place_row(place) * part.stride;
              CHECK(std::memcmp(token, plan.received[r].data() + row * plan.row_bytes(),
                                static_cast<size_t>(plan.row_bytes())) == 0);
            }
          }
        };
        check(*shared.tokens);
        // The word of a slot is its expert.
        std::vector<uint32_t> words(plan.ids[r].begin(), plan.ids[r].end());
        std::vector<uint32_t> word_of_row(static_cast<size_t>(plan.rows[r]));
        const auto again =
            transfer.share_again(op_of(plan, 1, ++call), *shared.layout, {x, x}, words.data(), word_of_row.data());
        CHECK_EQ(again->parts.size(), size_t{2});
        check(*shared.tokens);
        check(*again);
        size_t row = 0;
        for (size_t e = 0; e < plan.per_expert[r].size(); ++e) {
          for (int64_t n = plan.per_expert[r][e]; n > 0; --n, ++row) {
            CHECK_EQ(static_cast<int64_t>(word_of_row[row]), plan.expert_offsets[r] + static_cast<int64_t>(e));
          }
        }
        kept[(i + r) % kept.size()] = i % 2 ? shared.tokens : again;
      }
    });
    for (auto& heap : ranks.heaps) CHECK_EQ(heap->used(), int64_t{0});
  }
}

TEST(invalid_ids_of_one_rank_share_no_tokens) {
  Ranks ranks(2, long_timeout());
  Random random(5);
  Plan plan = plain_plan(random, 2, 8, 16, 4, 2, 0);
  plan.ids[1][3] = 4;
  on_ranks(2, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
    const Rows x{plan.x[r].data(), plan.stride()};
    const Shape shape{8, 2, 16, 0};
    CHECK_THROWS(transfer.share(op_of(plan, 0, 1), x, plan.ids[r].data(), shape), HandshakeFailed);
  });
  for (auto& heap : ranks.heaps) CHECK_EQ(heap->used(), int64_t{0});
}

// Large enough for non-temporal stores and for several threads per rank, aligned and unaligned.
TEST(transfer_with_threads_and_non_temporal_stores_gives_the_reference_bits) {
  Random random(23);
  for (const int64_t hidden : {1024, 1000, 1025}) {
    for (int dtype = 0; dtype < 3; ++dtype) {
      Ranks ranks(2, long_timeout());
      Plan plan = plain_plan(random, 2, 192, hidden, 8, 6, dtype);
      plan.rows_in_heap = hidden != 1000;
      on_ranks(2, [&](int rank) {
        int64_t call = 0;
        BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets, 3);
        run_and_check(plan, rank, transfer, call);
      });
    }
  }
}

TEST(transfer_every_isa_gives_the_same_bits) {
  const std::string before = kernels().name;
  for (const std::string& isa : isa_names()) {
    CHECK(set_isa(isa));
    CHECK(isa == kernels().name);
    Ranks ranks(2, long_timeout());
    Random random(31);
    run_random(ranks, random, 30 * repeats(), {16, 200, 9});
    run_random(ranks, random, 1, {300, 1100, 6});
  }
  CHECK(!set_isa("no such instruction set"));
  CHECK(set_isa(before));
}

TEST(transfer_with_top_k_above_64) {
  Random random(37);
  Ranks ranks(2, long_timeout());
  const Plan plan = plain_plan(random, 2, 5, 33, 100, 100, 1);
  on_ranks(2, [&](int rank) {
    int64_t call = 0;
    BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
    run_and_check(plan, rank, transfer, call);
  });
}

TEST(transfer_counters_survive_the_wrap) {
  for (const uint32_t limit : {0u, 0x80000000u}) {
    for (uint32_t before = 0; before < 10; ++before) {
      Communicator::Options options = long_timeout();
      options.first_progress = limit - before;
      options.spin_us = before % 2 ? 50 : 0;
      Ranks ranks(3, options);
      Random random(before);
      run_random(ranks, random, 1, {8, 40, 6});
    }
  }
}

// Several dispatches are pending before the first combine. Layouts and blocks must not depend on later dispatches.
TEST(transfer_dispatches_in_flight_do_not_disturb_each_other) {
  Random random(41);
  Ranks ranks(2, long_timeout());
  const Plan plans[2] = {plain_plan(random, 2, 9, 48, 6, 2, 0), plain_plan(random, 2, 13, 20, 6, 3, 1)};
  on_ranks(2, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    BlockingTransfer transfer = ranks.transfer(rank, plans[0].expert_offsets);
    int64_t call = 0;
    std::vector<Sent> sent;
    for (const Plan& p : plans) {
      sent.push_back(transfer.send(op_of(p, 0, ++call), {p.x[r].data(), p.stride()}, p.ids[r].data(),
                                   {p.tokens[r], p.top_k, p.hidden, p.dtype}));
    }
    for (size_t i = 2; i-- > 0;) {
      const Plan& p = plans[i];
      Bytes y(p.y[r].size());
      CHECK(std::memcmp(transfer.heap().base() + sent[i].block, p.received[r].data(), p.received[r].size()) == 0);
      transfer.sum(op_of(p, 1, ++call), *sent[i].layout, {p.out[r].data(), p.stride()}, p.weights[r].data(), y.data());
      CHECK(y == p.y[r]);
      transfer.heap().free(sent[i].block);
    }
  });
}

// Two threads of one process share a communicator. Operations are serialized; they do not interleave.
TEST(transfer_operations_of_two_threads_are_serialised) {
  Random random(43);
  Ranks ranks(1, long_timeout());
  const Plan plans[2] = {plain_plan(random, 1, 20, 64, 6, 2, 0), plain_plan(random, 1, 7, 31, 6, 3, 2)};
  on_ranks(2, [&](int thread) {
    int64_t call = 1000 * thread;
    BlockingTransfer transfer = ranks.transfer(0, plans[thread].expert_offsets);
    for (int i = 0; i < 100 * repeats(); ++i) run_and_check(plans[thread], 0, transfer, call);
  });
  CHECK_EQ(ranks.heaps[0]->used(), int64_t{0});
}

TEST(transfer_sends_extra_words_with_the_rows_and_returns_them) {
  Random random(43);
  for (const int world : {1, 2, 3}) {
    Ranks ranks(world, long_timeout());
    const Plan plan = plain_plan(random, world, 9, 48, 6, 2, 0);
    on_ranks(world, [&](int rank) {
      constexpr int64_t kWidth = 3;
      const size_t r = static_cast<size_t>(rank);
      BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
      const int64_t slots = plan.tokens[r] * plan.top_k;
      std::vector<uint32_t> words(static_cast<size_t>(slots * kWidth)), expected(words), back(words);
      for (size_t i = 0; i < words.size(); ++i) {
        words[i] = static_cast<uint32_t>(rank << 20) + static_cast<uint32_t>(i);
        if (plan.ids[r][i / kWidth] >= 0) expected[i] = words[i];
      }
      const Sent sent = transfer.start_send(op_of(plan, 0, 1), {plan.x[r].data(), plan.stride()}, plan.ids[r].data(),
                                            {plan.tokens[r], plan.top_k, plan.hidden, plan.dtype},
                                            {words.data(), kWidth, plan.top_k * kWidth, kWidth});
      sent.pending->finish();
      const auto pending = transfer.start_sum(op_of(plan, 3, 2), *sent.layout, {}, true,
                                              {transfer.heap().base() + sent.extra_block, kWidth});
      pending->sum(nullptr, nullptr, back.data(), kWidth);
      pending->finish();
      CHECK(back == expected);
      for (const int64_t block : {sent.block, sent.extra_block}) transfer.heap().free(block);
    });
    for (auto& heap : ranks.heaps) CHECK_EQ(heap->used(), int64_t{0});
  }
}
