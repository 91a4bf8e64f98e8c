// One rank's operations of peer_to_peer, each a row of launches: all that the host does between two looks at what came.
//
// What stays from call to call is kept here, so that a call names only what is its own. No Python, and no waiting for
// the device but in `wait`.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cuda/launch.h"

namespace moe_comm {
namespace p2p {

// What stays as long as the rank's block. group.timeout_ns is each operation's own.
struct Home {
  Group group{};
  std::vector<int64_t> offsets;  // as at group.offsets_at, for the host
  int64_t headers_at = 0;        // [slots, 49] in host memory: headers on their way to the device
  int64_t all_headers_at = 0, host_counts_at = 0, left_at = 0;
};

// Of one turn, on the device: kernels behind each other use it, and nothing reads it later.
struct Scratch {
  int64_t counts_at = 0, bad_at = 0, offers_at = 0, all_counts_at = 0, summary_at = 0;
};

struct Told {
  const char* header = nullptr;  // kHeaderWords words
  int64_t slot = 0;              // where they stand until the device has read them
  int64_t offer[kOfferWords] = {};
};

struct Rows {
  int64_t at = 0, stride = 0, hidden = 0, dtype = 0;
};

struct Tokens {
  int64_t tokens = 0, top_k = 0;
};

// Of relayed rows; `rows` 0: none.
struct Links {
  int64_t rows_at = 0, scales_at = 0, links_at = 0, rows = 0, blocks = 0;
};

// What this rank and all ranks have, from the last meeting with counts.
struct Counted {
  std::vector<int64_t> own;   // rows for each of this rank's experts
  std::vector<int64_t> rows;  // for each rank
  std::vector<int64_t> said;  // one word of each rank's header
  int64_t dropped = 0;
};

class Plan {
 public:
  Plan(std::shared_ptr<Starter> starter, const Home& home);

  // An operation begins: its launches go to `stream`. captured: they run when a graph does, which counts their turns.
  void begin(uintptr_t stream, int64_t timeout_ns, bool captured);
  void use(const Scratch& scratch) { scratch_ = scratch; }

  // Counts slots and begins a turn that tells how many; the rows of `move` are these slots'.
  void count_and_meet(const Tokens& t, int64_t ids_at, int64_t chunk, const Told& told);
  // Begins a turn without counts.
  void meet(const Told& told);
  void move(const Rows& x, int64_t place_at, int64_t format, int64_t power_of_two, const Links& links);
  // offers_at: of rows that stay where they are; 0: those of the last meeting.
  void sum(int64_t blocks, const Tokens& t, const Rows& y, int64_t place_at, int64_t weights_at, int64_t offers_at = 0);
  void spread(int64_t blocks, const Tokens& t, const Rows& grad, int64_t place_at, int64_t weights_at, int64_t dots_at);
  // Ends the turn of sum or spread.
  void done();

  // Few rows; see dispatch/peer_to_peer/few.py.
  void send_few(LlSendArgs args);
  void receive_few(int64_t parts, int64_t counts_at);
  void sum_few(int64_t blocks, const Tokens& t, const Rows& y, int64_t place_at, int64_t weights_at, int64_t offers_at);

  // Turns that were launched and will count when they run.
  int64_t turn = 0;

  int64_t seen_turn() const;  // that is over on the device, as far as the host can see
  bool failed() const;
  // Whether turn `until` is over, or something has failed, before `limit_ns` have passed.
  bool wait(int64_t until, int64_t limit_ns) const;
  Counted counted(int64_t header_word) const;

 private:
  // args: without the group's words, which are this rank's.
  template <class Args>
  void start(Kernel kernel, int64_t blocks, Args& args);
  void meet(const Told& told, bool with_counts);
  void counted_one() { turn += captured_ ? 0 : 1; }

  const std::shared_ptr<Starter> starter_;
  Home home_;
  Scratch scratch_;
  Slots slots_{};
  uintptr_t stream_ = 0;
  bool captured_ = false;
};

}  // namespace p2p
}  // namespace moe_comm
