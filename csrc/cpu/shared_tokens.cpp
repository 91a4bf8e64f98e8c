#include "shared_tokens.h"

#include <atomic>
#include <new>
#include <utility>

namespace moe_comm {

int64_t SharedTokens::flag_bytes(int world) {
  return (static_cast<int64_t>(world) * static_cast<int64_t>(sizeof(uint32_t)) + kBlockAlign - 1) / kBlockAlign *
         kBlockAlign;
}

void SharedTokens::hold(int64_t block, std::vector<int64_t> peer_blocks) {
  const int64_t rank = communicator_->rank();
  for (int p = 0; p < communicator_->world(); ++p) {
    char* flags = communicator_->address(p, peer_blocks[static_cast<size_t>(p)], flag_bytes(communicator_->world()));
    flags_.push_back(reinterpret_cast<std::atomic<uint32_t>*>(flags) + rank);
  }
  block_ = block;
}

SharedTokens::~SharedTokens() {
  if (block_ < 0 || !communicator_->owned()) return;  // a forked child reads a copy of its parent's object
  for (std::atomic<uint32_t>* flag : flags_) flag->store(1, std::memory_order_release);
  communicator_->heap().free_when_raised(block_, communicator_->world());
}

}  // namespace moe_comm
