#include <cstring>

#include "check.h"
#include "cpu/errors.h"
#include "cpu/exchange.h"
#include "reference.h"

using namespace moe_comm;
using namespace moe_comm::test;

namespace {

constexpr int64_t kCollective = 4;

Op collective(int64_t call, int64_t fault = 0) {
  Op op;
  std::memset(op.compared, 0, sizeof op.compared);
  op.compared[0] = kCollective;
  op.compared[1] = call;
  op.label = "a collective";
  op.fault = fault;
  return op;
}

// Element i of the rank's buffer. Small integers are exact in every dtype and every order of addition.
float value(int rank, int64_t i) { return static_cast<float>((rank * 7 + i * 3) % 23 - 11); }

// Allocate a block of `count` elements in the rank's heap; the caller frees it.
int64_t offer(Heap& heap, int rank, int64_t count, int dtype) {
  const int64_t size = dtype == 0 ? 4 : 2, block = heap.alloc(count * size);
  for (int64_t i = 0; i < count; ++i) narrow(dtype, value(rank, i), heap.base() + block + i * size);
  return block;
}

float total(int world, int64_t i) {
  float sum = 0;
  for (int rank = 0; rank < world; ++rank) sum += value(rank, i);
  return sum;
}

void run_and_check(Ranks& ranks, int rank, int64_t count, int dtype, int threads, int64_t& call) {
  const int world = ranks.world();
  const int64_t size = dtype == 0 ? 4 : 2, part = count / world;
  const size_t r = static_cast<size_t>(rank);
  Heap& heap = *ranks.heaps[r];
  Exchange exchange(ranks.communicators[r], threads);
  const int64_t block = offer(heap, rank, count, dtype);
  const Exchange::Buffer mine{heap.base() + block, count * size};

  Bytes gathered(static_cast<size_t>(world * count * size), '\xff');
  exchange.copy(collective(++call), mine, 0, count * size, gathered.data());
  Bytes swapped(static_cast<size_t>(world * part * size), '\xff');
  exchange.copy(collective(++call), mine, rank * part * size, part * size, swapped.data());
  Bytes summed(static_cast<size_t>(part * size), '\xff');
  exchange.sum(collective(++call), mine, rank * part, part, dtype, summed.data());
  exchange.all_sum(collective(++call), mine, dtype);
  for (int64_t i = 0; i < count; ++i) {
    CHECK_EQ(widen(dtype, mine.data + i * size), total(world, i));
    for (int p = 0; p < world; ++p) CHECK_EQ(widen(dtype, gathered.data() + (p * count + i) * size), value(p, i));
  }
  for (int64_t i = 0; i < part; ++i) {
    CHECK_EQ(widen(dtype, summed.data() + i * size), total(world, rank * part + i));
    for (int p = 0; p < world; ++p) {
      CHECK_EQ(widen(dtype, swapped.data() + (p * part + i) * size), value(p, rank * part + i));
    }
  }
  heap.free(block);
  // A rank leaves before its peers have read its values, and must not overwrite them.
  std::vector<Values> all(static_cast<size_t>(world));
  for (int64_t i = 0; i < 3; ++i) {
    exchange.values(collective(++call), {rank * 10 + i, -i}, all.data());
    for (int p = 0; p < world; ++p) {
      CHECK_EQ(all[static_cast<size_t>(p)][0], p * 10 + i);
      CHECK_EQ(all[static_cast<size_t>(p)][1], -i);
    }
  }
}

}  // namespace

TEST(exchange_copies_and_adds_every_part_on_1_2_3_8_ranks) {
  for (const int world : {1, 2, 3, 8}) {
    Ranks ranks(world, long_timeout());
    on_ranks(world, [&](int rank) {
      int64_t call = 0;
      for (int repeat = 0; repeat < repeats(); ++repeat) {
        for (const int64_t count : {1, 8, 65, 1000}) {
          for (const int dtype : {0, 1, 2}) run_and_check(ranks, rank, count, dtype, 1, call);
        }
      }
    });
    for (auto& heap : ranks.heaps) CHECK_EQ(heap->used(), int64_t{0});
  }
}

TEST(exchange_with_threads_and_named_memory_that_grows) {
  Ranks ranks = Ranks::named(2, long_timeout(), {int64_t{1} << 30, int64_t{1} << 30});
  on_ranks(2, [&](int rank) {
    int64_t call = 0;
    for (const int64_t count : {100, 300000, 1200001}) run_and_check(ranks, rank, count, 0, 2, call);
  });
}

TEST(exchange_with_a_fault_on_one_rank_fails_on_all_ranks_and_the_next_succeeds) {
  Ranks ranks(3, long_timeout());
  on_ranks(3, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    Exchange exchange(ranks.communicators[r], 1);
    const int64_t block = offer(*ranks.heaps[r], rank, 10, 0);
    const Exchange::Buffer mine = rank == 1 ? Exchange::Buffer{} : Exchange::Buffer{ranks.heaps[r]->base() + block, 40};
    bool failed = false;
    try {
      exchange.all_sum(collective(1, rank == 1 ? 4 : 0), mine, 0);
    } catch (const HandshakeFailed& error) {
      failed = error.headers.size() == 3;
    }
    CHECK(failed);
    ranks.heaps[r]->free(block);
    int64_t call = 1;
    run_and_check(ranks, rank, 100, 0, 1, call);
  });
}
