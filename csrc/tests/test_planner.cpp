// Plans by the kernel lend, block by block on the host and with a thread for each lane: those of the native core.
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "check.h"
#include "cpu/balance.h"
#include "cuda/launch.h"
#include "cuda/lend.h"

using namespace moe_comm;
using namespace moe_comm::test;

namespace {

// Random counts, and the arguments of lend.
struct Case {
  int64_t world, experts;
  std::vector<int64_t> loads, home, homes, offsets, counts, state, work, plan, tally;
  std::vector<Resident> residents;
  p2p::LendArgs args{};
  LentRows wanted;

  Case(Random& random, int64_t teams) : world(random.between(1, 9)), experts(random.between(1, 20)), state(3) {
    std::vector<std::vector<int64_t>> own(at_index(world));
    for (int64_t e = 0; e < experts; ++e) {
      home.push_back(random.below(world));
      own[at_index(home.back())].push_back(e);
    }
    size_t most = 0;
    for (const auto& of_rank : own) most = std::max(most, of_rank.size());
    args.copies = random.chance(0.7) ? static_cast<int64_t>(most) : 1;
    std::vector<int64_t> ends{0};
    homes = home;
    offsets = {0};
    for (const auto& of_rank : own) {
      homes.insert(homes.end(), of_rank.begin(), of_rank.end());
      ends.push_back(ends.back() + static_cast<int64_t>(of_rank.size()));
      offsets.push_back(ends.back() + static_cast<int64_t>(offsets.size()) * args.copies);
    }
    homes.insert(homes.end(), ends.begin(), ends.end());
    loads.resize(at_index(experts));
    counts.resize(at_index(world * offsets.back()));
    const int64_t most_rows = random.chance(0.5) ? 9 : 9000;
    int64_t all = 0, most_slots = 0;
    for (int64_t s = 0; s < world; ++s) {
      const int64_t before = all;
      for (int64_t e = 0; e < experts; ++e) {
        const int64_t rows = random.below(random.chance(0.3) ? most_rows : 9);
        counts[at_index(s * offsets.back() + e)] = rows;
        loads[at_index(e)] += rows;
        all += rows;
      }
      most_slots = std::max(most_slots, all - before);
    }
    for (int64_t i = random.below(12); i > 0; --i) {
      const Resident one{random.below(experts), random.below(world)};
      const auto same = [&](const Resident& other) { return other.expert == one.expert && other.rank == one.rank; };
      if (home[at_index(one.expert)] != one.rank && std::none_of(residents.begin(), residents.end(), same)) {
        residents.push_back(one);
      }
    }
    args.world = world;
    args.experts = offsets.back();
    args.routed = experts;
    args.rows = random.chance(0.5) ? 1000 : 1125;
    args.memory = random.chance(0.5) ? 0 : 1200;
    args.row_ns = random.between(1, 7);
    args.copy_ns = random.chance(0.5) ? 0 : random.below(500);
    args.residents = static_cast<int64_t>(residents.size());
    work.assign(at_index(p2p::LendWork::words(world, experts, args.residents, teams)), -7);
    args.offsets_at = address(offsets);
    args.state_at = address(state);
    args.homes_at = address(homes);
    args.all_counts_at = address(counts);
    args.residents_at = address(residents);
    args.work_at = address(work);
    tally.assign(6, 1);
    args.tally_at = address(tally);
    args.rank = random.below(world);
    wanted = plan_rows(loads, home, world, p2p::limits_of(args, all, most_slots), residents);
    plan.assign(at_index(p2p::LendPlan::words(world, experts, args.copies)), -7);
    args.plan_at = address(plan);
  }
  void check() const {
    const p2p::LendPlan got(args);
    CHECK_EQ(*got.size, static_cast<int64_t>(wanted.lent.size()));
    CHECK_EQ(*got.digest, static_cast<int64_t>(wanted.digest));
    int64_t rows = 0, own = 0;
    for (const int64_t load : loads) rows += load;
    CHECK_EQ(tally[0], rows + 1);
    CHECK_EQ(tally[2], *std::max_element(got.rows, got.rows + world) * world + 1);
    for (const Lent& one : wanted.lent) own += home[at_index(one.expert)] == args.rank;
    CHECK(tally[3] == 2 && tally[4] == *got.size + 1 && tally[5] == own + 1 && tally[1] >= tally[2]);
    for (size_t i = 0; i < wanted.lent.size(); ++i) {
      const Lent& one = wanted.lent[i];
      CHECK(got.lent[i].expert == one.expert && got.lent[i].rank == one.rank && got.lent[i].rows == one.rows);
    }
  }
};

class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t phase = phase_;
    if (++waiting_ == threads_) {
      waiting_ = 0;
      ++phase_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return phase_ != phase; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int threads_, waiting_ = 0;
  int64_t phase_ = 0;
};

// A block with a thread for each lane of its warps.
constexpr int kLanesOfWarp = 4;
struct Warp {
  Barrier barrier{kLanesOfWarp};
  int64_t values[kLanesOfWarp] = {};
};
thread_local int thread_number = 0, num_warps = 1;
thread_local Warp* warp_of_thread = nullptr;

struct ThreadLane {
  static constexpr int kLanes = kLanesOfWarp;
  int lane() const { return thread_number % kLanes; }
  int64_t team() const { return thread_number / kLanes; }
  int64_t teams() const { return num_warps; }
  void sync() const { warp_of_thread->barrier.wait(); }
  int64_t from(int64_t v, int other) const {
    warp_of_thread->values[lane()] = v;
    sync();
    const int64_t value = warp_of_thread->values[other];
    sync();
    return value;
  }
};

struct ThreadMachine {
  using WarpTeam = Team<ThreadLane>;
  Barrier* barrier;
  template <class F>
  void each(int n, F f) const {
    for (int i = thread_number; i < n; i += num_warps * kLanesOfWarp) f(i);
  }
  void sync() const { barrier->wait(); }
};

}  // namespace

TEST(planner_the_kernel_computes_the_plans_of_the_native_core) {
  Random random(80);
  for (int round = 0; round < 100000 * repeats(); ++round) {
    Case c(random, 1);
    p2p::run_on_host(p2p::k_lend, 1, &c.args);
    c.check();
  }
}

TEST(planner_any_number_of_warps_computes_the_same_plans) {
  for (int warps = 1; warps <= 3; ++warps) {
    Random random(81 + static_cast<uint64_t>(warps));
    std::vector<Case> cases;
    for (int i = 0; i < 40 * repeats(); ++i) cases.emplace_back(random, warps);
    std::vector<Warp> of_warps(at_index(warps));
    Barrier barrier(warps * kLanesOfWarp);
    on_ranks(warps * kLanesOfWarp, [&](int thread) {
      thread_number = thread;
      num_warps = warps;
      warp_of_thread = &of_warps[at_index(thread / kLanesOfWarp)];
      ThreadMachine m{&barrier};
      for (const Case& c : cases) p2p::lend(m, c.args);
    });
    for (const Case& c : cases) c.check();
  }
}
