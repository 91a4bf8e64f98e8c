#include "reference.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>

namespace moe_comm::test {

namespace {

struct Format {
  int exponent_bits, mantissa_bits;
};

Format format_of(int dtype) { return dtype == 1 ? Format{8, 7} : Format{5, 10}; }

float element(const Plan& plan, const Bytes& matrix, int64_t stride, int64_t row, int64_t column) {
  return widen(plan.dtype, matrix.data() + row * stride + column * plan.dtype_size());
}

void put(const Plan& plan, Bytes& matrix, int64_t row, int64_t column, float value) {
  narrow(plan.dtype, value, matrix.data() + row * plan.row_bytes() + column * plan.dtype_size());
}

Bytes random_matrix(Random& random, const Plan& plan, int64_t rows) {
  Bytes bytes(static_cast<size_t>(rows * plan.stride()));
  for (int64_t i = 0; i < rows * (plan.hidden + plan.pad); ++i) {
    const float value = static_cast<float>((random.unit() - 0.5) * std::exp2(random.between(-3, 3)));
    narrow(plan.dtype, value, bytes.data() + i * plan.dtype_size());
  }
  return bytes;
}

struct Slot {
  int64_t expert;
  int source;
  int64_t slot;  // token * top_k + k
};

// Literal implementation of the row order: sort all slots of all ranks by (expert, source, slot).
struct Places {
  std::vector<std::vector<Slot>> rows;                        // indexed by owner
  std::vector<std::vector<std::pair<int, int64_t>>> of_slot;  // indexed by source: (owner, row); owner -1 if dropped
};

Places sort_slots(const Plan& plan) {
  Places places;
  places.rows.resize(static_cast<size_t>(plan.world));
  places.of_slot.resize(static_cast<size_t>(plan.world));
  for (int s = 0; s < plan.world; ++s) {
    const auto& ids = plan.ids[static_cast<size_t>(s)];
    places.of_slot[static_cast<size_t>(s)].assign(ids.size(), {-1, -1});
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0) continue;
      int owner = 0;
      while (ids[i] >= plan.expert_offsets[static_cast<size_t>(owner) + 1]) ++owner;
      places.rows[static_cast<size_t>(owner)].push_back({ids[i], s, static_cast<int64_t>(i)});
    }
  }
  for (int owner = 0; owner < plan.world; ++owner) {
    auto& rows = places.rows[static_cast<size_t>(owner)];
    std::sort(rows.begin(), rows.end(), [](const Slot& a, const Slot& b) {
      return std::tie(a.expert, a.source, a.slot) < std::tie(b.expert, b.source, b.slot);
    });
    for (size_t r = 0; r < rows.size(); ++r) {
      places.of_slot[static_cast<size_t>(rows[r].source)][static_cast<size_t>(rows[r].slot)] = {
          owner, static_cast<int64_t>(r)};
    }
  }
  return places;
}

// y[t] = sum over k of weight * row, in fp32 and slot order. If weights is empty, all weights are 1.
Bytes reference_sum(const Plan& plan, const Places& places, int rank, const std::vector<Bytes>& rows, int64_t stride,
                    const std::vector<float>& weights) {
  const int64_t tokens = plan.tokens[static_cast<size_t>(rank)];
  Bytes y(static_cast<size_t>(tokens * plan.row_bytes()));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t d = 0; d < plan.hidden; ++d) {
      float total = 0;
      for (int64_t k = 0; k < plan.top_k; ++k) {
        const size_t slot = static_cast<size_t>(t * plan.top_k + k);
        const auto [owner, row] = places.of_slot[static_cast<size_t>(rank)][slot];
        if (owner < 0) continue;
        const float value = element(plan, rows[static_cast<size_t>(owner)], stride, row, d);
        const float product = weights.empty() ? value : weights[slot] * value;
        total = total + product;
      }
      put(plan, y, t, d, total);
    }
  }
  return y;
}

// Dot product in 32 lanes: lane l adds the products l, l + 32, ... in order. A tree reduction then adds the lanes.
float lane_dot(const Plan& plan, const Bytes& a, int64_t a_row, const Bytes& b, int64_t b_row) {
  float lanes[32] = {};
  for (int64_t d = 0; d < plan.hidden; ++d) {
    const float product = element(plan, a, plan.stride(), a_row, d) * element(plan, b, plan.stride(), b_row, d);
    lanes[d % 32] = lanes[d % 32] + product;
  }
  for (int half = 16; half; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  }
  return lanes[0];
}

void fill(Random& random, Plan& plan) {
  const size_t world = static_cast<size_t>(plan.world);
  for (auto* list : {&plan.x, &plan.g, &plan.out, &plan.received, &plan.y, &plan.grad_rows, &plan.dx})
    list->resize(world);
  plan.rows.resize(world);
  plan.per_expert.resize(world);
  plan.weights.resize(world);
  plan.grad_weights.resize(world);
  const Places places = sort_slots(plan);
  for (size_t r = 0; r < world; ++r) {
    const int64_t slots = plan.tokens[r] * plan.top_k;
    plan.x[r] = random_matrix(random, plan, plan.tokens[r]);
    plan.g[r] = random_matrix(random, plan, plan.tokens[r]);
    for (int64_t i = 0; i < slots; ++i) plan.weights[r].push_back(static_cast<float>(random.unit() * 2 - 0.5));
    plan.rows[r] = static_cast<int64_t>(places.rows[r].size());
    plan.out[r] = random_matrix(random, plan, plan.rows[r]);
    plan.per_expert[r].assign(static_cast<size_t>(plan.expert_offsets[r + 1] - plan.expert_offsets[r]), 0);
    for (const Slot& slot : places.rows[r])
      ++plan.per_expert[r][static_cast<size_t>(slot.expert - plan.expert_offsets[r])];
  }
  for (size_t r = 0; r < world; ++r) {
    const std::vector<Slot>& rows = places.rows[r];
    plan.received[r].resize(rows.size() * static_cast<size_t>(plan.row_bytes()));
    plan.grad_rows[r].resize(plan.received[r].size());
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t source = static_cast<size_t>(rows[i].source);
      const int64_t token = rows[i].slot / plan.top_k;
      if (plan.hidden) {
        std::memcpy(plan.received[r].data() + i * static_cast<size_t>(plan.row_bytes()),
                    plan.x[source].data() + token * plan.stride(), static_cast<size_t>(plan.row_bytes()));
      }
      const float weight = plan.weights[source][static_cast<size_t>(rows[i].slot)];
      for (int64_t d = 0; d < plan.hidden; ++d) {
        put(plan, plan.grad_rows[r], static_cast<int64_t>(i), d,
            weight * element(plan, plan.g[source], plan.stride(), token, d));
      }
    }
  }
  for (int r = 0; r < plan.world; ++r) {
    const size_t rank = static_cast<size_t>(r);
    plan.y[rank] = reference_sum(plan, places, r, plan.out, plan.stride(),
                                 plan.weighted ? plan.weights[rank] : std::vector<float>());
    plan.dx[rank] = reference_sum(plan, places, r, plan.grad_rows, plan.row_bytes(), {});
    for (int64_t i = 0; i < plan.tokens[rank] * plan.top_k; ++i) {
      const auto [owner, row] = places.of_slot[rank][static_cast<size_t>(i)];
      plan.grad_weights[rank].push_back(
          owner < 0 ? 0.0f : lane_dot(plan, plan.g[rank], i / plan.top_k, plan.out[static_cast<size_t>(owner)], row));
    }
  }
}

bool same(const void* a, const void* b, size_t bytes) { return bytes == 0 || std::memcmp(a, b, bytes) == 0; }

}  // namespace

float widen(int dtype, const char* p) {
  if (dtype == 0) {
    float value;
    std::memcpy(&value, p, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  const Format f = format_of(dtype);
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int exponent = (bits >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const int mantissa = bits & ((1 << f.mantissa_bits) - 1);
  float value;
  if (exponent == (1 << f.exponent_bits) - 1) {
    value = mantissa ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), 1 - bias - f.mantissa_bits);
  } else {
    value = std::ldexp(static_cast<float>(mantissa + (1 << f.mantissa_bits)), exponent - bias - f.mantissa_bits);
  }
  return bits >> 15 ? -value : value;
}

void narrow(int dtype, float value, char* p) {
  if (dtype == 0) {
    std::memcpy(p, &value, 4);
    return;
  }
  const Format f = format_of(dtype);
  const int bias = (1 << (f.exponent_bits - 1)) - 1, top = (1 << f.exponent_bits) - 1;
  int bits;
  const double size = std::fabs(static_cast<double>(value));
  if (std::isnan(value)) {
    bits = (top << f.mantissa_bits) | (1 << (f.mantissa_bits - 1));
  } else if (std::isinf(value)) {
    bits = top << f.mantissa_bits;
  } else {
    // Round to units in the last place, at the smallest normal exponent or above. nearbyint rounds half to even.
    int exponent = std::max(size > 0 ? std::ilogb(size) : 1 - bias, 1 - bias);
    double units = std::nearbyint(std::ldexp(size, f.mantissa_bits - exponent));
    if (units >= std::ldexp(2.0, f.mantissa_bits)) {
      units /= 2;
      ++exponent;
    }
    if (exponent > bias) {
      bits = top << f.mantissa_bits;
    } else {
      bits = static_cast<int>(units) + ((exponent + bias - 1) << f.mantissa_bits);
    }
  }
  if (std::signbit(value)) bits |= 0x8000;
  const uint16_t result = static_cast<uint16_t>(bits);
  std::memcpy(p, &result, 2);
}

Plan random_plan(Random& random, int world, const Limits& limits) {
  Plan plan;
  plan.world = world;
  plan.dtype = static_cast<int>(random.below(3));
  // Hidden sizes near multiples of 32 lanes, small, odd, and sometimes 0.
  const int64_t near = 32 * random.between(1, std::max<int64_t>(1, limits.max_hidden / 32)) + random.between(-1, 1);
  plan.hidden = random.chance(0.05) ? 0 : random.chance(0.4) ? near : random.between(1, limits.max_hidden);
  plan.weighted = random.chance(0.8);
  plan.weight_grads = random.chance(0.7);
  plan.rows_in_heap = random.chance(0.6);
  plan.pad = random.chance(0.4) ? random.between(1, 5) : 0;
  plan.expert_offsets = {0};
  for (int r = 0; r < world; ++r)
    plan.expert_offsets.push_back(plan.expert_offsets.back() + random.below(limits.max_experts / world + 2));
  if (plan.expert_offsets.back() == 0) plan.expert_offsets.back() = 1;
  const int64_t experts = plan.expert_offsets.back();
  plan.top_k = random.chance(0.1) ? experts : random.between(1, std::min<int64_t>(experts, 8));
  const double dropped = random.chance(0.3) ? random.unit() : 0.0;
  const bool one_expert = random.chance(0.15);
  const int64_t hot_expert = random.below(experts);
  const double skew = random.chance(0.5) ? random.unit() : 0.0;
  for (int r = 0; r < world; ++r) {
    plan.tokens.push_back(random.chance(0.2) ? 0 : random.between(1, limits.max_tokens));
    std::vector<int64_t> ids(static_cast<size_t>(plan.tokens.back() * plan.top_k));
    for (int64_t& id : ids) {
      id = one_expert || random.chance(skew) ? hot_expert : random.below(experts);
      if (random.chance(dropped)) id = -1;
    }
    plan.ids.push_back(std::move(ids));
  }
  fill(random, plan);
  return plan;
}

Plan plain_plan(Random& random, int world, int64_t tokens, int64_t hidden, int64_t experts, int64_t top_k, int dtype) {
  Plan plan;
  plan.world = world;
  plan.hidden = hidden;
  plan.top_k = top_k;
  plan.dtype = dtype;
  for (int r = 0; r <= world; ++r) plan.expert_offsets.push_back(experts * r / world);
  for (int r = 0; r < world; ++r) {
    plan.tokens.push_back(tokens);
    std::vector<int64_t> ids(static_cast<size_t>(tokens * top_k));
    for (int64_t& id : ids) id = random.below(experts);
    plan.ids.push_back(std::move(ids));
  }
  fill(random, plan);
  return plan;
}

Op op_of(const Plan& plan, int64_t operation, int64_t call) {
  Op op;
  const int64_t compared[kComparedWords] = {
      operation, call, plan.hidden, plan.dtype, plan.top_k, plan.expert_offsets.back(), plan.weight_grads, 7};
  std::copy(compared, compared + kComparedWords, op.compared);
  op.label = "layer 3";
  return op;
}

Ranks::Ranks(int world, Communicator::Options options, std::vector<int64_t> reserves) {
  reserves.resize(static_cast<size_t>(world), int64_t{1} << 30);
  for (int r = 0; r < world; ++r) {
    heaps.push_back(std::make_shared<Heap>("", Communicator::control_bytes(), 0, reserves[static_cast<size_t>(r)]));
    communicators.push_back(std::make_shared<Communicator>(heaps.back(), r, world, options));
  }
  for (auto& communicator : communicators) communicator->attach_local(heaps);
}

Ranks Ranks::named(int world, Communicator::Options options, std::vector<int64_t> reserves) {
  static int group = 0;
  Ranks ranks;
  std::vector<std::string> names;
  ++group;
  for (int r = 0; r < world; ++r) {
    names.push_back("/moe_comm_tests." + std::to_string(getpid()) + "." + std::to_string(group) + "." +
                    std::to_string(r));
    ranks.heaps.push_back(
        std::make_shared<Heap>(names.back(), Communicator::control_bytes(), 0, reserves[static_cast<size_t>(r)]));
    ranks.communicators.push_back(std::make_shared<Communicator>(ranks.heaps.back(), r, world, options));
  }
  for (auto& communicator : ranks.communicators) communicator->attach(names);
  for (auto& heap : ranks.heaps) heap->unlink();
  return ranks;
}

Communicator::Options long_timeout(double timeout_s) {
  Communicator::Options options;
  options.timeout_s = timeout_s;
  return options;
}

int headers_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const HandshakeFailed& error) {
    return static_cast<int>(error.headers.size());
  }
  return 0;
}

Sent BlockingTransfer::send(Op op, Rows x, const int64_t* ids, Shape shape) {
  Sent sent = start_send(std::move(op), x, ids, shape);
  sent.pending->finish();
  return sent;
}

void BlockingTransfer::sum(Op op, const Layout& layout, Rows rows, const float* weights, char* y) {
  const std::shared_ptr<PendingSum> pending = start_sum(std::move(op), layout, rows, true);
  pending->sum(weights, y);
  pending->finish();
}

int64_t BlockingTransfer::spread(Op op, const Layout& layout, Rows g, Rows rows, const float* weights,
                                 bool weight_grads, float* grad_weights) {
  const Spread spread = start_spread(std::move(op), layout, g, rows, weights, weight_grads, grad_weights);
  spread.pending->finish();
  return spread.block;
}

void run_and_check(const Plan& plan, int rank, BlockingTransfer& transfer, int64_t& call) {
  const size_t r = static_cast<size_t>(rank);
  Heap& heap = transfer.heap();
  const Rows x{plan.x[r].data(), plan.stride()}, g{plan.g[r].data(), plan.stride()};
  const size_t result_bytes = plan.y[r].size(), block_bytes = plan.received[r].size();

  const Sent sent = transfer.send(op_of(plan, 0, ++call), x, plan.ids[r].data(),
                                  {plan.tokens[r], plan.top_k, plan.hidden, plan.dtype});
  const Layout& layout = *sent.layout;
  CHECK_EQ(layout.rows, plan.rows[r]);
  CHECK(layout.rows_per_expert == plan.per_expert[r]);
  CHECK_EQ(layout.dropped, static_cast<int64_t>(std::count(plan.ids[r].begin(), plan.ids[r].end(), -1)));
  CHECK_EQ(sent.block % kBlockAlign, int64_t{0});
  CHECK(same(heap.base() + sent.block, plan.received[r].data(), block_bytes));

  Rows out{plan.out[r].data(), plan.stride()};
  int64_t copy = -1;
  if (plan.rows_in_heap) {
    copy = heap.alloc(plan.rows[r] * plan.row_bytes());
    for (int64_t i = 0; i < plan.rows[r] && plan.hidden; ++i) {
      std::memcpy(heap.base() + copy + i * plan.row_bytes(), out.data + i * out.stride,
                  static_cast<size_t>(plan.row_bytes()));
    }
    out = {heap.base() + copy, plan.row_bytes()};
  }
  Bytes y(result_bytes, '\xff');
  transfer.sum(op_of(plan, 1, ++call), layout, out, plan.weighted ? plan.weights[r].data() : nullptr, y.data());
  CHECK(same(y.data(), plan.y[r].data(), result_bytes));

  std::vector<float> grad_weights(plan.weights[r].size(), NAN);
  const int64_t grad_rows = transfer.spread(op_of(plan, 2, ++call), layout, g, out, plan.weights[r].data(),
                                            plan.weight_grads, plan.weight_grads ? grad_weights.data() : nullptr);
  CHECK(same(heap.base() + grad_rows, plan.grad_rows[r].data(), block_bytes));
  if (plan.weight_grads) CHECK(same(grad_weights.data(), plan.grad_weights[r].data(), grad_weights.size() * 4));

  Bytes dx(result_bytes, '\xff');
  transfer.sum(op_of(plan, 3, ++call), layout, {heap.base() + grad_rows, plan.row_bytes()}, nullptr, dx.data());
  CHECK(same(dx.data(), plan.dx[r].data(), result_bytes));

  heap.free(sent.block);
  heap.free(grad_rows);
  if (copy >= 0) heap.free(copy);
}

}  // namespace moe_comm::test
