// A pending dispatch or combine: begun but not completed, so that the caller can compute in the meantime.
//
//   Arriving   own rows are written at their owners   next(peers)   rows of that peer are complete in this block
//   Leaving    own rows are still being computed      raise(peer)   the rows that `peer` reads are written
//                                                       sum           reads the peers' rows once they are written
//
// A transfer without computation to overlap performs both halves in one call (transfer.cpp). Ranks may choose
// differently. All calls must come from one thread.
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
  // If `communicator` is null, there are no peers.
  Underway(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap);
  Underway(const Underway&) = delete;
  Underway& operator=(const Underway&) = delete;

  // Announce that this rank no longer reads or writes its peers' memory.
  void leave();
  // Wait until no peer reads or writes this rank's memory.
  void finish();
  // Call instead of finish after an error; notifies the peers. Not needed after an exception from this class.
  void abandon() { scope_.reset(); }
  // Return whether the operation completed on all ranks. While this is false (permanently after an error), a peer may
  // still write to this rank's block. Thread-safe.
  bool finished() const { return finished_.load(); }

  // --- for Transfer ---
  // Allocate a block. It is freed when the operation completes, unless give() releases it to the caller.
  int64_t alloc(int64_t bytes);
  int64_t give(int64_t block);
  void begin(const Op& op);
  void post(const Op& op);

 protected:
  void check_open() const {
    if (!scope_) throw std::logic_error("this transfer is over");
  }
  // Run one step. After an exception the operation is over; a header mismatch ends it on all ranks.
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
  // Return whether all rows of `peer` are written in this rank's block.
  bool ready(int peer) const;
  // Wait until the rows of one of `peers` are complete and return it. If several are, return the first in the order
  // given.
  int next(const std::vector<int>& peers);
};

class Leaving : public Underway {
 public:
  static constexpr int64_t kFlagBytes = 64;  // one cache line per flag, because flags are polled

  Leaving(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap, const Layout& layout, int threads);
  // Set the flag for `peer`: the rows that `peer` dispatched to this rank are computed.
  void raise(int peer);
  // Return whether sum would run without waiting.
  bool ready();
  // y [T, D] = the sum of each token's rows in slot order, multiplied by `weights` [T, K] unless null. Waits until all
  // peers have set this rank's flag. This rank's own rows must be written. Calls leave() at the end.
  void sum(const float* weights, char* y);

  // --- for Transfer ---
  // Publish the rows at `rows_offset` from the heap's start. No flags are needed if the rows are already `computed`.
  void offer(int64_t rows_offset, bool computed);

 private:
  // The flag of `owner` for rank `of`; null if all of the owner's rows are already written.
  std::atomic<uint32_t>* flag(int owner, int of);

  const Layout& layout_;
  int threads_;
  Record alone_{};  // used if there is no communicator
};

}  // namespace moe_comm
