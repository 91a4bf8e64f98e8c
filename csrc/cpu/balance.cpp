#include "balance.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>

namespace moe_comm {

namespace {

using Rows = std::vector<int64_t>;

struct Pair {
  int64_t donor, taker, rows;
};

// A plan is chosen from those of this many limits.
constexpr int64_t kLimits = 8;

size_t at(int64_t index) { return static_cast<size_t>(index); }

int64_t largest(const Rows& rows) { return std::max_element(rows.begin(), rows.end()) - rows.begin(); }

int64_t smallest(const Rows& rows) { return std::min_element(rows.begin(), rows.end()) - rows.begin(); }

// The input of a plan, with the experts of each rank and the residents in the order in which they are used.
struct Planner {
  const Rows& loads;
  const Rows& home;
  int64_t copies;
  std::vector<Resident> residents;
  Rows totals;
  std::vector<Rows> own;

  Planner(const Rows& loads_, const Rows& home_, int64_t world, int64_t copies_, std::vector<Resident> given)
      : loads(loads_), home(home_), copies(copies_), residents(std::move(given)), totals(at(world)), own(at(world)) {
    for (size_t e = 0; e < loads.size(); ++e) {
      totals[at(home[e])] += loads[e];
      own[at(home[e])].push_back(static_cast<int64_t>(e));
    }
    const auto pair = [](const Resident& one) { return std::tuple(one.expert, one.rank); };
    const auto equal = [&](const Resident& a, const Resident& b) { return pair(a) == pair(b); };
    std::sort(residents.begin(), residents.end(),
              [&](const Resident& a, const Resident& b) { return pair(a) < pair(b); });
    residents.erase(std::unique(residents.begin(), residents.end(), equal), residents.end());
    std::map<int64_t, int64_t> count;
    for (const Resident& one : residents) ++count[one.expert];
    const auto key = [&](const Resident& one) {
      return std::tuple(count[one.expert], -loads[at(one.expert)], one.expert, one.rank);
    };
    std::sort(residents.begin(), residents.end(),
              [&](const Resident& a, const Resident& b) { return key(a) < key(b); });
  }

  int64_t busiest(const std::vector<Lent>& lent) const {
    Rows rows = totals;
    for (const Lent& one : lent) {
      rows[at(home[at(one.expert)])] -= one.rows;
      rows[at(one.rank)] += one.rows;
    }
    return *std::max_element(rows.begin(), rows.end());
  }

  // The largest number of experts that a rank sends or receives.
  int64_t transfers(const std::vector<Lent>& lent) const {
    std::set<std::pair<int64_t, int64_t>> present;
    for (const Resident& one : residents) present.emplace(one.expert, one.rank);
    Rows out(totals.size()), in(totals.size());
    for (const Lent& one : lent) {
      if (present.count({one.expert, one.rank})) continue;
      ++out[at(home[at(one.expert)])];
      ++in[at(one.rank)];
    }
    return std::max(*std::max_element(out.begin(), out.end()), *std::max_element(in.begin(), in.end()));
  }

  bool fits(const std::vector<Lent>& lent) const {
    Rows count(totals.size());
    for (const Lent& one : lent) {
      if (++count[at(one.rank)] > copies) return false;
    }
    return true;
  }

  // Move the rows of `pairs`, of the smallest expert that is enough, or of the largest.
  std::vector<Lent> experts_of(std::vector<Pair> pairs, Rows left, std::vector<Lent> moved) const {
    std::sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) {
      return std::tuple(a.donor, -a.rows, a.taker) < std::tuple(b.donor, -b.rows, b.taker);
    });
    for (Pair& pair : pairs) {
      while (pair.rows) {
        int64_t chosen = -1;
        for (const int64_t e : own[at(pair.donor)]) {
          if (chosen < 0) {
            chosen = e;
            continue;
          }
          const int64_t rows = left[at(e)], best = left[at(chosen)];
          if (best >= pair.rows ? rows >= pair.rows && rows < best : rows > best) chosen = e;
        }
        const int64_t part = std::min(left[at(chosen)], pair.rows);
        moved.push_back({chosen, pair.taker, part});
        left[at(chosen)] -= part;
        pair.rows -= part;
      }
    }
    std::sort(moved.begin(), moved.end(),
              [](const Lent& a, const Lent& b) { return std::tuple(a.expert, a.rank) < std::tuple(b.expert, b.rank); });
    std::vector<Lent> lent;
    for (const Lent& one : moved) {
      if (!lent.empty() && lent.back().expert == one.expert && lent.back().rank == one.rank) {
        lent.back().rows += one.rows;
      } else {
        lent.push_back(one);
      }
    }
    return lent;
  }

  // Pairs after which all ranks have equal rows, up to one. Each taker has one donor.
  std::vector<Pair> even() const {
    const int64_t world = static_cast<int64_t>(totals.size());
    int64_t sum = 0;
    for (const int64_t rows : totals) sum += rows;
    Rows over = totals;
    for (int64_t r = 0; r < world; ++r) over[at(r)] -= sum / world + (r < sum % world);
    std::vector<Pair> pairs;
    for (int64_t donor = largest(over); over[at(donor)] > 0; donor = largest(over)) {
      const int64_t taker = smallest(over);
      pairs.push_back({donor, taker, -over[at(taker)]});
      over[at(donor)] += over[at(taker)];
      over[at(taker)] = 0;
    }
    return pairs;
  }

  // A plan in which no rank has more than `limit` rows; none if a rank has too few slots for copies.
  std::optional<std::vector<Lent>> within(int64_t limit) const {
    Rows left = loads, surplus(totals.size()), room(totals.size());
    for (size_t r = 0; r < totals.size(); ++r) {
      surplus[r] = std::max<int64_t>(totals[r] - limit, 0);
      room[r] = std::max<int64_t>(limit - totals[r], 0);
    }
    std::vector<Lent> moved;
    for (const Resident& one : residents) {
      int64_t& over = surplus[at(home[at(one.expert)])];
      const int64_t rows = std::min({over, room[at(one.rank)], left[at(one.expert)]});
      if (!rows) continue;
      moved.push_back({one.expert, one.rank, rows});
      left[at(one.expert)] -= rows;
      over -= rows;
      room[at(one.rank)] -= rows;
    }
    std::vector<Pair> pairs;
    for (int64_t donor = largest(surplus); surplus[at(donor)]; donor = largest(surplus)) {
      const int64_t taker = largest(room), rows = std::min(surplus[at(donor)], room[at(taker)]);
      pairs.push_back({donor, taker, rows});
      surplus[at(donor)] -= rows;
      room[at(taker)] -= rows;
    }
    std::vector<Lent> lent = experts_of(std::move(pairs), std::move(left), std::move(moved));
    if (!fits(lent)) lent = experts_of(even(), loads, {});
    return fits(lent) ? std::optional(std::move(lent)) : std::nullopt;
  }
};

}  // namespace

std::vector<Lent> plan_rows(const Rows& loads, const Rows& home, int64_t world, const BalanceLimits& limits,
                            std::vector<Resident> residents) {
  const Planner planner(loads, home, world, limits.copies, std::move(residents));
  const int64_t busiest = *std::max_element(planner.totals.begin(), planner.totals.end());
  const int64_t least_copy = planner.residents.empty() ? limits.copy_ns : 0;
  const int64_t end = std::min(busiest, limits.memory + 1);
  const int64_t step = std::max<int64_t>(1, (end - limits.rows) / kLimits);
  bool required = busiest > limits.memory;
  int64_t least = busiest * limits.row_ns;
  std::vector<Lent> best;
  for (int64_t limit = limits.rows; limit < end; limit += step) {
    if (!required && limit * limits.row_ns + least_copy >= least) break;
    std::optional<std::vector<Lent>> lent = planner.within(limit);
    if (!lent) continue;
    const int64_t cost = planner.busiest(*lent) * limits.row_ns + planner.transfers(*lent) * limits.copy_ns;
    if (cost < least || required) {
      best = *std::move(lent);
      least = cost;
      required = false;
    }
  }
  return best;
}

uint64_t plan_digest(const std::vector<Lent>& lent) {
  uint64_t value = 0;
  for (const Lent& one : lent) {
    for (const int64_t word : {one.expert, one.rank, one.rows}) {
      value = (value ^ (static_cast<uint64_t>(word) + 1)) * 0x9E3779B97F4A7C15u;
      value ^= value >> 32;
    }
  }
  return value;
}

}  // namespace moe_comm
