#include <cstring>
#include <vector>

#include "check.h"
#include "cpu/spans.h"

using namespace moe_comm;
using namespace moe_comm::test;

namespace {

constexpr int64_t kRowsAt = 4096 + (64 << 10), kRows = 32 << 10, kRingAt = kRowsAt + 4 * kRows, kRecord = 96;

// Exactly the required size, so that ASan detects accesses beyond the end.
std::vector<int64_t> region(int64_t records) { return std::vector<int64_t>((kRingAt + records * kRecord) / 8); }

char* bytes(std::vector<int64_t>& words) { return reinterpret_cast<char*>(words.data()); }

int64_t word(std::vector<int64_t>& words, int64_t at) { return words[static_cast<size_t>(at / 8)]; }

Span span_of(int kind, uint32_t group, int64_t nbytes) {
  Span span;
  span.kind = kind;
  span.group = group;
  span.nbytes = nbytes;
  return span;
}

}  // namespace

TEST(spans_wrap_around_the_ring_and_write_nothing_beyond_it) {
  auto words = region(8);
  SpanWriter writer;
  writer.bind(bytes(words), 8);
  std::vector<Span> spans(20, span_of(8, 5, 3));
  for (auto& span : spans) {
    writer.begin(span, 1, 2, false, 7, 1);
    writer.end(span);
  }
  CHECK_EQ(word(words, 64), int64_t{20});
  for (int64_t place = 0; place < 8; ++place) {
    const int64_t index = word(words, kRingAt + place * kRecord);
    CHECK_EQ(index, place < 4 ? 16 + place : 8 + place);
    CHECK(word(words, kRingAt + place * kRecord + 16) >= word(words, kRingAt + place * kRecord + 8));
    CHECK_EQ(word(words, kRingAt + place * kRecord + 40), index + 1);  // its call number
  }
  const auto before = words;
  const uint32_t rows[2] = {1, 2};
  writer.put(spans[0], 9, 9, 9);
  writer.put_device(spans[11], 9, 9);
  writer.put_rows(spans[3], rows, 2, 3);
  CHECK(words == before);
  CHECK_EQ(writer.take().rows, int64_t{3});
}

TEST(spans_rows_are_contiguous_and_within_their_words) {
  auto words = region(4);
  SpanWriter writer;
  writer.bind(bytes(words), 4);
  std::vector<uint32_t> rows(static_cast<size_t>(kRows) + 9, 3);
  for (const int64_t number : {kRows - 1, int64_t{2}, kRows + 9, int64_t{0}, int64_t{5}}) {
    Span span = span_of(8, 0, 0);
    writer.begin(span, 0, 0, false, 0, 0);
    writer.put_rows(span, rows.data(), number, 3 * number);
    const int64_t at = kRingAt + span.index % 4 * kRecord;
    const int64_t rows_at = word(words, at + 56);
    uint32_t count;
    std::memcpy(&count, bytes(words) + at + 92, sizeof count);
    CHECK_EQ(int64_t{count}, number < kRows ? number : kRows);
    CHECK(rows_at % kRows + count <= kRows);
  }
}

TEST(spans_of_another_region_change_nothing_in_this_one) {
  auto first = region(4), second = region(2);
  SpanWriter writer;
  writer.bind(bytes(first), 4);
  Span span = span_of(10, 3, 50);
  writer.begin(span, 1, 1, false, 0, 0);
  writer.bind(bytes(second), 2);
  const auto before = second;
  writer.end(span);
  writer.put(span, 2, 2, 2);
  CHECK(second == before);
  CHECK_EQ(writer.take().nbytes[10], int64_t{0});
}

TEST(spans_calls_are_published_for_as_many_groups_as_fit) {
  auto words = region(4);
  SpanWriter writer;
  writer.bind(bytes(words), 4);
  for (int round = 1; round <= 3; ++round) {
    for (uint32_t group = 1; group <= 300; ++group) {
      Span span = span_of(9, group, 0);
      writer.begin(span, 0, 0, false, 0, 0);
      writer.end(span);
      CHECK_EQ(word(words, kRingAt + span.index % 4 * kRecord + 40), int64_t{round});
    }
  }
  CHECK_EQ(word(words, 128 + 8), int64_t{3});
  CHECK_EQ(word(words, 4096 - 8), int64_t{3});
  CHECK_EQ(word(words, 4096), int64_t{0});
  writer.reset_calls();
  CHECK_EQ(word(words, 128), int64_t{0});
}
