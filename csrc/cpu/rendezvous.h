// One collective between the ranks of a host that overlaps with computation. Each rank reads a peer's buffer as soon as
// the peer has posted it. It reads a part that the peer computes later once the peer has raised its flag for this rank.
//
//   buffer  [flag for rank 0 | flag for rank 1 | ... | data for peers ]     a block in the rank's own heap
//
//   constructor        post the operation
//   next(peers)        wait for a peer that has posted                      gather: rows(peer) is readable
//   raise_flag(peer)   the part for `peer` is written                       scatter: the peer may read it
//   add                sum this rank's part over all ranks
//   publish_done       this rank reads no more; finish waits until all ranks have published this
//
// Each rank publishes the header of its operation. A rank that detects a mismatch notifies all ranks, and no rank
// finishes before it has checked each of its peers. All methods must be called from the thread that constructed the
// object.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "communicator.h"
#include "exchange.h"

namespace moe_comm {

class Rendezvous {
 public:
  static constexpr int64_t kFlagBytes = 64;  // one cache line per flag, because flags are polled

  // Post `op`. Clears the flags at the start of `own` first. With op.fault set, all ranks throw HandshakeFailed.
  Rendezvous(std::shared_ptr<Communicator> communicator, int threads, const Op& op, Exchange::Buffer own);

  // Wait until one of `peers` has posted and return it. If several have, return the first in the order given.
  int next(const std::vector<int>& peers);
  // Return bytes [first, first + bytes) of `peer`'s buffer. next() must have returned `peer` before.
  char* rows(int peer, int64_t first, int64_t bytes);
  // Raise the flag for `peer`: its part in this rank's buffer is written.
  void raise_flag(int peer);
  // y [count]: `count` elements from byte `first` of each rank's buffer, summed in rank order in fp32 and rounded once.
  // Waits until every rank has raised its flag for this rank.
  void add(int64_t first, int64_t count, int dtype, char* y);
  // Announce that this rank no longer reads its peers' memory.
  void publish_done();
  // Call publish_done, then wait until all peers have called it, so that none of them reads this rank's memory.
  void finish();
  // Call instead of finish after an error; notifies the peers. Not needed after an exception from this class.
  void abandon();

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

 private:
  // The flag for rank `reader` at the start of `buffer`.
  std::atomic<uint32_t>& flag(char* buffer, int reader) const;
  void check_open() const;
  // Wait for the peers that next() has not returned yet, and check their headers.
  void wait_all_posted();

  std::shared_ptr<Communicator> communicator_;
  int threads_;
  char* own_;
  std::vector<bool> posted_;
  std::optional<OpScope> scope_;
};

}  // namespace moe_comm
