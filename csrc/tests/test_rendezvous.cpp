#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "check.h"
#include "cpu/errors.h"
#include "cpu/rendezvous.h"
#include "reference.h"

using namespace moe_comm;
using namespace moe_comm::test;

namespace {

constexpr int64_t kCollective = 4, kFlag = Rendezvous::kFlagBytes;

Op collective_op(int64_t call, int64_t fault = 0, int64_t bytes = 0) {
  Op op;
  std::memset(op.compared, 0, sizeof op.compared);
  op.compared[0] = kCollective;
  op.compared[1] = call;
  op.compared[2] = bytes;
  op.label = "a collective";
  op.fault = fault;
  return op;
}

float value(int rank, int to, int64_t i) { return static_cast<float>((rank * 7 + to * 5 + i * 3) % 23 - 11); }

// The buffer of a rank: flags, `count` floats for all ranks, then `count` floats for each rank.
struct RankBuffer {
  RankBuffer(Heap& from, int ranks, int64_t each) : heap(from), world(ranks), count(each), block(heap.alloc(bytes())) {}
  ~RankBuffer() { heap.free(block); }
  int64_t common() const { return world * kFlag; }
  int64_t part(int to) const { return common() + (1 + to) * count * 4; }
  int64_t bytes() const { return part(world); }
  float* at(int64_t first) const { return reinterpret_cast<float*>(heap.base() + block + first); }
  Exchange::Buffer buffer() const { return {heap.base() + block, bytes()}; }

  Heap& heap;
  int world;
  int64_t count, block;
};

std::vector<int> peers_of(int rank, int world) {
  std::vector<int> peers;
  for (int i = 1; i < world; ++i) peers.push_back((rank + i) % world);
  return peers;
}

// Run a gather and a scatter in one operation.
void run_and_check(Ranks& ranks, int rank, int64_t count, int64_t call) {
  const int world = ranks.world();
  const size_t r = static_cast<size_t>(rank);
  RankBuffer own(*ranks.heaps[r], world, count);
  for (int64_t i = 0; i < count; ++i) own.at(own.common())[i] = value(rank, 0, i);
  Rendezvous rendezvous(ranks.communicators[r], 1, collective_op(call), own.buffer());
  std::vector<int> order = peers_of(rank, world);
  order.push_back(rank);
  for (const int to : order) {
    for (int64_t i = 0; i < count; ++i) own.at(own.part(to))[i] = value(rank, to, i);
    rendezvous.raise_flag(to);
  }
  for (std::vector<int> remaining = peers_of(rank, world); !remaining.empty();) {
    const int peer = rendezvous.next(remaining);
    remaining.erase(std::find(remaining.begin(), remaining.end(), peer));
    const float* rows = reinterpret_cast<const float*>(rendezvous.rows(peer, own.common(), count * 4));
    for (int64_t i = 0; i < count; ++i) CHECK_EQ(rows[i], value(peer, 0, i));
  }
  std::vector<float> sum(static_cast<size_t>(count));
  rendezvous.add(own.part(rank), count, 0, reinterpret_cast<char*>(sum.data()));
  if (call % 2) rendezvous.publish_done();
  for (int64_t i = 0; i < count; ++i) {
    float expected = 0;
    for (int p = 0; p < world; ++p) expected += value(p, rank, i);
    CHECK_EQ(sum[static_cast<size_t>(i)], expected);
  }
  rendezvous.finish();
}

}  // namespace

TEST(rendezvous_gathers_and_adds_on_1_2_3_8_ranks_near_the_wrap_of_the_counters) {
  for (const int world : {1, 2, 3, 8}) {
    Communicator::Options options = long_timeout();
    options.first_progress = 0xfffffff0u;
    Ranks ranks(world, options);
    on_ranks(world, [&](int rank) {
      int64_t call = 0;
      for (int repeat = 0; repeat < 3 + repeats(); ++repeat) {
        for (const int64_t count : {1, 33, 700}) run_and_check(ranks, rank, count, ++call);
      }
    });
    for (auto& heap : ranks.heaps) CHECK_EQ(heap->used(), int64_t{0});
  }
}

TEST(rendezvous_in_named_memory_that_grows) {
  Ranks ranks = Ranks::named(2, long_timeout(), {int64_t{1} << 30, int64_t{1} << 30});
  on_ranks(2, [&](int rank) {
    int64_t call = 0;
    for (const int64_t count : {100, 300000, 1200001}) run_and_check(ranks, rank, count, ++call);
  });
}

// Rank 0 reads rank 2's rows before rank 1 has posted. Rank 1 posts only after that.
TEST(rendezvous_reads_a_peer_that_has_posted_without_waiting_for_all) {
  Ranks ranks(3, long_timeout());
  std::atomic<bool> read{false};
  on_ranks(3, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    RankBuffer own(*ranks.heaps[r], 3, 4);
    while (rank == 1 && !read.load()) std::this_thread::yield();
    own.at(own.common())[0] = value(rank, 0, 0);
    Rendezvous rendezvous(ranks.communicators[r], 1, collective_op(1), own.buffer());
    if (rank == 0) {
      CHECK_EQ(rendezvous.next({1, 2}), 2);
      CHECK_EQ(*reinterpret_cast<float*>(rendezvous.rows(2, own.common(), 4)), value(2, 0, 0));
      CHECK_THROWS(rendezvous.rows(1, own.common(), 4), std::invalid_argument);
      CHECK_THROWS(rendezvous.rows(2, own.common(), own.bytes()), std::invalid_argument);
      read.store(true);
    }
    rendezvous.finish();
    CHECK_THROWS(rendezvous.finish(), std::logic_error);
    run_and_check(ranks, rank, 10, 2);
  });
}

// Two ranks run the same operation and wait for each other's flags. One of them detects that the third rank runs a
// different operation and ends its own.
TEST(rendezvous_of_ranks_in_different_calls_fails_on_all_ranks_and_the_next_succeeds) {
  for (const int bad_rank : {0, 1, 2}) {
    Ranks ranks(3, long_timeout());
    std::atomic<int> waiting{0};
    on_ranks(3, [&](int rank) {
      const size_t r = static_cast<size_t>(rank);
      RankBuffer own(*ranks.heaps[r], 3, 4);
      std::vector<float> sum(4);
      CHECK_EQ(headers_of([&] {
                 // The mismatching rank posts last, while the others are in the operation.
                 while (rank == bad_rank && waiting.load() < 2) std::this_thread::yield();
                 Rendezvous rendezvous(ranks.communicators[r], 1, collective_op(1, 0, rank == bad_rank ? 7 : 8),
                                       own.buffer());
                 const int other = 3 - bad_rank - rank;
                 if (rank != bad_rank) {
                   CHECK_EQ(rendezvous.next({other}), other);
                   ++waiting;
                 }
                 rendezvous.raise_flag(rank);  // raises no flag for other ranks
                 rendezvous.add(own.part(rank), 4, 0, reinterpret_cast<char*>(sum.data()));
                 CHECK(!"must not be added");
               }),
               3);
      run_and_check(ranks, rank, 10, 2);
    });
  }
}

// One rank has a different header and has waited for no peer. The others have checked each other, and one of them waits
// for a flag.
TEST(rendezvous_a_rank_that_detects_a_mismatch_wakes_the_ranks_that_wait_for_its_flag) {
  Ranks ranks(3, long_timeout());
  on_ranks(3, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    RankBuffer own(*ranks.heaps[r], 3, 4);
    const auto collective = [&] {
      Rendezvous rendezvous(ranks.communicators[r], 1, collective_op(rank == 2 ? 5 : 4), own.buffer());
      if (rank == 0)
        ranks.communicators[r]->wait_flag(
            *reinterpret_cast<std::atomic<uint32_t>*>(rendezvous.rows(rendezvous.next({1}), 0, kFlag)), 1);
      rendezvous.finish();
    };
    CHECK_EQ(headers_of(collective), 3);
    run_and_check(ranks, rank, 10, 6);
  });
}

TEST(rendezvous_with_a_fault_on_one_rank_fails_on_all_ranks_and_the_next_succeeds) {
  Ranks ranks(4, long_timeout());
  on_ranks(4, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    {
      RankBuffer own(*ranks.heaps[r], 4, 4);
      CHECK_EQ(headers_of([&] {
                 Rendezvous rendezvous(ranks.communicators[r], 1, collective_op(1, rank == 1 ? 4 : 0),
                                       rank == 1 ? Exchange::Buffer{} : own.buffer());
                 rendezvous.finish();
               }),
               4);
    }
    run_and_check(ranks, rank, 100, 2);
  });
}

TEST(rendezvous_that_is_abandoned_fails_on_every_rank_that_waits) {
  Ranks ranks(3, long_timeout());
  on_ranks(3, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    RankBuffer own(*ranks.heaps[r], 3, 4);
    std::vector<float> sum(4);
    Rendezvous rendezvous(ranks.communicators[r], 1, collective_op(1), own.buffer());
    if (rank == 1) {
      rendezvous.abandon();
      return;
    }
    rendezvous.raise_flag(rank);
    std::string message;
    try {
      rendezvous.add(own.part(rank), 4, 0, reinterpret_cast<char*>(sum.data()));
    } catch (const PeerError& error) {
      message = error.what();
    }
    CHECK(message.find("rank 1 aborted the operation after an error") != std::string::npos);
  });
}

TEST(rendezvous_a_rank_that_raises_no_flag_is_named_at_the_deadline) {
  Ranks ranks(3, long_timeout());
  for (auto& communicator : ranks.communicators) communicator->set_timeout(0.3);
  std::atomic<int> out{0};
  on_ranks(3, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    RankBuffer own(*ranks.heaps[r], 3, 4);
    std::vector<float> sum(4);
    Rendezvous rendezvous(ranks.communicators[r], 1, collective_op(1), own.buffer());
    if (rank != 2) {
      for (const int to : {0, 1, 2}) rendezvous.raise_flag(to);
      std::string message;
      try {
        rendezvous.add(own.part(rank), 4, 0, reinterpret_cast<char*>(sum.data()));
      } catch (const PeerTimeout& error) {
        message = error.what();
      }
      CHECK(message.find("waited for rank 2") != std::string::npos);
      ++out;
    }
    while (out.load() < 2) std::this_thread::yield();
  });
}
