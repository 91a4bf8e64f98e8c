// Span recorder: writes what a rank does to a memory region that other processes may read at any time.
// moe_comm/runtime/event_layout.py defines the layout of the region and reads it.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>

namespace moe_comm {

constexpr int kSpanKinds = 16;
constexpr int kFirstMoving = 8;  // kinds >= this value move data between ranks

// An open span: the fields set by the caller and the fields set by begin().
struct Span {
  int kind = 0;
  uint32_t group = 0;
  int32_t peer = -1;
  int64_t nbytes = 0;
  int64_t index = -1;  // -1: begin() was not called
  int64_t begin_ns = 0;
  uint64_t region = 0;  // number of the region in which the span began
};

// Totals over spans that move data. Nested spans are counted once.
struct SpanTotals {
  std::array<int64_t, kSpanKinds> ns{}, nbytes{};
  std::unordered_map<int32_t, int64_t> peers;
  std::unordered_map<uint32_t, int64_t> groups;
  int64_t rows = 0;
};

// Writes spans to the bound region. Not thread-safe; callers hold the GIL.
class SpanWriter {
 public:
  // Bind to a new region. The region must be empty except for its header and names.
  void bind(char* base, int64_t records);
  void begin(Span& span, uint32_t name, uint32_t layer, bool background, int32_t step, int32_t micro);
  void end(const Span& span);

  // Update the record of a span. No effect if the ring has overwritten the record or another region is bound.
  void put(const Span& span, uint32_t name, uint32_t layer, int32_t micro);
  void put_rows(const Span& span, const uint32_t* rows, int64_t number, int64_t sum);
  void put_device(const Span& span, int64_t begin_ns, int64_t end_ns);

  void begin_step(int64_t step);
  void reset_calls();
  SpanTotals take();

 private:
  struct Record;
  struct Calls {
    int64_t number = 0;
    int64_t* counter = nullptr;  // the same number in the region; null if the region has no free entry
  };

  Record* record_of(const Span& span) const;
  int64_t next_call(const Span& span);
  void count(const Span& span, int64_t now);

  char* base_ = nullptr;
  Record* ring_ = nullptr;
  int64_t records_ = 0;
  uint64_t region_ = 0;
  int64_t head_ = 0, rows_head_ = 0;
  std::unordered_map<uint64_t, Calls> calls_;
  int64_t outer_ = -1;  // index of the outermost span being counted, which includes its nested spans; -1: none
  int64_t inside_bytes_ = 0;
  uint32_t inside_group_ = 0;
  SpanTotals totals_;
};

}  // namespace moe_comm
