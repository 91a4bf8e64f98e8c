#include "balance.h"

#include <algorithm>

namespace moe_comm {

LentRows plan_rows(const std::vector<int64_t>& loads, const std::vector<int64_t>& home, int64_t world,
                   const BalanceLimits& limits, std::vector<Resident> residents) {
  const auto experts = static_cast<int64_t>(loads.size());
  const auto at = [](int64_t index) { return static_cast<size_t>(index); };
  PlanInput in{};
  in.world = world;
  in.experts = experts;
  in.loads = loads.data();
  in.home = home.data();
  in.limits = limits;
  std::vector<int64_t> offsets(at(world) + 1), totals(at(world)), held(at(experts)), of_expert(at(experts));
  for (int64_t e = 0; e < experts; ++e) {
    ++offsets[at(home[at(e)]) + 1];
    totals[at(home[at(e)])] += loads[at(e)];
  }
  for (int64_t r = 0; r < world; ++r) offsets[at(r) + 1] += offsets[at(r)];
  std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);
  for (int64_t e = 0; e < experts; ++e) held[at(next[at(home[at(e)])]++)] = e;
  std::vector<uint64_t> bits(at(experts * in.owner_words()));
  const auto added = [&](const Resident& one) {
    uint64_t& word = bits[at(one.expert * in.owner_words() + one.rank / 64)];
    const bool is_new = (word & owner_bit(one.rank)) == 0;
    word |= owner_bit(one.rank);
    of_expert[at(one.expert)] += is_new;
    return !is_new;
  };
  residents.erase(std::remove_if(residents.begin(), residents.end(), added), residents.end());
  std::sort(residents.begin(), residents.end(), [&](const Resident& a, const Resident& b) {
    return resident_before(a, of_expert[at(a.expert)], b, of_expert[at(b.expert)], loads.data());
  });
  in.held = held.data();
  in.offsets = offsets.data();
  in.totals = totals.data();
  in.residents = residents.data();
  in.num_residents = static_cast<int64_t>(residents.size());
  in.resident_bits = bits.data();

  const Team<OneLane> lane;
  std::vector<int64_t> memory(at(plan_words(in, 1))), first(at(experts) + 1);
  LentRows plan;
  plan.lent.resize(at(in.most_lent()));
  plan.lent.resize(at(plan_rows(lane, lane, in, memory.data(), plan.lent.data(), first.data())));
  plan.digest = plan_digest(lane, plan.lent.data(), static_cast<int64_t>(plan.lent.size()));
  return plan;
}

}  // namespace moe_comm
