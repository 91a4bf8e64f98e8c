// Ranks of one host that see each other's heaps: handshakes, waiting with deadlines, and noticing the dead.
//
// Every rank publishes a record in the control region at the start of its segment, and one counter, `progress`,
// that only grows (and wraps). An operation number n takes four counts:
//
//   4n + 1  arrived   header, counts and offsets of this operation can be read
//   4n + 2  ready     the block that peers write to has been allocated (dispatch only)
//   4n + 3  done      this rank reads and writes peers' memory no more
//
// A rank that waits sleeps on its own doorbell, which peers ring after each step; so one futex serves all waits.
// Nobody starts operation n + 1 before all are done with n, so one record per rank is enough.
//
// begin waits for all. An operation that has work to do meanwhile takes it apart: post, then wait_any for its peers one
// after the other, and flags of its own within the block that it offers; and at its end leave, then wait_left.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "heap.h"

namespace moe_comm {

constexpr int kHeaderWords = 49;   // as comm/header.py packs them
constexpr int kComparedWords = 8;  // of these, the first must agree
constexpr int kFaultWord = 8;      // 0, or 1 + the kind of error in this rank's input
constexpr int kTextWord = 9;

struct Record {
  int64_t header[kHeaderWords];
  int64_t counts_offset;  // dispatch: slots per global expert, E int64
  int64_t rows_offset;    // the block peers read from (sum, spread)
  int64_t rows_bytes;     // its size, and that of the block written to in spread
  int64_t block_offset;   // the block peers write to; -1 while there is none, -2 if it could not be allocated
  int64_t flags_offset;   // sum: for each rank, whether the rows that it reads stand; -1: all do
};

struct Control {
  uint64_t magic;
  int32_t pid;
  uint32_t rank;
  alignas(64) std::atomic<uint32_t> doorbell;  // rung by peers
  std::atomic<uint32_t> sleeping;
  alignas(64) std::atomic<uint32_t> progress;  // written by the owner alone
  std::atomic<uint32_t> broken;                // 0, or 1 + kind: the owner gave up, and why
  std::atomic<int32_t> culprit;                // the rank it blames
  // What the owner is doing, for reports; torn reads do no harm.
  alignas(64) std::atomic<int64_t> since_ns;
  std::atomic<int64_t> step;
  std::atomic<int32_t> waiting_for;  // a rank, or -1
  std::atomic<int32_t> in_op;        // 0 between operations
  Record record;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free,
              "atomics in shared memory must not hide a lock");

// One operation as this rank is about to do it.
struct Op {
  int64_t compared[kComparedWords];
  std::string label;
  int64_t fault = 0;  // 1 + kind
  std::string fault_text;
};

enum class Broken : uint32_t { died = 1, timeout = 2, gave_up = 3 };

std::string pack_header(const Op& op);

class Communicator {
 public:
  struct Options {
    double timeout_s = 300;
    double spin_us = 50;
    uint32_t first_progress = 0;  // tests start near the wrap
    bool watch_pids = true;
    std::function<void()> on_wait;  // called about every 0.1 s of a long wait; may throw (Ctrl-C)
  };

  Communicator(std::shared_ptr<Heap> heap, int rank, int world, Options options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  static int64_t control_bytes() { return sizeof(Control); }
  // Open the peers' segments by name. The owner's name is ignored.
  void attach(const std::vector<std::string>& names);
  // The same for ranks that are threads of one process (tests under sanitizers).
  void attach_local(const std::vector<std::shared_ptr<Heap>>& heaps);

  int rank() const { return rank_; }
  int world() const { return world_; }
  Heap& heap() const { return *heap_; }
  const std::shared_ptr<Heap>& heap_ptr() const { return heap_; }
  void set_step(int64_t step);
  void set_timeout(double seconds) { timeout_s_.store(seconds, std::memory_order_relaxed); }
  // Throws if a peer is dead or has given up, without waiting. Does nothing while another thread is in an operation,
  // which looks for itself.
  void check_peers();
  // Pids of all ranks, as attached.
  std::vector<int32_t> pids() const;

  // --- the protocol; between begin and finish one thread runs one operation ---
  std::unique_lock<std::mutex> lock() { return std::unique_lock<std::mutex>(mutex_); }
  Record& record() { return control(rank_).record; }
  const Record& record(int peer) const { return control(peer).record; }
  // Throws if an earlier operation broke the group, or in a forked child of the process that made it.
  void check_usable() const;
  // Publish `op`, wait for all, compare. Throws HandshakeFailed, after which the next operation may begin.
  void begin(const Op& op);
  // The first part of begin: publish `op`.
  void post(const Op& op);
  // The rest of it, peer by peer: the first of `peers` that has posted, once one has. Throws HandshakeFailed if it
  // posted something else, and this operation is over. Every rank must ask for each of its peers: so all find out.
  int wait_any(const std::vector<int>& peers);
  // Whether wait_any would give `peer` at once; and then, whether it would throw.
  bool has_posted(int peer) const;
  bool agrees(int peer) const;
  // The first of `peers` that reads and writes this rank's memory no more, once there is one.
  int wait_left(const std::vector<int>& peers);
  bool has_left(int peer) const;
  // Throws std::invalid_argument unless `peers` are some of the other ranks.
  void must_be_peers(const std::vector<int>& peers) const;
  // Tell `peer`, which may be waiting for it, that `flag` in this rank's memory is up.
  void raise(std::atomic<uint32_t>& flag, int peer);
  // Until `flag` in the memory of `peer` is up. Throws HandshakeFailed if it left instead because ranks disagree.
  void wait_flag(const std::atomic<uint32_t>& flag, int peer);
  // Dispatch only: tell that the block stands; wait until all blocks stand.
  void publish_ready();
  void wait_ready();
  // Tell that this rank reads no more of its peers' memory: the first part of finish, which waits until nobody does.
  void leave();
  void finish();
  // Called at the end of every operation; if it did not finish, the peers are told that this rank gave up.
  void abandon();
  // Address of [offset, offset + bytes) in a peer's segment, mapping more of it where needed.
  char* address(int peer, int64_t offset, int64_t bytes);

 private:
  struct Peer {
    std::shared_ptr<Heap> local;  // own heap, or a thread's
    std::unique_ptr<Mapping> map;
    int pidfd = -1;
    int32_t pid = 0;
  };

  Control& control(int peer) const;
  char* peer_base(int peer) const;
  void advance(uint32_t phase);
  void wait_all(uint32_t phase);
  // Until met(), for which this rank waits for `peer`.
  struct Patience;
  template <class Met>
  void wait_for(int peer, Patience& patience, Met met);
  bool has_reached(int peer, uint32_t phase) const;
  // The first of `peers` to reach `phase`.
  int wait_first(const std::vector<int>& peers, uint32_t phase);
  // Once all have posted, throws HandshakeFailed.
  [[noreturn]] void disagree();
  void look_after(int waiting_for);
  bool alive(int peer) const;
  [[noreturn]] void give_up(Broken why, int culprit, const std::string& text);
  [[noreturn]] void too_late(int peer, int64_t waited_ns);
  [[noreturn]] void throw_failure() const;
  std::string situation(int culprit) const;
  std::string describe(int peer) const;
  void ring(int peer);
  void ring();

  std::shared_ptr<Heap> heap_;
  int rank_;
  int world_;
  Options options_;
  std::atomic<double> timeout_s_;
  std::vector<Peer> peers_;
  uint32_t op_base_;  // progress value of the current operation's start
  bool in_op_ = false;
  bool left_ = false;
  std::string failure_;
  Broken failure_kind_ = Broken::died;
  std::mutex mutex_;
};

// One operation on the communicator (or on none). Left by an exception in the middle, it tells the peers, who would
// otherwise wait for this rank until their deadline.
class OpScope {
 public:
  explicit OpScope(Communicator* communicator) : communicator_(communicator) {
    if (!communicator_) return;
    lock_ = communicator_->lock();
    communicator_->check_usable();
  }
  ~OpScope() {
    if (communicator_) communicator_->abandon();
  }
  OpScope(const OpScope&) = delete;
  OpScope& operator=(const OpScope&) = delete;
  void finish() {
    if (communicator_) communicator_->finish();
  }

 private:
  Communicator* communicator_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace moe_comm
