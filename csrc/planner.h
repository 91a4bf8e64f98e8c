// Which rows of an expert are computed on another rank than its home: one source for the CPU and for GPUs. The
// reference is moe_comm/topology/balance.py.
//
// A plan is computed by teams of lanes: one lane on the CPU, and the warps of a block on a GPU. Each warp tries another
// limit of the rows of a rank. All lanes of a team run the same code on the same values. `each` divides work
// between them, `one` lets one of them write what all have read, and `best` finds an index, the lowest one of equals.
// Integers only, and no atomics: the plan does not depend on the number of teams and lanes.
#pragma once

#include "layout.h"

namespace moe_comm {

struct Lent {
  int64_t expert, rank, rows;
};

// `rows`: lend to keep to it, where that pays; at least the mean. `memory`: never exceeded. `row_ns`, `copy_ns`: costs
// of a row and of a copy that is not resident. `copies`: slots for copies on each rank.
struct BalanceLimits {
  int64_t rows, memory, row_ns, copy_ns, copies;
};

struct Resident {
  int64_t expert, rank;
};

// Lanes that run the same code. Lanes has: kLanes; lane(); team(), the number of the team, and teams(); sync(), after
// which the lanes of a team see each other's writes; and from(v, lane), the value of another lane, which all call.
template <class Lanes>
struct Team : Lanes {
  using Lanes::Lanes;

  template <class F>
  MOE_BLOCK void each(int64_t n, F f) const {
    for (int64_t i = this->lane(); i < n; i += Lanes::kLanes) f(i);
  }
  template <class F>
  MOE_BLOCK void one(F f) const {
    this->sync();
    if (this->lane() == 0) f();
    this->sync();
  }
  // The lowest index with the largest key(index), of `n`; -1 of none.
  template <class Key>
  MOE_BLOCK int64_t best(int64_t n, Key key) const {
    int64_t index = -1, most = 0;
    each(n, [&](int64_t i) {
      const int64_t found = key(i);
      if (index < 0 || found > most) {
        index = i;
        most = found;
      }
    });
    for (int other = Lanes::kLanes / 2; other > 0; other /= 2) {
      const int64_t i = this->from(index, this->lane() ^ other), found = this->from(most, this->lane() ^ other);
      if (i >= 0 && (index < 0 || found > most || (found == most && i < index))) {
        index = i;
        most = found;
      }
    }
    return index;
  }
  template <class Value>
  MOE_BLOCK int64_t sum(int64_t n, Value value) const {
    uint64_t total = 0;  // of hashes, which overflow
    each(n, [&](int64_t i) { total += static_cast<uint64_t>(value(i)); });
    for (int other = Lanes::kLanes / 2; other > 0; other /= 2) {
      total += static_cast<uint64_t>(this->from(static_cast<int64_t>(total), this->lane() ^ other));
    }
    return static_cast<int64_t>(total);
  }
};

struct OneLane {
  static constexpr int kLanes = 1;
  MOE_BLOCK int lane() const { return 0; }
  MOE_BLOCK int64_t team() const { return 0; }
  MOE_BLOCK int64_t teams() const { return 1; }
  MOE_BLOCK void sync() const {}
  MOE_BLOCK int64_t from(int64_t v, int) const { return v; }
};

// held, offsets: the experts in the order of their homes, then of their ids; those of rank r from offsets[r]. totals:
// rows of each rank's experts. residents, in the order of resident_before, each once; used first. resident_bits: see
// owner_bit.
struct PlanInput {
  int64_t world, experts;
  const int64_t *loads, *home, *held, *offsets, *totals;
  const Resident* residents;
  int64_t num_residents;
  const uint64_t* resident_bits;
  BalanceLimits limits;

  // A set of (expert, rank) has a bit for each: [E, owner_words].
  MOE_HD int64_t owner_words() const { return (world + 63) / 64; }
  // The most pairs of a plan: each move of rows uses a resident, or takes all that an expert has, or ends a pair of
  // ranks.
  MOE_HD int64_t most_lent() const { return num_residents + experts + world; }
};

MOE_HD inline int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }

MOE_HD inline uint64_t owner_bit(int64_t rank) { return uint64_t{1} << (rank % 64); }

MOE_HD inline int64_t bits_of(uint64_t word) {
#if defined(__CUDA_ARCH__)
  return __popcll(word);
#else
  return __builtin_popcountll(word);
#endif
}

// Residents are used in this order. copies: number of residents of the expert.
MOE_HD inline bool resident_before(const Resident& a, int64_t a_copies, const Resident& b, int64_t b_copies,
                                   const int64_t* loads) {
  if (a_copies != b_copies) return a_copies < b_copies;
  if (loads[a.expert] != loads[b.expert]) return loads[a.expert] > loads[b.expert];
  return a.expert != b.expert ? a.expert < b.expert : a.rank < b.rank;
}

constexpr int64_t kPlanLimits = 8;  // a plan is chosen from those of about this many limits
constexpr int64_t kMostRows = int64_t{1} << 62;

// One team's plan for one limit.
class Draft {
 public:
  // Words of memory that a draft needs.
  static MOE_HD int64_t words(const PlanInput& in) {
    return in.experts * (2 + in.owner_words()) + 2 + 4 * in.world + 3 * in.most_lent();
  }

  MOE_BLOCK Draft(const PlanInput& in, int64_t* memory)
      : in_(in),
        left_(memory),
        sums_(left_ + in.experts + 1),
        rows_(sums_ + in.experts + 1),
        copies_(rows_ + in.world),
        sent_(copies_ + in.world),
        received_(sent_ + in.world),
        owners_(reinterpret_cast<uint64_t*>(received_ + in.world)),
        lent_(reinterpret_cast<Lent*>(owners_ + in.experts * in.owner_words())) {}

  MOE_BLOCK int64_t limit() const { return limit_; }

  // Forget the plan: nothing is lent.
  template <class T>
  MOE_BLOCK void clear(const T& team) {
    team.sync();
    team.each(in_.experts, [&](int64_t e) { left_[e] = in_.loads[e]; });
    team.each(in_.experts * in_.owner_words(), [&](int64_t i) { owners_[i] = 0; });
    team.each(in_.world, [&](int64_t r) {
      rows_[r] = in_.totals[r];
      copies_[r] = sent_[r] = received_[r] = 0;
    });
    count_ = 0;
    team.sync();
  }

  // Lend until no rank has more than `limit` rows. Returns the cost, or -1 if a rank has too few slots for copies.
  template <class T>
  MOE_BLOCK int64_t plan(const T& team, int64_t limit) {
    limit_ = limit;
    clear(team);
    for (int64_t i = 0; i < in_.num_residents; ++i) {
      const auto [e, rank] = in_.residents[i];
      const int64_t home = in_.home[e];
      move(team, e, home, rank, lower(lower(rows_[home] - limit, limit - rows_[rank]), left_[e]));
    }
    level(team, false, [=](int64_t) { return limit; });
    if (!fits(team)) {  // with one donor for each rank, as many slots as it has experts are enough
      const int64_t all = team.sum(in_.world, [&](int64_t r) { return in_.totals[r]; });
      const int64_t mean = all / in_.world, ranks_above = all % in_.world;
      clear(team);
      level(team, true, [=](int64_t r) { return mean + (r < ranks_above); });
      if (!fits(team)) return -1;
    }
    const auto transfers = [&](int64_t r) { return sent_[r] > received_[r] ? sent_[r] : received_[r]; };
    const int64_t busiest = team.best(in_.world, [&](int64_t r) { return rows_[r]; });
    return rows_[busiest] * in_.limits.row_ns + transfers(team.best(in_.world, transfers)) * in_.limits.copy_ns;
  }

  // Write the plan by (expert, rank), and to first [E + 1] the position of each expert's. Returns the size of the plan.
  template <class T>
  MOE_BLOCK int64_t write(const T& team, Lent* lent, int64_t* first) {
    const int64_t words = in_.owner_words();
    team.one([&] { left_[0] = 0; });
    team.each(in_.experts, [&](int64_t e) {
      left_[e + 1] = 0;
      for (int64_t w = 0; w < words; ++w) left_[e + 1] += bits_of(owners_[e * words + w]);
    });
    const int64_t* position = running_sums(team, left_, sums_, static_cast<int>(in_.experts) + 1);
    team.each(in_.experts + 1, [&](int64_t e) { first[e] = position[e]; });
    team.each(count_, [&](int64_t i) {
      const Lent& one = lent_[i];
      const uint64_t* owners = owners_ + one.expert * words;
      int64_t at = position[one.expert] + bits_of(owners[one.rank / 64] & (owner_bit(one.rank) - 1));
      for (int64_t w = 0; w < one.rank / 64; ++w) at += bits_of(owners[w]);
      lent[at] = one;
    });
    return count_;
  }

 private:
  // Move rows of expert e to a rank, unless there are none.
  template <class T>
  MOE_BLOCK void move(const T& team, int64_t e, int64_t home, int64_t rank, int64_t rows) {
    if (rows <= 0) return;
    const int64_t word = e * in_.owner_words() + rank / 64;
    const bool lent = (owners_[word] & owner_bit(rank)) != 0;  // as a resident
    team.one([&] {
      left_[e] -= rows;
      rows_[home] -= rows;
      rows_[rank] += rows;
      if (lent) {
        int64_t i = 0;
        while (lent_[i].expert != e || lent_[i].rank != rank) ++i;
        lent_[i].rows += rows;
        return;
      }
      owners_[word] |= owner_bit(rank);
      lent_[count_] = {e, rank, rows};
      ++copies_[rank];
      if (in_.resident_bits[word] & owner_bit(rank)) return;
      ++sent_[home];
      ++received_[rank];
    });
    count_ += !lent;
  }

  // Move rows from the rank that has the most above its target to the one that has the most room, until no rank is
  // above its target: of the smallest expert that is enough, or else of the largest. whole: fill the room, after which
  // the first rank may be below its target.
  template <class T, class Target>
  MOE_BLOCK void level(const T& team, bool whole, Target target) {
    while (true) {
      const int64_t donor = team.best(in_.world, [&](int64_t r) { return rows_[r] - target(r); });
      const int64_t surplus = rows_[donor] - target(donor);
      if (surplus <= 0) return;
      const int64_t taker = team.best(in_.world, [&](int64_t r) { return target(r) - rows_[r]; });
      const int64_t room = target(taker) - rows_[taker];
      const int64_t *own = in_.held + in_.offsets[donor], homes = in_.offsets[donor + 1] - in_.offsets[donor];
      for (int64_t rows = whole ? room : lower(surplus, room); rows > 0;) {
        const int64_t e = own[team.best(homes, [&](int64_t i) {
          const int64_t left = left_[own[i]];
          return left >= rows ? kMostRows - left : left;
        })];
        const int64_t part = lower(left_[e], rows);
        move(team, e, donor, taker, part);
        rows -= part;
      }
    }
  }

  template <class T>
  MOE_BLOCK bool fits(const T& team) const {
    return copies_[team.best(in_.world, [&](int64_t r) { return copies_[r]; })] <= in_.limits.copies;
  }

  const PlanInput& in_;
  int64_t *left_, *sums_, *rows_, *copies_, *sent_, *received_;
  uint64_t* owners_;
  Lent* lent_;
  int64_t count_ = 0, limit_ = -1;
};

// Words of memory of plan_rows.
MOE_HD inline int64_t plan_words(const PlanInput& in, int64_t teams) { return teams * (1 + Draft::words(in)); }

// The rows to lend; see Draft::write. Called by all lanes of a block of teams, whose memory `block.sync()` orders. The
// cheapest of the plans of several limits, from limits.rows up to the rows of the busiest rank; of none, if lending
// does not pay.
template <class Block, class T>
MOE_BLOCK int64_t plan_rows(const Block& block, const T& team, const PlanInput& in, int64_t* memory, Lent* lent,
                            int64_t* first) {
  const int64_t teams = team.teams();
  int64_t* of_teams = memory;
  Draft draft(in, memory + teams + team.team() * Draft::words(in));
  const int64_t busiest = in.totals[team.best(in.world, [&](int64_t r) { return in.totals[r]; })];
  const int64_t end = lower(busiest, in.limits.memory + 1), range = (end - in.limits.rows) / kPlanLimits;
  const int64_t step = range > 1 ? range : 1, cheapest_copy = in.num_residents > 0 ? 0 : in.limits.copy_ns;
  int64_t cheapest = busiest * in.limits.row_ns, chosen = -1;
  bool required = busiest > in.limits.memory, open = true;
  for (int64_t from = in.limits.rows; open && from < end; from += step * teams) {
    const int64_t own = from + step * team.team();
    if (own < end) {
      const int64_t cost = draft.plan(team, own);
      team.one([&] { of_teams[team.team()] = cost; });
    }
    block.sync();
    for (int64_t t = 0; t < teams && open; ++t) {
      const int64_t limit = from + step * t, cost = of_teams[t];
      open = limit < end && (required || limit * in.limits.row_ns + cheapest_copy < cheapest);
      if (!open || cost < 0 || (cost >= cheapest && !required)) continue;
      cheapest = cost;
      chosen = limit;
      required = false;
    }
    block.sync();
  }
  if (team.team() == (chosen < 0 ? 0 : (chosen - in.limits.rows) / step % teams)) {
    if (chosen < 0) {
      draft.clear(team);
    } else if (draft.limit() != chosen) {
      draft.plan(team, chosen);
    }
    const int64_t count = draft.write(team, lent, first);
    team.one([&] { of_teams[0] = count; });
  }
  block.sync();
  return of_teams[0];
}

// A hash of a plan; 0 for the empty plan.
template <class T>
MOE_BLOCK uint64_t plan_digest(const T& team, const Lent* lent, int64_t count) {
  return static_cast<uint64_t>(team.sum(count, [&](int64_t i) {
    uint64_t value = 0;
    const int64_t words[] = {lent[i].expert, lent[i].rank, lent[i].rows};
    for (const int64_t word : words) {
      value = (value ^ (static_cast<uint64_t>(word) + 1)) * 0x9E3779B97F4A7C15u;
      value ^= value >> 32;
    }
    return static_cast<int64_t>(value);
  }));
}

}  // namespace moe_comm
