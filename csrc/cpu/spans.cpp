#include "cpu/spans.h"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace moe_comm {

struct SpanWriter::Record {
  int64_t index, begin_ns, end_ns, device_begin_ns, device_end_ns, call, nbytes, rows_at;
  int32_t step, micro;
  uint16_t kind, thread;
  uint32_t name, layer, group;
  int32_t peer;
  uint32_t experts;
};

namespace {

constexpr int64_t kHeaderBytes = 4096, kNamesBytes = 64 << 10, kRowsWords = 32 << 10;
constexpr int64_t kHeadAt = 64, kActiveAt = 72, kStepAt = 88, kRowsHeadAt = 104, kCallsAt = 128;

struct CallsEntry {
  uint32_t group, kind;
  int64_t number;
};

int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{1000000000} * now.tv_sec + now.tv_nsec;
}

// Publish a word that other processes read concurrently.
void publish(char* base, int64_t at, int64_t value) {
  __atomic_store_n(reinterpret_cast<int64_t*>(base + at), value, __ATOMIC_RELEASE);
}

}  // namespace

void SpanWriter::bind(char* base, int64_t records) {
  static_assert(sizeof(Record) == 96 && sizeof(CallsEntry) == 16, "as in event_layout.py");
  base_ = base;
  ring_ = reinterpret_cast<Record*>(base + kHeaderBytes + kNamesBytes + 4 * kRowsWords);
  records_ = records;
  ++region_;
  head_ = rows_head_ = 0;
  calls_.clear();
  outer_ = -1;
}

void SpanWriter::begin(Span& span, uint32_t name, uint32_t layer, bool background, int32_t step, int32_t micro) {
  const int64_t now = monotonic_ns();
  span.index = head_;
  span.begin_ns = now;
  span.region = region_;
  const int64_t call = span.group != 0 && !background ? next_call(span) : 0;
  if (outer_ < 0 && span.kind >= kFirstMoving && !background) {
    outer_ = span.index;
    inside_bytes_ = 0;
    inside_group_ = 0;
  }
  Record& record = ring_[head_ % records_];
  __atomic_store_n(&record.index, int64_t{-1}, __ATOMIC_RELAXED);  // readers skip records that are being overwritten
  __atomic_thread_fence(__ATOMIC_RELEASE);
  record.begin_ns = now;
  record.end_ns = record.device_begin_ns = record.device_end_ns = 0;
  record.call = call;
  record.nbytes = span.nbytes;
  record.rows_at = 0;
  record.step = step;
  record.micro = micro;
  record.kind = static_cast<uint16_t>(span.kind);
  record.thread = background;
  record.name = name;
  record.layer = layer;
  record.group = span.group;
  record.peer = span.peer;
  record.experts = 0;
  __atomic_store_n(&record.index, span.index, __ATOMIC_RELEASE);
  publish(base_, kHeadAt, ++head_);
  publish(base_, kActiveAt, now);
}

void SpanWriter::end(const Span& span) {
  if (span.region != region_) return;
  const int64_t now = monotonic_ns();
  if (Record* record = record_of(span)) __atomic_store_n(&record->end_ns, now, __ATOMIC_RELEASE);
  publish(base_, kActiveAt, now);
  if (outer_ == span.index) {
    outer_ = -1;
    count(span, now);
  } else if (span.nbytes != 0 && outer_ >= 0) {
    inside_bytes_ += span.nbytes;
    if (span.group != 0) inside_group_ = span.group;
    if (span.peer >= 0) totals_.peers[span.peer] += span.nbytes;
  }
}

void SpanWriter::count(const Span& span, int64_t now) {
  const int64_t nbytes = span.nbytes != 0 ? span.nbytes : inside_bytes_;
  const uint32_t group = span.nbytes != 0 ? span.group : inside_group_;
  totals_.ns[span.kind] += now - span.begin_ns;
  if (nbytes == 0) return;
  totals_.nbytes[span.kind] += nbytes;
  if (span.nbytes != 0 && span.peer >= 0) {
    totals_.peers[span.peer] += nbytes;
  } else if (group != 0) {
    totals_.groups[group] += nbytes;
  }
}

void SpanWriter::put(const Span& span, uint32_t name, uint32_t layer, int32_t micro) {
  Record* record = record_of(span);
  if (record == nullptr) return;
  record->nbytes = span.nbytes;
  record->micro = micro;
  record->name = name;
  record->layer = layer;
  record->peer = span.peer;
}

void SpanWriter::put_rows(const Span& span, const uint32_t* rows, int64_t number, int64_t sum) {
  totals_.rows += sum;
  Record* record = record_of(span);
  if (record == nullptr) return;
  record->nbytes = span.nbytes;
  number = std::min(number, kRowsWords);
  const int64_t remaining = kRowsWords - rows_head_ % kRowsWords;
  if (number > remaining) rows_head_ += remaining;  // rows of one span are contiguous
  const int64_t rows_at = std::exchange(rows_head_, rows_head_ + number);
  publish(base_, kRowsHeadAt, rows_head_);  // before the rows: readers skip rows that may be being overwritten
  __atomic_thread_fence(__ATOMIC_RELEASE);
  std::memcpy(base_ + kHeaderBytes + kNamesBytes + 4 * (rows_at % kRowsWords), rows, 4 * number);
  record->rows_at = rows_at;
  __atomic_store_n(&record->experts, static_cast<uint32_t>(number), __ATOMIC_RELEASE);
}

void SpanWriter::put_device(const Span& span, int64_t begin_ns, int64_t end_ns) {
  Record* record = record_of(span);
  if (record == nullptr) return;
  record->device_begin_ns = begin_ns;
  __atomic_store_n(&record->device_end_ns, end_ns, __ATOMIC_RELEASE);
}

void SpanWriter::begin_step(int64_t step) {
  outer_ = -1;
  publish(base_, kStepAt, step);
}

void SpanWriter::reset_calls() {
  calls_.clear();
  std::memset(base_ + kCallsAt, 0, kHeaderBytes - kCallsAt);
}

SpanTotals SpanWriter::take() { return std::exchange(totals_, {}); }

SpanWriter::Record* SpanWriter::record_of(const Span& span) const {
  if (span.index < 0 || span.region != region_) return nullptr;
  Record& record = ring_[span.index % records_];
  return record.index == span.index ? &record : nullptr;
}

int64_t SpanWriter::next_call(const Span& span) {
  const auto place = static_cast<int64_t>(calls_.size()) * static_cast<int64_t>(sizeof(CallsEntry)) + kCallsAt;
  const auto [entry_of, is_new] = calls_.try_emplace(uint64_t{span.group} << 8 | static_cast<uint64_t>(span.kind));
  Calls& calls = entry_of->second;
  if (is_new && place + static_cast<int64_t>(sizeof(CallsEntry)) <= kHeaderBytes) {
    auto* entry = reinterpret_cast<CallsEntry*>(base_ + place);
    entry->kind = static_cast<uint32_t>(span.kind);
    entry->group = span.group;
    calls.counter = &entry->number;
  }
  ++calls.number;
  if (calls.counter != nullptr) __atomic_store_n(calls.counter, calls.number, __ATOMIC_RELEASE);
  return calls.number;
}

}  // namespace moe_comm
