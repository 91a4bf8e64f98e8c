// What a rank is doing and has just done, in a region of memory that others may read at any time. The region's layout
// is that of moe_comm/runtime/event_layout.py, which reads it.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>

namespace moe_comm {

constexpr int kSpanKinds = 16;
constexpr int kFirstMoving = 8;  // kinds from here on move data between ranks

// One that is under way. What its owner says of it, and what begin() adds.
struct Span {
  int kind = 0;
  uint32_t group = 0;
  int32_t peer = -1;
  int64_t nbytes = 0;
  int64_t index = -1;  // -1: never begun
  int64_t begin_ns = 0;
  uint64_t region = 0;  // the number of the region that it began in
};

// Sums over spans that move data; what is inside another one counts once.
struct SpanTotals {
  std::array<int64_t, kSpanKinds> ns{}, nbytes{};
  std::unordered_map<int32_t, int64_t> peers;
  std::unordered_map<uint32_t, int64_t> groups;
  int64_t rows = 0;
};

// Writes into one region after the other. Its callers take turns (they hold Python's lock).
class SpanWriter {
 public:
  // From now on into this region, which is empty but for its header and names.
  void bind(char* base, int64_t records);
  void begin(Span& span, uint32_t name, uint32_t layer, bool aside, int32_t step, int32_t micro);
  void end(const Span& span);

  // These change a span's record, unless the ring has gone round since or another region is written to.
  void put(const Span& span, uint32_t name, uint32_t layer, int32_t micro);
  void put_rows(const Span& span, const uint32_t* rows, int64_t number, int64_t sum);
  void put_device(const Span& span, int64_t begin_ns, int64_t end_ns);

  void begin_step(int64_t step);
  void count_anew();
  SpanTotals take();

 private:
  struct Record;
  struct Calls {
    int64_t number = 0;
    int64_t* shown = nullptr;  // where the region tells it; null: no room
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
  int64_t outer_ = -1;  // index of the span that the sums count, with what is inside it
  int64_t inside_bytes_ = 0;
  uint32_t inside_group_ = 0;
  SpanTotals totals_;
};

}  // namespace moe_comm
