// A pending dispatch or combine: started but not completed, so that the caller can compute in the meantime.
//
//   PendingReceive   all own rows are written at their owners
//                      next(peers)        wait for a peer's rows; they are then complete in this rank's block
//   PendingSum       own rows are still being computed
//                      raise_flag(peer)   the rows that `peer` reads are written
//                      sum                wait until the peers have written their rows, and add them
//
// An operation without computation to overlap performs both halves in one call (bindings.cpp). Ranks may choose
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

class PendingTransfer {
 public:
  // If `communicator` is null, there are no peers.
  PendingTransfer(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap);
  PendingTransfer(const PendingTransfer&) = delete;
  PendingTransfer& operator=(const PendingTransfer&) = delete;

  // Announce that this rank no longer reads or writes its peers' memory.
  void publish_done();
  // Wait until no peer reads or writes this rank's memory.
  void finish();
  // Call instead of finish after an error; notifies the peers. Not needed after an exception from this class.
  void abandon() { scope_.reset(); }
  // Return whether the operation completed on all ranks. While this is false (permanently after an error), a peer may
  // still write to this rank's block. Thread-safe.
  bool finished() const { return finished_.load(); }

  // --- for Transfer ---
  // Allocate a block. It is freed when the operation completes, unless release() passes it to the caller.
  int64_t alloc(int64_t bytes);
  int64_t release(int64_t block);
  void begin(const Op& op);
  void post(const Op& op);

 protected:
  void check_open() const {
    if (!scope_)
      throw std::logic_error("this transfer has ended: it finished, failed or was abandoned; start a new one");
  }
  // Run one step. An exception ends the operation; a header mismatch ends it on all ranks.
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

class PendingReceive : public PendingTransfer {
 public:
  using PendingTransfer::PendingTransfer;
  // Return whether all rows of `peer` are written in this rank's block.
  bool ready(int peer) const;
  // Wait until the rows of one of `peers` are complete and return it. If several are, return the first in the order
  // given.
  int next(const std::vector<int>& peers);
};

class PendingSum : public PendingTransfer {
 public:
  static constexpr int64_t kFlagBytes = 64;  // one cache line per flag, because flags are polled

  PendingSum(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap, const Layout& layout, int threads);
  // Raise the flag for `peer`: the rows that `peer` dispatched to this rank are computed.
  void raise_flag(int peer);
  // Return whether sum would run without waiting.
  bool ready();
  // y [T, D] = the sum of each token's rows in slot order, multiplied by `weights` [T, K] unless null. Waits until all
  // peers have raised their flags for this rank. This rank's own rows must be written. Calls publish_done() at the end.
  // extra [T, K, width]: the words of each slot's row; null without. y null: only these.
  void sum(const float* weights, char* y, uint32_t* extra = nullptr, int64_t width = 0);

  // --- for Transfer ---
  // Publish the rows at `rows_offset` from the heap's start. No flags are needed if the rows are already `computed`.
  void publish_rows(int64_t rows_offset, bool computed);
  // The record that describes this rank's rows.
  Record& record() { return communicator_ ? communicator_->record() : local_record_; }

 private:
  // The flag of `owner` for rank `reader`; null if all of the owner's rows are already written.
  std::atomic<uint32_t>* flag(int owner, int reader);

  const Layout& layout_;
  int threads_;
  Record local_record_{};  // used if there is no communicator
};

}  // namespace moe_comm
