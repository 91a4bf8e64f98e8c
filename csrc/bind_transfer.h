// What the bindings of dispatch and combine share.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "bind_tensor.h"
#include "bind_torch.h"
#include "cpu/kernels.h"
#include "cpu/transfer.h"

namespace moe_comm {

inline pybind11::capsule matrix_tensor(char* data, int64_t rows, int64_t columns, int dtype,
                                       std::function<void()> on_release) {
  const uint8_t code = dtype == kBFloat16 ? 4 : 2;
  return matrix_tensor(data, rows, columns, {code, static_cast<uint8_t>(8 * dtype_bytes(dtype)), 1}, {1, 0},
                       std::move(on_release));
}

// A heap block as a tensor. The block is freed with the tensor.
inline pybind11::capsule block_tensor(std::shared_ptr<Heap> heap, int64_t offset, int64_t rows, int64_t columns,
                                      int dtype) {
  char* data = heap->base() + offset;
  return matrix_tensor(data, rows, columns, dtype, [heap = std::move(heap), offset] { heap->free(offset); });
}

// The arguments of a dispatch: tokens [T, D] and ids [T, K].
class Tokens {
 public:
  Tokens(pybind11::handle x, pybind11::handle ids) : x_TD_(matrix_of(x)), ids_TK_(dense_integers(ids)) {
    if (x_TD_.rows != ids_TK_.rows) throw std::invalid_argument("tokens and expert ids must have as many rows");
  }
  Rows rows() const { return {x_TD_.data, x_TD_.stride}; }
  const int64_t* ids() const { return reinterpret_cast<const int64_t*>(ids_TK_.data); }
  Shape shape() const { return {x_TD_.rows, ids_TK_.columns, x_TD_.columns, x_TD_.dtype}; }

 private:
  TensorMatrix x_TD_, ids_TK_;
};

inline Op make_op(const std::array<int64_t, kComparedWords>& compared, std::string label, int64_t fault,
                  std::string text) {
  Op op;
  std::copy(compared.begin(), compared.end(), op.compared);
  op.label = std::move(label);
  op.fault = fault;
  op.fault_text = std::move(text);
  return op;
}

// Release the GIL while `body` runs.
template <class Body>
auto without_gil(Body body) {
  pybind11::gil_scoped_release release;
  return body();
}

}  // namespace moe_comm
