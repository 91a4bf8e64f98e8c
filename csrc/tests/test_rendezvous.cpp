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

Op meeting(int64_t call, int64_t fault = 0, int64_t bytes = 0) {
  Op op;
  std::memset(op.compared, 0, sizeof op.compared);
  op.compared[0] = kCollective;
  op.compared[1] = call;
  op.compared[2] = bytes;
  op.label = "a meeting";
  op.fault = fault;
  return op;
}

float value(int rank, int to, int64_t i) { return static_cast<float>((rank * 7 + to * 5 + i * 3) % 23 - 11); }

// The buffer of a rank: flags, `count` floats for all ranks, then `count` floats for each rank.
struct Place {
  Place(Heap& from, int ranks, int64_t each) : heap(from), world(ranks), count(each), block(heap.alloc(bytes())) {}
  ~Place() { heap.free(block); }
  int64_t common() const { return world * kFlag; }
  int64_t part(int to) const { return common() + (1 + to) * count * 4; }
  int64_t bytes() const { return part(world); }
  float* at(int64_t first) const { return reinterpret_cast<float*>(heap.base() + block + first); }
  Exchange::Offer offer() const { return {heap.base() + block, bytes()}; }

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
void play(Ranks& ranks, int rank, int64_t count, int64_t call) {
  const int world = ranks.world();
  const size_t r = static_cast<size_t>(rank);
  Place place(*ranks.heaps[r], world, count);
  for (int64_t i = 0; i < count; ++i) place.at(place.common())[i] = value(rank, 0, i);
  Rendezvous meet(ranks.communicators[r], 1, meeting(call), place.offer());
  std::vector<int> order = peers_of(rank, world);
  order.push_back(rank);
  for (const int to : order) {
    for (int64_t i = 0; i < count; ++i) place.at(place.part(to))[i] = value(rank, to, i);
    meet.raise(to);
  }
  for (std::vector<int> left = peers_of(rank, world); !left.empty();) {
    const int peer = meet.next(left);
    left.erase(std::find(left.begin(), left.end(), peer));
    const float* rows = reinterpret_cast<const float*>(meet.rows(peer, place.common(), count * 4));
    for (int64_t i = 0; i < count; ++i) CHECK_EQ(rows[i], value(peer, 0, i));
  }
  std::vector<float> sum(static_cast<size_t>(count));
  meet.add(place.part(rank), count, 0, reinterpret_cast<char*>(sum.data()));
  if (call % 2) meet.leave();
  for (int64_t i = 0; i < count; ++i) {
    float expected = 0;
    for (int p = 0; p < world; ++p) expected += value(p, rank, i);
    CHECK_EQ(sum[static_cast<size_t>(i)], expected);
  }
  meet.finish();
}

}  // namespace

TEST(rendezvous_gathers_and_adds_on_1_2_3_8_ranks_near_the_wrap_of_the_counters) {
  for (const int world : {1, 2, 3, 8}) {
    Communicator::Options options = patient();
    options.first_progress = 0xfffffff0u;
    Ranks ranks(world, options);
    on_ranks(world, [&](int rank) {
      int64_t call = 0;
      for (int repeat = 0; repeat < 3 + repeats(); ++repeat) {
        for (const int64_t count : {1, 33, 700}) play(ranks, rank, count, ++call);
      }
    });
    for (auto& heap : ranks.heaps) CHECK_EQ(heap->used(), int64_t{0});
  }
}

TEST(rendezvous_in_named_memory_that_grows) {
  Ranks ranks = Ranks::named(2, patient(), {int64_t{1} << 30, int64_t{1} << 30});
  on_ranks(2, [&](int rank) {
    int64_t call = 0;
    for (const int64_t count : {100, 300000, 1200001}) play(ranks, rank, count, ++call);
  });
}

// Rank 0 reads rank 2's rows before rank 1 has posted. Rank 1 posts only after that.
TEST(rendezvous_takes_who_has_come_and_does_not_wait_for_all) {
  Ranks ranks(3, patient());
  std::atomic<bool> read{false};
  on_ranks(3, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    Place place(*ranks.heaps[r], 3, 4);
    while (rank == 1 && !read.load()) std::this_thread::yield();
    place.at(place.common())[0] = value(rank, 0, 0);
    Rendezvous meet(ranks.communicators[r], 1, meeting(1), place.offer());
    if (rank == 0) {
      CHECK_EQ(meet.next({1, 2}), 2);
      CHECK_EQ(*reinterpret_cast<float*>(meet.rows(2, place.common(), 4)), value(2, 0, 0));
      CHECK_THROWS(meet.rows(1, place.common(), 4), std::invalid_argument);
      CHECK_THROWS(meet.rows(2, place.common(), place.bytes()), std::invalid_argument);
      read.store(true);
    }
    meet.finish();
    CHECK_THROWS(meet.finish(), std::logic_error);
    play(ranks, rank, 10, 2);
  });
}

// Two ranks run the same operation and wait for each other's flags. One of them detects that the third rank runs a
// different operation, and leaves.
TEST(rendezvous_of_ranks_in_different_calls_fails_alike_everywhere_and_the_next_goes_on) {
  for (const int odd : {0, 1, 2}) {
    Ranks ranks(3, patient());
    std::atomic<int> waiting{0};
    on_ranks(3, [&](int rank) {
      const size_t r = static_cast<size_t>(rank);
      Place place(*ranks.heaps[r], 3, 4);
      std::vector<float> sum(4);
      CHECK_EQ(headers_of([&] {
                 // The mismatching rank posts last, while the others are in the operation.
                 while (rank == odd && waiting.load() < 2) std::this_thread::yield();
                 Rendezvous meet(ranks.communicators[r], 1, meeting(1, 0, rank == odd ? 7 : 8), place.offer());
                 const int other = 3 - odd - rank;
                 if (rank != odd) {
                   CHECK_EQ(meet.next({other}), other);
                   ++waiting;
                 }
                 meet.raise(rank);  // sets no flag for other ranks
                 meet.add(place.part(rank), 4, 0, reinterpret_cast<char*>(sum.data()));
                 CHECK(!"must not be added");
               }),
               3);
      play(ranks, rank, 10, 2);
    });
  }
}

// One rank has a different header and has waited for no peer. The others have checked each other, and one of them waits
// for a flag.
TEST(rendezvous_a_rank_that_leaves_for_a_mismatch_wakes_those_that_wait_for_its_flag) {
  Ranks ranks(3, patient());
  on_ranks(3, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    Place place(*ranks.heaps[r], 3, 4);
    const auto collective = [&] {
      Rendezvous meet(ranks.communicators[r], 1, meeting(rank == 2 ? 5 : 4), place.offer());
      if (rank == 0)
        ranks.communicators[r]->wait_flag(
            *reinterpret_cast<std::atomic<uint32_t>*>(meet.rows(meet.next({1}), 0, kFlag)), 1);
      meet.finish();
    };
    CHECK_EQ(headers_of(collective), 3);
    play(ranks, rank, 10, 6);
  });
}

TEST(rendezvous_of_a_rank_with_a_fault_fails_alike_everywhere_and_the_next_goes_on) {
  Ranks ranks(4, patient());
  on_ranks(4, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    {
      Place place(*ranks.heaps[r], 4, 4);
      CHECK_EQ(headers_of([&] {
                 Rendezvous meet(ranks.communicators[r], 1, meeting(1, rank == 1 ? 4 : 0),
                                 rank == 1 ? Exchange::Offer{} : place.offer());
                 meet.finish();
               }),
               4);
    }
    play(ranks, rank, 100, 2);
  });
}

TEST(rendezvous_that_is_abandoned_reaches_every_rank_that_waits) {
  Ranks ranks(3, patient());
  on_ranks(3, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    Place place(*ranks.heaps[r], 3, 4);
    std::vector<float> sum(4);
    Rendezvous meet(ranks.communicators[r], 1, meeting(1), place.offer());
    if (rank == 1) {
      meet.abandon();
      return;
    }
    meet.raise(rank);
    std::string said;
    try {
      meet.add(place.part(rank), 4, 0, reinterpret_cast<char*>(sum.data()));
    } catch (const PeerError& error) {
      said = error.what();
    }
    CHECK(said.find("rank 1 left the operation after an error") != std::string::npos);
  });
}

TEST(rendezvous_a_rank_that_raises_no_flag_is_named_at_the_deadline) {
  Ranks ranks(3, patient());
  for (auto& communicator : ranks.communicators) communicator->set_timeout(0.3);
  std::atomic<int> out{0};
  on_ranks(3, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    Place place(*ranks.heaps[r], 3, 4);
    std::vector<float> sum(4);
    Rendezvous meet(ranks.communicators[r], 1, meeting(1), place.offer());
    if (rank != 2) {
      for (const int to : {0, 1, 2}) meet.raise(to);
      std::string said;
      try {
        meet.add(place.part(rank), 4, 0, reinterpret_cast<char*>(sum.data()));
      } catch (const PeerTimeout& error) {
        said = error.what();
      }
      CHECK(said.find("waited for rank 2") != std::string::npos);
      ++out;
    }
    while (out.load() < 2) std::this_thread::yield();
  });
}
