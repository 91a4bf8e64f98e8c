#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "check.h"
#include "cpu/errors.h"
#include "cpu/pending.h"
#include "reference.h"

using namespace moe_comm;
using namespace moe_comm::test;

namespace {

std::vector<int> peers_of(int rank, int world) {
  std::vector<int> peers;
  for (int i = 1; i < world; ++i) peers.push_back((rank + i) % world);
  return peers;
}

// Compare the rows from `source` in the block of `rank` with the reference.
void check_rows(const Plan& plan, int rank, int source, const Layout& layout, const char* block,
                const Bytes& expected) {
  const int64_t experts = plan.expert_offsets.back(), bytes = plan.row_bytes();
  int64_t row = 0;
  for (int64_t e = plan.expert_offsets[static_cast<size_t>(rank)];
       e < plan.expert_offsets[static_cast<size_t>(rank) + 1]; ++e) {
    for (int s = 0; s < plan.world; ++s) {
      const int64_t rows = layout.counts[static_cast<size_t>(s * experts + e)];
      if (s == source && rows * bytes > 0) {
        CHECK(std::memcmp(block + row * bytes, expected.data() + row * bytes, static_cast<size_t>(rows * bytes)) == 0);
      }
      row += rows;
    }
  }
  CHECK_EQ(row, layout.rows);
}

// Check each peer's rows as soon as they are complete, while other peers are still writing.
void check_each_peer(const Plan& plan, int rank, const Layout& layout, PendingReceive& pending, const char* block,
                     const Bytes& expected) {
  check_rows(plan, rank, rank, layout, block, expected);
  for (std::vector<int> remaining = peers_of(rank, plan.world); !remaining.empty();) {
    const int peer = pending.next(remaining);
    CHECK(pending.ready(peer));
    remaining.erase(std::find(remaining.begin(), remaining.end(), peer));
    check_rows(plan, rank, peer, layout, block, expected);
  }
  pending.finish();
  CHECK(pending.finished());
}

// Write the results for each peer just before setting its flag; own results last.
void write_and_flag(const Plan& plan, int rank, const Layout& layout, PendingSum& pending, char* block,
                    const Bytes& results) {
  const int64_t experts = plan.expert_offsets.back(), bytes = plan.row_bytes();
  std::vector<int> order = peers_of(rank, plan.world);
  order.push_back(rank);
  for (const int to : order) {
    int64_t row = 0;
    for (int64_t e = plan.expert_offsets[static_cast<size_t>(rank)];
         e < plan.expert_offsets[static_cast<size_t>(rank) + 1]; ++e) {
      for (int s = 0; s < plan.world; ++s) {
        const int64_t rows = layout.counts[static_cast<size_t>(s * experts + e)];
        if (s == to && rows * bytes > 0) {
          std::memcpy(block + row * bytes, results.data() + row * bytes, static_cast<size_t>(rows * bytes));
        }
        row += rows;
      }
    }
    pending.raise_flag(to);
  }
}

// Return the experts' output without padding between rows.
Bytes dense(const Plan& plan, int rank) {
  const size_t r = static_cast<size_t>(rank);
  Bytes rows(static_cast<size_t>(plan.rows[r] * plan.row_bytes()));
  for (int64_t i = 0; i < plan.rows[r] && plan.hidden; ++i) {
    std::memcpy(rows.data() + i * plan.row_bytes(), plan.out[r].data() + i * plan.stride(),
                static_cast<size_t>(plan.row_bytes()));
  }
  return rows;
}

// Same as run_and_check() in reference.cpp, but operation i runs in two halves if bit i of `split` is set.
void run_in_halves(const Plan& plan, int rank, BlockingTransfer& transfer, int64_t& call, unsigned split) {
  const size_t r = static_cast<size_t>(rank);
  Heap& heap = transfer.heap();
  const Rows x{plan.x[r].data(), plan.stride()}, g{plan.g[r].data(), plan.stride()};
  const float* weights = plan.weighted ? plan.weights[r].data() : nullptr;
  const Sent sent = transfer.start_send(op_of(plan, 0, ++call), x, plan.ids[r].data(),
                                        {plan.tokens[r], plan.top_k, plan.hidden, plan.dtype});
  const Layout& layout = *sent.layout;
  if (split & 1) {
    check_each_peer(plan, rank, layout, *sent.pending, heap.base() + sent.block, plan.received[r]);
  } else {
    sent.pending->finish();
  }
  const Bytes results = dense(plan, rank);
  const int64_t block = heap.alloc(static_cast<int64_t>(results.size()));
  const Rows out{heap.base() + block, plan.row_bytes()};
  const auto sum = [&](int operation, const Bytes& from, const float* by, const Bytes& expected) {
    Bytes y(expected.size(), '\xff');
    if (split >> operation & 1) {
      const auto pending = transfer.start_sum(op_of(plan, operation, ++call), layout, out, false);
      write_and_flag(plan, rank, layout, *pending, heap.base() + block, from);
      while (split & 16 && !pending->ready()) std::this_thread::yield();
      pending->sum(by, y.data());
      pending->finish();
    } else {
      if (!from.empty()) std::memcpy(heap.base() + block, from.data(), from.size());
      transfer.sum(op_of(plan, operation, ++call), layout, out, by, y.data());
    }
    CHECK(y == expected);
  };
  sum(1, results, weights, plan.y[r]);
  std::vector<float> grad_weights(plan.weights[r].size());
  const Spread spread = transfer.start_spread(op_of(plan, 2, ++call), layout, g, out, plan.weights[r].data(),
                                              plan.weight_grads, plan.weight_grads ? grad_weights.data() : nullptr);
  if (split & 4) {
    check_each_peer(plan, rank, layout, *spread.pending, heap.base() + spread.block, plan.grad_rows[r]);
  } else {
    spread.pending->finish();
  }
  if (plan.weight_grads) CHECK(grad_weights == plan.grad_weights[r]);
  sum(3, plan.grad_rows[r], nullptr, plan.dx[r]);
  heap.free(sent.block);
  heap.free(spread.block);
  heap.free(block);
}

}  // namespace

TEST(pending_operations_in_two_halves_give_the_reference_bits_on_1_2_3_8_ranks_near_the_wrap_of_the_counters) {
  for (const int world : {1, 2, 3, 8}) {
    Communicator::Options options = long_timeout();
    options.first_progress = 0xfffffff0u;
    Ranks ranks(world, options);
    Random random(static_cast<uint64_t>(world) + 7);
    std::vector<Plan> plans;
    for (int i = 0; i < (world == 8 ? 6 : 16) * repeats(); ++i) plans.push_back(random_plan(random, world, Limits()));
    on_ranks(world, [&](int rank) {
      int64_t call = 0;
      unsigned split = static_cast<unsigned>(rank);  // ranks use different modes
      for (const Plan& plan : plans) {
        BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
        run_in_halves(plan, rank, transfer, call, split % 3 ? 31u : split * 7);
        ++split;
      }
    });
    for (auto& heap : ranks.heaps) CHECK_EQ(heap->used(), int64_t{0});
  }
}

TEST(pending_operations_in_named_memory_that_grows) {
  Ranks ranks = Ranks::named(2, long_timeout(), {int64_t{1} << 30, int64_t{1} << 30});
  Random random(5);
  for (const int64_t tokens : {20, 900}) {
    const Plan plan = plain_plan(random, 2, tokens, 512, 6, 2, 0);
    on_ranks(2, [&](int rank) {
      int64_t call = tokens;
      BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
      run_in_halves(plan, rank, transfer, call, 31);
    });
  }
}

TEST(pending_operations_without_peers_give_the_reference_bits) {
  Random random(6);
  auto heap = std::make_shared<Heap>("", 0, 0, int64_t{1} << 30);
  for (int i = 0; i < 20 * repeats(); ++i) {
    const Plan plan = random_plan(random, 1, Limits());
    BlockingTransfer transfer(nullptr, heap, plan.expert_offsets, 1);
    int64_t call = 0;
    run_in_halves(plan, 0, transfer, call, 31);
  }
  CHECK_EQ(heap->used(), int64_t{0});
}

// Rank 0 completes its sum before rank 1 has written its own rows and before rank 2 has set the flag for rank 1.
TEST(pending_sum_waits_only_for_the_flags_for_its_own_rank) {
  Random random(8);
  Ranks ranks(3, long_timeout());
  const Plan plan = plain_plan(random, 3, 9, 40, 6, 2, 0);
  std::atomic<bool> summed{false};
  on_ranks(3, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
    const Sent sent = transfer.send(op_of(plan, 0, 1), {plan.x[r].data(), plan.stride()}, plan.ids[r].data(),
                                    {plan.tokens[r], plan.top_k, plan.hidden, plan.dtype});
    const Bytes results = dense(plan, rank);
    const int64_t block = transfer.heap().alloc(static_cast<int64_t>(results.size()));
    const auto pending =
        transfer.start_sum(op_of(plan, 1, 2), *sent.layout, {transfer.heap().base() + block, plan.row_bytes()}, false);
    std::memcpy(transfer.heap().base() + block, results.data(), results.size());
    if (rank == 1) CHECK(!pending->ready());  // its flag is set only after rank 0 has completed its sum
    pending->raise_flag(0);
    while (rank != 0 && !summed.load()) std::this_thread::yield();
    Bytes y(plan.y[r].size());
    if (rank == 0) {
      pending->sum(plan.weights[r].data(), y.data());
      summed.store(true);
    }
    for (const int to : {1, 2}) pending->raise_flag(to);
    if (rank != 0) pending->sum(plan.weights[r].data(), y.data());
    CHECK(y == plan.y[r]);
    pending->finish();
    CHECK_THROWS(pending->finish(), std::logic_error);
    transfer.heap().free(sent.block);
    transfer.heap().free(block);
  });
}

TEST(pending_a_header_mismatch_is_reported_on_all_ranks_and_the_next_call_succeeds) {
  Random random(9);
  for (const int bad_rank : {0, 1, 2}) {
    for (const bool split : {false, true}) {
      Ranks ranks(3, long_timeout());
      const Plan plan = plain_plan(random, 3, 6, 40, 6, 2, 0);
      on_ranks(3, [&](int rank) {
        const size_t r = static_cast<size_t>(rank);
        BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
        int64_t call = 1;
        const Sent sent = transfer.send(op_of(plan, 0, call), {plan.x[r].data(), plan.stride()}, plan.ids[r].data(),
                                        {plan.tokens[r], plan.top_k, plan.hidden, plan.dtype});
        const int64_t block = transfer.heap().alloc(plan.rows[r] * plan.row_bytes());
        const Rows out{transfer.heap().base() + block, plan.row_bytes()};
        Bytes y(plan.y[r].size());
        ++call;
        CHECK_EQ(headers_of([&] {
                   if (rank == bad_rank && split) {
                     transfer.start_spread(op_of(plan, 2, call), *sent.layout, {plan.g[r].data(), plan.stride()}, out,
                                           plan.weights[r].data(), false, nullptr);
                   } else {
                     const auto pending =
                         transfer.start_sum(op_of(plan, 1, call + (rank == bad_rank)), *sent.layout, out, false);
                     pending->raise_flag((rank + 1) % 3);
                     pending->sum(plan.weights[r].data(), y.data());
                   }
                   CHECK(!"must not be summed");
                 }),
                 3);
        transfer.heap().free(sent.block);
        transfer.heap().free(block);
        run_in_halves(plan, rank, transfer, call, 31);
        CHECK_EQ(transfer.heap().used(), int64_t{0});
      });
    }
  }
}

// A rank abandons an operation after its rows have been written. Its peers receive the rows and raise in their next
// call.
TEST(pending_an_abandoned_operation_fails_on_every_rank) {
  Random random(10);
  for (const bool late : {false, true}) {
    Ranks ranks(3, long_timeout());
    const Plan plan = plain_plan(random, 3, 6, 40, 6, 2, 0);
    on_ranks(3, [&](int rank) {
      const size_t r = static_cast<size_t>(rank);
      BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
      std::string message;
      try {
        const Sent sent = transfer.start_send(op_of(plan, 0, 1), {plan.x[r].data(), plan.stride()}, plan.ids[r].data(),
                                              {plan.tokens[r], plan.top_k, plan.hidden, plan.dtype});
        if (rank == 1 && !late) {
          sent.pending->abandon();
          CHECK(!sent.pending->finished());
          CHECK_THROWS(sent.pending->finish(), std::logic_error);
          return;
        }
        check_each_peer(plan, rank, *sent.layout, *sent.pending, transfer.heap().base() + sent.block, plan.received[r]);
        const int64_t block = transfer.heap().alloc(plan.rows[r] * plan.row_bytes());
        const auto pending = transfer.start_sum(op_of(plan, 1, 2), *sent.layout,
                                                {transfer.heap().base() + block, plan.row_bytes()}, false);
        if (rank == 1) return pending->abandon();
        for (const int to : {0, 1, 2}) pending->raise_flag(to);
        Bytes y(plan.y[r].size());
        pending->sum(nullptr, y.data());
        CHECK(!"must not be summed");
      } catch (const PeerError& error) {
        message = error.what();
      }
      CHECK(message.find("rank 1 aborted the operation after an error") != std::string::npos);
    });
  }
}

TEST(pending_a_rank_that_raises_no_flag_is_named_at_the_deadline) {
  Random random(11);
  Ranks ranks(2, long_timeout());
  const Plan plan = plain_plan(random, 2, 6, 40, 6, 2, 0);
  std::atomic<bool> out{false};
  on_ranks(2, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
    const Sent sent = transfer.send(op_of(plan, 0, 1), {plan.x[r].data(), plan.stride()}, plan.ids[r].data(),
                                    {plan.tokens[r], plan.top_k, plan.hidden, plan.dtype});
    const int64_t block = transfer.heap().alloc(plan.rows[r] * plan.row_bytes());
    const Rows rows{transfer.heap().base() + block, plan.row_bytes()};
    const auto pending = transfer.start_sum(op_of(plan, 1, 2), *sent.layout, rows, false);
    Bytes y(plan.y[r].size());
    if (rank == 0) {
      pending->raise_flag(1);
      ranks.communicators[r]->set_timeout(0.3);
      std::string message;
      try {
        pending->sum(nullptr, y.data());
      } catch (const PeerTimeout& error) {
        message = error.what();
      }
      CHECK(message.find("waited for rank 1") != std::string::npos);
      out.store(true);
    }
    while (!out.load()) std::this_thread::yield();
  });
}

TEST(pending_rows_that_are_computed_later_must_be_in_the_heap) {
  Random random(12);
  for (const int world : {1, 3}) {
    Ranks ranks(world, long_timeout());
    const Plan plan = plain_plan(random, world, 6, 40, 6, 2, 0);
    on_ranks(world, [&](int rank) {
      const size_t r = static_cast<size_t>(rank);
      BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
      int64_t call = 1;
      const Sent sent = transfer.send(op_of(plan, 0, call), {plan.x[r].data(), plan.stride()}, plan.ids[r].data(),
                                      {plan.tokens[r], plan.top_k, plan.hidden, plan.dtype});
      // The flags of an operation before, whose block is free when the rows of rank 0 are refused.
      run_in_halves(plan, rank, transfer, call, 31);
      const int64_t block = transfer.heap().alloc(plan.rows[r] * plan.row_bytes());
      const char* const allowed = transfer.heap().base() + block;
      const char* const rows = rank == 0 ? plan.out[r].data() : allowed;
      Bytes before(allowed, allowed + plan.rows[r] * plan.row_bytes()), y(plan.y[r].size());
      ++call;
      CHECK_EQ(headers_of([&] {
                 const auto pending =
                     transfer.start_sum(op_of(plan, 1, call), *sent.layout, {rows, plan.stride()}, false);
                 for (int peer = 0; peer < world; ++peer) pending->raise_flag(peer);
                 pending->sum(plan.weights[r].data(), y.data());
                 CHECK(!"must not be summed");
               }),
               world);
      CHECK(std::equal(before.begin(), before.end(), allowed));
      transfer.heap().free(sent.block);
      transfer.heap().free(block);
      run_in_halves(plan, rank, transfer, call, 31);
      CHECK_EQ(transfer.heap().used(), int64_t{0});
    });
  }
}
