// One operation between the ranks of a host in which each rank computes while its peers come: what they offer is read
// where it lies as soon as they have posted it, and what they are still computing for this rank once its flag is up.
//
//   offer   [flag for rank 0 | flag for rank 1 | ... | what peers read]     a block of the rank's own heap
//
//   post    next(peers)    row by row, whoever has posted first             gathers: rows(peer) can be read
//           raise(peer)    the part for `peer` stands in the offer          scatters: the peer may read it
//           add            this rank's parts of all offers, added
//           leave          reads no more; finish waits until nobody does
//
// As in every operation ranks say what they are in, and a rank that finds a peer in another one tells all: no rank ends
// this without having asked for each of its peers. Nothing here may be called by two threads, nor the end of it by
// another thread than the beginning.
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
  static constexpr int64_t kFlagBytes = 64;  // a cache line each: they are polled

  // Posts. The flags at the start of `mine` are lowered first. With op.fault set, throws HandshakeFailed on all ranks.
  Rendezvous(std::shared_ptr<Communicator> communicator, int threads, const Op& op, Exchange::Offer mine);

  // The first of `peers` that has posted, once one has; ready ones in the order given.
  int next(const std::vector<int>& peers);
  // Bytes [first, first + bytes) of what `peer` offers; it must have been asked for.
  char* rows(int peer, int64_t first, int64_t bytes);
  // This rank's part for `peer` stands in its offer.
  void raise(int peer);
  // y [count]: the `count` elements from byte `first` of each rank's offer, added in order of rank in fp32 and rounded
  // once, as soon as every rank has raised this rank's flag.
  void add(int64_t first, int64_t count, int dtype, char* y);
  // This rank reads no more of its peers' memory.
  void leave();
  // ... and nobody reads of its own.
  void finish();
  // Instead of finish, after an error: the peers hear of it. Not needed after an exception from here.
  void abandon();

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

 private:
  std::atomic<uint32_t>& flag(char* offer, int of) const;
  void check_open() const;
  // Asks for the peers that were not asked for yet.
  void meet_all();

  std::shared_ptr<Communicator> communicator_;
  int threads_;
  char* mine_;
  std::vector<bool> met_;
  std::optional<OpScope> scope_;
};

}  // namespace moe_comm
