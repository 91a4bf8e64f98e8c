// A transfer between its two halves: begun, and not over yet, so that the caller computes while the peers do their
// part.
//
//   Arriving   this rank's rows stand at their owners   next(peers)   whose rows stand in this rank's block, too
//   Leaving    this rank's rows are being computed      raise(peer)   those that `peer` reads stand
//                                                       sum           reads the peers', as soon as theirs do
//
// A transfer that has nothing to compute meanwhile goes through both halves at once (transfer.cpp); ranks need not do
// alike. Calls come from one thread, the last from the thread that made the first.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "communicator.h"
#include "errors.h"
#include "heap.h"

namespace moe_comm {

struct Layout;

class Underway {
 public:
  // `communicator` null: there are no peers.
  Underway(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap);
  Underway(const Underway&) = delete;
  Underway& operator=(const Underway&) = delete;

  // This rank reads and writes no more of its peers' memory.
  void leave();
  // ... and nobody does of its own.
  void finish();
  // Instead of finish, after an error: the peers hear of it. Not needed after an exception from here.
  void abandon() { scope_.reset(); }
  // Whether it came to an end that all ranks reached. Before, and after an error for ever, a peer may be writing to
  // this rank's block. Any thread may ask.
  bool finished() const { return finished_.load(); }

  // --- for Transfer ---
  // A block of the heap until the end, or until it is given to somebody else.
  int64_t alloc(int64_t bytes);
  int64_t give(int64_t block);
  void begin(const Op& op);
  void post(const Op& op);

 protected:
  void check_open() const {
    if (!scope_) throw std::logic_error("this transfer is over");
  }
  // What follows after an exception: the operation is over, on all ranks alike if they disagree.
  template <class Step>
  auto step(Step part) {
    check_open();
    try {
      return part();
    } catch (const HandshakeFailed&) {
      close();
      throw;
    } catch (...) {
      scope_.reset();
      throw;
    }
  }
  void close();

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Heap> heap_;

 private:
  std::vector<int64_t> blocks_;
  std::atomic<bool> finished_{false};
  std::optional<OpScope> scope_;
};

class Arriving : public Underway {
 public:
  using Underway::Underway;
  // Whether all rows of `peer` stand in this rank's block.
  bool ready(int peer) const;
  // The first of `peers` of which they do, once there is one; in the order given.
  int next(const std::vector<int>& peers);
};

class Leaving : public Underway {
 public:
  static constexpr int64_t kFlagBytes = 64;  // a cache line each: they are polled

  Leaving(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap, const Layout& layout, int threads);
  // The rows of this rank's block that `peer` dispatched stand.
  void raise(int peer);
  // Whether sum would not wait.
  bool ready();
  // y [T, D] = the rows of each token of this rank, times `weights` [T, K] where they are not null, in order of slot;
  // as soon as all peers have raised this rank's flag. Its own rows must stand. Then this rank has left.
  void sum(const float* weights, char* y);

  // --- for Transfer ---
  // The rows stand `rows_offset` from the heap's start. Without flags where they are `computed`.
  void offer(int64_t rows_offset, bool computed);

 private:
  // Of `owner`, for rank `of`; null: all its rows stand.
  std::atomic<uint32_t>* flag(int owner, int of);

  const Layout& layout_;
  int threads_;
  Record alone_{};  // where there is no communicator
};

}  // namespace moe_comm
