// Communication between the ranks of one host, which map each other's heaps: handshake, waits with deadlines, and
// detection of dead peers.
//
// Every rank publishes a record in the control region at the start of its segment. It also publishes a counter,
// `progress`, that only increases (and wraps). Operation number n uses four counts:
//
//   4n + 1  posted    header, counts and offsets of this operation can be read
//   4n + 2  ready     the block that peers write to is allocated (dispatch only)
//   4n + 3  done      this rank no longer reads or writes its peers' memory
//
// A waiting rank sleeps on its own doorbell. Peers ring it after each step, so one futex serves all waits. A rank
// starts operation n + 1 only after all ranks are done with n, so one record per rank is enough.
//
// An operation whose peers read nothing but the record may end before all ranks are done (finish_later). The rank then
// waits for them when its next operation begins.
//
// begin waits for all ranks. An operation that overlaps communication with computation uses the separate steps instead:
// post, wait_any_posted for each peer, flags in its own published block, publish_done, wait_any_done.
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

constexpr int kHeaderWords = 49;   // packed by comm/header.py
constexpr int kComparedWords = 8;  // the first kComparedWords words must be equal on all ranks
constexpr int kFaultWord = 8;      // 0, or 1 + the kind of error in this rank's input
constexpr int kTextWord = 9;
constexpr int kValues = 2;

struct Record {
  int64_t header[kHeaderWords];
  int64_t counts_offset;  // dispatch: slots per global expert, E int64
  int64_t rows_offset;    // the block peers read from (sum, spread)
  int64_t rows_bytes;     // the size of that block, and of the block written to in spread
  int64_t block_offset;   // the block peers write to; -1 before it is allocated, -2 if the allocation failed
  int64_t extra_offset;   // the extra words of the rows of that block, and their size
  int64_t extra_bytes;
  int64_t flags_offset;     // sum: one flag per reading rank, set once its rows are written; -1: all rows are written
  int64_t values[kValues];  // Exchange::values
};

struct Control {
  std::atomic<uint64_t> magic;  // written after pid and rank
  int32_t pid;
  uint32_t rank;
  alignas(64) std::atomic<uint32_t> doorbell;  // rung by peers
  std::atomic<uint32_t> sleeping;
  alignas(64) std::atomic<uint32_t> progress;  // written only by the owner
  std::atomic<uint32_t> failure;               // 0, or a FailureKind value: why the group failed on the owner
  std::atomic<int32_t> failed_rank;            // the rank that caused it
  // The owner's current activity, for error reports. Words that do not belong together are harmless there.
  alignas(64) std::atomic<int64_t> since_ns;
  std::atomic<int64_t> step;
  std::atomic<int32_t> waiting_for;  // a rank, or -1
  std::atomic<int32_t> in_op;        // 0 between operations
  Record record;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free,
              "atomics in shared memory must not hide a lock");

// The header of this rank's next operation.
struct Op {
  int64_t compared[kComparedWords];
  std::string label;
  int64_t fault = 0;  // 1 + kind
  std::string fault_text;
};

enum class FailureKind : uint32_t { died = 1, timeout = 2, aborted = 3 };

std::string pack_header(const Op& op);

class Communicator {
 public:
  struct Options {
    double timeout_s = 300;
    double spin_us = 50;
    uint32_t first_progress = 0;  // tests set a value close to the wrap-around
    bool watch_pids = true;
    std::function<void()> on_wait;  // called about every 0.1 s during a long wait; may throw (Ctrl-C)
  };

  Communicator(std::shared_ptr<Heap> heap, int rank, int world, Options options);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  static int64_t control_bytes() { return sizeof(Control); }
  // Open the peers' segments by name. The owner's name is ignored.
  void attach(const std::vector<std::string>& names);
  // Same as attach, for ranks that are threads of one process (tests under sanitizers).
  void attach_local(const std::vector<std::shared_ptr<Heap>>& heaps);

  int rank() const { return rank_; }
  int world() const { return world_; }
  Heap& heap() const { return *heap_; }
  const std::shared_ptr<Heap>& heap_ptr() const { return heap_; }
  void set_step(int64_t step);
  void set_timeout(double seconds) { timeout_s_.store(seconds, std::memory_order_relaxed); }
  // Throw if a peer is dead or reports a failure; does not wait. Does nothing while another thread runs an operation,
  // because that operation checks its peers itself.
  void check_peers();
  // Return the pids of all ranks, as recorded by attach.
  std::vector<int32_t> pids() const;

  // --- the protocol; one thread runs each operation, from begin to finish ---
  // Throws PeerError in a forked child, where a thread of the parent may have held the lock.
  std::unique_lock<std::mutex> lock() {
    check_owner();
    return std::unique_lock<std::mutex>(mutex_);
  }
  Record& record() { return control(rank_).record; }
  const Record& record(int peer) const { return control(peer).record; }
  // Whether this process created the group. A forked child must not use it.
  bool owned() const;
  // Throw unless owned().
  void check_owner() const;
  // Throw if an earlier operation failed, or as check_owner.
  void check_usable() const;
  // Publish `op`, wait for all ranks and compare headers. Throws HandshakeFailed on a mismatch; the next operation may
  // then begin.
  void begin(const Op& op);
  // The first part of begin: publish `op`.
  void post(const Op& op);
  // The second part of begin, peer by peer: wait until one of `peers` has posted and return it. Throws HandshakeFailed
  // if that peer posted a different header; the operation is then over. Every rank must call this for each of its
  // peers, so that all ranks detect a mismatch.
  int wait_any_posted(const std::vector<int>& peers);
  // Return whether wait_any_posted would return `peer` immediately.
  bool has_posted(int peer) const;
  // Return whether the header of `peer` matches this rank's header and reports no fault.
  bool header_matches(int peer) const;
  // Wait until one of `peers` no longer reads or writes this rank's memory, and return it.
  int wait_any_done(const std::vector<int>& peers);
  bool is_done(int peer) const;
  // Throw std::invalid_argument unless all of `peers` are valid ranks other than this one.
  void check_peer_ranks(const std::vector<int>& peers) const;
  // Raise `flag` in this rank's memory and wake `peer`, which may be waiting for it.
  void raise_flag(std::atomic<uint32_t>& flag, int peer);
  // Wait until `peer` has raised `flag` in its memory. Throws HandshakeFailed if `peer` ended the operation because of
  // a header mismatch.
  void wait_flag(const std::atomic<uint32_t>& flag, int peer);
  // Dispatch only: publish_ready announces this rank's block; wait_ready waits for the blocks of all ranks.
  void publish_ready();
  void wait_ready();
  // Announce that this rank no longer reads or writes its peers' memory. This is the first part of finish, which then
  // waits until all peers have announced it too.
  void publish_done();
  void finish();
  // As finish, but the next operation waits for the peers. For operations whose peers read this rank's record only.
  void finish_later();
  // Wait for the peers of an operation that finish_later has ended. post does so; call it before writing the record
  // fields of such an operation.
  void settle();
  // Called at the end of every operation. If the operation did not finish, this notifies the peers that this rank
  // aborted it.
  void abandon();
  // Notify the peers that this rank takes part in no further operation. Does nothing in a forked child.
  void give_up();
  // Return the address of [offset, offset + bytes) in a peer's segment. Maps more of the segment where needed.
  char* address(int peer, int64_t offset, int64_t bytes);

 private:
  struct Peer {
    std::shared_ptr<Heap> local;  // own heap, or the heap of a rank in the same process
    std::unique_ptr<Mapping> map;
    int pidfd = -1;
    int32_t pid = 0;
  };

  Control& control(int peer) const;
  char* peer_base(int peer) const;
  void advance(uint32_t phase);
  void end_operation();
  void wait_all(uint32_t phase);
  // Wait until condition() returns true; `peer` is the rank waited for.
  struct WaitTimes;
  template <class Condition>
  void wait_for(int peer, WaitTimes& times, Condition condition);
  bool has_reached(int peer, uint32_t phase) const;
  // Return the first of `peers` that reaches `phase`.
  int wait_first(const std::vector<int>& peers, uint32_t phase);
  // Wait until all ranks have posted, then throw HandshakeFailed.
  [[noreturn]] void fail_handshake();
  // Throw if a peer is dead or reports a failure. waiting_for: the rank that the message names, or -1.
  void throw_if_peer_failed(int waiting_for);
  bool alive(int peer) const;
  [[noreturn]] void fail(FailureKind kind, int failed_rank, const std::string& text);
  [[noreturn]] void fail_timeout(int peer, int64_t waited_ns);
  [[noreturn]] void throw_failure() const;
  // What this rank does, as the start of an error message; waiting_for -1: it is between operations.
  std::string describe_wait(int waiting_for) const;
  std::string describe_state(int peer) const;
  void ring(int peer);
  void ring();

  std::shared_ptr<Heap> heap_;
  int rank_;
  int world_;
  Options options_;
  std::atomic<double> timeout_s_;
  std::vector<Peer> peers_;
  uint32_t op_base_;  // value of `progress` at the start of the current operation
  bool in_op_ = false;
  bool done_published_ = false;
  bool unsettled_ = false;  // the last operation ended by finish_later
  std::string failure_;
  FailureKind failure_kind_ = FailureKind::died;
  std::mutex mutex_;
};

// Scope of one operation on the communicator (or without one, if null). If an exception leaves the scope, the peers are
// notified; otherwise they would wait for this rank until their deadline.
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
