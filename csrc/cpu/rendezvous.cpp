#include "rendezvous.h"

#include <algorithm>
#include <new>
#include <stdexcept>

#include "kernels.h"

namespace moe_comm {

Rendezvous::Rendezvous(std::shared_ptr<Communicator> communicator, int threads, const Op& op, Exchange::Offer mine)
    : communicator_(std::move(communicator)), threads_(threads), mine_(const_cast<char*>(mine.data)) {
  const int world = communicator_->world();
  met_.resize(static_cast<size_t>(world));
  met_[static_cast<size_t>(communicator_->rank())] = true;
  if (!op.fault && mine.bytes < world * kFlagBytes) {
    throw std::invalid_argument("an offer begins with a flag of " + std::to_string(kFlagBytes) +
                                " bytes for each rank");
  }
  scope_.emplace(communicator_.get());
  publish_offer(*communicator_, op.fault ? Exchange::Offer{} : mine);
  if (!op.fault) {
    for (int p = 0; p < world; ++p) new (mine_ + p * kFlagBytes) std::atomic<uint32_t>(0);
  }
  communicator_->post(op);
}

std::atomic<uint32_t>& Rendezvous::flag(char* offer, int of) const {
  return *reinterpret_cast<std::atomic<uint32_t>*>(offer + of * kFlagBytes);
}

void Rendezvous::check_open() const {
  if (!scope_) throw std::logic_error("this rendezvous is over");
}

int Rendezvous::next(const std::vector<int>& peers) {
  check_open();
  communicator_->must_be_peers(peers);
  try {
    const int peer = communicator_->wait_any(peers);
    met_[static_cast<size_t>(peer)] = true;
    return peer;
  } catch (...) {
    scope_.reset();
    throw;
  }
}

char* Rendezvous::rows(int peer, int64_t first, int64_t bytes) {
  check_open();
  if (peer < 0 || peer >= communicator_->world() || !met_[static_cast<size_t>(peer)]) {
    throw std::invalid_argument("rank " + std::to_string(peer) + " has not been waited for");
  }
  const Record& record = communicator_->record(peer);
  if (first < 0 || bytes < 0 || first > record.rows_bytes - bytes) {
    throw std::invalid_argument("rank " + std::to_string(peer) + " offers " + std::to_string(record.rows_bytes) +
                                " bytes, not " + std::to_string(bytes) + " from byte " + std::to_string(first));
  }
  return communicator_->address(peer, record.rows_offset, record.rows_bytes) + first;
}

void Rendezvous::raise(int peer) {
  check_open();
  if (peer < 0 || peer >= communicator_->world()) throw std::invalid_argument("no such rank");
  communicator_->raise(flag(mine_, peer), peer);
}

void Rendezvous::meet_all() {
  std::vector<int> left;
  for (int i = 1; i < communicator_->world(); ++i) {
    const int p = (communicator_->rank() + i) % communicator_->world();
    if (!met_[static_cast<size_t>(p)]) left.push_back(p);
  }
  while (!left.empty()) left.erase(std::find(left.begin(), left.end(), next(left)));
}

void Rendezvous::add(int64_t first, int64_t count, int dtype, char* y) {
  check_open();
  const int world = communicator_->world(), rank = communicator_->rank();
  if (flag(mine_, rank).load() == 0) throw std::logic_error("this rank's own part does not stand yet");
  meet_all();
  std::vector<char*> parts;
  for (int p = 0; p < world; ++p) parts.push_back(rows(p, first, count * dtype_bytes(dtype)));
  try {
    for (int i = 1; i < world; ++i) {
      const int p = (rank + i) % world;
      communicator_->wait_flag(flag(rows(p, 0, 0), rank), p);
    }
  } catch (...) {
    scope_.reset();
    throw;
  }
  add_parts(parts, count, dtype, threads_, y);
}

void Rendezvous::leave() {
  check_open();
  meet_all();
  communicator_->leave();
}

void Rendezvous::finish() {
  leave();
  communicator_->finish();
  scope_.reset();
}

void Rendezvous::abandon() { scope_.reset(); }

}  // namespace moe_comm
