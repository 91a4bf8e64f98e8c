#include "exchange.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "../layout.h"
#include "errors.h"
#include "kernels.h"
#include "pool.h"

namespace moe_comm {

namespace {

constexpr int64_t kGrainBytes = int64_t{256} << 10;  // minimum work per thread
constexpr int64_t kAlignElements = 32;               // each part that a rank writes starts on its own cache line

// Elements [first, last) that rank `part` of `parts` reduces.
struct Span {
  Span(int64_t count, int part, int parts) {
    const int64_t each = (count / parts + kAlignElements) / kAlignElements * kAlignElements;
    first = std::min(count, part * each);
    last = std::min(count, first + each);
  }
  int64_t first, last;
};

}  // namespace

Exchange::Exchange(std::shared_ptr<Communicator> communicator, int threads)
    : communicator_(std::move(communicator)), threads_(threads) {}

void publish_buffer(Communicator& communicator, Exchange::Buffer own) {
  Record& record = communicator.record();
  record.rows_offset = 0;
  record.rows_bytes = 0;
  if (own.bytes == 0) return;
  if (!communicator.heap().owns(own.data, own.bytes)) {
    throw std::invalid_argument("a rank shares memory of its own heap; got " + std::to_string(own.bytes) +
                                " bytes outside it. Allocate the buffer with Heap.tensor");
  }
  record.rows_offset = own.data - communicator.heap().base();
  record.rows_bytes = own.bytes;
}

void Exchange::begin(const Op& op, Buffer own) {
  publish_buffer(*communicator_, op.fault ? Buffer{} : own);
  communicator_->begin(op);
}

char* Exchange::buffer_of(int peer) {
  const Record& record = communicator_->record(peer);
  return communicator_->address(peer, record.rows_offset, record.rows_bytes);
}

void Exchange::copy(const Op& op, Buffer own, int64_t first, int64_t part, char* y) {
  OpScope scope(communicator_.get());
  begin(op, own);
  const int world = communicator_->world(), rank = communicator_->rank();
  for (int i = 1; i <= world; ++i) {  // own part last, so that each rank starts reading at a different peer
    const int peer = (rank + i) % world;
    const char* from = buffer_of(peer) + first;
    parallel_for(part, kGrainBytes, threads_, [&](int64_t begin, int64_t end) {
      std::memcpy(y + peer * part + begin, from + begin, static_cast<size_t>(end - begin));
    });
  }
  scope.finish();
}

void Exchange::sum(const Op& op, Buffer own, int64_t first, int64_t count, int dtype, char* y) {
  OpScope scope(communicator_.get());
  begin(op, own);
  add(first, count, dtype, y);
  scope.finish();
}

void Exchange::values(const Op& op, const Values& own, Values* y) {
  OpScope scope(communicator_.get());
  communicator_->settle();
  std::copy(own.begin(), own.end(), communicator_->record().values);
  communicator_->begin(op);
  for (int p = 0; p < world(); ++p) std::copy_n(communicator_->record(p).values, kValues, y[p].begin());
  communicator_->finish_later();
}

void Exchange::all_sum(const Op& op, Buffer own, int dtype) {
  OpScope scope(communicator_.get());
  begin(op, own);
  const int world = communicator_->world(), rank = communicator_->rank();
  const int64_t size = dtype_bytes(dtype), count = own.bytes / size;
  char* sums = buffer_of(rank);
  const Span summed(count, rank, world);
  add(summed.first, summed.last - summed.first, dtype, sums + summed.first * size);
  // Each rank reads only its own part of the peers' buffers before this point. After wait_ready all parts are reduced,
  // so the other parts of this rank's buffer may be overwritten.
  communicator_->publish_ready();
  communicator_->wait_ready();
  for (int i = 1; i < world; ++i) {
    const int peer = (rank + i) % world;
    const Span other(count, peer, world);
    const char* from = buffer_of(peer) + other.first * size;
    parallel_for((other.last - other.first) * size, kGrainBytes, threads_, [&](int64_t begin, int64_t end) {
      std::memcpy(sums + other.first * size + begin, from + begin, static_cast<size_t>(end - begin));
    });
  }
  scope.finish();
}

void Exchange::add(int64_t first, int64_t count, int dtype, char* y) {
  std::vector<char*> parts;
  for (int p = 0; p < communicator_->world(); ++p) parts.push_back(buffer_of(p) + first * dtype_bytes(dtype));
  add_parts(parts, count, dtype, threads_, y);
}

void add_parts(const std::vector<char*>& parts, int64_t count, int dtype, int threads, char* y) {
  const int64_t size = dtype_bytes(dtype), world = static_cast<int64_t>(parts.size());
  std::vector<int64_t> place;
  for (int p = 0; p < world; ++p) place.push_back(pack_place(p, 0));
  // Reuse the combine kernel with one token; its `world` rows are the parts. Threads split the range into blocks of
  // whole cache lines.
  const int64_t blocks = (count + kAlignElements - 1) / kAlignElements;
  parallel_for(blocks, kGrainBytes / (kAlignElements * size), threads, [&](int64_t begin, int64_t end) {
    const int64_t from = begin * kAlignElements, to = std::min(count, end * kAlignElements);
    std::vector<char*> base(parts);
    for (char*& p : base) p += from * size;
    const TokenLoop loop{place.data(), base.data(), world, to - from, dtype, false};
    kernels().sum(loop, 0, 1, y + from * size, (to - from) * size, nullptr);
  });
}

}  // namespace moe_comm
