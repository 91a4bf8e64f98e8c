#include "cuda/plan.h"

#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

#include "cuda/shared.h"

namespace moe_comm {
namespace p2p {

namespace {

template <class Args>
void set_slots(Args& args, const Slots& slots) {
  static_assert(offsetof(Args, tokens) == sizeof(Group), "slots follow the group");
  std::memcpy(reinterpret_cast<char*>(&args) + sizeof(Group), &slots, sizeof slots);
}

// Blocks of sum: each warp of the grid adds up 1 KiB of a token's row at a time.
int64_t sum_blocks(int64_t blocks, int64_t tokens, int64_t columns, int64_t dtype) {
  const int64_t warps = tokens * (1 + (columns * element_bytes(dtype) - 1) / 1024);
  return blocks < warps ? blocks : warps;
}

const Report* report_of(const Group& group) { return reinterpret_cast<const Report*>(group.report_at); }

}  // namespace

Plan::Plan(std::shared_ptr<Starter> starter, const RankConstants& home)
    : starter_(std::move(starter)), constants_(home) {}

void Plan::begin(uintptr_t stream, int64_t timeout_ns, bool captured) {
  stream_ = stream;
  constants_.group.timeout_ns = timeout_ns;
  captured_ = captured;
}

template <class Args>
void Plan::start(Kernel kernel, int64_t blocks, Args& args) {
  if (blocks == 0) return;
  std::memcpy(&args, &constants_.group, sizeof constants_.group);
  Launch how;
  how.blocks = blocks;
  how.threads = usual_threads(kernel);
  how.shared_bytes = shared_bytes(kernel, &args, how.threads);
  how.stream = stream_;
  starter_->start(kernel, how, &args);
}

template <class Args>
Args Plan::push_args(const Slots& slots, const Rows& x, const Sending& how, const Links& links) const {
  Args push{};
  set_slots(push, slots);
  push.hidden = x.hidden;
  push.dtype = x.dtype;
  push.x_at = x.at;
  push.stride = x.stride;
  push.offers_at = scratch_.offers_at;
  push.all_counts_at = scratch_.all_counts_at;
  push.left_at = constants_.left_at;
  push.format = how.format;
  push.power_of_two = how.power_of_two;
  push.relay = links.blocks > 0;
  push.order_at = how.order_at;
  push.bulk = how.bulk;
  return push;
}

Slots Plan::slots_of(const Slotted& s) const {
  const int64_t chunks = (s.of.tokens * s.of.top_k + s.chunk - 1) / s.chunk;
  return {s.of.tokens, s.of.top_k,         s.ids_at,        s.chunk,
          chunks,      scratch_.counts_at, scratch_.bad_at, scratch_.expert_rows_at,
          s.place_at};
}

void Plan::count_and_meet(const MeetInput& input, const Slots& slots, const Sending& how, int64_t ids) {
  CountArgs count{};
  set_slots(count, slots);
  count.ids = ids;
  start(k_count, slots.chunks, count);
  auto scan = meet_args<ScanArgs>(input, &slots, &how);
  scan.meets = how.order_at == 0;
  start(k_scan, (constants_.group.experts + kScanExperts - 1) / kScanExperts, scan);
  if (how.order_at) {
    OrderArgs order{};
    set_slots(order, slots);
    order.order_at = how.order_at;
    start(k_order, slots.chunks, order);
    auto a = meet_args<MeetArgs>(input, &slots, &how);
    start(k_meet, 1, a);
  }
  counted_one();
}

void Plan::dispatch(const MeetInput& input, const Slotted& s, const Rows& x, const Sending& how, const Links& links) {
  const Slots slots = slots_of(s);
  count_and_meet(input, slots, how, constants_.group.experts);
  const int64_t blocks = how.blocks < slots.chunks ? how.blocks : slots.chunks;
  if (how.format == kSame && how.by_expert && links.blocks == 0) {
    auto push = push_args<PushTilesArgs>(slots, x, how, links);
    start(k_push_tiles, blocks, push);
  } else if (how.format == kSame) {
    auto push = push_args<PushArgs>(slots, x, how, links);
    start(k_push, blocks, push);
  } else {
    auto push = push_args<PushFp8Args>(slots, x, how, links);
    start(k_push_fp8, blocks, push);
  }
  if (how.wait == 0) return;
  arrive(0, constants_.group.world);
  if (links.rows == 0) return;
  FanOutArgs fan_out{};
  fan_out.hidden = x.hidden;
  fan_out.dtype = x.dtype;
  fan_out.rows_at = links.rows_at;
  fan_out.scales_at = links.scales_at;
  fan_out.links_at = links.links_at;
  fan_out.rows = links.rows;
  fan_out.summary_at = scratch_.summary_at;
  fan_out.format = how.format;
  start(k_fan_out, links.blocks < links.rows ? links.blocks : links.rows, fan_out);
}

void Plan::arrive(int64_t first_source, int64_t sources) {
  ArriveArgs a{};
  a.all_counts_at = scratch_.all_counts_at;
  a.first_source = first_source;
  a.sources = sources;
  start(k_arrive, 1, a);
}

bool Plan::received(int64_t source) const {
  const Group& g = constants_.group;
  const Control control{g.world, g.experts, g.local_experts};
  const int64_t* own = reinterpret_cast<const int64_t* const*>(g.peers_at)[g.rank];
  const int64_t* counts = reinterpret_cast<const int64_t*>(constants_.host_counts_at) + source * g.experts;
  const auto rank = static_cast<size_t>(g.rank);
  for (int64_t e = constants_.offsets[rank]; e < constants_.offsets[rank + 1]; ++e) {
    const int64_t* flag = own + control.arrived(e - constants_.offsets[rank], source, 0);
    for (int64_t tile = 0; tile < num_flags(counts[e]); ++tile) {
      if (__atomic_load_n(flag + tile, __ATOMIC_ACQUIRE) < turn) return false;
    }
  }
  return true;
}

void Plan::meet(const MeetInput& input) {
  auto a = meet_args<MeetArgs>(input, nullptr, nullptr);
  start(k_meet, 1, a);
  counted_one();
}

template <class Args>
Args Plan::meet_args(const MeetInput& input, const Slots* slots, const Sending* how) const {
  Args a{};
  a.header_at = constants_.headers_at + input.slot * kHeaderWords * 8;
  std::memcpy(reinterpret_cast<void*>(a.header_at), input.header, kHeaderWords * 8);
  std::memcpy(&a.offer_0, input.offer, sizeof input.offer);
  a.offers_at = scratch_.offers_at;
  a.all_headers_at = constants_.all_headers_at;
  if (slots != nullptr) {
    set_slots(a, *slots);
    a.with_counts = 1;
    a.strict = how->strict;
    a.own_counts_at = how->own_counts_at;
    a.digest_at = how->digest_at;
    a.all_counts_at = scratch_.all_counts_at;
    a.host_counts_at = constants_.host_counts_at;
    a.summary_at = scratch_.summary_at;
  }
  return a;
}

template <class Args>
Args Plan::sum_args(const Tokens& t, const Rows& y, const SlotData& slots, int64_t offers_at) const {
  Args a{};
  a.hidden = a.columns = y.hidden;
  a.dtype = y.dtype;
  a.tokens = t.tokens;
  a.top_k = t.top_k;
  a.place_at = slots.place_at;
  a.offers_at = offers_at != 0 ? offers_at : scratch_.offers_at;
  a.weights_at = slots.weights_at;
  a.words_at = slots.words_at;
  a.y_at = y.at;
  return a;
}

void Plan::sum(int64_t blocks, const Tokens& t, const Rows& y, const SlotData& slots, int64_t offers_at, bool ends) {
  auto a = sum_args<SumArgs>(t, y, slots, offers_at);
  a.ends = ends;
  start(k_sum, sum_blocks(blocks, t.tokens, y.hidden, y.dtype), a);
}

void Plan::combine(const MeetInput& input, int64_t blocks, const Tokens& t, const Rows& y, const SlotData& slots) {
  meet(input);
  sum(blocks, t, y, slots, 0, true);
  if (t.tokens == 0) done();
}

void Plan::sum_slices(int64_t blocks, const Tokens& t, const Rows& y, int64_t place_at, int64_t weights_at) {
  auto a = sum_args<SumArgs>(t, y, {place_at, weights_at}, 0);
  for (int64_t slice = 0; slice < num_slices(y.hidden); ++slice) {
    ReadyArgs ready{};
    ready.slice = slice;
    start(k_ready, 1, ready);
    a.first_column = first_column(y.hidden, slice);
    a.columns = first_column(y.hidden, slice + 1) - a.first_column;
    start(k_sum, sum_blocks(blocks, t.tokens, a.columns, y.dtype), a);
  }
}

void Plan::sum_reduced(int64_t blocks, const Tokens& t, const Rows& y, int64_t place_at, int64_t weights_at,
                       const Reduction& own) {
  WeighArgs weigh{};
  weigh.tokens = t.tokens;
  weigh.top_k = t.top_k;
  weigh.place_at = place_at;
  weigh.offers_at = scratch_.offers_at;
  weigh.weights_at = weights_at;
  const int64_t per = usual_threads(k_weigh), slots = (t.tokens * t.top_k + per - 1) / per;
  start(k_weigh, blocks < slots ? blocks : slots, weigh);
  stage(0);
  ReduceArgs reduce{};
  reduce.hidden = y.hidden;
  reduce.dtype = y.dtype;
  reduce.rows = own.rows;
  reduce.top_k = t.top_k;
  reduce.rows_at = own.rows_at;
  reduce.links_at = own.links_at;
  reduce.reduced_at = own.reduced_at;
  const int64_t batches = (own.rows + kReduceBatch - 1) / kReduceBatch;
  start(k_reduce, blocks < batches ? blocks : batches, reduce);
  stage(1);
  auto sum = sum_args<SumReducedArgs>(t, y, {place_at, weights_at}, 0);
  start(k_sum_reduced, sum_blocks(blocks, t.tokens, y.hidden, y.dtype), sum);
}

void Plan::stage(int64_t number) {
  StageArgs a{};
  a.stage = number;
  start(k_stage, 1, a);
}

template <class Args>
Args Plan::spread_args(const Tokens& t, const Rows& grad, const SlotData& slots, int64_t dots_at) const {
  Args a{};
  a.hidden = grad.hidden;
  a.dtype = grad.dtype;
  a.tokens = t.tokens;
  a.top_k = t.top_k;
  a.place_at = slots.place_at;
  a.offers_at = scratch_.offers_at;
  a.weights_at = slots.weights_at;
  a.words_at = slots.words_at;
  a.grad_at = grad.at;
  a.stride = grad.stride;
  a.dots_at = dots_at;
  return a;
}

void Plan::send(const MeetInput& input, int64_t blocks, const Tokens& t, const Rows& grad, const SlotData& slots,
                int64_t dots_at, int64_t order_at, bool ends) {
  meet(input);
  const int64_t of_tokens = blocks < t.tokens ? blocks : t.tokens;
  const bool merges = ends && of_tokens > 0 && order_at == 0;
  if (order_at == 0) {
    auto a = spread_args<SpreadArgs>(t, grad, slots, dots_at);
    a.ends = merges;
    start(k_spread, of_tokens, a);
  } else {
    auto a = spread_args<SpreadTilesArgs>(t, grad, slots, dots_at);
    a.order_at = order_at;
    start(k_spread_tiles, of_tokens, a);
  }
  if (ends && !merges) done();
}

void Plan::done() {
  DoneArgs a{};
  start(k_done, 1, a);
}

namespace {

template <class Args>
void set_homes(Args& args, const Lending& homes) {
  args.routed = homes.routed;
  args.homes_at = homes.homes_at;
  args.copies = homes.copies;
  args.plan_at = homes.plan_at;
}

template <class Args>
void set_sizes(Args& args, const StackSizes& sizes) {
  args.size_0 = sizes[0];
  args.size_1 = sizes[1];
  args.size_2 = sizes[2];
  args.size_3 = sizes[3];
}

}  // namespace

void Plan::lend(const MeetInput& input, const Slotted& s, const Lending& homes, const LendSettings& settings) {
  const Slots slots = slots_of(s);
  count_and_meet(input, slots, {}, homes.routed);
  LendArgs lend{};
  set_homes(lend, homes);
  lend.rows = settings.rows;
  lend.memory = settings.memory;
  lend.row_ns = settings.row_ns;
  lend.copy_ns = settings.copy_ns;
  lend.all_counts_at = scratch_.all_counts_at;
  lend.work_at = settings.work_at;
  lend.tally_at = settings.tally_at;
  start(k_lend, 1, lend);
  AssignArgs assign{};
  set_slots(assign, slots);
  set_homes(assign, homes);
  start(k_assign, slots.chunks, assign);
}

void Plan::pull(const Lending& homes, const StackSizes& sizes, int64_t stacks_at, int64_t element, int64_t blocks) {
  PullArgs a{};
  set_homes(a, homes);
  set_sizes(a, sizes);
  a.stacks_at = stacks_at;
  a.element = element;
  start(k_pull, blocks, a);
}

void Plan::collect(const MeetInput& input, const Lending& homes, const StackSizes& sizes, const StackSizes& out_at,
                   int64_t dtype, int64_t blocks) {
  meet(input);
  CollectArgs a{};
  set_homes(a, homes);
  set_sizes(a, sizes);
  a.offers_at = scratch_.offers_at;
  a.dtype = dtype;
  a.out_0 = out_at[0];
  a.out_1 = out_at[1];
  a.out_2 = out_at[2];
  a.out_3 = out_at[3];
  a.ends = 1;
  start(k_collect, blocks, a);
}

void Plan::send_few(LlSendArgs args) { start(k_ll_send, constants_.group.experts * args.parts, args); }

void Plan::receive_few(int64_t parts, int64_t counts_at) {
  LlArriveArgs a{};
  a.parts = parts;
  a.few_counts_at = counts_at;
  start(k_ll_arrive, 1, a);
}

void Plan::sum_few(int64_t blocks, const Tokens& t, const Rows& y, int64_t place_at, int64_t weights_at,
                   int64_t offers_at) {
  LlReadyArgs ready{};
  ready.tokens = t.tokens;
  ready.top_k = t.top_k;
  ready.place_at = place_at;
  start(k_ll_ready, 1, ready);
  counted_one();
  sum(blocks, t, y, {place_at, weights_at}, offers_at, false);
}

int64_t Plan::completed_turn() const { return __atomic_load_n(&report_of(constants_.group)->turn, __ATOMIC_ACQUIRE); }

bool Plan::failed() const { return __atomic_load_n(&report_of(constants_.group)->fault, __ATOMIC_ACQUIRE) != kNone; }

bool Plan::wait(int64_t until, int64_t limit_ns) const {
  using Clock = std::chrono::steady_clock;
  if (completed_turn() >= until || failed()) return true;
  const auto end = Clock::now() + std::chrono::nanoseconds(limit_ns);
  while (Clock::now() < end) {
    std::this_thread::yield();  // other ranks may be threads of this process
    if (completed_turn() >= until || failed()) return true;
  }
  return false;
}

Counted Plan::counted(int64_t header_word) const {
  const auto* counts = reinterpret_cast<const int64_t*>(constants_.host_counts_at);
  const auto* headers = reinterpret_cast<const int64_t*>(constants_.all_headers_at);
  const int64_t world = constants_.group.world, experts = constants_.group.experts;
  Counted result;
  for (int64_t owner = 0; owner < world; ++owner) {
    int64_t rows = 0;
    for (int64_t e = constants_.offsets[owner]; e < constants_.offsets[owner + 1]; ++e) {
      int64_t of_expert = 0;
      for (int64_t source = 0; source < world; ++source) of_expert += counts[source * experts + e];
      rows += of_expert;
      if (owner == constants_.group.rank) result.own.push_back(of_expert);
    }
    result.rows.push_back(rows);
    result.header_words.push_back(headers[owner * kHeaderWords + header_word]);
  }
  result.dropped = report_of(constants_.group)->dropped;
  return result;
}

}  // namespace p2p
}  // namespace moe_comm
