#include "rendezvous.h"

#include <algorithm>
#include <new>
#include <stdexcept>

#include "kernels.h"

namespace moe_comm {

Rendezvous::Rendezvous(std::shared_ptr<Communicator> communicator, int threads, const Op& op, Exchange::Buffer own)
    : communicator_(std::move(communicator)), threads_(threads), own_(const_cast<char*>(own.data)) {
  const int world = communicator_->world();
  posted_.resize(static_cast<size_t>(world));
  posted_[static_cast<size_t>(communicator_->rank())] = true;
  if (!op.fault && own.bytes < world * kFlagBytes) {
    throw std::invalid_argument("the buffer must begin with a flag of " + std::to_string(kFlagBytes) +
                                " bytes for each of " + std::to_string(world) + " ranks; got " +
                                std::to_string(own.bytes) + " bytes");
  }
  scope_.emplace(communicator_.get());
  publish_buffer(*communicator_, op.fault ? Exchange::Buffer{} : own);
  if (!op.fault) {
    for (int p = 0; p < world; ++p) new (own_ + p * kFlagBytes) std::atomic<uint32_t>(0);
  }
  communicator_->post(op);
}

std::atomic<uint32_t>& Rendezvous::flag(char* buffer, int reader) const {
  return *reinterpret_cast<std::atomic<uint32_t>*>(buffer + reader * kFlagBytes);
}

void Rendezvous::check_open() const {
  if (!scope_) {
    throw std::logic_error("this operation has ended: it finished, failed or was abandoned; start a new one");
  }
}

int Rendezvous::next(const std::vector<int>& peers) {
  check_open();
  communicator_->check_peer_ranks(peers);
  try {
    const int peer = communicator_->wait_any_posted(peers);
    posted_[static_cast<size_t>(peer)] = true;
    return peer;
  } catch (...) {
    scope_.reset();
    throw;
  }
}

char* Rendezvous::rows(int peer, int64_t first, int64_t bytes) {
  check_open();
  if (peer < 0 || peer >= communicator_->world() || !posted_[static_cast<size_t>(peer)]) {
    throw std::invalid_argument("the buffer of rank " + std::to_string(peer) +
                                " is not readable yet; call next() until it returns this rank");
  }
  const Record& record = communicator_->record(peer);
  if (first < 0 || bytes < 0 || first > record.rows_bytes - bytes) {
    throw std::invalid_argument("rank " + std::to_string(peer) + " shares " + std::to_string(record.rows_bytes) +
                                " bytes; got a request for " + std::to_string(bytes) + " bytes from byte " +
                                std::to_string(first));
  }
  return communicator_->address(peer, record.rows_offset, record.rows_bytes) + first;
}

void Rendezvous::raise_flag(int peer) {
  check_open();
  if (peer < 0 || peer >= communicator_->world()) {
    throw std::invalid_argument("rank " + std::to_string(peer) + " does not exist; expected 0.." +
                                std::to_string(communicator_->world() - 1));
  }
  communicator_->raise_flag(flag(own_, peer), peer);
}

void Rendezvous::wait_all_posted() {
  std::vector<int> missing;
  for (int i = 1; i < communicator_->world(); ++i) {
    const int p = (communicator_->rank() + i) % communicator_->world();
    if (!posted_[static_cast<size_t>(p)]) missing.push_back(p);
  }
  while (!missing.empty()) missing.erase(std::find(missing.begin(), missing.end(), next(missing)));
}

void Rendezvous::add(int64_t first, int64_t count, int dtype, char* y) {
  check_open();
  const int world = communicator_->world(), rank = communicator_->rank();
  if (flag(own_, rank).load() == 0) {
    throw std::logic_error("add() reads this rank's own part; write it and call raise_flag(" + std::to_string(rank) +
                           ") first");
  }
  wait_all_posted();
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

void Rendezvous::publish_done() {
  check_open();
  wait_all_posted();
  communicator_->publish_done();
}

void Rendezvous::finish() {
  publish_done();
  communicator_->finish();
  scope_.reset();
}

void Rendezvous::abandon() { scope_.reset(); }

}  // namespace moe_comm
