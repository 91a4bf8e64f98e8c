#include "pending.h"

#include <algorithm>
#include <new>

#include "kernels.h"
#include "transfer.h"

namespace moe_comm {

PendingTransfer::PendingTransfer(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap)
    : communicator_(std::move(communicator)), heap_(std::move(heap)) {
  scope_.emplace(communicator_.get());
}

int64_t PendingTransfer::alloc(int64_t bytes) {
  blocks_.push_back(heap_->alloc(bytes));
  return blocks_.back();
}

int64_t PendingTransfer::release(int64_t block) {
  blocks_.erase(std::find(blocks_.begin(), blocks_.end(), block));
  return block;
}

void PendingTransfer::begin(const Op& op) {
  step([&] {
    if (communicator_) return communicator_->begin(op);
    if (op.fault) throw HandshakeFailed({pack_header(op)});
  });
}

void PendingTransfer::post(const Op& op) {
  step([&] {
    if (communicator_) return communicator_->post(op);
    if (op.fault) throw HandshakeFailed({pack_header(op)});
  });
}

void PendingTransfer::publish_done() {
  step([&] {
    if (communicator_) communicator_->publish_done();
  });
}

void PendingTransfer::finish() {
  step([&] { scope_->finish(); });
  close();
}

void PendingTransfer::close() {
  for (const int64_t block : blocks_) heap_->free(block);
  blocks_.clear();
  finished_.store(true);
  scope_.reset();
}

bool PendingReceive::ready(int peer) const {
  check_open();
  return !communicator_ || communicator_->is_done(peer);
}

int PendingReceive::next(const std::vector<int>& peers) {
  check_open();
  if (!communicator_) {
    throw std::invalid_argument("next() waits for a peer, but this process holds all experts and has no peers");
  }
  communicator_->check_peer_ranks(peers);
  return step([&] { return communicator_->wait_any_done(peers); });
}

PendingSum::PendingSum(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap, const Layout& layout,
                       int threads)
    : PendingTransfer(std::move(communicator), std::move(heap)), layout_(layout), threads_(threads) {
  record().flags_offset = -1;  // without rows, raise_flag must not write to the flags of an earlier operation
}

void PendingSum::publish_rows(int64_t rows_offset, bool computed) {
  Record& own = record();
  own.rows_offset = rows_offset;
  own.rows_bytes = layout_.rows * layout_.hidden * dtype_bytes(layout_.dtype);
  if (!communicator_ || computed) return;
  own.flags_offset = alloc(communicator_->world() * kFlagBytes);
  for (int p = 0; p < communicator_->world(); ++p) {
    new (heap_->base() + own.flags_offset + p * kFlagBytes) std::atomic<uint32_t>(0);
  }
}

std::atomic<uint32_t>* PendingSum::flag(int owner, int reader) {
  const int64_t offset = communicator_->record(owner).flags_offset;
  if (offset < 0) return nullptr;
  return reinterpret_cast<std::atomic<uint32_t>*>(
      communicator_->address(owner, offset + reader * kFlagBytes, kFlagBytes));
}

void PendingSum::raise_flag(int peer) {
  check_open();
  const int world = communicator_ ? communicator_->world() : 1;
  if (peer < 0 || peer >= world) {
    throw std::invalid_argument("rank " + std::to_string(peer) + " does not exist; expected 0.." +
                                std::to_string(world - 1));
  }
  std::atomic<uint32_t>* const own_flag = communicator_ ? flag(communicator_->rank(), peer) : nullptr;
  if (own_flag) communicator_->raise_flag(*own_flag, peer);
}

bool PendingSum::ready() {
  return step([&] {
    const int world = communicator_ ? communicator_->world() : 1;
    for (int i = 1; i < world; ++i) {
      const int p = (communicator_->rank() + i) % world;
      if (!communicator_->has_posted(p)) return false;
      if (!communicator_->header_matches(p)) return true;  // sum will throw HandshakeFailed
      const std::atomic<uint32_t>* const peer_flag = flag(p, communicator_->rank());
      if (peer_flag && peer_flag->load() == 0 && !communicator_->is_done(p)) return false;
    }
    return true;
  });
}

void PendingSum::sum(const float* weights, char* y, uint32_t* extra, int64_t width) {
  step([&] {
    const int world = communicator_ ? communicator_->world() : 1, rank = communicator_ ? communicator_->rank() : 0;
    std::vector<int> missing;
    for (int i = 1; i < world; ++i) missing.push_back((rank + i) % world);
    const std::vector<int> peers = missing;
    while (!missing.empty()) {
      missing.erase(std::find(missing.begin(), missing.end(), communicator_->wait_any_posted(missing)));
    }
    for (const int p : peers) {
      if (const std::atomic<uint32_t>* const peer_flag = flag(p, rank)) communicator_->wait_flag(*peer_flag, p);
    }
    const auto at = [&](int p, int64_t offset, int64_t bytes) {
      return communicator_ ? communicator_->address(p, offset, bytes) : heap_->base() + offset;
    };
    std::vector<char*> base(static_cast<size_t>(world)), extra_base(base);
    for (int p = 0; p < world; ++p) {
      const Record& other = communicator_ ? communicator_->record(p) : local_record_;
      if (y) base[static_cast<size_t>(p)] = at(p, other.rows_offset, other.rows_bytes);
      if (extra) extra_base[static_cast<size_t>(p)] = at(p, other.extra_offset, other.extra_bytes);
    }
    if (y) sum_rows(layout_, base, weights, threads_, y);
    if (extra) read_extra(layout_, extra_base, width, threads_, extra);
  });
  publish_done();
}

}  // namespace moe_comm
