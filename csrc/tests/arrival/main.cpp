// Prints when the rows of one rank's dispatch are written, and when its flags rise, for push by expert and by token.
//
// Usage: arrival tokens experts top_k world blocks by_expert
// Output: a line per flag: expert, tile, rows of the tile, time. The time is the share of push's rows that are written
// when the flag rises, if all blocks write rows at the same rate.
//
// The blocks of push run one after another on a machine that counts the rows that each has written. A block does not
// wait for another one, so the counts are the times of blocks that run together. By token, the block that adds the last
// rows of an expert sets its flag; which one this is depends on the order, so the flag's time is the latest addition.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "cuda/push.h"

using namespace moe_comm;
using namespace moe_comm::p2p;

namespace {

int64_t address(const void* p) { return reinterpret_cast<int64_t>(p); }

// A machine that notes the rows that this block has written at each atomic and at each flag.
class Clock : public Machine {
 public:
  using Machine::Machine;

  std::map<const int64_t*, int64_t>* added = nullptr;   // by counter: rows of its block before the latest addition
  std::map<const int64_t*, int64_t>* raised = nullptr;  // by flag: rows of its block before, or minus its counter
  const int64_t* last_counter = nullptr;

  template <int kAtOnce, class Load, class Store>
  void move_rows(int rows, int words, Load load, Store store) {
    Machine::move_rows<kAtOnce>(rows, words, load, store);
    written_ += rows;
  }
  int64_t fetch_add(int64_t* p, int64_t v) {
    (*added)[p] = std::max((*added)[p], written_);
    last_counter = p;
    return Machine::fetch_add(p, v);
  }
  void store_release(int64_t* p, int64_t v) {
    (*raised)[p] = last_counter != nullptr ? -address(last_counter) : written_;
    Machine::store_release(p, v);
  }

 private:
  int64_t written_ = 0;
};

struct Random {
  uint64_t state = 0x9e3779b97f4a7c15ull;
  int64_t below(int64_t n) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<int64_t>((state >> 11) % static_cast<uint64_t>(n));
  }
};

}  // namespace

int main(int, char** argv) {
  const int64_t tokens = std::atoll(argv[1]), experts = std::atoll(argv[2]), top_k = std::atoll(argv[3]),
                world = std::atoll(argv[4]), blocks = std::atoll(argv[5]), rank = world / 2;
  const bool by_expert = std::atoll(argv[6]) != 0;
  const int64_t hidden = 4, chunk = std::max<int64_t>(1, tokens / 256) * top_k, slots = tokens * top_k;
  const int64_t chunks = (slots + chunk - 1) / chunk;
  Random random;
  std::vector<int64_t> ids(slots), places(slots), offsets(world + 1), counts(chunks * experts), bad(chunks * 4),
      expert_rows(experts), offers(world * kOfferWords), all_counts(world * experts), left(experts),
      order(order_words(slots, experts));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < top_k; ++k) {
      int64_t& id = ids[t * top_k + k];
      do id = random.below(experts);
      while (std::find(&ids[t * top_k], &id, id) != &id);
    }
  }
  for (int64_t r = 0; r <= world; ++r) offsets[r] = r * experts / world;
  const int64_t local = (experts + world - 1) / world;
  const Control control{world, experts, local};
  // Rows of other ranks are not simulated: each owner has only this rank's rows.
  std::vector<std::vector<Words16>> memory;
  std::vector<char*> peers;
  for (int64_t r = 0; r < world; ++r) {
    memory.emplace_back((control.bytes() + slots * hidden * 4) / 16 + 1);
    peers.push_back(reinterpret_cast<char*>(memory.back().data()));
  }
  State state{1, 0, 0};
  Report report{};
  int64_t abort = 0;
  const auto fill = [&](auto& a) {
    a.world = world;
    a.rank = rank;
    a.experts = experts;
    a.local_experts = local;
    a.peers_at = address(peers.data());
    a.offsets_at = address(offsets.data());
    a.state_at = address(&state);
    a.report_at = address(&report);
    a.abort_at = address(&abort);
    a.tokens = tokens;
    a.top_k = top_k;
    a.ids_at = address(ids.data());
    a.chunk = chunk;
    a.chunks = chunks;
    a.counts_at = address(counts.data());
    a.bad_at = address(bad.data());
    a.expert_rows_at = address(expert_rows.data());
    a.place_at = address(places.data());
  };
  const auto run = [&](auto kernel, int64_t grid, const auto& a, int64_t bytes) {
    std::vector<Words16> shared(static_cast<size_t>(bytes / 16 + 1));
    for (int64_t b = 0; b < grid; ++b) {
      Machine m(b, grid, reinterpret_cast<char*>(shared.data()), bytes);
      kernel(m, a);
    }
  };
  CountArgs count{};
  ScanArgs scanned{};
  OrderArgs ordered{};
  PushArgs by_token{};
  PushTilesArgs sent{};
  fill(count), fill(scanned), fill(ordered), fill(sent);
  count.ids = experts;
  run([](Machine& m, const CountArgs& a) { p2p::count(m, a); }, chunks, count, shared_bytes(count, 1));
  run([](Machine& m, const ScanArgs& a) { p2p::scan(m, a); }, (experts + kScanExperts - 1) / kScanExperts, scanned,
      shared_bytes(scanned, 1));
  ordered.order_at = address(order.data());
  run([](Machine& m, const OrderArgs& a) { p2p::order(m, a); }, chunks, ordered, shared_bytes(ordered, 1));
  const std::vector<int64_t> own = expert_rows;
  std::copy(own.begin(), own.end(), all_counts.begin() + rank * experts);
  first_rows(
      offsets.data(), static_cast<int>(world), 0, [&](int s, int64_t e) { return s == 0 ? own[e] : 0; },
      expert_rows.data());
  for (int64_t r = 0; r < world; ++r) {
    offers[r * kOfferWords + kRowsAt] = control.bytes();
    offers[r * kOfferWords + kRoom] = -1;
  }
  std::vector<float> x(tokens * hidden, 1.0f);
  sent.hidden = hidden;
  sent.x_at = address(x.data());
  sent.stride = hidden * 4;
  sent.offers_at = address(offers.data());
  sent.all_counts_at = address(all_counts.data());
  sent.left_at = address(left.data());
  sent.order_at = address(order.data());
  static_assert(sizeof by_token == sizeof sent, "the words of both are the same");
  std::memcpy(&by_token, &sent, sizeof sent);
  std::map<const int64_t*, int64_t> added, raised;
  const int64_t bytes = std::max(shared_bytes(sent, 1), shared_bytes(by_token, 1));
  std::vector<Words16> shared(static_cast<size_t>(bytes / 16 + 1));
  for (int64_t b = 0; b < blocks; ++b) {
    Clock m(b, blocks, reinterpret_cast<char*>(shared.data()), bytes);
    m.added = &added;
    m.raised = &raised;
    by_expert ? push_tiles(m, sent) : push(m, by_token);
  }
  // By token, a row of x is written to its top_k places at once.
  const double all = static_cast<double>(by_expert ? slots : tokens) / static_cast<double>(blocks);
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t owner = owner_of(offsets.data(), world, e), n = own[e];
    for (int64_t t = 0; t < num_flags(n); ++t) {
      const auto* words = reinterpret_cast<const int64_t*>(peers[owner]);
      const int64_t* flag = words + control.arrived(e - offsets[owner], rank, t);
      if (*flag != 1) return 1;
      const int64_t at = raised.at(flag);
      const int64_t rows = at < 0 ? added.at(reinterpret_cast<const int64_t*>(-at)) : at;
      const int64_t of_tile = std::min(flag_rows(n), n - t * flag_rows(n));
      std::printf("%lld %lld %lld %.6f\n", static_cast<long long>(e), static_cast<long long>(t),
                  static_cast<long long>(of_tile), static_cast<double>(rows) / all);
    }
  }
  return 0;
}
