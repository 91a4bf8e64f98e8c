// Kernel arguments of peer_to_peer dispatch and combine, and the layout of the symmetric memory that ranks share.
//
// Every kernel takes one struct by value. All members are 8 bytes, so Python packs the struct as an array of words, and
// one launch path serves nvcc kernels, NVRTC kernels and host runs. This file includes no header that NVRTC lacks.
//
// Each rank has one block of symmetric memory. Every rank knows the address of every block:
//
//   block   [ control | heap: rows that peers write to or read from ]
//
//   control [ posted W | header 2 x W x 49 | offer 2 x W x 5 | counts 2 x W x E |
//             done W | arrived L x W x 16 | sent 2 x L x W x 4 | staged 2 x W | results 4 x W ]
//
// Each peer writes to its own words of the control area and then sets the matching flag word to the current turn
// number. Flags are never reset. A turn is a sequence number: each meet starts a new turn. A rank can be at most one
// turn ahead of a peer that still reads, so the data is double-buffered by parity (0 or 1) of the turn. meet copies
// counts and offers to this rank's private memory, where the kernels that follow read them.
//
//   dispatch   count ▸ scan [▸ order] ▸ meet (counts, offers) ▸ push ▸ arrive [▸ fan_out]      one turn, no host
//   combine    meet (offers) ▸ sum ▸ done            also the backward of dispatch, without weights
//   backward   meet (offers) ▸ spread ▸ done         backward of combine
//
// The last block of a kernel can run the kernel that follows: scan runs meet, and sum and spread done.
// Then these are no launches of their own.
//
//   lending    count ▸ scan ▸ meet (counts) ▸ lend ▸ assign ▸ pull      a turn before the dispatch to slots
//              pull                                                     before the backward of the experts
//              meet (offers) ▸ collect ▸ done                           gradients of lent experts
//
//   overlapped meet (offers) ▸ [ready ▸ sum] for each slice ▸ done      combine of results that are still computed
//              meet (offers) ▸ spread_tiles ▸ done                      backward of combine, for a GEMM that waits
//   reduced    meet (offers) ▸ weigh ▸ stage ▸ reduce ▸ stage ▸ sum_reduced ▸ done      combine, see below
//
// The reduced combine moves one row per (token, owner), where sum moves one per slot. If several slots of a token have
// one owner, weigh links their rows there and writes their weights. After the first stage all links have been written;
// reduce then adds the linked rows of each token in fp32, in slot order, and rounds once to the row dtype. After the
// second stage all reduced rows can be read; sum_reduced adds one row per owner. Rows of other slots are read in place.
// Partial sums are rounded, so the result differs from that of sum, and depends on the placement of experts.
//
// The overlapped combine divides the columns of the results into slices. On another stream, a GEMM computes them slice
// by slice (overlap/triton/publish_mm.py). After the last of a rank's rows of a slice, it sets results(slice, rank) at
// the rank of the tokens. ready waits for one slice of all ranks; sum then adds its columns, while the GEMM computes
// the next slice. spread_tiles sets arrived(e, rank, tile) at the owner of e as push_tiles does.
//
// A rank's rows for an expert have a flag for each tile of flag_rows(n) of its n rows: arrived(e, rank, tile). push
// walks tokens and reads each once; the rows of an expert end with the last tokens, and so do its flags. With the list
// that `order` writes, push_tiles and spread_tiles walk tiles (order.h), so a GEMM that waits for tiles computes
// meanwhile.
//
//   low latency  ll_send ▸ ll_arrive ▸ [experts] ▸ ll_ready ▸ sum
//
// Low-latency dispatch (1 to 256 tokens) exchanges no counts. Every (expert, source rank) pair has a fixed region of
// max_tokens rows at the expert's owner; a flag word with turn and count is written after the rows.
//
// ll_ready sets this rank's done word at all peers: the results of its experts are in its block. One word per rank is
// enough, because the caller hands over the results of all experts in one call. ll_ready then waits only for the owners
// of this rank's rows. A rank can therefore complete turn n while a peer still computes turn n. It cannot complete
// turn n + 1: ll_arrive waits for a flag of every rank, also if this rank has no experts, and a rank sets its flags of
// turn n + 1 after its kernels of turn n. So when a rank has completed ll_arrive of turn n + 1, all ranks have
// completed turn n. It follows that nothing is overwritten that a peer still reads:
//
//   received rows   one buffer. Only one source rank writes to a region. If it sent rows of turn n there, its ll_ready
//                   of turn n waited for the owner, which had computed on them, before it sends rows of turn n + 1.
//   sent flags      two copies, by parity of the turn, because a source that sent no rows to an owner does not wait for
//                   it. Flags of turn n + 2 are written by ranks that have completed ll_arrive of turn n + 1, so all
//                   ranks have read those of turn n.
//   results         one buffer. An owner writes results of turn n + 1 after ll_arrive of turn n + 1, so all ranks have
//                   completed the sum of turn n.
//   done words      only grow, so a wait for turn n also ends with turn n + 1.
//
// A turn of another kind begins with meet, which waits until all ranks have completed their earlier turns.
//
// Only meet, arrive, ready, stage, done, ll_arrive and ll_ready wait, and each runs with one block, or in the last
// block of another kernel, when all other blocks have ended. A waiting kernel therefore never keeps a peer's kernel off
// the device, even if ranks share a device and other kernels have many blocks.
#pragma once

#include "layout.h"

namespace moe_comm {
namespace p2p {

constexpr int64_t kHeaderWords = 49;   // packed by comm/header.py
constexpr int64_t kComparedWords = 8;  // the first kComparedWords words must be equal on all ranks
constexpr int64_t kDigestWord = 6;     // digest of the placement, above kDigestShift bits
constexpr int kDigestShift = 22;
constexpr int64_t kFaultWord = 8;    // 0; 1 + the kind of error in this rank's input; or kBadIdsWord
constexpr int64_t kBadIdsWord = -1;  // bad expert ids; words 9, 10, 11: first bad slot, its id, number of bad ids
constexpr int64_t kOfferWords = 5;
constexpr int64_t kNowhere = -1;        // offered by a rank that could not allocate
constexpr int64_t kMaxParts = 4;        // maximum number of ll_send blocks per expert
constexpr int64_t kMaxSlices = 4;       // maximum number of column slices of an overlapped combine
constexpr int64_t kSliceColumns = 256;  // the first column of a slice is a multiple of it
constexpr int64_t kTileRows = 128;      // approximate number of rows of a tile with a flag
constexpr int64_t kStackAlign = 256;    // alignment in bytes of the tensors of a stack
constexpr int64_t kTileFlags = 16;      // maximum number of tiles, and flags, of one (expert, source rank)

// Words of an offer. The first four are byte offsets from the start of the offering rank's block. The last is the
// capacity in rows; -1 means unlimited.
enum Offer : int64_t { kRowsAt = 0, kBlockAt = 1, kScalesAt = 2, kLinksAt = 3, kRoom = 4 };

// Error codes in State::fault and Report::fault.
enum Fault : int64_t {
  kNone = 0,
  kTimedOut =
      1,  // who: the rank waited for; what: the Wait; expected, value: what its word must reach, and its last value
  kAborted = 2,   // the host set the abort word because a peer is dead
  kDisagree = 3,  // headers differ, or a header reports a fault
  kBadIds = 4,    // an expert id is out of range; who: the first such slot; value: its id
  kNoRoom = 6,    // a rank could not allocate; who: that rank
};
enum Wait : int64_t { kPosted = 0, kDone = 1, kArrived = 2, kSent = 3, kResults = 4, kStaged = 5 };

// A row of a token with several rows at one owner: the next of these rows or -1; the weight of the row; 1 if it is the
// first. Zeros for other rows.
struct alignas(16) RowLink {
  int64_t next;
  float weight;
  int32_t first;
};

// Wire format of rows: unchanged; e4m3 with one scale per 128 channels; e4m3 with one scale per row.
enum Format : int64_t { kSame = 0, kBlockScales = 1, kRowScales = 2 };
constexpr int64_t kScaleChannels = 128;

MOE_HD inline int64_t element_bytes(int64_t dtype) { return dtype == 0 ? 4 : 2; }
// Row stride in bytes at the destination. e4m3 rows are padded with zeros to a multiple of 16 bytes.
MOE_HD inline int64_t row_bytes(int64_t hidden, int64_t dtype, int64_t format) {
  return format == kSame ? hidden * element_bytes(dtype) : (hidden + 15) / 16 * 16;
}
// Number of fp32 scales per row. Scales are stored densely, [R, scales], in a separate block.
MOE_HD inline int64_t row_scales(int64_t hidden, int64_t format) {
  return format == kSame ? 0 : format == kRowScales ? 1 : (hidden + kScaleChannels - 1) / kScaleChannels;
}

// The tiles of the n rows that a rank sends to one expert: the rows of each but the last, and their number. Tiles have
// about kTileRows rows and nearly equal sizes, so that blocks which send as many tiles send as many rows.
MOE_HD inline int64_t flag_rows(int64_t n) {
  const uint32_t rows = static_cast<uint32_t>(n), tiles = (rows + kTileRows / 2) / kTileRows;  // 32 bits: fast division
  const uint32_t limited = tiles < 1 ? 1 : tiles < kTileFlags ? tiles : kTileFlags;
  return (rows + limited - 1) / limited;
}
MOE_HD inline int64_t num_flags(int64_t n) {
  const uint32_t rows = static_cast<uint32_t>(n), of_tile = static_cast<uint32_t>(flag_rows(n));
  return n > 0 ? (rows + of_tile - 1) / of_tile : 0;
}

// The control area, as offsets in 8-byte words from the start of a block. L is the maximum number of experts per rank.
struct Control {
  int64_t world, experts, local_experts;

  MOE_HD int64_t posted(int64_t from) const { return from; }
  MOE_HD int64_t header(int64_t parity, int64_t from) const { return world + (parity * world + from) * kHeaderWords; }
  MOE_HD int64_t offer(int64_t parity, int64_t from) const {
    return header(2, 0) + (parity * world + from) * kOfferWords;
  }
  MOE_HD int64_t counts(int64_t parity, int64_t from) const { return offer(2, 0) + (parity * world + from) * experts; }
  MOE_HD int64_t done(int64_t from) const { return counts(2, 0) + from; }
  MOE_HD int64_t arrived(int64_t local_expert, int64_t from, int64_t tile) const {
    return done(world) + (local_expert * world + from) * kTileFlags + tile;
  }
  // Low latency: turn << 16 | row count, one word per ll_send part.
  MOE_HD int64_t sent(int64_t parity, int64_t local_expert, int64_t from, int64_t part) const {
    return arrived(local_experts, 0, 0) + ((parity * local_experts + local_expert) * world + from) * kMaxParts + part;
  }
  MOE_HD int64_t staged(int64_t stage, int64_t from) const { return sent(2, 0, 0, 0) + stage * world + from; }
  MOE_HD int64_t results(int64_t slice, int64_t from) const { return staged(2, 0) + slice * world + from; }
  // Size of the control area in bytes, rounded up to a multiple of 256.
  MOE_HD int64_t bytes() const { return (results(kMaxSlices, 0) * 8 + 255) / 256 * 256; }
};

// The slices of an overlapped combine: their number, and the first column of a slice, or the end after the last one.
MOE_HD inline int64_t num_slices(int64_t columns) {
  const int64_t units = (columns + kSliceColumns - 1) / kSliceColumns;
  return units < kMaxSlices ? units : kMaxSlices;
}
MOE_HD inline int64_t first_column(int64_t columns, int64_t slice) {
  const int64_t units = (columns + kSliceColumns - 1) / kSliceColumns, slices = num_slices(columns);
  return slice < slices ? slice * units / slices * kSliceColumns : columns;
}

// This rank's state in device memory; initially zero.
struct State {
  int64_t turn;   // number of the last meet or ll_ready; the kernels increment it, so a captured graph can be replayed
  int64_t fault;  // if nonzero, every later kernel returns immediately. If all ranks see the same fault (kDisagree,
                  // kBadIds, kNoRoom), the host may reset it to 0 and continue; otherwise the ranks' turns differ
  int64_t ended;  // blocks that have ended, of the running kernel if its last block runs the next one; else 0
};

// In page-locked host memory. Kernels write it; the host reads it after a synchronization or polls `turn`.
struct Report {
  int64_t turn;  // written last, by meet, ll_arrive and every kernel that fails
  int64_t fault, who, what, expected, value;
  int64_t rows;      // of the last meet with counts or ll_arrive: rows for this rank's experts, with overflow
  int64_t dropped;   // this rank's slots with id -1
  int64_t overflow;  // this rank's slots beyond the capacity. Not a fault: they get no place and contribute nothing
  int64_t bad;       // out-of-range ids, which ll_send treats as -1; this counter is its only way to report them
                     // meet sets rows, dropped and overflow; ll_send adds to overflow and bad, the host resets those
};

// --- kernel arguments: arrays of 8-byte words, declared once for C++ and Python ---
//
// MOE_WORDS(X) lists the words of a struct. Words named *_at are device addresses; 0 means absent.

// Arguments common to all kernels; they are the first words of every argument struct.
#define MOE_P2P_GROUP(X)                                                               \
  X(world)                                                                             \
  X(rank)                                                                              \
  X(experts)                                                                           \
  X(local_experts) /* the most that one rank holds */                                  \
  X(peers_at)      /* W addresses: the ranks' blocks */                                \
  X(offsets_at)    /* W + 1: the first expert of each rank */                          \
  X(state_at)      /* State */                                                         \
  X(report_at)     /* Report, in host memory */                                        \
  X(abort_at)      /* one word in host memory: not 0 tells waiting kernels to leave */ \
  X(timeout_ns)

// T tokens with K slots each. Slots are split into chunks of `chunk` slots, a multiple of K. count runs one
// block per chunk. The row of a slot at the owner of its expert e is the sum of
//   expert_rows_at[e]       rows of the experts before e on that rank, and of the ranks before this one for e
//   counts_at[chunk][e]     this rank's slots for e in the chunks before
//   low half of place_at    slots for e before this one in its chunk
#define MOE_P2P_SLOTS(X)                                                                                            \
  X(tokens)                                                                                                         \
  X(top_k)                                                                                                          \
  X(ids_at) /* [T, K] int64 */                                                                                      \
  X(chunk)                                                                                                          \
  X(chunks)         /* ceil(T * K / chunk), 0 where there are no slots */                                           \
  X(counts_at)      /* [chunks, E] int64: count writes slots per expert; scan replaces them by those before */      \
  X(bad_at)         /* [chunks, 4] int64: slots dropped; how many are bad; the first bad slot or -1; its id */      \
  X(expert_rows_at) /* [E] int64: scan writes this rank's slots per expert; meet replaces them by the first row */  \
  X(place_at) /* [T, K] int64: count writes slots before and in total of the same expert in the chunk (low and high \
                 half) or -1; push replaces them by places, as layout.h packs them */

// Rows: elements of `dtype` (runtime/shared.DTYPE_CODES: 0 fp32, 1 bf16, 2 fp16); `hidden` elements per row are used.
#define MOE_P2P_ROWS(X) \
  X(hidden)             \
  X(dtype)

// count: [chunks] blocks. Counts the slots per expert in each chunk.
#define MOE_P2P_COUNT(X) \
  MOE_P2P_GROUP(X)       \
  MOE_P2P_SLOTS(X)       \
  X(ids) /* valid ids are below it; at most E */

// order: [chunks] blocks, between scan and meet. Lists this rank's slots by expert, and their tiles in the order in
// which push and spread send them; see order.h.
#define MOE_P2P_ORDER(X) \
  MOE_P2P_GROUP(X)       \
  MOE_P2P_SLOTS(X)       \
  X(order_at) /* [order_words(T * K, E)] int64 */

// meet: one block. Starts a turn. Writes this rank's header, offer and, if with_counts, slots per expert to all peers;
// waits for theirs; compares headers. With counts, it then converts expert_rows_at to first rows and writes summary_at
// and the report. Without counts, the slot words are not read. After a fault, summary_at has zeros, so kernels that
// read numbers of rows there compute nothing; so has own_counts_at.
#define MOE_P2P_MEET(X)                                                                                        \
  MOE_P2P_GROUP(X)                                                                                             \
  MOE_P2P_SLOTS(X)                                                                                             \
  X(with_counts)                                                                                               \
  X(strict)    /* with counts: a fault on every rank if one of them receives more rows than it has room for */ \
  X(header_at) /* [49] in host memory that the device reads */                                                 \
  X(offer_0)                                                                                                   \
  X(offer_1)                                                                                                   \
  X(offer_2)                                                                                                   \
  X(offer_3)                                                                                                   \
  X(offer_4)                                                                                                   \
  X(offers_at)      /* [W, 5] int64 on the device: all offers of this turn, for the kernels that follow */     \
  X(all_headers_at) /* [W, 49] in host memory, or 0 */                                                         \
  X(all_counts_at)  /* [W, E] int64 on the device: slots of each rank for each expert; written with counts */  \
  X(host_counts_at) /* the same in host memory, or 0 */                                                        \
  X(digest_at)      /* int64 on the device that is added to the header's digest of the placement, or 0 */      \
  X(summary_at)     /* [L + 1] int64 on the device: first row of each of this rank's experts, then the end;    \
                       never beyond this rank's room */                                                        \
  X(own_counts_at)  /* int64 rows of each of this rank's experts in this room, on the device, or 0 */

// scan: ceil(E / kScanExperts) blocks. Sums the counts over the chunks. With `meets`, the last block then runs meet;
// otherwise the words of meet are not read.
#define MOE_P2P_SCAN(X) MOE_P2P_MEET(X) X(meets)

// push, and push_fp8 for rows that are quantised: any number of blocks; each takes chunks in turn. Writes each slot's
// row to its place at the expert's owner and fills place_at. Sets arrived(e, rank, tile) at the owner of e for all
// tiles after the last of this rank's rows for e. push_tiles: the same for rows that are neither quantised nor relayed;
// each block takes tiles of the order in turn. Sets arrived(e, rank, tile) once the rows of the tile are written.
//   A slot with a row index beyond the owner's capacity (offer word 4) gets place -1 and counts as overflow.
//   format: Format; the received values equal those of dispatch/wire_dtype.py.
//   relay: a token's row is sent once per rank; the owner's links (offer word 3) list its other destinations there.
#define MOE_P2P_PUSH(X)                                                                           \
  MOE_P2P_GROUP(X)                                                                                \
  MOE_P2P_SLOTS(X)                                                                                \
  MOE_P2P_ROWS(X)                                                                                 \
  X(x_at)                                                                                         \
  X(stride) /* bytes */                                                                           \
  X(offers_at)                                                                                    \
  X(all_counts_at)                                                                                \
  X(left_at) /* [E] int64, zero before the first push; each push counts in it and leaves zeros */ \
  X(format)                                                                                       \
  X(power_of_two)                                                                                 \
  X(relay)                                                                                        \
  X(order_at) /* as order wrote it; only for push_tiles */                                        \
  X(bulk)     /* copy rows by cp.async.bulk where their addresses allow it; sm_90 and newer */

// arrive: one block. Waits until the rows of some source ranks for this rank's experts have been written.
#define MOE_P2P_ARRIVE(X)                           \
  MOE_P2P_GROUP(X)                                  \
  X(all_counts_at) /* [W, E], as meet wrote them */ \
  X(first_source)  /* the first source rank */      \
  X(sources)       /* number of source ranks */

// fan_out: any number of blocks. Relay: copies rows and their scales to the other destinations listed in links.
#define MOE_P2P_FAN_OUT(X)                                           \
  MOE_P2P_GROUP(X)                                                   \
  MOE_P2P_ROWS(X)                                                    \
  X(rows_at)                                                         \
  X(scales_at)                                                       \
  X(links_at)   /* [R] int64: the row that it is a copy of, or -1 */ \
  X(rows)       /* R, the most there can be */                       \
  X(summary_at) /* as meet wrote it: its end says how many are */    \
  X(format)

// sum: any number of blocks. y[t] = sum over k, in order, of weights[t, k] * row at place[t, k] (offer word 0),
// accumulated in fp32 and rounded once. If weights_at is 0, the sum is unweighted. Slots without a place contribute
// nothing. Only `columns` columns from `first_column` are computed. Unless words_at is 0, the 4-byte word of the row of
// each slot (offer word 2) is copied to words_at [T, K]; 0 for slots without a place. sum_reduced ignores the last two.
#define MOE_P2P_SUM(X)                   \
  MOE_P2P_GROUP(X)                       \
  MOE_P2P_ROWS(X)                        \
  X(first_column)                        \
  X(columns)                             \
  X(tokens)                              \
  X(top_k)                               \
  X(place_at)                            \
  X(offers_at)                           \
  X(weights_at) /* [T, K] fp32 */        \
  X(y_at)       /* [T, hidden], dense */ \
  X(words_at)                            \
  X(ends) /* whether the last block then runs done */

// ready: one block. Waits until all ranks have computed a slice of their results for this rank's tokens.
#define MOE_P2P_READY(X) \
  MOE_P2P_GROUP(X)       \
  X(slice)

// weigh: any number of blocks. If several slots of a token have one owner, writes a RowLink for each of their rows to
// the owner's links (offer word 3), which are zero before. Other slots get none.
#define MOE_P2P_WEIGH(X) \
  MOE_P2P_GROUP(X)       \
  X(tokens)              \
  X(top_k)               \
  X(place_at)            \
  X(offers_at)           \
  X(weights_at) /* [T, K] fp32 */

// stage: one block. Announces that this rank has completed a stage of the turn; waits until all ranks have.
#define MOE_P2P_STAGE(X) \
  MOE_P2P_GROUP(X)       \
  X(stage) /* 0 or 1 */

// reduce: any number of blocks. reduced[r] = sum over the rows linked from r of weight * row, if r is the first of its
// links.
#define MOE_P2P_REDUCE(X)                           \
  MOE_P2P_GROUP(X)                                  \
  MOE_P2P_ROWS(X)                                   \
  X(rows)       /* R */                             \
  X(top_k)      /* the most rows that are linked */ \
  X(rows_at)    /* [R, hidden] */                   \
  X(links_at)   /* [R] RowLink */                   \
  X(reduced_at) /* [R, hidden] */

// sum_reduced: any number of blocks. As sum; the linked rows of a token are replaced by one row of reduced (offer word
// 1), with weight 1.

// spread: any number of blocks. Backward of the weighted sum: writes grad[t] * weights[t, k] to place[t, k] in the
// owners' blocks (offer word 1). Unless dots_at is 0, writes the dot products of grad[t] with the row at place[t, k]
// (offer word 0) to dots_at [T, K] fp32. The additions follow the order of the CPU kernel (csrc/cpu/kernels_impl.inc),
// so the bits are equal. If weights_at is 0, all weights are 1. Unless words_at is 0, the 4-byte word of each slot in
// words_at [T, K] is sent with its row (offer word 2).
// spread_tiles: the same without words, tile by tile as push_tiles. Sets arrived(e, rank, tile) at the owner of e once
// the rows of the tile are written.
#define MOE_P2P_SPREAD(X)                                    \
  MOE_P2P_GROUP(X)                                           \
  MOE_P2P_ROWS(X)                                            \
  X(tokens)                                                  \
  X(top_k)                                                   \
  X(place_at)                                                \
  X(offers_at)                                               \
  X(weights_at)                                              \
  X(grad_at)                                                 \
  X(stride) /* bytes */                                      \
  X(dots_at)                                                 \
  X(order_at) /* as order wrote it; only for spread_tiles */ \
  X(words_at)                                                \
  X(ends) /* whether the last block then runs done; not for spread_tiles */

// done: one block. Announces that this rank no longer accesses peers' memory in this turn; waits until all ranks have
// done so.
#define MOE_P2P_DONE(X) MOE_P2P_GROUP(X)

// ll_send: E * parts blocks. Writes this rank's rows for an expert to row (local expert * W + rank) * max_tokens + i of
// the owner's block (offer word 0; scales: word 2), then the flag word. Part p sends rows p, p + parts, ... Writes
// place_at. Offers are known in advance. Slots of one expert beyond max_tokens get place -1 and count as overflow.
// Ranks without experts get the flag word of their first (absent) expert.
#define MOE_P2P_LL_SEND(X)                               \
  MOE_P2P_GROUP(X)                                       \
  X(tokens)                                              \
  X(top_k)                                               \
  X(ids_at)                                              \
  MOE_P2P_ROWS(X)                                        \
  X(x_at)                                                \
  X(stride) /* bytes */                                  \
  X(offers_at)                                           \
  X(place_at)                                            \
  X(max_tokens) /* at most 65535 */                      \
  X(parts)      /* 1 to kMaxParts, equal on all ranks */ \
  X(format)                                              \
  X(power_of_two)

// ll_arrive: one block. Waits until all ranks have written their rows; reports the number of rows from each rank.
#define MOE_P2P_LL_ARRIVE(X)                         \
  MOE_P2P_GROUP(X)                                   \
  X(parts)                                           \
  X(few_counts_at)  /* [L, W] int64 on the device */ \
  X(host_counts_at) /* the same in host memory, or 0 */

// ll_ready: one block. Announces that this rank's results are in its block; waits for the owners in place_at. Ends the
// turn.
#define MOE_P2P_LL_READY(X) \
  MOE_P2P_GROUP(X)          \
  X(tokens)                 \
  X(top_k)                  \
  X(place_at)

// Lending: ids name E experts, which `experts` does not count, but slots: each rank's experts, and then its slots for
// copies of others. homes_at: [E] home of each expert; [E] the experts by home, then by id; [W + 1] the first of each
// rank among these; [E] the slot of each expert at its home. plan_at: LendPlan in lend.h.
#define MOE_P2P_HOMES(X)                        \
  X(routed) /* E */                             \
  X(homes_at)                                   \
  X(copies) /* slots of each rank for copies */ \
  X(plan_at)

// lend: one block, after a meet with the counts of experts. Writes the plan of the rows that ranks compute for others.
#define MOE_P2P_LEND(X)                                                                                       \
  MOE_P2P_GROUP(X)                                                                                            \
  MOE_P2P_HOMES(X)                                                                                            \
  X(rows)   /* the most that a rank should have, in thousandths of the mean */                                \
  X(memory) /* the most that it may have, in thousandths of the slots of the rank with most; 0: no limit */   \
  X(row_ns)                                                                                                   \
  X(copy_ns)                                                                                                  \
  X(all_counts_at)                                                                                            \
  X(residents_at) /* [residents] (expert, rank) of copies whose weights are present */                        \
  X(residents)                                                                                                \
  X(work_at)  /* memory; see LendWork */                                                                      \
  X(tally_at) /* [6] int64 to which the counts of the call are added, or 0: rows; ranks times the rows of the \
                 busiest one without lending, and with it; 1; experts lent, and of these by this rank */

// assign: [chunks] blocks, between lend and the count of the dispatch. Replaces place_at, as count wrote it for ids of
// experts, by ids of slots, or -1: the rows of an expert are cut in the order of (source rank, token, slot).
#define MOE_P2P_ASSIGN(X) MOE_P2P_GROUP(X) MOE_P2P_SLOTS(X) MOE_P2P_HOMES(X)

// A stack has up to four tensors [slots, size], one after the other, each aligned to kStackAlign bytes. Sizes are equal
// on all ranks; `slots` is local_experts.
#define MOE_P2P_STACK(X) X(size_0) X(size_1) X(size_2) X(size_3)

// pull: any number of blocks. Copies the weights of the experts that this rank is lent from the stacks of their homes.
#define MOE_P2P_PULL(X)                             \
  MOE_P2P_GROUP(X)                                  \
  MOE_P2P_HOMES(X)                                  \
  MOE_P2P_STACK(X)                                  \
  X(stacks_at) /* W addresses: the ranks' stacks */ \
  X(element)   /* bytes */

// collect: any number of blocks, after a meet in which ranks offer stacks of fp32 gradients (offer word 0). Adds the
// gradients of each of this rank's experts: its own, then those of the ranks that it is lent to, in order. The sums are
// rounded once.
#define MOE_P2P_COLLECT(X)                             \
  MOE_P2P_GROUP(X)                                     \
  MOE_P2P_HOMES(X)                                     \
  MOE_P2P_STACK(X)                                     \
  X(offers_at)                                         \
  X(dtype)                                             \
  X(out_0) /* addresses of [homes, size] of `dtype` */ \
  X(out_1)                                             \
  X(out_2)                                             \
  X(out_3)                                             \
  X(ends) /* whether the last block then runs done */

// All kernels p2p_<name>: name, argument struct, words.
#define MOE_P2P_KERNELS(K)                         \
  K(count, CountArgs, MOE_P2P_COUNT)               \
  K(scan, ScanArgs, MOE_P2P_SCAN)                  \
  K(order, OrderArgs, MOE_P2P_ORDER)               \
  K(meet, MeetArgs, MOE_P2P_MEET)                  \
  K(push, PushArgs, MOE_P2P_PUSH)                  \
  K(push_tiles, PushTilesArgs, MOE_P2P_PUSH)       \
  K(push_fp8, PushFp8Args, MOE_P2P_PUSH)           \
  K(arrive, ArriveArgs, MOE_P2P_ARRIVE)            \
  K(fan_out, FanOutArgs, MOE_P2P_FAN_OUT)          \
  K(sum, SumArgs, MOE_P2P_SUM)                     \
  K(ready, ReadyArgs, MOE_P2P_READY)               \
  K(weigh, WeighArgs, MOE_P2P_WEIGH)               \
  K(stage, StageArgs, MOE_P2P_STAGE)               \
  K(reduce, ReduceArgs, MOE_P2P_REDUCE)            \
  K(sum_reduced, SumReducedArgs, MOE_P2P_SUM)      \
  K(spread, SpreadArgs, MOE_P2P_SPREAD)            \
  K(spread_tiles, SpreadTilesArgs, MOE_P2P_SPREAD) \
  K(done, DoneArgs, MOE_P2P_DONE)                  \
  K(ll_send, LlSendArgs, MOE_P2P_LL_SEND)          \
  K(ll_arrive, LlArriveArgs, MOE_P2P_LL_ARRIVE)    \
  K(ll_ready, LlReadyArgs, MOE_P2P_LL_READY)       \
  K(lend, LendArgs, MOE_P2P_LEND)                  \
  K(assign, AssignArgs, MOE_P2P_ASSIGN)            \
  K(pull, PullArgs, MOE_P2P_PULL)                  \
  K(collect, CollectArgs, MOE_P2P_COLLECT)

#define MOE_P2P_WORD(name) int64_t name;
struct Group {
  MOE_P2P_GROUP(MOE_P2P_WORD)
};
struct Slots {
  MOE_P2P_SLOTS(MOE_P2P_WORD)
};
#define MOE_P2P_STRUCT(kernel, name, words) \
  struct name {                             \
    words(MOE_P2P_WORD)                     \
  };
MOE_P2P_KERNELS(MOE_P2P_STRUCT)

}  // namespace p2p
}  // namespace moe_comm
