// What the host tells the kernels of peer_to_peer dispatch, and where things stand in the memory that ranks share.
//
// Every kernel takes one struct by value: all members are 8 bytes, so that Python packs it as a row of words and one
// launch path serves nvcc's kernels, NVRTC's and the host's. Free of headers that NVRTC lacks.
//
// Each rank has one block of symmetric memory, of which every rank knows the address:
//
//   block   [ control | heap: rows that peers write to or read from ]
//
//   control [ told W | header 2 x W x 49 | offer 2 x W x 5 | counts 2 x W x E | done W | arrived L x W | sent L x W x 4
//   ]
//
// Peers write there, each in its own place, and raise a word to the number of the turn when what belongs to it stands;
// nothing is ever reset. A turn is what follows a meet, up to the next; parity 0 or 1 says which half holds it, since a
// rank can be one turn ahead of a peer that still reads, and no more. (A dispatch that lets the host allocate is two
// turns, so meet copies the counts to memory of this rank's own, where push and arrive find them.)
//
//   dispatch   count ▸ meet (counts) ▸ [host allocates] ▸ meet (offers) ▸ push ▸ arrive [▸ fan_out]
//   combine    meet (offers) ▸ sum ▸ done            and so dispatch's backward, without weights
//   backward   meet (offers) ▸ spread ▸ done         of combine
//
//   few rows   ll_send ▸ ll_arrive ▸ [experts] ▸ ll_ready ▸ sum
//
// Dispatch of few rows (1 to 256 tokens) asks nobody: every (expert, source) has a fixed place for max_tokens rows at
// the expert's owner, and a word that holds turn and count follows them. One buffer is enough: who has left ll_ready
// knows that all ranks have computed, so their rows may be overwritten; who has left ll_arrive knows that all ranks
// have summed what came before, so this rank's results may be.
//
// Only meet, arrive, done, ll_arrive and ll_ready wait, with one block each: nothing that waits keeps a peer's kernel
// off the device, however many ranks share it and however many blocks the others have.
#pragma once

#include "layout.h"

namespace moe_comm {
namespace p2p {

constexpr int64_t kHeaderWords = 49;   // as comm/header.py packs them
constexpr int64_t kComparedWords = 8;  // of these, the first must agree
constexpr int64_t kFaultWord = 8;      // 0; 1 + the kind of error in this rank's input; or kBadIdsWord
constexpr int64_t kBadIdsWord = -1;    // found by count; words 9, 10, 11 hold the first bad slot, its id, how many
constexpr int64_t kOfferWords = 5;
constexpr int64_t kNowhere = -1;  // an offer of a rank that could not allocate
constexpr int64_t kMaxParts = 4;  // of ll_send: blocks an expert

// Words of an offer: bytes from the start of the offering rank's block; last, how many rows it has room for, -1 for as
// many as come.
enum Offer : int64_t { kRowsAt = 0, kBlockAt = 1, kScalesAt = 2, kLinksAt = 3, kRoom = 4 };

// What went wrong, in State::fault and Report::fault.
enum Fault : int64_t {
  kNone = 0,
  kTimedOut = 1,  // who: the rank waited for; what: the wait (Wait); wanted, seen: of its word
  kAborted = 2,   // the host said so: a peer is gone
  kDisagree = 3,  // headers differ, or one holds a fault
  kBadIds = 4,    // an expert id out of range; who: the first slot that has one; seen: the id
  kNoRoom = 6,    // a rank could not allocate; who: which
};
enum Wait : int64_t { kTold = 0, kDone = 1, kArrived = 2, kSent = 3 };

// How rows travel: as they are; e4m3 with a scale each 128 channels; e4m3 with a scale a row.
enum Format : int64_t { kSame = 0, kBlockScales = 1, kRowScales = 2 };
constexpr int64_t kScaleChannels = 128;

MOE_HD inline int64_t element_bytes(int64_t dtype) { return dtype == 0 ? 4 : 2; }
// From row to row where rows arrive; e4m3 rows begin on 16 bytes, zeros fill them up.
MOE_HD inline int64_t row_bytes(int64_t hidden, int64_t dtype, int64_t format) {
  return format == kSame ? hidden * element_bytes(dtype) : (hidden + 15) / 16 * 16;
}
// fp32 scales of a row; they stand dense, [R, scales], in a block of their own.
MOE_HD inline int64_t row_scales(int64_t hidden, int64_t format) {
  return format == kSame ? 0 : format == kRowScales ? 1 : (hidden + kScaleChannels - 1) / kScaleChannels;
}

// The control area, in 8-byte words from the start of a block. L: the most experts that one rank holds.
struct Control {
  int64_t world, experts, local_experts;

  MOE_HD int64_t told(int64_t from) const { return from; }
  MOE_HD int64_t header(int64_t parity, int64_t from) const { return world + (parity * world + from) * kHeaderWords; }
  MOE_HD int64_t offer(int64_t parity, int64_t from) const {
    return header(2, 0) + (parity * world + from) * kOfferWords;
  }
  MOE_HD int64_t counts(int64_t parity, int64_t from) const { return offer(2, 0) + (parity * world + from) * experts; }
  MOE_HD int64_t done(int64_t from) const { return counts(2, 0) + from; }
  MOE_HD int64_t arrived(int64_t local_expert, int64_t from) const { return done(world) + local_expert * world + from; }
  // Of few rows: turn << 16 | how many, from each of ll_send's parts.
  MOE_HD int64_t sent(int64_t local_expert, int64_t from, int64_t part) const {
    return arrived(local_experts, 0) + (local_expert * world + from) * kMaxParts + part;
  }
  // All of it, in bytes, up to a multiple of 256.
  MOE_HD int64_t bytes() const { return (sent(local_experts, 0, 0) * 8 + 255) / 256 * 256; }
};

// On the device, this rank's own, zero at first.
struct State {
  int64_t turn;   // of the last meet or ll_ready; they count it up themselves, so that a captured graph can run again
  int64_t fault;  // once it is not 0 every later kernel returns at once. Where all ranks see the same fault (kDisagree,
                  // kBadIds, kNoRoom) the host may set it to 0 and go on; else the ranks' turns differ
};

// In page-locked host memory that kernels write; the host reads it after a synchronisation, or polls `turn`.
struct Report {
  int64_t turn;  // written last, by meet, ll_arrive and whatever fails
  int64_t fault, who, what, wanted, seen;
  int64_t rows;      // of the last meet with counts, or ll_arrive: rows for this rank's experts, room or not
  int64_t dropped;   // slots of this rank with id -1
  int64_t overflow;  // slots of this rank that found no room. Not a fault: they get no place and add nothing
  int64_t bad;       // ids out of range that ll_send took for -1; it has no other way to say so
                     // meet sets rows, dropped and overflow; ll_send adds to overflow and bad, the host sets them to 0
};

// --- what kernels take: rows of 8-byte words, named once, for C++ and for Python ---
//
// MOE_WORDS(X) lists the words of a struct. "at" words are device addresses, 0 where there is nothing.

// What all kernels need; the first words of every argument struct.
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

// T tokens with K slots each; slots are cut into chunks of `chunk`, a multiple of K, a block of count and of push each.
#define MOE_P2P_SLOTS(X)                                                                                      \
  X(tokens)                                                                                                   \
  X(top_k)                                                                                                    \
  X(ids_at) /* [T, K] int64 */                                                                                \
  X(chunk)                                                                                                    \
  X(chunks)    /* ceil(T * K / chunk), 0 where there are no slots */                                          \
  X(counts_at) /* [chunks, E] int64: count writes slots per expert; meet makes of it the first row of each */ \
  X(bad_at)    /* [chunks, 4] int64: slots dropped; how many are bad; the first bad slot or -1; its id */

// Rows: elements of `dtype` (runtime/shared.DTYPE_CODES: 0 fp32, 1 bf16, 2 fp16), `hidden` of them used.
#define MOE_P2P_ROWS(X) \
  X(hidden)             \
  X(dtype)

// count: [chunks] blocks. Slots per expert of each chunk.
#define MOE_P2P_COUNT(X) MOE_P2P_GROUP(X) MOE_P2P_SLOTS(X)

// meet: one block. Begins a turn: tells all peers header, offer and, if with_counts, slots per expert; waits for
// theirs; compares; then, with counts, turns counts_at into first rows and writes summary_at and the report.
// Without counts the words of slots are not read.
#define MOE_P2P_MEET(X)                                                                                       \
  MOE_P2P_GROUP(X)                                                                                            \
  MOE_P2P_SLOTS(X)                                                                                            \
  X(with_counts)                                                                                              \
  X(header_at) /* [49] in host memory that the device reads */                                                \
  X(offer_0)                                                                                                  \
  X(offer_1)                                                                                                  \
  X(offer_2)                                                                                                  \
  X(offer_3)                                                                                                  \
  X(offer_4)                                                                                                  \
  X(offers_at)      /* [W, 5] int64 on the device: all offers of this turn, for the kernels that follow */    \
  X(all_headers_at) /* [W, 49] in host memory, or 0 */                                                        \
  X(all_counts_at)  /* [W, E] int64 on the device: slots of each rank for each expert; written with counts */ \
  X(host_counts_at) /* the same in host memory, or 0 */                                                       \
  X(summary_at)     /* [L + 1] int64 on the device: first row of each of this rank's experts, then the end;   \
                       never beyond this rank's room */

// push: [chunks] blocks. Each slot's row to its place at the expert's owner; writes place_at. Raises arrived(e, rank)
// at the owner of e once all of this rank's rows for e are there.
//   A slot whose row is beyond the owner's room (offer word 4) gets place -1 and counts as overflow.
//   format: Format; what arrives has dispatch/wire_dtype.py's values.
//   relay: a token's row goes once to each rank; the owner's links (offer word 3) say where else it belongs there.
#define MOE_P2P_PUSH(X)                                                                            \
  MOE_P2P_GROUP(X)                                                                                 \
  MOE_P2P_SLOTS(X)                                                                                 \
  MOE_P2P_ROWS(X)                                                                                  \
  X(x_at)                                                                                          \
  X(stride) /* bytes */                                                                            \
  X(offers_at)                                                                                     \
  X(all_counts_at)                                                                                 \
  X(place_at) /* [T, K] int64, as layout.h packs them */                                           \
  X(left_at)  /* [E] int64, zero before the first push; each push counts in it and leaves zeros */ \
  X(format)                                                                                        \
  X(power_of_two)                                                                                  \
  X(relay)

// arrive: one block. Waits until all rows of this rank's experts are there.
#define MOE_P2P_ARRIVE(X) \
  MOE_P2P_GROUP(X)        \
  X(all_counts_at) /* [W, E], as meet wrote them */

// fan_out: any number of blocks. Relay: copies rows, and their scales, to the other places that links name.
#define MOE_P2P_FAN_OUT(X)                                           \
  MOE_P2P_GROUP(X)                                                   \
  MOE_P2P_ROWS(X)                                                    \
  X(rows_at)                                                         \
  X(scales_at)                                                       \
  X(links_at)   /* [R] int64: the row that it is a copy of, or -1 */ \
  X(rows)       /* R, the most there can be */                       \
  X(summary_at) /* as meet wrote it: its end says how many are */    \
  X(format)

// sum: any number of blocks. y[t] = sum over k, in order, of weights[t, k] * rows at place[t, k] (offer word 0), in
// fp32, rounded once; weights 0: unweighted. Slots without place add nothing.
#define MOE_P2P_SUM(X)            \
  MOE_P2P_GROUP(X)                \
  MOE_P2P_ROWS(X)                 \
  X(tokens)                       \
  X(top_k)                        \
  X(place_at)                     \
  X(offers_at)                    \
  X(weights_at) /* [T, K] fp32 */ \
  X(y_at)       /* [T, hidden], dense */

// spread: any number of blocks. Backward of sum with weights: grad[t] * weights[t, k] to place[t, k] of the peers'
// blocks (offer word 1); dots_at [T, K] fp32, or 0: the dot products of grad[t] with the row at place[t, k] (offer word
// 0), in the CPU kernel's order of additions (csrc/cpu/kernels_impl.inc), so that the bits are the same. weights 0:
// ones.
#define MOE_P2P_SPREAD(X) \
  MOE_P2P_GROUP(X)        \
  MOE_P2P_ROWS(X)         \
  X(tokens)               \
  X(top_k)                \
  X(place_at)             \
  X(offers_at)            \
  X(weights_at)           \
  X(grad_at)              \
  X(stride) /* bytes */   \
  X(dots_at)

// done: one block. This rank reads and writes peers' memory no more in this turn; waits until nobody does.
#define MOE_P2P_DONE(X) MOE_P2P_GROUP(X)

// ll_send: E * parts blocks. Sends this rank's rows for an expert to row (local expert * W + rank) * max_tokens + i of
// its owner's block (offer word 0; scales: word 2), then the word. Part p sends rows p, p + parts, ... Writes place_at.
// Offers are known beforehand. Duplicates of an expert beyond max_tokens get place -1 and count as overflow.
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

// ll_arrive: one block. Waits until all rows are there; says how many came from each rank.
#define MOE_P2P_LL_ARRIVE(X)                         \
  MOE_P2P_GROUP(X)                                   \
  X(parts)                                           \
  X(few_counts_at)  /* [L, W] int64 on the device */ \
  X(host_counts_at) /* the same in host memory, or 0 */

// ll_ready: one block. This rank's results stand in its block; waits until all ranks' do. Ends the turn.
#define MOE_P2P_LL_READY(X) MOE_P2P_GROUP(X)

// Every kernel p2p_<name>: name, struct, words.
#define MOE_P2P_KERNELS(K)                      \
  K(count, CountArgs, MOE_P2P_COUNT)            \
  K(meet, MeetArgs, MOE_P2P_MEET)               \
  K(push, PushArgs, MOE_P2P_PUSH)               \
  K(arrive, ArriveArgs, MOE_P2P_ARRIVE)         \
  K(fan_out, FanOutArgs, MOE_P2P_FAN_OUT)       \
  K(sum, SumArgs, MOE_P2P_SUM)                  \
  K(spread, SpreadArgs, MOE_P2P_SPREAD)         \
  K(done, DoneArgs, MOE_P2P_DONE)               \
  K(ll_send, LlSendArgs, MOE_P2P_LL_SEND)       \
  K(ll_arrive, LlArriveArgs, MOE_P2P_LL_ARRIVE) \
  K(ll_ready, LlReadyArgs, MOE_P2P_LL_READY)

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
