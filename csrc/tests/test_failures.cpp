#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "check.h"
#include "cpu/errors.h"
#include "reference.h"

using namespace moe_comm;
using namespace moe_comm::test;

namespace {

// Options with a short spin phase before sleeping.
Communicator::Options short_spin(double timeout_s = 120) {
  Communicator::Options options = long_timeout(timeout_s);
  options.spin_us = 20;
  return options;
}

const int64_t* words(const std::string& header) { return reinterpret_cast<const int64_t*>(header.data()); }

std::string text(const std::string& header) {
  const char* p = reinterpret_cast<const char*>(words(header) + kTextWord);
  return std::string(p, strnlen(p, 320));
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Sent send(const Plan& plan, int rank, BlockingTransfer& transfer, Op op) {
  const size_t r = static_cast<size_t>(rank);
  return transfer.send(std::move(op), {plan.x[r].data(), plan.stride()}, plan.ids[r].data(),
                       {plan.tokens[r], plan.top_k, plan.hidden, plan.dtype});
}

}  // namespace

TEST(failure_a_header_mismatch_is_reported_on_all_ranks_and_the_next_call_succeeds) {
  Random random(1);
  const int world = 4;
  Ranks ranks(world, short_spin());
  const Plan plan = plain_plan(random, world, 6, 40, 8, 2, 0);
  for (int field = 0; field < kComparedWords; ++field) {
    on_ranks(world, [&](int rank) {
      BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
      int64_t call = 100 * field;
      run_and_check(plan, rank, transfer, call);
      Op op = op_of(plan, 0, ++call);
      if (rank == field % world) op.compared[field] += 1;
      std::vector<std::string> headers;
      try {
        send(plan, rank, transfer, op);
        CHECK(!"a mismatch must throw");
      } catch (const HandshakeFailed& error) {
        headers = error.headers;
      }
      CHECK_EQ(headers.size(), static_cast<size_t>(world));
      for (int p = 0; p < world; ++p) {
        const int64_t expected = op_of(plan, 0, call).compared[field] + (p == field % world);
        CHECK_EQ(words(headers[static_cast<size_t>(p)])[field], expected);
        CHECK(text(headers[static_cast<size_t>(p)]) == "layer 3");
      }
      run_and_check(plan, rank, transfer, call);
    });
  }
  for (auto& heap : ranks.heaps) CHECK_EQ(heap->used(), int64_t{0});
}

// One rank dispatches while the other combines. Both raise, and the next operation succeeds.
TEST(failure_ranks_in_different_operations_raise_on_both) {
  Random random(2);
  Ranks ranks(2, short_spin());
  const Plan plan = plain_plan(random, 2, 6, 40, 8, 2, 0);
  on_ranks(2, [&](int rank) {
    BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
    int64_t call = 0;
    const Sent sent = send(plan, rank, transfer, op_of(plan, 0, ++call));
    ++call;
    Bytes y(plan.y[0].size());
    std::vector<float> grads(plan.weights[0].size());
    const Rows out{plan.out[static_cast<size_t>(rank)].data(), plan.stride()};
    if (rank == 0) {
      CHECK_THROWS(transfer.sum(op_of(plan, 1, call), *sent.layout, out, plan.weights[0].data(), y.data()),
                   HandshakeFailed);
    } else {
      CHECK_THROWS(
          transfer.spread(op_of(plan, 2, call), *sent.layout, out, out, plan.weights[1].data(), true, grads.data()),
          HandshakeFailed);
    }
    transfer.heap().free(sent.block);
    CHECK_EQ(transfer.heap().used(), int64_t{0});
    run_and_check(plan, rank, transfer, call);
  });
}

TEST(failure_bad_ids_on_one_rank_are_reported_on_all) {
  Random random(3);
  const int world = 3;
  Ranks ranks(world, short_spin());
  const Plan good = plain_plan(random, world, 5, 16, 7, 2, 0);
  const int64_t bad_ids[] = {7, -2, -3, int64_t{1} << 40, std::numeric_limits<int64_t>::min()};
  for (const int64_t bad : bad_ids) {
    Plan plan = good;
    plan.ids[1][5] = bad;  // token 2, slot 1
    on_ranks(world, [&](int rank) {
      BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
      int64_t call = 0;
      try {
        send(plan, rank, transfer, op_of(plan, 0, ++call));
        CHECK(!"a bad id must throw");
      } catch (const HandshakeFailed& error) {
        CHECK_EQ(words(error.headers[0])[kFaultWord], int64_t{0});
        CHECK_EQ(words(error.headers[1])[kFaultWord], int64_t{2});
        CHECK(has(text(error.headers[1]), bad == -2 ? "token 2 are NaN or all -Inf"
                                                    : "expert id " + std::to_string(bad) + " of token 2, slot 1"));
      }
      run_and_check(good, rank, transfer, call);
    });
  }
  for (auto& heap : ranks.heaps) CHECK_EQ(heap->used(), int64_t{0});
}

TEST(failure_a_fault_passed_by_the_caller_is_reported_on_all) {
  Random random(4);
  Ranks ranks(2, short_spin());
  const Plan plan = plain_plan(random, 2, 5, 16, 7, 2, 0);
  on_ranks(2, [&](int rank) {
    BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
    Op op = op_of(plan, 0, 1);
    if (rank == 0) {
      op.fault = 1;
      op.fault_text = std::string(1000, 'x');  // longer than the text field of a header
    }
    try {
      // Arguments as passed from Python with a fault: no tokens and null pointers.
      rank == 0 ? transfer.send(op, {}, nullptr, {0, 2, 16, 0}) : send(plan, rank, transfer, op);
      CHECK(!"a fault must throw");
    } catch (const HandshakeFailed& error) {
      CHECK_EQ(words(error.headers[0])[kFaultWord], int64_t{1});
      CHECK_EQ(text(error.headers[0]).size(), size_t{320});
    }
    int64_t call = 1;
    run_and_check(plan, rank, transfer, call);
  });
}

// Rank 1's heap holds one growth step. Tests each allocation that can fail, in order.
TEST(failure_a_full_heap_on_one_rank_is_reported_on_all_and_the_group_stays_usable) {
  Random random(5);
  const int world = 3;
  Ranks ranks(world, short_spin(), {int64_t{1} << 30, kGrowStep, int64_t{1} << 30});
  const Plan plan = plain_plan(random, world, 6, 64, 6, 2, 0);
  Plan large = plain_plan(random, world, 512, 1024, 6, 2, 0);  // 4 MiB for each rank
  on_ranks(world, [&](int rank) {
    const size_t r = static_cast<size_t>(rank);
    BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
    Heap& heap = transfer.heap();
    int64_t call = 0;
    std::vector<int64_t> filling;
    const auto fill = [&] {
      if (rank != 1) return;
      try {
        for (;;) filling.push_back(heap.alloc(64));
      } catch (const HeapError&) {
      }
    };
    const auto drain = [&] {
      for (int64_t block : filling) heap.free(block);
      filling.clear();
    };
    // The block that receives rows.
    CHECK_THROWS(send(large, rank, transfer, op_of(large, 0, ++call)), HeapError);
    CHECK_EQ(heap.used(), int64_t{0});
    run_and_check(plan, rank, transfer, call);
    // The counts buffer.
    fill();
    CHECK_THROWS(send(plan, rank, transfer, op_of(plan, 0, ++call)), HandshakeFailed);
    drain();
    CHECK_EQ(heap.used(), int64_t{0});
    // Combine's copy of rows outside the heap, and the blocks of combine backward.
    const Sent sent = send(plan, rank, transfer, op_of(plan, 0, ++call));
    const Rows out{plan.out[r].data(), plan.stride()}, g{plan.g[r].data(), plan.stride()};
    Bytes y(plan.y[r].size());
    std::vector<float> grads(plan.weights[r].size());
    fill();
    try {
      transfer.sum(op_of(plan, 1, ++call), *sent.layout, out, plan.weights[r].data(), y.data());
      CHECK(!"combine must fail");
    } catch (const HandshakeFailed& error) {
      CHECK_EQ(words(error.headers[1])[kFaultWord], int64_t{4});
      CHECK(has(text(error.headers[1]), "cannot grow the heap"));
    }
    CHECK_THROWS(
        transfer.spread(op_of(plan, 2, ++call), *sent.layout, g, out, plan.weights[r].data(), true, grads.data()),
        HandshakeFailed);
    drain();
    transfer.sum(op_of(plan, 1, ++call), *sent.layout, out, plan.weights[r].data(), y.data());
    CHECK(y == plan.y[r]);
    heap.free(sent.block);
    CHECK_EQ(heap.used(), int64_t{0});
  });
}

TEST(failure_a_rank_that_never_calls_times_out_on_the_others) {
  Random random(6);
  const int world = 4;
  const Plan plan = plain_plan(random, world, 6, 40, 8, 2, 0);
  Ranks ranks(world, short_spin());
  on_ranks(world, [&](int rank) {
    BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
    int64_t call = 0;
    run_and_check(plan, rank, transfer, call);
  });
  for (auto& communicator : ranks.communicators) {
    communicator->set_timeout(0.3);
    communicator->set_step(12);
  }
  on_ranks(world, [&](int rank) {
    if (rank == 2) return;
    BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
    std::string first;
    try {
      send(plan, rank, transfer, op_of(plan, 0, 5));
      CHECK(!"the others must time out");
    } catch (const PeerTimeout& error) {
      first = error.what();
    }
    CHECK(has(first, "rank " + std::to_string(rank) +
                         " in dispatch (call 5) of layer 'layer 3' at step 12 waited for rank 2"));
    CHECK(has(first, "rank 2: between operations for") && has(first, "after dispatch backward (call 4)"));
    try {
      send(plan, rank, transfer, op_of(plan, 0, 6));
      CHECK(!"a broken group must stay broken");
    } catch (const PeerTimeout& error) {
      CHECK(first == error.what());
    }
  });
  // The late rank raises immediately, because the other ranks have failed.
  BlockingTransfer late = ranks.transfer(2, plan.expert_offsets);
  CHECK_THROWS(send(plan, 2, late, op_of(plan, 0, 5)), PeerTimeout);
  CHECK_THROWS(ranks.communicators[2]->check_peers(), PeerTimeout);
}

// Rank 0 cannot map as much of rank 1's memory as rank 1 may allocate: an error during an operation.
TEST(failure_an_error_during_an_operation_is_reported_on_every_rank) {
  Random random(7);
  Ranks ranks = Ranks::named(3, short_spin(), {2 * kGrowStep, int64_t{1} << 30, int64_t{1} << 30});
  const Plan plan = plain_plan(random, 3, 6, 40, 6, 2, 0);
  Plan large = plain_plan(random, 3, 3000, 512, 6, 1, 0);
  for (auto& ids : large.ids) std::fill(ids.begin(), ids.end(), int64_t{2});  // all to rank 1: 18 MiB
  on_ranks(3, [&](int rank) {
    BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
    int64_t call = 0;
    run_and_check(plan, rank, transfer, call);
    const Op op = op_of(large, 0, ++call);
    if (rank == 0) {
      CHECK_THROWS(send(large, rank, transfer, op), HeapError);
    } else {
      try {
        send(large, rank, transfer, op);
        CHECK(!"must fail");
      } catch (const PeerError& error) {
        CHECK(has(error.what(), "rank 0 aborted the operation after an error"));
      }
    }
    CHECK_THROWS(send(plan, rank, transfer, op_of(plan, 0, ++call)), PeerError);
  });
}

// One rank gives up while no operation runs. The others raise in their next operation, in which they wait for it.
TEST(failure_a_rank_that_gives_up_between_operations_is_named_on_every_rank) {
  Random random(8);
  Ranks ranks(3, short_spin());
  const Plan plan = plain_plan(random, 3, 6, 40, 6, 2, 0);
  on_ranks(3, [&](int rank) {
    BlockingTransfer transfer = ranks.transfer(rank, plan.expert_offsets);
    int64_t call = 0;
    run_and_check(plan, rank, transfer, call);
    if (rank == 1) ranks.communicators[1]->give_up();
    for (int attempt = 0; attempt < 2; ++attempt) {
      std::string message;
      try {
        send(plan, rank, transfer, op_of(plan, 0, ++call));
        CHECK(!"must fail");
      } catch (const PeerError& error) {
        message = error.what();
      }
      CHECK(has(message, rank == 1 ? "rank 1 aborted an operation" : "rank 1 aborted the operation"));
    }
  });
}

TEST(failure_peers_are_checked_between_operations) {
  Ranks ranks(2, short_spin());
  ranks.communicators[0]->check_peers();
  ranks.communicators[1]->set_timeout(0.05);
  Random random(9);
  const Plan plan = plain_plan(random, 2, 2, 8, 2, 1, 0);
  BlockingTransfer transfer = ranks.transfer(1, plan.expert_offsets);
  CHECK_THROWS(send(plan, 1, transfer, op_of(plan, 0, 1)), PeerTimeout);
  CHECK_THROWS(ranks.communicators[0]->check_peers(), PeerTimeout);
}

TEST(failure_attach_rejects_segments_that_are_not_of_a_rank_of_this_group) {
  const std::string prefix = "/moe_comm_tests." + std::to_string(getpid()) + ".attach";
  auto own = std::make_shared<Heap>(prefix + "0", Communicator::control_bytes(), 0, kGrowStep);
  auto empty = std::make_shared<Heap>(prefix + "1", Communicator::control_bytes(), 0, kGrowStep);
  auto other = std::make_shared<Heap>(prefix + "2", Communicator::control_bytes(), 0, kGrowStep);
  Communicator second(other, 1, 2, short_spin());
  Communicator rank0(own, 0, 2, short_spin());
  Communicator same(other, 0, 2, short_spin());
  CHECK_THROWS(rank0.attach({own->name(), empty->name()}), HeapError);  // has no control record
  CHECK_THROWS(rank0.attach({own->name(), other->name()}), HeapError);  // belongs to rank 0, not rank 1
  CHECK_THROWS(rank0.attach({own->name(), prefix + "missing"}), HeapError);
  CHECK_THROWS(rank0.attach({own->name()}), HeapError);
}

// A forked child has no threads of its parent and must not touch the parent's blocks, peers or names.
TEST(failure_a_forked_child_does_not_change_the_parents_memory) {
  const std::string name = "/moe_comm_tests." + std::to_string(getpid()) + ".fork";
  auto heap = std::make_shared<Heap>(name, Communicator::control_bytes(), 0, kGrowStep);
  auto communicator = std::make_shared<Communicator>(heap, 0, 1, short_spin());
  const int64_t block = heap->alloc(100);
  const pid_t child = fork();
  if (child == 0) {
    bool alloc_rejected = false, op_rejected = false;
    heap->free(block);
    try {
      heap->alloc(100);
    } catch (const HeapError&) {
      alloc_rejected = true;
    }
    try {
      communicator->check_peers();
    } catch (const PeerError&) {
      op_rejected = true;
    }
    {
      Heap own(name + "child", 64, 0, kGrowStep);
    }
    communicator.reset();
    heap.reset();
    _exit(alloc_rejected && op_rejected ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK_EQ(heap->blocks(), int64_t{1});
  CHECK_EQ(access(("/dev/shm" + name).c_str(), F_OK), 0);
}
