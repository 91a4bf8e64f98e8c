// Python bindings of the grouped GEMMs on the CPU. Arguments are addresses, sizes and strides.
#include "bind_gemm.h"

#include <pybind11/stl.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "cpu/expert_layer.h"
#include "cpu/gemm/doubles.h"
#include "cpu/gemm/gemm.h"

namespace py = pybind11;

namespace moe_comm {

namespace {

using Sizes = std::vector<int64_t>;
// Addresses and rows of the sources, bytes between rows, row list or 0, scale or 0, number and width of the rows.
using RowsArgument =
    std::tuple<std::vector<uintptr_t>, std::vector<int64_t>, int64_t, uintptr_t, uintptr_t, int64_t, int64_t>;

gemm::Rows rows_of(RowsArgument argument) {
  auto& [base, rows, stride, place, scale, count, width] = argument;
  return {std::move(base),
          std::move(rows),
          stride,
          reinterpret_cast<const int64_t*>(place),
          count,
          width,
          reinterpret_cast<const float*>(scale)};
}

constexpr int kFloat64 = 3;  // of these functions only; layout.h has the other codes

gemm::Stack stack_of(const std::array<int64_t, 4>& stack) {
  return {static_cast<uintptr_t>(stack[0]), stack[1], stack[2], stack[3]};
}

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// Stacks w13, w2, b13 and b2; shape: D, F.
SwigluExperts experts_of(const Sizes& sizes, int dtype, int threads,
                         const std::array<std::array<int64_t, 4>, 4>& stacks, const std::array<int64_t, 2>& shape) {
  return {stack_of(stacks[0]),
          stack_of(stacks[1]),
          stack_of(stacks[2]),
          stack_of(stacks[3]),
          static_cast<int64_t>(sizes.size()),
          shape[0],
          shape[1],
          dtype,
          threads};
}

}  // namespace

void bind_gemm(py::module_& m) {
  m.def(
      "grouped_gemm",
      [](const Sizes& sizes, int dtype, int threads, RowsArgument x, std::array<int64_t, 4> w, int64_t columns,
         std::array<int64_t, 2> bias, std::array<int64_t, 2> out, bool accumulate) {
        const gemm::Rows rows = rows_of(std::move(x));
        py::gil_scoped_release release;
        (dtype == kFloat64 ? gemm::rows_of_doubles : gemm::rows)(
            {sizes.data(), static_cast<int64_t>(sizes.size()), dtype, threads}, rows, stack_of(w), columns,
            {static_cast<uintptr_t>(bias[0]), bias[1], 0, 0}, {static_cast<uintptr_t>(out[0]), out[1], accumulate});
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("threads"), py::arg("x"), py::arg("w"), py::arg("columns"),
      py::arg("bias"), py::arg("out"), py::arg("accumulate") = false);
  m.def(
      "grouped_gemm_weights",
      [](const Sizes& sizes, int dtype, int threads, RowsArgument y, RowsArgument x, std::array<int64_t, 4> out,
         int out_dtype, bool accumulate) {
        const gemm::Rows left = rows_of(std::move(y)), right = rows_of(std::move(x));
        const gemm::Groups groups{sizes.data(), static_cast<int64_t>(sizes.size()), dtype, threads};
        py::gil_scoped_release release;
        if (dtype == kFloat64) {
          gemm::weights_of_doubles(groups, left, right, stack_of(out), accumulate);
        } else {
          gemm::weights(groups, left, right, stack_of(out), out_dtype, accumulate);
        }
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("threads"), py::arg("y"), py::arg("x"), py::arg("out"),
      py::arg("out_dtype"), py::arg("accumulate"));
  m.def(
      "swiglu_experts",
      [](const Sizes& sizes, int dtype, int threads, RowsArgument x,
         const std::array<std::array<int64_t, 4>, 4>& stacks, std::array<int64_t, 2> shape,
         std::array<int64_t, 3> buffers, std::array<int64_t, 2> out) {
        const ExpertForward pass{rows_of(std::move(x)),     pointer<char>(buffers[0]), buffers[1] != 0,
                                 pointer<char>(buffers[2]), pointer<char>(out[0]),     out[1]};
        py::gil_scoped_release release;
        run_forward(experts_of(sizes, dtype, threads, stacks, shape), sizes.data(), pass);
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("threads"), py::arg("x"), py::arg("stacks"), py::arg("shape"),
      py::arg("buffers"), py::arg("out"));
  m.def(
      "swiglu_experts_backward",
      [](const Sizes& sizes, int dtype, int threads, std::pair<RowsArgument, RowsArgument> rows,
         const std::array<std::array<int64_t, 4>, 4>& stacks, std::array<int64_t, 2> shape,
         std::array<int64_t, 5> buffers, std::array<int64_t, 2> weights, std::array<int64_t, 2> grad_x,
         const std::array<std::array<int64_t, 5>, 2>& grads) {
        const auto stack = [&](size_t i) { return stack_of({grads[i][0], grads[i][1], grads[i][2], grads[i][3]}); };
        const ExpertBackward pass{rows_of(std::move(rows.first)),
                                  rows_of(std::move(rows.second)),
                                  pointer<char>(buffers[0]),
                                  buffers[1],
                                  pointer<char>(buffers[2]),
                                  pointer<char>(buffers[3]),
                                  buffers[4] != 0,
                                  pointer<float>(weights[0]),
                                  pointer<float>(weights[1]),
                                  pointer<char>(grad_x[0]),
                                  grad_x[1],
                                  stack(0),
                                  stack(1),
                                  static_cast<int>(grads[0][4]),
                                  static_cast<int>(grads[1][4])};
        py::gil_scoped_release release;
        run_backward(experts_of(sizes, dtype, threads, stacks, shape), sizes.data(), pass);
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("threads"), py::arg("rows"), py::arg("stacks"), py::arg("shape"),
      py::arg("buffers"), py::arg("weights"), py::arg("grad_x"), py::arg("grads"));
  m.def("gemm_isa_names", &gemm::isa_names);
  m.def("gemm_isa", &gemm::isa);
  m.def("set_gemm_isa", &gemm::set_isa);
}

}  // namespace moe_comm
