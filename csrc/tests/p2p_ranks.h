// Ranks of peer_to_peer dispatch as threads of one process. The kernels of csrc/cuda run on the host.
#pragma once

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/args.h"
#include "cuda/launch.h"
#include "cuda/machine.h"
#include "cuda/shared.h"
#include "reference.h"

namespace moe_comm::test {

// Inputs and expected results of one dispatch and the operations that follow it, on all ranks.
struct P2pCase {
  int world = 1, dtype = 0;
  int64_t hidden = 8, top_k = 1, chunk = 1, format = 0, room = -1, push_blocks = 2;
  bool power_of_two = false, relay = false, bulk = false, by_expert = false;
  bool merged = false;   // the last block of a kernel runs the next one
  bool at_once = false;  // the blocks of such kernels run in threads
  std::vector<int64_t> offsets, tokens;
  std::vector<std::vector<int64_t>> ids;
  std::vector<Bytes> x, g, out;  // [T, hidden], [T, hidden] by rank; [R, hidden] by owner
  std::vector<std::vector<float>> weights;
  // Indexed by rank:
  struct Slot {
    int64_t expert, source, slot;
  };
  std::vector<std::vector<Slot>> rows;  // of each owner, in contract order, including rows beyond capacity
  std::vector<std::vector<int64_t>> places;
  std::vector<int64_t> dropped, overflow;

  int64_t routed = 0;  // ids are below it; 0: below experts()

  int64_t experts() const { return offsets.back(); }
  int64_t ids_below() const { return routed > 0 ? routed : experts(); }
  int64_t local_experts() const;
  int64_t element() const { return dtype == 0 ? 4 : 2; }
  int64_t kept(int64_t owner) const;  // number of an owner's rows within capacity
};

// The layout of the control area depends on the experts, so all cases of one P2pRanks have equal offsets.
P2pCase random_case(Random& random, const std::vector<int64_t>& offsets);
std::vector<int64_t> random_offsets(Random& random, int world);
// Fill in routing, tensors and expected results. The caller has set world, dtype, hidden, top_k, offsets, tokens and
// room.
void fill_case(Random& random, P2pCase& c);

class P2pRanks {
 public:
  static constexpr int64_t kRegionBytes = int64_t{1} << 18;
  static constexpr int64_t kMostExperts = 40;

  P2pRanks(int world, double timeout_s = 30);

  struct Rank {
    p2p::State state{};
    p2p::Report report{};
    int64_t abort = 0, digest = 0;
    std::vector<int64_t> header, offers, all_headers, all_counts, host_counts, summary, left, counts, bad, expert_rows,
        place, order;
  };

  // Arguments common to all kernels.
  p2p::Group group(int rank, const P2pCase& c);
  template <class Args>
  Args args(int rank, const P2pCase& c) {
    Args a{};
    const p2p::Group g = group(rank, c);
#define MOE_P2P_SET(name) a.name = g.name;
    MOE_P2P_GROUP(MOE_P2P_SET)
#undef MOE_P2P_SET
    return a;
  }
  // Also the words of slots.
  template <class Args>
  Args slot_args(int rank, const P2pCase& c);
  // Also the words of meet.
  template <class Args>
  Args meet_args(int rank, const P2pCase& c, bool with_counts, const std::vector<int64_t>& offer);
  template <class Args>
  void push_rows(const char* kernel, int rank, const P2pCase& c);
  template <class Args>
  void spread_rows(const char* name, void (*kernel)(p2p::Machine&, const Args&), int rank, const P2pCase& c,
                   float* dots);
  // Byte offset of a region in this rank's block: 0 rows, 1 gradients, 2 scales, 3 links, 4 results.
  int64_t region(int rank, const P2pCase& c, int which) const;
  char* data(int rank, int64_t offset) { return peers_[static_cast<size_t>(rank)] + offset; }
  Rank& of(int rank) { return ranks_[static_cast<size_t>(rank)]; }

  // Counts, scans, lists slots by expert, and meets with counts. Returns false if the turn failed.
  bool count(int rank, const P2pCase& c, const std::vector<int64_t>& offer);
  // offer: the regions of this rank. Returns false if the turn failed.
  bool meet(int rank, const P2pCase& c, bool with_counts, const std::vector<int64_t>& offer);
  std::vector<int64_t> dispatch_offer(int rank, const P2pCase& c);
  void push(int rank, const P2pCase& c);
  void arrive(int rank, const P2pCase& c);
  void fan_out(int rank, const P2pCase& c);
  void sum(int rank, const P2pCase& c, bool weighted, char* y, float* words = nullptr);
  // The kernels between meet and done of a reduced combine. The rows are in region 4, links in 3, reduced rows in 0.
  void sum_reduced(int rank, const P2pCase& c, char* y);
  void spread(int rank, const P2pCase& c, float* dots);
  void done(int rank, const P2pCase& c);
  // Runs done, or checks that the last block of the kernel before it ran it.
  void end(int rank, const P2pCase& c, bool ended);

  // Run dispatch, combine and backward, and check the results.
  void run_and_check(int rank, const P2pCase& c);
  void check_received(int rank, const P2pCase& c, const char* rows, const char* scales, int64_t n);
  // Combine with rows that owners reduce, and compare with a literal implementation.
  void check_reduced(int rank, const P2pCase& c);
  void check_row(const P2pCase& c, const P2pCase::Slot& slot, const char* row, const char* scales);

 private:
  int world_;
  int64_t timeout_ns_;
  std::vector<std::vector<p2p::Words16>> memory_;
  std::vector<char*> peers_;
  std::vector<Rank> ranks_;
};

// Emulated threads per block in run_p2p; the distribution of work depends on it. Set it only while no rank runs.
inline int host_threads = 1;

template <class Args>
void run_p2p(const char* name, int64_t blocks, const Args& a) {
  const int kernel = p2p::kernel_number(name);
  if (p2p::argument_bytes(kernel) != static_cast<int64_t>(sizeof a)) fail(name, 0, "wrong arguments");
  p2p::run_on_host(kernel, blocks, &a, host_threads);
}

// Run the blocks of a kernel, each in a thread if `at_once`: any of them may end last.
template <class Args>
void run_blocks(const char* name, void (*kernel)(p2p::Machine&, const Args&), int64_t blocks, const Args& a,
                bool at_once) {
  if (!at_once) return run_p2p(name, blocks, a);
  std::vector<std::thread> threads;
  for (int64_t block = 0; block < blocks; ++block) {
    threads.emplace_back([&, block] {
      const int64_t bytes = p2p::shared_bytes(a, host_threads);
      std::vector<p2p::Words16> memory(static_cast<size_t>(bytes / 16 + 1));
      p2p::Machine m(block, blocks, reinterpret_cast<char*>(memory.data()), bytes, host_threads);
      kernel(m, a);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

template <class Args>
Args P2pRanks::slot_args(int rank, const P2pCase& c) {
  const auto at = static_cast<size_t>(rank);
  Rank& me = of(rank);
  Args a = args<Args>(rank, c);
  a.tokens = c.tokens[at];
  a.top_k = c.top_k;
  a.ids_at = reinterpret_cast<int64_t>(c.ids[at].data());
  a.chunk = c.chunk;
  a.chunks = (a.tokens * a.top_k + a.chunk - 1) / a.chunk;
  a.counts_at = reinterpret_cast<int64_t>(me.counts.data());
  a.bad_at = reinterpret_cast<int64_t>(me.bad.data());
  a.expert_rows_at = reinterpret_cast<int64_t>(me.expert_rows.data());
  a.place_at = reinterpret_cast<int64_t>(me.place.data());
  return a;
}

// Convert to e4m3 by searching the 127 magnitudes; ties to even.
uint8_t e4m3_by_search(float f);
float e4m3_value(int byte);

}  // namespace moe_comm::test
