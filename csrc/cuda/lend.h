// Lending of experts within a call: the plan, on every rank the same from the counts that meet has exchanged.
#pragma once

#include "cuda/machine.h"
#include "cuda/shared.h"

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
  LentSlot* lent;   // by (expert, rank)

  static MOE_HD int64_t words(int64_t world, int64_t experts, int64_t copies) {
    return 3 + world + 2 * experts + world * copies * static_cast<int64_t>(sizeof(LentSlot) / 8);
  }
  MOE_HD LendPlan(int64_t at, int64_t world, int64_t experts)
      : size(reinterpret_cast<int64_t*>(at)),
        digest(size + 1),
        rows(digest + 1),
        first(rows + world),
        before(first + experts + 1),
        lent(reinterpret_cast<LentSlot*>(before + experts)) {}
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
  PlanInput in{};
  in.world = a.world;
  in.experts = a.routed;
  in.num_residents = a.residents;
  in.home = at<const int64_t>(a.homes_at);
  in.held = in.home + a.routed;
  in.offsets = in.held + a.routed;
  const LendPlan plan(a.plan_at, a.world, a.routed);
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
    int64_t homes = 0, slots = 0;
    for (int64_t i = in.offsets[r]; i < in.offsets[r + 1]; ++i) homes += work.loads[in.held[i]];
    for (int e = 0; e < experts; ++e) slots += counts[r * a.experts + e];
    work.totals[r] = homes;
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
  const int lent = static_cast<int>(size);
  const int64_t* first_slot = at<const int64_t>(a.offsets_at);
  m.each(lent, [&](int i) {
    const Lent& one = work.lent[i];
    int64_t slot = first_slot[one.rank] + in.offsets[one.rank + 1] - in.offsets[one.rank],
            from = work.loads[one.expert];
    for (int j = 0; j < i; ++j) slot += work.lent[j].rank == one.rank;
    for (int64_t j = i; j < plan.first[one.expert + 1]; ++j) from -= work.lent[j].rows;
    plan.lent[i] = {one.expert, one.rank, one.rows, from, slot};
  });
  m.each(world, [&](int r) {
    int64_t all = work.totals[r];
    for (int i = 0; i < lent; ++i) {
      const Lent& one = work.lent[i];
      all += one.rank == r ? one.rows : in.home[one.expert] == r ? -one.rows : 0;
    }
    plan.rows[r] = all;
  });
}

}  // namespace p2p
}  // namespace moe_comm
