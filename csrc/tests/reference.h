// What dispatch, combine and their backward passes must give, written the slow and obvious way.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/communicator.h"
#include "cpu/transfer.h"

namespace moe_comm::test {

// One element in `dtype`, to and from float, through decimal-free textbook rounding.
float widen(int dtype, const char* p);
void narrow(int dtype, float value, char* p);

using Bytes = std::vector<char>;

// One dispatch with everything that follows it, on all ranks.
struct Plan {
  int world = 1;
  int64_t hidden = 0, top_k = 1;
  int dtype = 0;
  bool weighted = true;      // combine has weights
  bool weight_grads = true;  // and they want gradients
  bool rows_in_heap = true;  // the experts' output stands in the heap, dense
  int64_t pad = 0;           // elements between rows of x, g and expert output
  std::vector<int64_t> expert_offsets;
  // By rank:
  std::vector<int64_t> tokens;
  std::vector<Bytes> x, g, out;             // [T, hidden], [T, hidden], [R, hidden], rows `stride()` apart
  std::vector<std::vector<int64_t>> ids;    // [T, top_k]
  std::vector<std::vector<float>> weights;  // [T, top_k]
  // Results, dense:
  std::vector<int64_t> rows;  // R
  std::vector<std::vector<int64_t>> per_expert;
  std::vector<Bytes> received, y, grad_rows, dx;
  std::vector<std::vector<float>> grad_weights;

  int64_t stride() const { return (hidden + pad) * dtype_size(); }
  int64_t dtype_size() const { return dtype == 0 ? 4 : 2; }
  int64_t row_bytes() const { return hidden * dtype_size(); }
};

struct Limits {
  int64_t max_tokens = 24, max_hidden = 80, max_experts = 12;
};

// A random plan, empty ranks and experts, dropped slots and skewed routing among them; results filled in.
Plan random_plan(Random& random, int world, const Limits& limits);
// The same for given sizes: every rank has `tokens`, routing is uniform.
Plan plain_plan(Random& random, int world, int64_t tokens, int64_t hidden, int64_t experts, int64_t top_k, int dtype);

Op op_of(const Plan& plan, int64_t operation, int64_t call);

// Waits long: sanitizers and busy machines are slow.
Communicator::Options patient(double timeout_s = 120);

// How many headers came with the HandshakeFailed that `body` throws; 0 if it throws none.
int headers_of(const std::function<void()>& body);

// Both halves of each operation at once.
class WholeTransfer : public Transfer {
 public:
  using Transfer::Transfer;
  Sent send(Op op, Rows x, const int64_t* ids, Shape shape);
  // weights may be null for ones
  void sum(Op op, const Layout& layout, Rows rows, const float* weights, char* y);
  int64_t spread(Op op, const Layout& layout, Rows g, Rows rows, const float* weights, bool weight_grads,
                 float* grad_weights);
};

// Ranks as threads of one process, each with a private heap that all see at the same address.
class Ranks {
 public:
  Ranks(int world, Communicator::Options options, std::vector<int64_t> reserves = {});
  // The same through named shared memory and attach, as processes would.
  static Ranks named(int world, Communicator::Options options, std::vector<int64_t> reserves);

  int world() const { return static_cast<int>(heaps.size()); }
  WholeTransfer transfer(int rank, const std::vector<int64_t>& expert_offsets, int threads = 1) const {
    const size_t r = static_cast<size_t>(rank);
    return WholeTransfer(communicators[r], heaps[r], expert_offsets, threads);
  }

  std::vector<std::shared_ptr<Heap>> heaps;
  std::vector<std::shared_ptr<Communicator>> communicators;

 private:
  Ranks() = default;
};

// Dispatch, combine, combine backward, dispatch backward of `plan` on `rank`; compares all bits. `call` counts on.
void play(const Plan& plan, int rank, WholeTransfer& transfer, int64_t& call);

}  // namespace moe_comm::test
