// Rows of the tokens of all ranks, which the experts of every rank read in place.
//
//   a rank's block    | one flag per rank | its slots, by expert | its tokens |                  of a dispatch
//                     | one flag per rank | words of its slots   | one or two parts of T rows |  in backward
//
// The tokens stay valid while this object exists on any rank. Each rank raises its flag in all blocks when it releases
// its object. The owner frees its block when all flags are raised.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "communicator.h"

namespace moe_comm {

class SharedTokens {
 public:
  // Without a communicator, the tokens are the caller's, who keeps them.
  explicit SharedTokens(std::shared_ptr<Communicator> communicator) : communicator_(std::move(communicator)) {}
  ~SharedTokens();
  SharedTokens(const SharedTokens&) = delete;
  SharedTokens& operator=(const SharedTokens&) = delete;

  // Rows of all tokens: the tokens themselves, or their gradients.
  struct Part {
    std::vector<uintptr_t> base;  // address of the row of the first token of each rank
    int64_t stride = 0;           // bytes between rows
  };
  std::vector<Part> parts;
  std::vector<int64_t> tokens;  // of each rank

  // --- for Transfer ---
  static int64_t flag_bytes(int world);
  // Take over this rank's block, and the blocks of its peers.
  void hold(int64_t block, std::vector<int64_t> peer_blocks);

 private:
  std::shared_ptr<Communicator> communicator_;
  std::vector<std::atomic<uint32_t>*> flags_;  // this rank's flag in the block of each rank
  int64_t block_ = -1;
};

}  // namespace moe_comm
