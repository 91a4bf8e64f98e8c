// Operations of peer_to_peer dispatch on one rank. Each operation is one call, which launches a sequence of kernels.
//
// State that is constant across calls is kept here, so a call passes only its own arguments. This code does not use
// Python and waits for the device only in `wait`.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "cuda/launch.h"

namespace moe_comm {
namespace p2p {

// Constants for the lifetime of the rank's block. group.timeout_ns is set by each operation.
struct RankConstants {
  Group group{};
  std::vector<int64_t> offsets;  // host copy of group.offsets_at
  int64_t headers_at = 0;        // [slots, 49] in host memory: staging buffers for headers
  int64_t all_headers_at = 0, host_counts_at = 0, left_at = 0;
};

// Device buffers for one turn. Later kernels in the same stream use them; they are not read after the turn.
struct Scratch {
  int64_t counts_at = 0, bad_at = 0, expert_rows_at = 0, offers_at = 0, all_counts_at = 0, summary_at = 0;
};

struct MeetInput {
  const char* header = nullptr;  // kHeaderWords 8-byte words
  int64_t slot = 0;              // staging slot that holds the header until the device has read it
  int64_t offer[kOfferWords] = {};
};

struct Rows {
  int64_t at = 0, stride = 0, hidden = 0, dtype = 0;
};

// This rank's rows for reduce: their number, and the addresses of rows, links and reduced rows.
struct Reduction {
  int64_t rows = 0, rows_at = 0, links_at = 0, reduced_at = 0;
};

struct Tokens {
  int64_t tokens = 0, top_k = 0;
};

// Per slot, for sum and spread: places; weights, or 0 for ones; and words that spread sends with the rows and that sum
// takes from them, or 0.
struct SlotData {
  int64_t place_at = 0, weights_at = 0, words_at = 0;
};

// Slots of dispatched tokens: expert ids, and output for places. `chunk`: slots per block of count.
struct Slotted {
  Tokens of;
  int64_t ids_at = 0, place_at = 0, chunk = 1;
};

// How push sends rows, on at most `blocks` blocks; see PushArgs. wait: also launch the kernels that wait for the rows
// of all ranks; otherwise the caller launches `arrive`. order_at: where to list the slots by expert, or 0; by_expert:
// push walks this list, unless it converts or relays rows. strict, own_counts_at, digest_at: see MeetArgs.
struct Sending {
  int64_t blocks = 1, format = 0, power_of_two = 0, bulk = 0, wait = 1, order_at = 0, by_expert = 0, strict = 0,
          own_counts_at = 0, digest_at = 0;
};

// The homes of experts, and the memory of a plan; see MOE_P2P_HOMES.
struct Lending {
  int64_t routed = 0, homes_at = 0, copies = 0, plan_at = 0;
};

// Settings and memory of lend; see LendArgs.
struct LendSettings {
  int64_t rows = 0, memory = 0, row_ns = 0, copy_ns = 0, work_at = 0, tally_at = 0;
};

// Sizes of the tensors of a stack; see MOE_P2P_STACK.
using StackSizes = std::array<int64_t, 4>;

// Buffers of relayed rows; rows == 0: no relay.
struct Links {
  int64_t rows_at = 0, scales_at = 0, links_at = 0, rows = 0, blocks = 0;
};

// Counts from the last meet with counts.
struct Counted {
  std::vector<int64_t> own;           // rows for each of this rank's experts
  std::vector<int64_t> rows;          // rows for each rank
  std::vector<int64_t> header_words;  // one header word from each rank
  int64_t dropped = 0;
};

class Plan {
 public:
  Plan(std::shared_ptr<Starter> starter, const RankConstants& home);

  // Begin an operation: kernels are launched on `stream`. captured: the launches are recorded in a CUDA graph and run
  // at replay, which advances the device's turn.
  void begin(uintptr_t stream, int64_t timeout_ns, bool captured);
  void use(const Scratch& scratch) { scratch_ = scratch; }

  // Launch a dispatch: the counts and the offered buffers are exchanged in one meet, and the rows move.
  void dispatch(const MeetInput& input, const Slotted& slots, const Rows& x, const Sending& how, const Links& links);
  // Launch the wait for the rows of some ranks, in the turn of a dispatch.
  void arrive(int64_t first_source, int64_t sources);
  // Return whether all rows of a rank have been written. Only where the host can read the blocks.
  bool received(int64_t source) const;
  // Launch a meet without counts.
  void meet(const MeetInput& input);
  // A whole turn: meet, sum and done. Without tokens, done is a launch of its own.
  void combine(const MeetInput& input, int64_t blocks, const Tokens& t, const Rows& y, const SlotData& slots);
  // A turn: meet and spread, and done unless the caller ends it. dots_at, order_at: see SpreadArgs.
  void send(const MeetInput& input, int64_t blocks, const Tokens& t, const Rows& grad, const SlotData& slots,
            int64_t dots_at = 0, int64_t order_at = 0, bool ends = true);
  // As sum, of results that are still computed: each slice of columns after all ranks have computed it.
  void sum_slices(int64_t blocks, const Tokens& t, const Rows& y, int64_t place_at, int64_t weights_at);
  // As sum, with rows that their owners have reduced.
  void sum_reduced(int64_t blocks, const Tokens& t, const Rows& y, int64_t place_at, int64_t weights_at,
                   const Reduction& own);
  // End a turn.
  void done();

  // Lending; see cuda/lend.h. A turn before the dispatch: replaces the places of `slots` by ids of slots.
  void lend(const MeetInput& input, const Slotted& slots, const Lending& homes, const LendSettings& settings);
  // Launch the copies of weights from stacks of elements of `element` bytes.
  void pull(const Lending& homes, const StackSizes& sizes, int64_t stacks_at, int64_t element, int64_t blocks);
  // A turn: the sums of offered gradients, as elements of `dtype`.
  void collect(const MeetInput& input, const Lending& homes, const StackSizes& sizes, const StackSizes& out_at,
               int64_t dtype, int64_t blocks);

  // Low latency; see dispatch/peer_to_peer/low_latency.py.
  void send_few(LlSendArgs args);
  void receive_few(int64_t parts, int64_t counts_at);
  void sum_few(int64_t blocks, const Tokens& t, const Rows& y, int64_t place_at, int64_t weights_at, int64_t offers_at);

  // Number of turns launched so far, excluding captured launches.
  int64_t turn = 0;

  int64_t completed_turn() const;  // last turn that the device has reported as completed
  bool failed() const;
  // Return true once turn `until` is completed or a fault is reported; false after `limit_ns`.
  bool wait(int64_t until, int64_t limit_ns) const;
  Counted counted(int64_t header_word) const;

 private:
  // args: all words except those of the group, which start() fills in.
  template <class Args>
  void start(Kernel kernel, int64_t blocks, Args& args);
  template <class Args>
  Args push_args(const Slots& slots, const Rows& x, const Sending& how, const Links& links) const;
  template <class Args>
  Args meet_args(const MeetInput& input, const Slots* slots, const Sending* how) const;
  Slots slots_of(const Slotted& s) const;
  // Count slots whose ids are below `ids`, and meet with the counts.
  void count_and_meet(const MeetInput& input, const Slots& slots, const Sending& how, int64_t ids);
  // offers_at: the offers for rows at fixed offsets; 0 uses the offers of the last meet. ends: also run done.
  void sum(int64_t blocks, const Tokens& t, const Rows& y, const SlotData& slots, int64_t offers_at, bool ends);
  template <class Args>
  Args sum_args(const Tokens& t, const Rows& y, const SlotData& slots, int64_t offers_at) const;
  template <class Args>
  Args spread_args(const Tokens& t, const Rows& grad, const SlotData& slots, int64_t dots_at) const;
  void stage(int64_t number);
  void counted_one() { turn += captured_ ? 0 : 1; }

  const std::shared_ptr<Starter> starter_;
  RankConstants constants_;
  Scratch scratch_;
  uintptr_t stream_ = 0;
  bool captured_ = false;
};

}  // namespace p2p
}  // namespace moe_comm
