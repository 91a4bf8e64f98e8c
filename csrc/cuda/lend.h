// Lending of experts within a call. Every rank computes the same plan from the counts that meet has exchanged:
//
//   ids of experts ── lend, assign ──▸ ids of slots ──▸ dispatch          stack of a home ── pull ──▸ slots for copies
//   fp32 gradients of all owners of an expert ── collect ──▸ its home
#pragma once

#include "cuda/convert.h"
#include "cuda/meet.h"

namespace moe_comm {
namespace p2p {

// Rows of an expert that a rank computes, which is not its home: `rows` of them, from row `from` in the order of
// (source rank, token, slot). slot: the rank's slot for the expert.
struct LentSlot {
  int64_t expert, rank, rows, from, slot;
};

// A plan in device memory.
struct LendPlan {
  int64_t* size;    // number of `lent`
  int64_t* digest;  // of plan_digest
  int64_t* rows;    // [W] that each rank computes
  int64_t* first;   // [E + 1] the first of `lent` of each expert
  int64_t* before;  // [E] rows of the source ranks before this one
  int64_t* taken;   // [W, copies] positions in `lent` of the experts in each rank's slots for copies; then -1
  LentSlot* lent;   // by (expert, rank)

  static MOE_HD int64_t words(int64_t world, int64_t experts, int64_t copies) {
    return 3 + world + 2 * experts + world * copies * (1 + static_cast<int64_t>(sizeof(LentSlot) / 8));
  }
  template <class Args>
  MOE_HD explicit LendPlan(const Args& a)
      : size(reinterpret_cast<int64_t*>(a.plan_at)),
        digest(size + 1),
        rows(digest + 1),
        first(rows + a.world),
        before(first + a.routed + 1),
        taken(before + a.routed),
        lent(reinterpret_cast<LentSlot*>(taken + a.world * a.copies)) {}
};

// The homes of experts; see MOE_P2P_HOMES.
struct Homes {
  const int64_t *home, *held, *first, *slot;

  template <class Args>
  MOE_BLOCK explicit Homes(const Args& a)
      : home(at<const int64_t>(a.homes_at)), held(home + a.routed), first(held + a.routed), slot(first + a.world + 1) {}
};

// Memory of lend besides that of plan_rows.
struct LendWork {
  int64_t *loads, *of_expert, *totals, *slots;
  uint64_t* bits;
  Resident* residents;
  Lent* lent;
  int64_t* drafts;

  MOE_HD LendWork(int64_t at, const PlanInput& in)
      : loads(reinterpret_cast<int64_t*>(at)),
        of_expert(loads + in.experts),
        totals(of_expert + in.experts),
        slots(totals + in.world),
        bits(reinterpret_cast<uint64_t*>(slots + in.world)),
        residents(reinterpret_cast<Resident*>(bits + in.experts * in.owner_words())),
        lent(reinterpret_cast<Lent*>(residents + in.num_residents)),
        drafts(reinterpret_cast<int64_t*>(lent + in.most_lent())) {}
  static MOE_HD int64_t words(int64_t world, int64_t experts, int64_t residents, int64_t teams) {
    PlanInput in{};
    in.world = world;
    in.experts = experts;
    in.num_residents = residents;
    return 2 * (experts + world + residents) + experts * in.owner_words() + 3 * in.most_lent() + plan_words(in, teams);
  }
};

constexpr int64_t kPullBytes = 32 << 10;       // of an expert that a block copies at once
constexpr int64_t kCollectElements = 8 << 10;  // of an expert that a block sums at once

// The limits of a call. slots: (token, slot) pairs of the rank that has the most.
MOE_BLOCK BalanceLimits limits_of(const LendArgs& a, int64_t rows, int64_t slots) {
  constexpr int64_t parts = 1000;
  const int64_t even = (rows + a.world - 1) / a.world, limit = rows * a.rows / (parts * a.world);
  const int64_t memory = a.memory ? (slots * a.memory + parts - 1) / parts : rows;
  const int64_t most = memory < even ? even : memory, wanted = limit < even ? even : limit;
  return {lower(wanted, most), most, a.row_ns, a.copy_ns, a.copies};
}

template <class M>
MOE_BLOCK void lend(M& m, const LendArgs& a) {
  if (failed(a)) return;
  const Homes homes(a);
  PlanInput in{};
  in.world = a.world;
  in.experts = a.routed;
  in.num_residents = a.residents;
  in.home = homes.home;
  in.held = homes.held;
  in.offsets = homes.first;
  const LendPlan plan(a);
  const LendWork work(a.work_at, in);
  const int64_t* counts = at<const int64_t>(a.all_counts_at);
  const Resident* given = at<const Resident>(a.residents_at);
  const int experts = static_cast<int>(a.routed), world = static_cast<int>(a.world);
  const int residents = static_cast<int>(a.residents), words = static_cast<int>(in.owner_words());
  m.each(experts, [&](int e) {
    int64_t all = 0, copies = 0;
    for (int s = 0; s < world; ++s) {
      if (s == a.rank) plan.before[e] = all;
      all += counts[s * a.experts + e];
    }
    for (int w = 0; w < words; ++w) work.bits[e * words + w] = 0;
    for (int i = 0; i < residents; ++i) {
      if (given[i].expert != e) continue;
      work.bits[e * words + given[i].rank / 64] |= owner_bit(given[i].rank);
      ++copies;
    }
    work.loads[e] = all;
    work.of_expert[e] = copies;
  });
  m.sync();
  m.each(residents, [&](int i) {
    int64_t position = 0;
    for (int j = 0; j < residents; ++j) {
      position += resident_before(given[j], work.of_expert[given[j].expert], given[i], work.of_expert[given[i].expert],
                                  work.loads);
    }
    work.residents[position] = given[i];
  });
  m.each(world, [&](int r) {
    int64_t all = 0, slots = 0;
    for (int64_t i = homes.first[r]; i < homes.first[r + 1]; ++i) all += work.loads[homes.held[i]];
    for (int e = 0; e < experts; ++e) slots += counts[r * a.experts + e];
    work.totals[r] = all;
    work.slots[r] = slots;
  });
  m.sync();
  in.loads = work.loads;
  in.totals = work.totals;
  in.residents = work.residents;
  in.resident_bits = work.bits;
  const typename M::WarpTeam team{};
  const int64_t rows = team.sum(world, [&](int64_t r) { return work.slots[r]; });
  in.limits = limits_of(a, rows, work.slots[team.best(world, [&](int64_t r) { return work.slots[r]; })]);
  const int64_t size = plan_rows(m, team, in, work.drafts, work.lent, plan.first);
  if (team.team() == 0) {
    const uint64_t digest = plan_digest(team, work.lent, size);
    team.one([&] {
      *plan.size = size;
      *plan.digest = static_cast<int64_t>(digest);
    });
  }
  const int lent = static_cast<int>(size), copies = static_cast<int>(a.copies);
  const int64_t* first_slot = at<const int64_t>(a.offsets_at);
  m.each(world * copies, [&](int i) { plan.taken[i] = -1; });
  m.sync();
  m.each(lent, [&](int i) {
    const Lent& one = work.lent[i];
    int64_t place = 0, from = work.loads[one.expert];
    for (int j = 0; j < i; ++j) place += work.lent[j].rank == one.rank;
    for (int64_t j = i; j < plan.first[one.expert + 1]; ++j) from -= work.lent[j].rows;
    const int64_t own = homes.first[one.rank + 1] - homes.first[one.rank];
    plan.lent[i] = {one.expert, one.rank, one.rows, from, first_slot[one.rank] + own + place};
    plan.taken[one.rank * copies + place] = i;
  });
  m.each(world, [&](int r) {
    int64_t all = work.totals[r];
    for (int i = 0; i < lent; ++i) {
      const Lent& one = work.lent[i];
      all += one.rank == r ? one.rows : homes.home[one.expert] == r ? -one.rows : 0;
    }
    plan.rows[r] = all;
  });
  if (a.tally_at == 0) return;
  m.sync();
  const auto busiest = [&](const int64_t* of_ranks) {
    return of_ranks[team.best(world, [&](int64_t r) { return of_ranks[r]; })];
  };
  const int64_t own = team.sum(lent, [&](int64_t i) { return homes.home[work.lent[i].expert] == a.rank; });
  const int64_t added[] = {rows, busiest(work.totals) * world, busiest(plan.rows) * world, 1, size, own};
  m.each(1, [&](int) {
    MOE_UNROLL
    for (int i = 0; i < 6; ++i) at<int64_t>(a.tally_at)[i] += added[i];
  });
}

template <class M>
MOE_BLOCK void assign(M& m, const AssignArgs& a) {
  if (failed(a)) return;
  const Homes homes(a);
  const LendPlan plan(a);
  const int64_t first_slot = m.block() * a.chunk;
  const int64_t* ids = at<const int64_t>(a.ids_at) + first_slot;
  const int64_t* before_chunk = at<const int64_t>(a.counts_at) + m.block() * a.experts;
  int64_t* slots = at<int64_t>(a.place_at) + first_slot;
  m.each(chunk_slots(a.tokens, a.top_k, a.chunk, m.block()), [&](int i) {
    if (slots[i] == kDropped) return;
    const int64_t e = ids[i], row = plan.before[e] + before_chunk[e] + ChunkRank::of(slots[i]).before;
    int64_t slot = homes.slot[e];
    for (int64_t j = plan.first[e]; j < plan.first[e + 1] && plan.lent[j].from <= row; ++j) slot = plan.lent[j].slot;
    slots[i] = slot;
  });
}

// The tensors of a stack; see MOE_P2P_STACK.
struct Stack {
  static constexpr int kTensors = 4;
  int64_t size[kTensors];
  int64_t at[kTensors];  // first byte

  template <class Args>
  MOE_BLOCK Stack(const Args& a, int64_t element) : size{a.size_0, a.size_1, a.size_2, a.size_3} {
    int64_t end = 0;
    for (int t = 0; t < kTensors; ++t) {
      at[t] = end;
      end += (a.local_experts * size[t] * element + kStackAlign - 1) / kStackAlign * kStackAlign;
    }
  }
};

// Calls copy(first, count) for the parts of n elements that this block handles. `skipped`: parts of other blocks before
// its next one.
template <class M, class Copy>
MOE_BLOCK void parts_of_block(M& m, int64_t n, int64_t part, int64_t& skipped, Copy copy) {
  const int64_t parts = (n + part - 1) / part;
  for (; skipped < parts; skipped += m.blocks()) copy(skipped * part, lower(part, n - skipped * part));
  skipped -= parts;
}

// Copies bytes; all are multiples of 16, or of 2.
template <class M>
MOE_BLOCK void copy_bytes(M& m, const char* from, char* to, int64_t bytes) {
  if (((reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) | bytes) & 15) == 0) {
    m.template move_rows<4>(
        1, static_cast<int>(bytes / 16), [&](int, int i) { return load16(from + i * 16); },
        [&](int, int i, const Words16& v) { store16(to + i * 16, v); });
  } else {
    m.each(static_cast<int>(bytes / 2),
           [&](int i) { reinterpret_cast<uint16_t*>(to)[i] = reinterpret_cast<const uint16_t*>(from)[i]; });
  }
}

template <class M>
MOE_BLOCK void pull(M& m, const PullArgs& a) {
  if (failed(a)) return;
  const Homes homes(a);
  const LendPlan plan(a);
  const Stack stack(a, a.element);
  char* const* stacks = at<char* const>(a.stacks_at);
  const int64_t* first_slot = at<const int64_t>(a.offsets_at);
  int64_t skipped = m.block();
  for (int64_t c = 0; c < a.copies && plan.taken[a.rank * a.copies + c] >= 0; ++c) {
    const LentSlot one = plan.lent[plan.taken[a.rank * a.copies + c]];
    const int64_t home = homes.home[one.expert];
    const int64_t from = homes.slot[one.expert] - first_slot[home], to = one.slot - first_slot[a.rank];
    for (int t = 0; t < Stack::kTensors; ++t) {
      const int64_t bytes = stack.size[t] * a.element;
      parts_of_block(m, bytes, kPullBytes, skipped, [&](int64_t first, int64_t n) {
        copy_bytes(m, stacks[home] + stack.at[t] + from * bytes + first,
                   stacks[a.rank] + stack.at[t] + to * bytes + first, n);
      });
    }
  }
}

// Writes kAtOnce sums of the gradients of one expert: of `own`, then of the ranks that it is lent to.
template <int64_t dtype, int kAtOnce, class Load>
MOE_BLOCK void collect_piece(Load load, int64_t owners, void* out) {
  typedef Piece<kFp32, kAtOnce == 4> In;
  float total[kAtOnce];
  In::load(load(0), total);
  for (int64_t owner = 1; owner < owners; ++owner) {
    float more[kAtOnce];
    In::load(load(owner), more);
    MOE_UNROLL
    for (int c = 0; c < kAtOnce; ++c) total[c] = plus(total[c], more[c]);
  }
  typedef typename Element<dtype>::Bits Bits;
  struct alignas(kAtOnce * sizeof(Bits)) Sums {
    Bits bits[kAtOnce];
  } sums;
  MOE_UNROLL
  for (int c = 0; c < kAtOnce; ++c) sums.bits[c] = static_cast<Bits>(narrow<dtype>(total[c]));
  *reinterpret_cast<Sums*>(out) = sums;
}

template <int64_t dtype, class M>
MOE_BLOCK void collect_gradients(M& m, const CollectArgs& a) {
  const Homes homes(a);
  const LendPlan plan(a);
  const Blocks blocks(a);
  const Stack stack(a, 4);
  const int64_t* first_slot = at<const int64_t>(a.offsets_at);
  const int64_t* offers = at<const int64_t>(a.offers_at);
  const int64_t out[] = {a.out_0, a.out_1, a.out_2, a.out_3};
  const auto row_of = [&](int64_t rank, int64_t slot, int t) {
    return blocks.peers[rank] + offers[rank * kOfferWords + kRowsAt] + stack.at[t] +
           (slot - first_slot[rank]) * stack.size[t] * 4;
  };
  int64_t skipped = m.block();
  for (int64_t i = homes.first[a.rank]; i < homes.first[a.rank + 1]; ++i) {
    const int64_t e = homes.held[i], lent = plan.first[e], owners = 1 + plan.first[e + 1] - lent;
    MOE_UNROLL
    for (int t = 0; t < Stack::kTensors; ++t) {
      constexpr int64_t bytes = static_cast<int64_t>(sizeof(typename Element<dtype>::Bits));
      const int64_t to = out[t] + (homes.slot[e] - first_slot[a.rank]) * stack.size[t] * bytes;
      const bool vectors = stack.size[t] % 4 == 0 && to % (4 * bytes) == 0;
      parts_of_block(m, stack.size[t], kCollectElements, skipped, [&](int64_t first, int64_t n) {
        const auto from = [&](int64_t element) {
          return [=](int64_t owner) {
            const char* row = owner == 0
                                  ? row_of(a.rank, homes.slot[e], t)
                                  : row_of(plan.lent[lent + owner - 1].rank, plan.lent[lent + owner - 1].slot, t);
            return row + (first + element) * 4;
          };
        };
        if (vectors) {
          m.each(static_cast<int>(n / 4),
                 [&](int x) { collect_piece<dtype, 4>(from(4 * x), owners, at<void>(to + (first + 4 * x) * bytes)); });
        } else {
          m.each(static_cast<int>(n),
                 [&](int x) { collect_piece<dtype, 1>(from(x), owners, at<void>(to + (first + x) * bytes)); });
        }
      });
    }
  }
}

template <class M>
MOE_BLOCK void collect(M& m, const CollectArgs& a) {
  if (failed(a)) return;
  if (a.dtype == kFp32) {
    collect_gradients<kFp32>(m, a);
  } else if (a.dtype == kBf16) {
    collect_gradients<kBf16>(m, a);
  } else {
    collect_gradients<kFp16>(m, a);
  }
  if (a.ends && is_last_block(m, a)) end_turn(m, a);
}

}  // namespace p2p
}  // namespace moe_comm
