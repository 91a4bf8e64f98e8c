// A simple, slow reference for dispatch, combine and their backward passes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/communicator.h"
#include "cpu/transfer.h"

namespace moe_comm::test {

// Convert one element of `dtype` to and from float, with textbook rounding.
float widen(int dtype, const char* p);
void narrow(int dtype, float value, char* p);

using Bytes = std::vector<char>;

// Inputs and expected results of one dispatch and the operations that follow it, on all ranks.
struct Plan {
  int world = 1;
  int64_t hidden = 0, top_k = 1;
  int dtype = 0;
  bool weighted = true;      // combine has weights
  bool weight_grads = true;  // the weights require gradients
  bool rows_in_heap = true;  // the experts' output is dense and in the heap
  int64_t pad = 0;           // padding elements between rows of x, g and expert output
  std::vector<int64_t> expert_offsets;
  // Indexed by rank:
  std::vector<int64_t> tokens;
  std::vector<Bytes> x, g, out;             // [T, hidden], [T, hidden], [R, hidden], rows `stride()` apart
  std::vector<std::vector<int64_t>> ids;    // [T, top_k]
  std::vector<std::vector<float>> weights;  // [T, top_k]
  // Expected results, dense:
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

// Return a random plan with its expected results. Includes empty ranks and experts, dropped slots and skewed routing.
Plan random_plan(Random& random, int world, const Limits& limits);
// Return a plan of the given size: every rank has `tokens` tokens, and routing is uniform.
Plan plain_plan(Random& random, int world, int64_t tokens, int64_t hidden, int64_t experts, int64_t top_k, int dtype);

Op op_of(const Plan& plan, int64_t operation, int64_t call);

// Options with a long timeout: sanitizers and busy machines are slow.
Communicator::Options long_timeout(double timeout_s = 120);

// Return the number of headers in the HandshakeFailed that `body` throws; 0 if it throws none.
int headers_of(const std::function<void()>& body);

// Runs both halves of each operation in one call.
class BlockingTransfer : public Transfer {
 public:
  using Transfer::Transfer;
  Sent send(Op op, Rows x, const int64_t* ids, Shape shape);
  // If weights is null, all weights are 1.
  void sum(Op op, const Layout& layout, Rows rows, const float* weights, char* y);
  int64_t spread(Op op, const Layout& layout, Rows g, Rows rows, const float* weights, bool weight_grads,
                 float* grad_weights);
};

// Ranks as threads of one process. Each has a private heap that all threads see at the same address.
class Ranks {
 public:
  Ranks(int world, Communicator::Options options, std::vector<int64_t> reserves = {});
  // Ranks with named shared memory that call attach, as separate processes do.
  static Ranks named(int world, Communicator::Options options, std::vector<int64_t> reserves);

  int world() const { return static_cast<int>(heaps.size()); }
  BlockingTransfer transfer(int rank, const std::vector<int64_t>& expert_offsets, int threads = 1) const {
    const size_t r = static_cast<size_t>(rank);
    return BlockingTransfer(communicators[r], heaps[r], expert_offsets, threads);
  }

  std::vector<std::shared_ptr<Heap>> heaps;
  std::vector<std::shared_ptr<Communicator>> communicators;

 private:
  Ranks() = default;
};

// Run dispatch, combine, combine backward and dispatch backward of `plan` on `rank`, and compare all bits. Increments
// `call`.
void run_and_check(const Plan& plan, int rank, BlockingTransfer& transfer, int64_t& call);

}  // namespace moe_comm::test
