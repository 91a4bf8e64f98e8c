#include "underway.h"

#include <algorithm>
#include <new>

#include "kernels.h"
#include "transfer.h"

namespace moe_comm {

Underway::Underway(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap)
    : communicator_(std::move(communicator)), heap_(std::move(heap)) {
  scope_.emplace(communicator_.get());
}

int64_t Underway::alloc(int64_t bytes) {
  blocks_.push_back(heap_->alloc(bytes));
  return blocks_.back();
}

int64_t Underway::give(int64_t block) {
  blocks_.erase(std::find(blocks_.begin(), blocks_.end(), block));
  return block;
}

void Underway::begin(const Op& op) {
  step([&] {
    if (communicator_) return communicator_->begin(op);
    if (op.fault) throw HandshakeFailed({pack_header(op)});
  });
}

void Underway::post(const Op& op) {
  step([&] {
    if (communicator_) return communicator_->post(op);
    if (op.fault) throw HandshakeFailed({pack_header(op)});
  });
}

void Underway::leave() {
  step([&] {
    if (communicator_) communicator_->leave();
  });
}

void Underway::finish() {
  step([&] { scope_->finish(); });
  close();
}

void Underway::close() {
  for (const int64_t block : blocks_) heap_->free(block);
  blocks_.clear();
  finished_.store(true);
  scope_.reset();
}

bool Arriving::ready(int peer) const {
  check_open();
  return !communicator_ || communicator_->has_left(peer);
}

int Arriving::next(const std::vector<int>& peers) {
  check_open();
  if (!communicator_) throw std::invalid_argument("there are no peers");
  communicator_->must_be_peers(peers);
  return step([&] { return communicator_->wait_left(peers); });
}

Leaving::Leaving(std::shared_ptr<Communicator> communicator, std::shared_ptr<Heap> heap, const Layout& layout,
                 int threads)
    : Underway(std::move(communicator), std::move(heap)), layout_(layout), threads_(threads) {}

void Leaving::offer(int64_t rows_offset, bool computed) {
  Record& mine = communicator_ ? communicator_->record() : alone_;
  mine.rows_offset = rows_offset;
  mine.rows_bytes = layout_.rows * layout_.hidden * dtype_bytes(layout_.dtype);
  mine.flags_offset = -1;
  if (!communicator_ || computed) return;
  mine.flags_offset = alloc(communicator_->world() * kFlagBytes);
  for (int p = 0; p < communicator_->world(); ++p) {
    new (heap_->base() + mine.flags_offset + p * kFlagBytes) std::atomic<uint32_t>(0);
  }
}

std::atomic<uint32_t>* Leaving::flag(int owner, int of) {
  const int64_t offset = communicator_->record(owner).flags_offset;
  if (offset < 0) return nullptr;
  return reinterpret_cast<std::atomic<uint32_t>*>(communicator_->address(owner, offset + of * kFlagBytes, kFlagBytes));
}

void Leaving::raise(int peer) {
  check_open();
  if (peer < 0 || peer >= (communicator_ ? communicator_->world() : 1)) throw std::invalid_argument("no such rank");
  std::atomic<uint32_t>* const up = communicator_ ? flag(communicator_->rank(), peer) : nullptr;
  if (up) communicator_->raise(*up, peer);
}

bool Leaving::ready() {
  return step([&] {
    const int world = communicator_ ? communicator_->world() : 1;
    for (int i = 1; i < world; ++i) {
      const int p = (communicator_->rank() + i) % world;
      if (!communicator_->has_posted(p)) return false;
      if (!communicator_->agrees(p)) return true;  // sum will throw HandshakeFailed
      const std::atomic<uint32_t>* const up = flag(p, communicator_->rank());
      if (up && up->load() == 0 && !communicator_->has_left(p)) return false;
    }
    return true;
  });
}

void Leaving::sum(const float* weights, char* y) {
  step([&] {
    const int world = communicator_ ? communicator_->world() : 1, rank = communicator_ ? communicator_->rank() : 0;
    std::vector<int> left;
    for (int i = 1; i < world; ++i) left.push_back((rank + i) % world);
    const std::vector<int> peers = left;
    while (!left.empty()) left.erase(std::find(left.begin(), left.end(), communicator_->wait_any(left)));
    for (const int p : peers) {
      if (const std::atomic<uint32_t>* const up = flag(p, rank)) communicator_->wait_flag(*up, p);
    }
    std::vector<char*> base(static_cast<size_t>(world));
    for (int p = 0; p < world; ++p) {
      const Record& other = communicator_ ? communicator_->record(p) : alone_;
      base[static_cast<size_t>(p)] = communicator_ ? communicator_->address(p, other.rows_offset, other.rows_bytes)
                                                   : heap_->base() + other.rows_offset;
    }
    sum_rows(layout_, base, weights, threads_, y);
  });
  leave();
}

}  // namespace moe_comm
