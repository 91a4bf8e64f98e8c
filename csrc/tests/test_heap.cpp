#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <map>
#include <thread>

#include "check.h"
#include "cpu/errors.h"
#include "cpu/heap.h"

using namespace moe_comm;
using namespace moe_comm::test;

TEST(heap_blocks_are_aligned_disjoint_and_can_be_freed) {
  Heap heap("", 0, 0, 64 << 20);
  const int64_t a = heap.alloc(1), b = heap.alloc(65), c = heap.alloc(0);
  CHECK_EQ(a % kBlockAlign + b % kBlockAlign + c % kBlockAlign, int64_t{0});
  CHECK_EQ(b - a, int64_t{64});
  CHECK_EQ(c - b, int64_t{128});
  CHECK_EQ(heap.used(), int64_t{64 + 128 + 64});
  CHECK_EQ(heap.blocks(), int64_t{3});
  heap.free(b);
  heap.free(b);  // a double free and an invalid offset have no effect
  heap.free(17);
  heap.free(a);
  heap.free(c);
  CHECK_EQ(heap.used(), int64_t{0});
  CHECK_EQ(heap.blocks(), int64_t{0});
  CHECK_EQ(heap.peak(), int64_t{256});
}

TEST(heap_merges_neighbours_in_any_order) {
  int order[4] = {0, 1, 2, 3};
  do {
    Heap heap("", 0, 0, kGrowStep);
    int64_t blocks[4];
    for (int64_t& block : blocks) block = heap.alloc(kGrowStep / 4);
    CHECK_THROWS(heap.alloc(1), HeapError);
    for (int i : order) heap.free(blocks[i]);
    CHECK_EQ(heap.alloc(kGrowStep), int64_t{0});  // merged into one block again
  } while (std::next_permutation(order, order + 4));
}

TEST(heap_allocates_the_best_fit) {
  Heap heap("", 0, 0, kGrowStep);
  const int64_t big = heap.alloc(4096), separator1 = heap.alloc(64), small = heap.alloc(256),
                separator2 = heap.alloc(64);
  heap.free(big);
  heap.free(small);
  CHECK_EQ(heap.alloc(200), small);
  CHECK_EQ(heap.alloc(300), big);
  heap.free(separator1);
  heap.free(separator2);
}

TEST(heap_grows_without_moving_and_stops_at_its_reserve) {
  Heap heap("", 100, 0, 4 * kGrowStep);
  const char* base = heap.base();
  CHECK_EQ(heap.size(), kGrowStep);
  const int64_t first = heap.alloc(1000);
  CHECK(first >= 100);
  std::memset(heap.base() + first, 7, 1000);
  const int64_t more = heap.alloc(2 * kGrowStep);
  std::memset(heap.base() + more, 8, static_cast<size_t>(2 * kGrowStep));
  CHECK(heap.base() == base);
  CHECK_EQ(heap.base()[first + 999], char{7});
  const int64_t before = heap.size();
  CHECK_THROWS(heap.alloc(4 * kGrowStep), HeapError);
  CHECK_EQ(heap.size(), before);
  heap.free(more);
  heap.free(heap.alloc(2 * kGrowStep));  // the heap is still usable
  CHECK_EQ(heap.size(), before);
  CHECK(heap.owns(base, before));
  CHECK(!heap.owns(base, before + 1));
  CHECK(!heap.owns(base - 1, 1));
}

TEST(heap_rejects_impossible_sizes) {
  Heap heap("", 0, 0, kGrowStep);
  CHECK_THROWS(heap.alloc(-1), HeapError);
  CHECK_THROWS(heap.alloc(std::numeric_limits<int64_t>::max()), HeapError);
  CHECK_THROWS(heap.alloc(std::numeric_limits<int64_t>::max() - 63), HeapError);
  CHECK_EQ(heap.blocks(), int64_t{0});
  heap.free(heap.alloc(kGrowStep));
}

TEST(heap_control_region_is_zero_and_never_allocated) {
  Heap heap("", 1000, 0, kGrowStep);
  for (int i = 0; i < 1000; ++i) CHECK_EQ(int{heap.base()[i]}, 0);
  std::vector<int64_t> all;
  try {
    for (;;) all.push_back(heap.alloc(64));
  } catch (const HeapError&) {
  }
  CHECK_EQ(static_cast<int64_t>(all.size()), (kGrowStep - 1024) / 64);
  for (int64_t block : all) CHECK(block >= 1000);
}

TEST(heap_name_is_exclusive_and_is_unlinked) {
  const std::string name = "/moe_comm_tests." + std::to_string(getpid()) + ".heap";
  {
    Heap heap(name, 64, 0, kGrowStep);
    CHECK_THROWS(Heap(name, 64, 0, kGrowStep), HeapError);
    heap.free(heap.alloc(100));
  }
  CHECK_EQ(shm_unlink(name.c_str()), -1);
  // A constructor that throws leaves no name.
  CHECK_THROWS(Heap(name, 64, 4 * kGrowStep, kGrowStep), HeapError);
  CHECK_EQ(shm_unlink(name.c_str()), -1);
}

// Threads pass blocks to each other, and the receiver frees them. Each block is filled with its own byte value, so
// overlapping blocks are detected.
TEST(heap_survives_threads_that_free_each_others_blocks) {
  Heap heap("", 64, 0, int64_t{256} << 20);
  struct Block {
    int64_t offset, bytes;
    char mark;
  };
  constexpr int kThreads = 4, kSlots = 64;
  std::atomic<Block*> slots[kSlots] = {};
  std::atomic<int> damaged{0};
  const auto check_and_free = [&](Block* block) {
    for (int64_t i = 0; i < block->bytes; ++i) damaged += heap.base()[block->offset + i] != block->mark;
    heap.free(block->offset);
    delete block;
  };
  const int rounds = 1500 * repeats();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Random random(static_cast<uint64_t>(t) + 11);
      for (int i = 0; i < rounds; ++i) {
        auto* block = new Block;
        block->bytes = random.chance(0.02) ? random.between(1, 100000) : random.between(0, 2000);
        block->mark = static_cast<char>(random.below(256));
        block->offset = heap.alloc(block->bytes);
        std::memset(heap.base() + block->offset, block->mark, static_cast<size_t>(block->bytes));
        if (Block* old = slots[random.below(kSlots)].exchange(block)) check_and_free(old);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (auto& slot : slots) {
    if (Block* last = slot.load()) check_and_free(last);
  }
  CHECK_EQ(damaged.load(), 0);
  CHECK_EQ(heap.used(), int64_t{0});
  CHECK_EQ(heap.blocks(), int64_t{0});
  heap.free(heap.alloc(heap.size() - 64));  // all free blocks are merged again
}
