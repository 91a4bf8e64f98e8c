// Calls that lend experts on the host: slots, weights and gradients, compared with literal implementations.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "cpu/balance.h"
#include "cuda/lend.h"
#include "p2p_ranks.h"

using namespace moe_comm;
using namespace moe_comm::test;
using namespace moe_comm::p2p;

namespace {

// A group with homes and slots for copies, and stacks of 16-bit weights.
struct Layer {
  int64_t copies, most_slots = 0;
  std::vector<int64_t> offsets{0}, homes, home_slots;
  std::vector<int64_t> home;  // of each expert
  int64_t sizes[4];
  std::vector<std::vector<Words16>> stacks, gradients;
  std::vector<int64_t> stacks_at;

  int64_t experts() const { return static_cast<int64_t>(home.size()); }
  int64_t world() const { return static_cast<int64_t>(offsets.size()) - 1; }
  // The first byte of tensor t of a stack.
  int64_t tensor(int t, int64_t element) const {
    int64_t end = 0;
    for (int before = 0; before < t; ++before) end += (most_slots * sizes[before] * element + 255) / 256 * 256;
    return end;
  }

  Layer(Random& random, int world) : home(at_index(random.between(1, 3 * world))) {
    std::vector<std::vector<int64_t>> own(at_index(world));
    for (int64_t e = 0; e < experts(); ++e) own[at_index(home[at_index(e)] = random.below(world))].push_back(e);
    size_t most = 0;
    for (const auto& of_rank : own) most = std::max(most, of_rank.size());
    copies = random.between(1, static_cast<int64_t>(most));
    homes = home;
    home_slots.resize(home.size());
    std::vector<int64_t> first{0};
    for (const auto& of_rank : own) {
      for (const int64_t& e : of_rank) {
        homes.push_back(e);
        home_slots[at_index(e)] = offsets.back() + static_cast<int64_t>(&e - of_rank.data());
      }
      first.push_back(first.back() + static_cast<int64_t>(of_rank.size()));
      offsets.push_back(offsets.back() + static_cast<int64_t>(of_rank.size()) + copies);
      most_slots = std::max(most_slots, static_cast<int64_t>(of_rank.size()) + copies);
    }
    homes.insert(homes.end(), first.begin(), first.end());
    homes.insert(homes.end(), home_slots.begin(), home_slots.end());
    const int64_t widths[] = {0, 3, 16, 40, 20000};
    for (int64_t& size : sizes) size = widths[random.below(random.chance(0.2) ? 5 : 4)];
    for (int r = 0; r < world; ++r) {
      stacks.emplace_back(at_index(tensor(3, 2) + most_slots * sizes[3] * 2) / 16 + 1);
      gradients.emplace_back(at_index(tensor(3, 4) + most_slots * sizes[3] * 4) / 16 + 1);
      char* stack = reinterpret_cast<char*>(stacks.back().data());
      for (int t = 0; t < 4; ++t) {
        for (const int64_t e : own[at_index(r)]) {
          for (int64_t i = 0; i < sizes[t]; ++i) {
            const uint16_t word = weight(e, t, i);
            std::memcpy(stack + tensor(t, 2) + (row(r, e) * sizes[t] + i) * 2, &word, 2);
          }
        }
      }
      stacks_at.push_back(address(stacks.back()));
    }
  }
  static uint16_t weight(int64_t e, int t, int64_t i) {
    return static_cast<uint16_t>(e * 7919 + t * 104729 + i * 31 + 1);
  }
  int64_t row(int64_t rank, int64_t e) const { return home_slots[at_index(e)] - offsets[at_index(rank)]; }

  template <class Args>
  void set(Args& a, std::vector<int64_t>& plan) const {
    a.routed = experts();
    a.homes_at = address(homes);
    a.copies = copies;
    a.plan_at = address(plan);
  }
  template <class Args>
  void set_sizes(Args& a) const {
    a.size_0 = sizes[0], a.size_1 = sizes[1], a.size_2 = sizes[2], a.size_3 = sizes[3];
  }
};

// The rank and slot of each row of expert e.
struct Owner {
  int64_t rank, slot, rows;
};

std::vector<std::vector<Owner>> owners_of(const Layer& layer, const std::vector<int64_t>& loads, const LentRows& plan) {
  std::vector<std::vector<Owner>> owners;
  std::vector<int64_t> used(layer.offsets.begin(), layer.offsets.end());
  for (int64_t e = 0; e < layer.experts(); ++e) {
    owners.push_back({{layer.home[at_index(e)], layer.home_slots[at_index(e)], loads[at_index(e)]}});
    ++used[at_index(layer.home[at_index(e)])];
  }
  for (const Lent& one : plan.lent) {
    owners[at_index(one.expert)][0].rows -= one.rows;
    owners[at_index(one.expert)].push_back({one.rank, used[at_index(one.rank)]++, one.rows});
  }
  return owners;
}

float gradient(int64_t slot, int t, int64_t i) {
  return static_cast<float>((slot * 271 + t * 53 + i * 13) % 1009 - 500) * 0.0137f;
}

// Returns the number of experts that are lent.
int64_t run_and_check(P2pRanks& ranks, int rank, const P2pCase& c, Layer& layer, int dtype) {
  CHECK(ranks.count(rank, c, {0, 0, 0, 0, -1}));
  std::vector<int64_t> plan(at_index(LendPlan::words(c.world, layer.experts(), layer.copies)), -7);
  std::vector<int64_t> work(at_index(LendWork::words(c.world, layer.experts(), 0, 1)), -7);
  auto lend = ranks.args<LendArgs>(rank, c);
  lend.rows = 1000;
  lend.row_ns = 1;
  layer.set(lend, plan);
  lend.all_counts_at = address(ranks.of(rank).all_counts);
  lend.work_at = address(work);
  run_p2p("lend", 1, lend);
  auto assign_args = ranks.slot_args<AssignArgs>(rank, c);
  layer.set(assign_args, plan);
  run_blocks("assign", assign<Machine>, assign_args.chunks, assign_args, c.at_once);
  auto pull_args = ranks.args<PullArgs>(rank, c);
  layer.set(pull_args, plan);
  layer.set_sizes(pull_args);
  pull_args.stacks_at = address(layer.stacks_at);
  pull_args.element = 2;
  run_blocks("pull", pull<Machine>, c.push_blocks, pull_args, c.at_once);

  // The rows of each expert, in the order of (source rank, slot).
  std::vector<int64_t> loads(at_index(layer.experts())), before(loads.size());
  int64_t all = 0, most = 0;
  for (int s = 0; s < c.world; ++s) {
    int64_t valid = 0;
    for (const int64_t id : c.ids[at_index(s)]) {
      if (id < 0) continue;
      ++loads[at_index(id)];
      before[at_index(id)] += s < rank;
      ++valid;
    }
    all += valid;
    most = std::max(most, valid);
  }
  const LentRows wanted = plan_rows(loads, layer.home, c.world, limits_of(lend, all, most), {});
  const auto owners = owners_of(layer, loads, wanted);
  for (size_t i = 0; i < c.ids[at_index(rank)].size(); ++i) {
    const int64_t id = c.ids[at_index(rank)][i];
    int64_t slot = -1;
    if (id >= 0) {
      int64_t row = before[at_index(id)]++;
      auto owner = owners[at_index(id)].begin();
      for (; row >= owner->rows; ++owner) row -= owner->rows;
      slot = owner->slot;
    }
    CHECK_EQ(ranks.of(rank).place[i], slot);
  }

  // Weights of lent experts, and gradients of all slots.
  const int64_t first_slot = layer.offsets[at_index(rank)];
  char* offered = reinterpret_cast<char*>(layer.gradients[at_index(rank)].data());
  for (int64_t e = 0; e < layer.experts(); ++e) {
    for (const Owner& owner : owners[at_index(e)]) {
      if (owner.rank != rank) continue;
      const char* stack = reinterpret_cast<const char*>(layer.stacks_at[at_index(rank)]);
      for (int t = 0; t < 4; ++t) {
        const int64_t row = (owner.slot - first_slot) * layer.sizes[t];
        for (int64_t i = 0; i < layer.sizes[t]; ++i) {
          uint16_t word;
          std::memcpy(&word, stack + layer.tensor(t, 2) + (row + i) * 2, 2);
          CHECK_EQ(int{word}, int{Layer::weight(e, t, i)});
          const float g = gradient(owner.slot, t, i);
          std::memcpy(offered + layer.tensor(t, 4) + (row + i) * 4, &g, 4);
        }
      }
    }
  }
  CHECK(ranks.meet(rank, c, false, {offered - ranks.data(rank, 0), 0, 0, 0, -1}));
  const int64_t element = element_bytes(dtype), homes = layer.homes[at_index(2 * layer.experts() + rank + 1)] -
                                                        layer.homes[at_index(2 * layer.experts() + rank)];
  auto collect_args = ranks.args<CollectArgs>(rank, c);
  layer.set(collect_args, plan);
  layer.set_sizes(collect_args);
  collect_args.offers_at = address(ranks.of(rank).offers);
  collect_args.dtype = dtype;
  collect_args.ends = 1;
  std::vector<Bytes> out;
  for (int t = 0; t < 4; ++t) out.emplace_back(at_index(homes * layer.sizes[t] * element + 16));
  collect_args.out_0 = address(out[0]), collect_args.out_1 = address(out[1]);
  collect_args.out_2 = address(out[2]), collect_args.out_3 = address(out[3]);
  run_blocks("collect", collect<Machine>, c.push_blocks, collect_args, c.at_once);
  for (int64_t e = 0; e < layer.experts(); ++e) {
    if (layer.home[at_index(e)] != rank) continue;
    for (int t = 0; t < 4; ++t) {
      for (int64_t i = 0; i < layer.sizes[t]; ++i) {
        float total = 0;
        for (const Owner& owner : owners[at_index(e)]) total += gradient(owner.slot, t, i);
        char expected[4] = {};
        test::narrow(dtype, total, expected);
        CHECK(std::memcmp(out[at_index(t)].data() + (layer.row(rank, e) * layer.sizes[t] + i) * element, expected,
                          at_index(element)) == 0);
      }
    }
  }
  CHECK_EQ(ranks.of(rank).state.fault, int64_t{kNone});
  return static_cast<int64_t>(wanted.lent.size());
}

}  // namespace

TEST(lend_slots_weights_and_gradients_are_those_of_the_plan) {
  Random random(90);
  std::atomic<int64_t> lent{0};
  for (int round = 0; round < 3 * repeats(); ++round) {
    for (int world = 1; world <= 4; ++world) {
      for (const int threads : {1, 3, 64}) {
        Layer layer(random, world);
        std::vector<P2pCase> cases;
        for (int i = 0; i < 6; ++i) {
          P2pCase c;
          c.world = world;
          c.offsets = layer.offsets;
          c.routed = layer.experts();
          c.hidden = 8;
          c.top_k = random.between(1, 3);
          c.chunk = c.top_k * random.between(1, 5);
          c.push_blocks = random.between(1, 4);
          c.merged = random.chance(0.5);
          c.at_once = random.chance(0.5);
          for (int r = 0; r < world; ++r) c.tokens.push_back(random.chance(0.2) ? 0 : random.below(30));
          fill_case(random, c);
          cases.push_back(c);
        }
        host_threads = threads;
        P2pRanks ranks(world);
        on_ranks(world, [&](int rank) {
          for (size_t i = 0; i < cases.size(); ++i) {
            lent += run_and_check(ranks, rank, cases[i], layer, static_cast<int>(i % 3));
          }
        });
      }
    }
  }
  host_threads = 1;
  CHECK(lent > 100);
}
