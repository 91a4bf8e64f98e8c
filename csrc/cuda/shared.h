// Shared memory size per block of each kernel. The host computes it before a launch; kernels allocate with m.shared in
// the order of the additions here.
#pragma once

#include "cuda/args.h"

namespace moe_comm {
namespace p2p {

constexpr int64_t kSpreadBatch = kTileRows;  // slots that spread processes between two syncs
constexpr int64_t kReduceBatch = 16;         // rows that reduce processes between two syncs
constexpr int kRankWords = 16;               // expert ids of a chunk that a thread of count compares at once
constexpr int64_t kScanExperts = 32;         // experts of one block of scan
constexpr int64_t kSlotBytes = 32;           // of push, for each slot of the chunk that it sends and of the next
constexpr int64_t kTileBytes = kTileRows * 16 + 16;  // of push, for the rows of a tile that it sends at once
constexpr int64_t kLinkBatch = 32;                   // rows that fan_out processes between two syncs
constexpr int kBulkWarps = 16;                       // warps of a block that copy in bulk, each with its own buffers
constexpr int kBulkBuffers = 4;                      // buffers of a warp
constexpr int kBulkAhead = 2;                        // loads in flight before the first store
constexpr int kBulkBytes = 2048;                     // size of a buffer
constexpr int64_t kLanes = 32;                       // lanes of a dot product, as on the CPU
constexpr int64_t kGroup = 16;                       // channels that a thread quantises at once

struct Pieces {
  int64_t bytes = 0;
  MOE_HD Pieces& add(int64_t count, int64_t size) {
    bytes += (count * size + 15) / 16 * 16;
    return *this;
  }
};

MOE_HD inline int64_t quantise_blocks(int64_t hidden) { return (hidden + kScaleChannels - 1) / kScaleChannels; }

// Number of chunk segments that a block of scan sums in parallel.
MOE_HD inline int64_t scan_segments(int64_t experts, int64_t chunks, int64_t threads) {
  int64_t segments = threads / (experts < kScanExperts ? (experts > 0 ? experts : 1) : kScanExperts);
  if (segments > chunks) segments = chunks;
  return segments < 1 ? 1 : segments;
}

MOE_HD inline void add_quantise(Pieces& p, int64_t rows, int64_t format) {
  if (format == kRowScales) p.add(rows, 4).add(rows, 4);
}

MOE_HD inline void add_meet(Pieces& p, int64_t experts, int64_t with_counts) {
  p.add(kHeaderWords, 8).add(6, 8).add(1, 8);
  if (with_counts) p.add(experts, 8).add(experts, 8).add(experts + 1, 8).add(experts + 1, 8);
}
// Of is_last_block, and of a wait after it.
MOE_HD inline void add_last_block(Pieces& p, int64_t used) {
  if (used) p.add(1, 8).add(1, 8);
}

MOE_HD inline int64_t shared_bytes(const CountArgs& a, int64_t) {
  return Pieces().add(a.chunk + kRankWords, 4).add(4, 8).bytes;
}
MOE_HD inline int64_t shared_bytes(const ScanArgs& a, int64_t threads) {
  const Pieces sums = Pieces().add(scan_segments(a.experts, a.chunks, threads) * kScanExperts, 8);
  Pieces meets;
  if (a.meets) add_meet(meets.add(1, 8), a.experts, a.with_counts);
  return sums.bytes > meets.bytes ? sums.bytes : meets.bytes;
}
MOE_HD inline int64_t shared_bytes(const OrderArgs& a, int64_t) {
  Pieces p;
  for (int i = 0; i < 4; ++i) p.add(a.experts + 1, 8);
  return p.bytes;
}
MOE_HD inline int64_t shared_bytes(const MeetArgs& a, int64_t) {
  Pieces p;
  add_meet(p, a.experts, a.with_counts);
  return p.bytes;
}
MOE_HD inline int64_t shared_bytes(const PushFp8Args& a, int64_t) {
  Pieces p = Pieces().add(2 * a.chunk, kSlotBytes);
  add_quantise(p, a.chunk, a.format);
  return p.bytes;
}
MOE_HD inline void add_bulk(Pieces& p, int64_t bulk) {
  if (bulk) p.add(kBulkWarps * kBulkBuffers * kBulkBytes, 1).add(kBulkWarps * kBulkBuffers, 8);
}
MOE_HD inline int64_t shared_bytes(const PushArgs& a, int64_t) {
  Pieces p = Pieces().add(2 * a.chunk, kSlotBytes);
  add_bulk(p, a.bulk);
  return p.bytes;
}
MOE_HD inline int64_t shared_bytes(const PushTilesArgs& a, int64_t) {
  Pieces p = Pieces().add(2, kTileBytes);
  add_bulk(p, a.bulk);
  return p.bytes;
}
MOE_HD inline int64_t shared_bytes(const ArriveArgs&, int64_t) { return Pieces().add(1, 8).bytes; }
MOE_HD inline int64_t shared_bytes(const FanOutArgs&, int64_t) {
  return Pieces().add(kLinkBatch, 8).add(kLinkBatch, 8).add(1, 8).bytes;
}
MOE_HD inline Pieces addend_pieces(int64_t n, int64_t most) {
  return Pieces().add(n * most, 8).add(n * most, 4).add(n, 4);
}
MOE_HD inline int64_t shared_bytes(const SumArgs& a, int64_t) {
  Pieces p;
  add_last_block(p, a.ends);
  return p.bytes;
}
MOE_HD inline int64_t shared_bytes(const SumReducedArgs&, int64_t) { return 0; }
MOE_HD inline int64_t shared_bytes(const ReadyArgs&, int64_t) { return Pieces().add(1, 8).bytes; }
MOE_HD inline int64_t shared_bytes(const WeighArgs&, int64_t) { return 0; }
MOE_HD inline int64_t shared_bytes(const StageArgs&, int64_t) { return Pieces().add(1, 8).bytes; }
MOE_HD inline int64_t shared_bytes(const ReduceArgs& a, int64_t) {
  return addend_pieces(kReduceBatch, a.top_k).add(kReduceBatch, 8).add(1, 8).bytes;
}
MOE_HD inline Pieces spread_memory() {
  return Pieces().add(kSpreadBatch, 8).add(kSpreadBatch, 8).add(kSpreadBatch * (kLanes + 1), 4);
}
MOE_HD inline int64_t shared_bytes(const SpreadArgs& a, int64_t) {
  Pieces p = spread_memory();
  add_last_block(p, a.ends);
  return p.bytes;
}
MOE_HD inline int64_t shared_bytes(const SpreadTilesArgs&, int64_t) {
  return spread_memory().add(kSpreadBatch, 4).bytes;
}
MOE_HD inline int64_t shared_bytes(const DoneArgs&, int64_t) { return Pieces().add(1, 8).bytes; }
MOE_HD inline int64_t shared_bytes(const LlSendArgs& a, int64_t threads) {
  Pieces p;
  p.add(threads, 8).add(threads, 8).add(a.max_tokens, 4).add(a.max_tokens, 8).add(a.max_tokens, 8).add(2, 8);
  add_quantise(p, a.max_tokens, a.format);
  return p.bytes;
}
MOE_HD inline int64_t shared_bytes(const LlArriveArgs&, int64_t) { return Pieces().add(1, 8).add(1, 8).bytes; }
MOE_HD inline int64_t shared_bytes(const LlReadyArgs& a, int64_t) { return Pieces().add(a.world, 4).add(1, 8).bytes; }
MOE_HD inline int64_t shared_bytes(const LendArgs&, int64_t) { return 0; }
MOE_HD inline int64_t shared_bytes(const AssignArgs&, int64_t) { return 0; }
MOE_HD inline int64_t shared_bytes(const PullArgs&, int64_t) { return 0; }
MOE_HD inline int64_t shared_bytes(const CollectArgs& a, int64_t) {
  Pieces p;
  add_last_block(p, a.ends);
  return p.bytes;
}

}  // namespace p2p
}  // namespace moe_comm
