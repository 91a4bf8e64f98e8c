#include "p2p_ranks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <thread>
#include <tuple>

#include "cpu/kernels.h"
#include "cuda/combine.h"
#include "layout.h"

namespace moe_comm::test {

using namespace p2p;

namespace {

Bytes random_rows(Random& random, int dtype, int64_t rows, int64_t hidden) {
  const int64_t size = dtype == 0 ? 4 : 2;
  Bytes bytes(at_index(rows * hidden * size));
  for (int64_t i = 0; i < rows * hidden; ++i) {
    const double scale = std::exp2(static_cast<double>(random.between(-6, 3)));
    narrow(dtype, random.chance(0.05) ? 0.0f : static_cast<float>((random.unit() - 0.5) * scale),
           bytes.data() + i * size);
  }
  return bytes;
}

}  // namespace

int64_t P2pCase::local_experts() const {
  int64_t most = 0;
  for (size_t r = 0; r + 1 < offsets.size(); ++r) most = std::max(most, offsets[r + 1] - offsets[r]);
  return most;
}

int64_t P2pCase::kept(int64_t owner) const {
  const int64_t all = static_cast<int64_t>(rows[at_index(owner)].size());
  return room < 0 ? all : std::min(room, all);
}

void fill_case(Random& random, P2pCase& c) {
  const double skew = random.unit(), drop = random.chance(0.3) ? 0.4 : 0.0;
  const int64_t hot_expert = random.below(c.ids_below());
  c.rows.assign(at_index(c.world), {});
  for (int s = 0; s < c.world; ++s) {
    const int64_t tokens = c.tokens[at_index(s)];
    std::vector<int64_t> ids;
    std::vector<float> weights;
    for (int64_t i = 0; i < tokens * c.top_k; ++i) {
      ids.push_back(random.chance(drop) ? -1 : random.chance(skew) ? hot_expert : random.below(c.ids_below()));
      weights.push_back(static_cast<float>(random.unit()));
    }
    c.ids.push_back(ids);
    c.weights.push_back(weights);
    c.x.push_back(random_rows(random, c.dtype, tokens, c.hidden));
    c.g.push_back(random_rows(random, c.dtype, tokens, c.hidden));
    c.dropped.push_back(std::count(ids.begin(), ids.end(), -1));
    c.places.emplace_back(ids.size(), kDropped);
    c.overflow.push_back(0);
  }
  // Literal implementation of the contract: all slots of an owner, sorted by (expert, source, slot).
  for (int owner = 0; owner < c.world; ++owner) {
    auto& rows = c.rows[at_index(owner)];
    for (int s = 0; s < c.world; ++s) {
      for (size_t i = 0; i < c.ids[at_index(s)].size(); ++i) {
        const int64_t e = c.ids[at_index(s)][i];
        if (e >= c.offsets[at_index(owner)] && e < c.offsets[at_index(owner) + 1]) {
          rows.push_back({e, s, static_cast<int64_t>(i)});
        }
      }
    }
    std::sort(rows.begin(), rows.end(), [](const P2pCase::Slot& a, const P2pCase::Slot& b) {
      return std::tie(a.expert, a.source, a.slot) < std::tie(b.expert, b.source, b.slot);
    });
    for (size_t r = 0; r < rows.size(); ++r) {
      const bool kept = static_cast<int64_t>(r) < c.kept(owner);
      c.places[at_index(rows[r].source)][at_index(rows[r].slot)] =
          kept ? pack_place(owner, static_cast<int64_t>(r)) : kDropped;
      if (!kept) ++c.overflow[at_index(rows[r].source)];
    }
    c.out.push_back(random_rows(random, c.dtype, static_cast<int64_t>(rows.size()), c.hidden));
  }
}

std::vector<int64_t> random_offsets(Random& random, int world) {
  std::vector<int64_t> offsets = {0};
  for (int r = 0; r < world; ++r) offsets.push_back(offsets.back() + random.below(5));
  if (offsets.back() == 0) offsets.back() = 2;
  if (random.chance(0.4) && offsets.back() <= kScanExperts) {  // two blocks of scan
    offsets.back() = random.between(kScanExperts + 1, P2pRanks::kMostExperts);
  }
  return offsets;
}

P2pCase random_case(Random& random, const std::vector<int64_t>& offsets) {
  P2pCase c;
  c.world = static_cast<int>(offsets.size()) - 1;
  c.offsets = offsets;
  c.dtype = static_cast<int>(random.below(3));
  const int64_t widths[] = {8, 16, 5, 40, 33, 1, 136, 0};
  c.hidden = widths[random.below(8)];
  c.top_k = random.between(1, 4);
  c.chunk = c.top_k * random.between(1, 5);
  c.format = random.chance(0.4) ? random.between(1, 2) : 0;
  c.power_of_two = random.chance(0.5);
  c.relay = random.chance(0.4);
  c.bulk = random.chance(0.5);
  c.by_expert = c.format == kSame && !c.relay && random.chance(0.6);
  c.push_blocks = random.between(1, 4);
  for (int r = 0; r < c.world; ++r) c.tokens.push_back(random.chance(0.2) ? 0 : random.below(12));
  if (random.chance(0.4)) c.room = random.chance(0.5) ? 400 : random.below(20);
  c.merged = random.chance(0.5);
  c.at_once = c.merged && random.chance(0.3);
  fill_case(random, c);
  return c;
}

P2pRanks::P2pRanks(int world, double timeout_s)
    : world_(world), timeout_ns_(static_cast<int64_t>(timeout_s * 1e9)), ranks_(at_index(world)) {
  const p2p::Control largest{world, kMostExperts, kMostExperts};
  for (int r = 0; r < world; ++r) {
    memory_.emplace_back(at_index((largest.bytes() + 6 * kRegionBytes) / 16));
    peers_.push_back(reinterpret_cast<char*>(memory_.back().data()));
    ranks_[at_index(r)].left.assign(at_index(kMostExperts), 0);
    ranks_[at_index(r)].header.assign(at_index(p2p::kHeaderWords), 0);
  }
}

Group P2pRanks::group(int rank, const P2pCase& c) {
  const auto address = [](const void* p) { return reinterpret_cast<int64_t>(p); };
  Rank& me = of(rank);
  Group g{};
  g.world = world_;
  g.rank = rank;
  g.experts = c.experts();
  g.local_experts = c.local_experts();
  g.peers_at = address(peers_.data());
  g.offsets_at = address(c.offsets.data());
  g.state_at = address(&me.state);
  g.report_at = address(&me.report);
  g.abort_at = address(&me.abort);
  g.timeout_ns = timeout_ns_;
  return g;
}

int64_t P2pRanks::region(int rank, const P2pCase& c, int which) const {
  const p2p::Control largest{world_, kMostExperts, kMostExperts};
  // Offers differ between ranks. Rows of odd ranks may start at addresses that are not 16-byte aligned.
  const int64_t shift = c.hidden % 2 && which != 3 && c.format == 0 ? rank % 2 * 4 : rank % 3 * 64;
  return largest.bytes() + which * kRegionBytes + shift;
}

bool P2pRanks::count(int rank, const P2pCase& c, const std::vector<int64_t>& offer) {
  Rank& me = of(rank);
  const int64_t chunks = slot_args<CountArgs>(rank, c).chunks;
  me.counts.assign(at_index(chunks * c.experts()), -7);
  me.bad.assign(at_index(chunks * 4), -7);
  me.expert_rows.assign(at_index(c.experts()), -7);
  me.place.assign(c.ids[at_index(rank)].size(), -9);
  auto counts = slot_args<CountArgs>(rank, c);
  counts.ids = c.ids_below();
  run_p2p("count", chunks, counts);
  const bool meets = c.merged && !c.by_expert && c.push_blocks % 2 == 0;  // no kernel sends by the order
  ScanArgs scans = meets ? meet_args<ScanArgs>(rank, c, true, offer) : slot_args<ScanArgs>(rank, c);
  scans.meets = meets;
  run_blocks("scan", scan<Machine>, (c.experts() + kScanExperts - 1) / kScanExperts, scans, c.at_once);
  if (meets) return me.state.fault == kNone;
  OrderArgs order = slot_args<OrderArgs>(rank, c);
  me.order.assign(at_index(order_words(order.tokens * order.top_k, c.experts())), -7);
  order.order_at = reinterpret_cast<int64_t>(me.order.data());
  run_p2p("order", chunks, order);
  return meet(rank, c, true, offer);
}

template <class Args>
Args P2pRanks::meet_args(int rank, const P2pCase& c, bool with_counts, const std::vector<int64_t>& offer) {
  Rank& me = of(rank);
  Args a = slot_args<Args>(rank, c);
  a.with_counts = with_counts;
  a.header_at = reinterpret_cast<int64_t>(me.header.data());
  a.offer_0 = offer[0];
  a.offer_1 = offer[1];
  a.offer_2 = offer[2];
  a.offer_3 = offer[3];
  a.offer_4 = offer[4];
  me.offers.assign(at_index(world_ * kOfferWords), -9);
  me.all_headers.assign(at_index(world_ * p2p::kHeaderWords), -9);
  a.offers_at = reinterpret_cast<int64_t>(me.offers.data());
  a.all_headers_at = reinterpret_cast<int64_t>(me.all_headers.data());
  if (with_counts) {
    me.all_counts.assign(at_index(world_ * c.experts()), -9);
    me.host_counts.assign(at_index(world_ * c.experts()), -9);
    me.summary.assign(at_index(c.local_experts() + 1), -9);
    a.digest_at = reinterpret_cast<int64_t>(&me.digest);
  }
  a.all_counts_at = reinterpret_cast<int64_t>(me.all_counts.data());
  a.host_counts_at = reinterpret_cast<int64_t>(me.host_counts.data());
  a.summary_at = reinterpret_cast<int64_t>(me.summary.data());
  return a;
}

bool P2pRanks::meet(int rank, const P2pCase& c, bool with_counts, const std::vector<int64_t>& offer) {
  run_p2p("meet", 1, meet_args<MeetArgs>(rank, c, with_counts, offer));
  return of(rank).state.fault == kNone;
}

std::vector<int64_t> P2pRanks::dispatch_offer(int rank, const P2pCase& c) {
  return {region(rank, c, 0), 0, region(rank, c, 2), region(rank, c, 3), c.room};
}

template <class Args>
void P2pRanks::push_rows(const char* kernel, int rank, const P2pCase& c) {
  Rank& me = of(rank);
  Args a = slot_args<Args>(rank, c);
  a.hidden = c.hidden;
  a.dtype = c.dtype;
  a.x_at = reinterpret_cast<int64_t>(c.x[at_index(rank)].data());
  a.stride = c.hidden * c.element();
  a.offers_at = reinterpret_cast<int64_t>(me.offers.data());
  a.all_counts_at = reinterpret_cast<int64_t>(me.all_counts.data());
  a.left_at = reinterpret_cast<int64_t>(me.left.data());
  a.format = c.format;
  a.power_of_two = c.power_of_two;
  a.relay = c.relay;
  a.order_at = reinterpret_cast<int64_t>(me.order.data());
  a.bulk = c.bulk;
  run_p2p(kernel, std::min(c.push_blocks, a.chunks), a);
}

void P2pRanks::push(int rank, const P2pCase& c) {
  if (c.by_expert) {
    push_rows<PushTilesArgs>("push_tiles", rank, c);
  } else if (c.format == kSame) {
    push_rows<PushArgs>("push", rank, c);
  } else {
    push_rows<PushFp8Args>("push_fp8", rank, c);
  }
}

void P2pRanks::arrive(int rank, const P2pCase& c) {
  ArriveArgs a = args<ArriveArgs>(rank, c);
  a.all_counts_at = reinterpret_cast<int64_t>(of(rank).all_counts.data());
  a.sources = world_;
  run_p2p("arrive", 1, a);
}

void P2pRanks::fan_out(int rank, const P2pCase& c) {
  FanOutArgs a = args<FanOutArgs>(rank, c);
  a.hidden = c.hidden;
  a.dtype = c.dtype;
  a.rows_at = reinterpret_cast<int64_t>(data(rank, region(rank, c, 0)));
  a.scales_at = reinterpret_cast<int64_t>(data(rank, region(rank, c, 2)));
  a.links_at = reinterpret_cast<int64_t>(data(rank, region(rank, c, 3)));
  a.rows = c.room >= 0 ? c.room : 1 << 20;
  a.summary_at = reinterpret_cast<int64_t>(of(rank).summary.data());
  a.format = c.format;
  run_p2p("fan_out", 3, a);
}

void P2pRanks::sum(int rank, const P2pCase& c, bool weighted, char* y, float* words) {
  SumArgs a = args<SumArgs>(rank, c);
  a.hidden = c.hidden;
  a.dtype = c.dtype;
  a.tokens = c.tokens[at_index(rank)];
  a.top_k = c.top_k;
  a.place_at = reinterpret_cast<int64_t>(of(rank).place.data());
  a.offers_at = reinterpret_cast<int64_t>(of(rank).offers.data());
  a.weights_at = weighted ? reinterpret_cast<int64_t>(c.weights[at_index(rank)].data()) : 0;
  a.y_at = reinterpret_cast<int64_t>(y);
  const int64_t slices = std::max<int64_t>(p2p::num_slices(c.hidden), 1);
  for (int64_t slice = 0; slice < slices; ++slice) {
    a.first_column = p2p::first_column(c.hidden, slice);
    a.columns = p2p::first_column(c.hidden, slice + 1) - a.first_column;
    const bool last = slice + 1 == slices;
    a.words_at = last ? reinterpret_cast<int64_t>(words) : 0;
    a.ends = c.merged && last;
    run_blocks("sum", p2p::sum<Machine>, 3, a, a.ends && c.at_once);
  }
}

void P2pRanks::sum_reduced(int rank, const P2pCase& c, char* y) {
  const auto address = [](const void* p) { return reinterpret_cast<int64_t>(p); };
  const Rank& me = of(rank);
  const auto stage = [&](int64_t number) {
    StageArgs a = args<StageArgs>(rank, c);
    a.stage = number;
    run_p2p("stage", 1, a);
  };
  WeighArgs weigh = args<WeighArgs>(rank, c);
  weigh.tokens = c.tokens[at_index(rank)];
  weigh.top_k = c.top_k;
  weigh.place_at = address(me.place.data());
  weigh.offers_at = address(me.offers.data());
  weigh.weights_at = address(c.weights[at_index(rank)].data());
  run_p2p("weigh", 2, weigh);
  stage(0);
  ReduceArgs reduce = args<ReduceArgs>(rank, c);
  reduce.hidden = c.hidden;
  reduce.dtype = c.dtype;
  reduce.rows = c.kept(rank);
  reduce.top_k = c.top_k;
  reduce.rows_at = address(data(rank, region(rank, c, 4)));
  reduce.links_at = address(data(rank, region(rank, c, 3)));
  reduce.reduced_at = address(data(rank, region(rank, c, 0)));
  run_p2p("reduce", 2, reduce);
  stage(1);
  SumReducedArgs sum = args<SumReducedArgs>(rank, c);
  sum.hidden = sum.columns = c.hidden;
  sum.dtype = c.dtype;
  sum.tokens = weigh.tokens;
  sum.top_k = c.top_k;
  sum.place_at = weigh.place_at;
  sum.offers_at = weigh.offers_at;
  sum.weights_at = weigh.weights_at;
  sum.y_at = address(y);
  run_p2p("sum_reduced", 2, sum);
}

template <class Args>
void P2pRanks::spread_rows(const char* name, void (*kernel)(Machine&, const Args&), int rank, const P2pCase& c,
                           float* dots) {
  Args a = args<Args>(rank, c);
  a.hidden = c.hidden;
  a.dtype = c.dtype;
  a.tokens = c.tokens[at_index(rank)];
  a.top_k = c.top_k;
  a.place_at = reinterpret_cast<int64_t>(of(rank).place.data());
  a.offers_at = reinterpret_cast<int64_t>(of(rank).offers.data());
  a.weights_at = reinterpret_cast<int64_t>(c.weights[at_index(rank)].data());
  a.grad_at = reinterpret_cast<int64_t>(c.g[at_index(rank)].data());
  a.stride = c.hidden * c.element();
  a.dots_at = reinterpret_cast<int64_t>(dots);
  a.order_at = reinterpret_cast<int64_t>(of(rank).order.data());
  a.words_at = a.weights_at;
  a.ends = c.merged;
  run_blocks(name, kernel, a.tokens > 0 ? 3 : 0, a, c.at_once);
}

void P2pRanks::spread(int rank, const P2pCase& c, float* dots) {
  if (c.push_blocks % 2 == 0) {
    spread_rows("spread", p2p::spread<Machine>, rank, c, dots);
  } else {
    spread_rows("spread_tiles", p2p::spread_tiles<Machine>, rank, c, dots);
    arrive(rank, c);
  }
}

void P2pRanks::done(int rank, const P2pCase& c) { run_p2p("done", 1, args<DoneArgs>(rank, c)); }

void P2pRanks::end(int rank, const P2pCase& c, bool ended) {
  if (!ended) return done(rank, c);
  const p2p::Control control{c.world, c.experts(), c.local_experts()};
  const int64_t* words = reinterpret_cast<const int64_t*>(data(rank, 0));
  for (int from = 0; from < c.world; ++from) {
    CHECK(__atomic_load_n(words + control.done(from), __ATOMIC_ACQUIRE) >= of(rank).state.turn);
  }
  CHECK_EQ(of(rank).state.ended, int64_t{0});
}

float e4m3_value(int byte) {
  const int exponent = (byte >> 3) & 15, fraction = byte & 7;
  const double magnitude = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return static_cast<float>(byte & 0x80 ? -magnitude : magnitude);
}

uint8_t e4m3_by_search(float f) {
  static const std::vector<float> values = [] {
    std::vector<float> all;
    for (int b = 0; b < 0x7f; ++b) all.push_back(e4m3_value(b));
    return all;
  }();
  if (std::isnan(f)) return 0x7f;
  const double magnitude = std::min(std::fabs(static_cast<double>(f)), 448.0);
  int best = 0;
  for (int b = 1; b < 0x7f; ++b) {
    const double nearer = std::fabs(values[at_index(best)] - magnitude) - std::fabs(values[at_index(b)] - magnitude);
    if (nearer > 0 || (nearer == 0 && b % 2 == 0)) best = b;
  }
  return static_cast<uint8_t>(best | (std::signbit(f) ? 0x80 : 0));
}

void P2pRanks::check_row(const P2pCase& c, const P2pCase::Slot& slot, const char* row, const char* scales) {
  const char* x = c.x[at_index(slot.source)].data() + slot.slot / c.top_k * c.hidden * c.element();
  if (c.format == kSame) {
    CHECK(c.hidden == 0 || std::memcmp(row, x, at_index(c.hidden * c.element())) == 0);
    return;
  }
  const int64_t block = c.format == kRowScales ? std::max<int64_t>(c.hidden, 1) : kScaleChannels;
  for (int64_t first = 0; first < c.hidden; first += block) {
    const int64_t last = std::min(first + block, c.hidden);
    float most = 0;
    for (int64_t d = first; d < last; ++d) most = std::max(most, std::fabs(widen(c.dtype, x + d * c.element())));
    float scale = std::max(most / 448.0f, std::ldexp(1.0f, -126));
    if (c.power_of_two) scale = std::exp2(std::ceil(std::log2(scale)));
    float given;
    std::memcpy(&given, scales + first / block * 4, 4);
    CHECK_EQ(given, scale);
    for (int64_t d = first; d < last; ++d) {
      CHECK_EQ(int{static_cast<uint8_t>(row[d])}, int{e4m3_by_search(widen(c.dtype, x + d * c.element()) / scale)});
    }
  }
  for (int64_t d = c.hidden; d < row_bytes(c.hidden, c.dtype, c.format); ++d) CHECK_EQ(int{row[d]}, 0);
}

void P2pRanks::check_received(int rank, const P2pCase& c, const char* rows, const char* scales, int64_t n) {
  const int64_t bytes = row_bytes(c.hidden, c.dtype, c.format), of_scales = 4 * row_scales(c.hidden, c.format);
  for (int64_t r = 0; r < n; ++r) {
    check_row(c, c.rows[at_index(rank)][at_index(r)], rows + r * bytes, scales + r * of_scales);
  }
}

void P2pRanks::check_reduced(int rank, const P2pCase& c) {
  const size_t r = at_index(rank);
  const int64_t bytes = c.hidden * c.element(), tokens = c.tokens[r];
  char* links = data(rank, region(rank, c, 3));
  std::memset(links, 0, at_index(c.kept(rank)) * sizeof(RowLink));
  std::memset(data(rank, region(rank, c, 0)), 0x7f, at_index(c.kept(rank) * bytes));
  CHECK(meet(rank, c, false, {region(rank, c, 4), region(rank, c, 0), 0, region(rank, c, 3), -1}));
  Bytes y(at_index(tokens * bytes) + 16, 'y'), expected = y;
  sum_reduced(rank, c, y.data());
  done(rank, c);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t* places = c.places[r].data() + t * c.top_k;
    std::vector<int64_t> owners;  // in the order of their first slots
    for (int64_t k = 0; k < c.top_k; ++k) {
      if (places[k] == kDropped) continue;
      const int64_t owner = place_owner(places[k]);
      if (std::find(owners.begin(), owners.end(), owner) == owners.end()) owners.push_back(owner);
    }
    for (int64_t d = 0; d < c.hidden; ++d) {
      float total = 0;
      for (const int64_t owner : owners) {
        float partial = 0;
        int rows = 0;
        for (int64_t k = 0; k < c.top_k; ++k) {
          if (places[k] == kDropped || place_owner(places[k]) != owner) continue;
          const char* row = c.out[at_index(owner)].data() + place_row(places[k]) * bytes;
          partial += widen(c.dtype, row + d * c.element()) * c.weights[r][at_index(t * c.top_k + k)];
          ++rows;
        }
        char rounded[4] = {};
        narrow(c.dtype, partial, rounded);
        total += rows > 1 ? widen(c.dtype, rounded) : partial;
      }
      narrow(c.dtype, total, expected.data() + t * bytes + d * c.element());
    }
  }
  CHECK(y == expected);
}

void P2pRanks::run_and_check(int rank, const P2pCase& c) {
  Rank& me = of(rank);
  const size_t r = at_index(rank);
  const int64_t bytes = c.hidden * c.element(), tokens = c.tokens[r];
  CHECK(count(rank, c, dispatch_offer(rank, c)));
  push(rank, c);
  arrive(rank, c);
  if (c.relay) fan_out(rank, c);
  CHECK_EQ(me.state.fault, int64_t{kNone});
  CHECK(me.place == c.places[r]);
  CHECK(me.host_counts == me.all_counts);
  CHECK_EQ(me.report.rows, static_cast<int64_t>(c.rows[r].size()));
  CHECK_EQ(me.report.dropped, c.dropped[r]);
  CHECK_EQ(me.report.overflow, c.overflow[r]);
  CHECK(std::all_of(me.left.begin(), me.left.end(), [](int64_t left) { return left == 0; }));
  for (int64_t i = 0; i <= c.local_experts(); ++i) {
    const int64_t expert = std::min(c.offsets[r] + i, c.offsets[r + 1]);
    int64_t first = 0;
    for (const P2pCase::Slot& slot : c.rows[r]) first += slot.expert < expert;
    CHECK_EQ(me.summary[at_index(i)], std::min(first, c.kept(rank)));
  }
  check_received(rank, c, data(rank, region(rank, c, 0)), data(rank, region(rank, c, 2)), c.kept(rank));

  // Combine must produce the same bits as the CPU kernels.
  char* out = data(rank, region(rank, c, 4));
  if (!c.out[r].empty()) std::memcpy(out, c.out[r].data(), c.out[r].size());
  std::vector<char*> bases;
  for (const Bytes& of_owner : c.out) bases.push_back(const_cast<char*>(of_owner.data()));
  const TokenLoop loop = {c.places[r].data(), bases.data(), c.top_k, c.hidden, c.dtype, false};
  for (const bool weighted : {true, false}) {
    CHECK(meet(rank, c, false, {region(rank, c, 4), 0, 0, 0, -1}));
    Bytes y(at_index(tokens * bytes) + 16, 'y'), expected = y;
    // y is 16-byte aligned if the rows are; otherwise it need not be.
    sum(rank, c, weighted, y.data());
    end(rank, c, c.merged);
    kernels().sum(loop, 0, tokens, expected.data(), bytes, weighted ? c.weights[r].data() : nullptr);
    CHECK(y == expected);
  }

  check_reduced(rank, c);

  // Backward of combine: row gradients at the owners, and weight gradients.
  char* grads = data(rank, region(rank, c, 1));
  std::memset(grads, 0, at_index(c.kept(rank) * bytes));
  CHECK(meet(rank, c, false, {region(rank, c, 4), region(rank, c, 1), region(rank, c, 2), 0, -1}));
  std::vector<float> dots(c.ids[r].size(), 7.0f), expected_dots = dots;
  spread(rank, c, dots.data());
  end(rank, c, c.merged && c.push_blocks % 2 == 0 && tokens > 0);
  std::vector<Bytes> grad_rows = c.out;
  std::vector<char*> grad_bases;
  for (Bytes& of_owner : grad_rows) grad_bases.push_back(of_owner.data());
  kernels().spread(loop, 0, tokens, c.g[r].data(), bytes, c.weights[r].data(), grad_bases.data(), expected_dots.data());
  CHECK(dots.empty() || std::memcmp(dots.data(), expected_dots.data(), dots.size() * 4) == 0);
  const char* words = data(rank, region(rank, c, 2));
  const bool with_words = c.push_blocks % 2 == 0;  // as spread chooses its kernel
  for (int64_t row = 0; row < c.kept(rank); ++row) {
    const P2pCase::Slot& slot = c.rows[r][at_index(row)];
    const size_t source = at_index(slot.source);
    CHECK(!with_words || std::memcmp(words + row * 4, &c.weights[source][at_index(slot.slot)], 4) == 0);
    for (int64_t d = 0; d < c.hidden; ++d) {
      const char* g = c.g[source].data() + slot.slot / c.top_k * bytes + d * c.element();
      char expected[4] = {};
      narrow(c.dtype, widen(c.dtype, g) * c.weights[source][at_index(slot.slot)], expected);
      CHECK(std::memcmp(grads + row * bytes + d * c.element(), expected, at_index(c.element())) == 0);
    }
  }

  // The words return with the sum of the gradients of rows.
  CHECK(meet(rank, c, false, {region(rank, c, 1), 0, region(rank, c, 2), 0, -1}));
  std::vector<float> returned(c.ids[r].size(), 7.0f);
  Bytes y(at_index(tokens * bytes) + 16, 'y');
  sum(rank, c, false, y.data(), returned.data());
  end(rank, c, c.merged);
  for (size_t i = 0; i < returned.size(); ++i) {
    CHECK(!with_words || returned[i] == (c.places[r][i] == kDropped ? 0.0f : c.weights[r][i]));
  }
  CHECK_EQ(me.state.fault, int64_t{kNone});
  CHECK_EQ(me.state.ended, int64_t{0});
}

}  // namespace moe_comm::test
