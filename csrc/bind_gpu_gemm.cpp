// Python bindings of the GEMMs on GPUs, and of recorded launches.
#include "bind_gpu_gemm.h"

#include <pybind11/stl.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind_p2p.h"
#include "cuda/gemm/launch.h"
#include "cuda/record.h"

namespace py = pybind11;

namespace moe_comm {

namespace {

using Words = std::array<int64_t, 5>;

gemm::Matrices matrices_of(const Words& words) { return {words[0], words[1], words[2], words[3], words[4]}; }

// Alpha and limit of Glu in csrc/cuda/gemm/swiglu.h.
using Glu = std::array<float, 2>;

// slots: address of slots, top-k, address of biases and their stride.
gemm::RowsProduct rows_of(const std::array<Words, 4>& matrices, bool transposed, int64_t counts_at, int64_t experts,
                          const std::array<int64_t, 4>& slots, const Glu& glu) {
  const auto& [rows, w, out, act] = matrices;
  return {matrices_of(rows), matrices_of(w), matrices_of(out), matrices_of(act), counts_at, experts, transposed,
          slots[0],          slots[1],       slots[2],         slots[3],         glu[0],    glu[1]};
}

gemm::GradientProduct gradient_of(const Words& grad, const Words& w, int64_t counts_at, int64_t experts,
                                  const std::array<Words, 3>& matrices, const std::array<int64_t, 3>& weights,
                                  const Glu& glu) {
  const auto& [h, grad_h, act] = matrices;
  return {matrices_of(grad), matrices_of(w), matrices_of(h), matrices_of(grad_h), matrices_of(act), counts_at,
          experts,           weights[0],     weights[1],     weights[2],          glu[0],           glu[1]};
}

// Put the address of a buffer in place of its number, -1 for none.
void place(int64_t* at, const p2p::Record::Addresses& addresses) {
  *at = *at < 0 ? 0 : addresses.at(static_cast<size_t>(*at));
}

// bytes: a value. int: the number of a buffer. Sequence: the number of a buffer, and a matrix in it.
p2p::Argument argument_of(const py::handle& given) {
  p2p::Argument argument;
  if (py::isinstance<py::bytes>(given)) {
    const auto bytes = given.cast<std::string>();
    if (bytes.size() > sizeof argument.value) throw std::invalid_argument("a value has at most 8 bytes");
    std::memcpy(&argument.value, bytes.data(), bytes.size());
  } else if (py::isinstance<py::int_>(given)) {
    argument.buffer = given.cast<int64_t>();
  } else {
    const auto words = given.cast<std::array<int64_t, 9>>();
    argument.buffer = words[0];
    argument.is_matrix = true;
    argument.matrix = {
        static_cast<int>(words[1]),      static_cast<int>(words[2]),     words[3], words[4], words[5], words[6],
        static_cast<uint32_t>(words[7]), static_cast<uint32_t>(words[8])};
  }
  return argument;
}

void bind_record(py::module_& m) {
  using p2p::Record;
  py::class_<Record>(m, "GpuRecord")
      .def(py::init([](const std::map<std::string, uintptr_t>& calls, uintptr_t context,
                       const std::vector<std::pair<int64_t, int64_t>>& places) {
             std::vector<p2p::Buffer> buffers;
             for (const auto& [base, offset] : places) buffers.push_back({base, offset});
             return std::make_unique<Record>(driver_of(calls, context), calls.at("cuTensorMapEncodeTiled"),
                                             std::move(buffers));
           }),
           py::arg("calls"), py::arg("context"), py::arg("buffers"))
      .def("kernel",
           [](Record& self, uintptr_t function, const p2p::Grid& grid, unsigned threads, unsigned shared_bytes,
              const py::sequence& arguments) {
             p2p::RecordedKernel kernel{reinterpret_cast<void*>(function), grid, threads, shared_bytes, {}};
             for (const py::handle given : arguments) kernel.arguments.push_back(argument_of(given));
             self.add(std::move(kernel));
           })
      .def("rows",
           [](Record& self, std::shared_ptr<gemm::Launcher> launcher, const Words& rows, const Words& w,
              bool transposed, int64_t counts_at, int64_t experts, const Words& out, const Words& act,
              std::array<int64_t, 4> slots, Glu glu) {
             const gemm::RowsProduct recorded =
                 rows_of({rows, w, out, act}, transposed, counts_at, experts, slots, glu);
             self.add([launcher = std::move(launcher), recorded](const Record::Addresses& at, uintptr_t stream) {
               gemm::RowsProduct product = recorded;
               for (int64_t* one : {&product.rows.at, &product.w.at, &product.out.at, &product.act.at,
                                    &product.counts_at, &product.slots_at, &product.bias_at}) {
                 place(one, at);
               }
               launcher->rows(product, stream);
             });
           })
      .def("swiglu_gradient",
           [](Record& self, std::shared_ptr<gemm::Launcher> launcher, const Words& grad, const Words& w,
              int64_t counts_at, int64_t experts, const std::array<Words, 3>& matrices, std::array<int64_t, 3> weights,
              Glu glu) {
             const gemm::GradientProduct recorded = gradient_of(grad, w, counts_at, experts, matrices, weights, glu);
             self.add([launcher = std::move(launcher), recorded](const Record::Addresses& at, uintptr_t stream) {
               gemm::GradientProduct product = recorded;
               for (int64_t* one : {&product.grad.at, &product.w.at, &product.h.at, &product.grad_h.at, &product.act.at,
                                    &product.counts_at, &product.weights_at, &product.slots_at, &product.sections_at}) {
                 place(one, at);
               }
               launcher->swiglu_gradient(product, stream);
             });
           })
      .def("weights",
           [](Record& self, std::shared_ptr<gemm::Launcher> launcher, const Words& a, const Words& b, int64_t counts_at,
              int64_t experts, const Words& out, bool add) {
             const gemm::WeightsProduct recorded{matrices_of(a), matrices_of(b), matrices_of(out),
                                                 counts_at,      experts,        add};
             self.add([launcher = std::move(launcher), recorded](const Record::Addresses& at, uintptr_t stream) {
               gemm::WeightsProduct product = recorded;
               for (int64_t* one : {&product.a.at, &product.b.at, &product.out.at, &product.counts_at}) place(one, at);
               launcher->weights(product, stream);
             });
           })
      .def("__len__", &Record::size)
      .def("run", &Record::run, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_gpu_gemm(py::module_& m) {
  m.def("gpu_gemm_code", [] { return py::bytes(gemm::compiled_kernels()); });
  m.def("gpu_gemm_kernels", [] {
    std::vector<std::string> names;
    for (const char* name : gemm::kernel_names()) names.push_back(name);
    return names;
  });
  py::class_<gemm::Launcher, std::shared_ptr<gemm::Launcher>>(m, "GpuGemm")
      .def(py::init([](const std::map<std::string, uintptr_t>& calls, uintptr_t context,
                       const std::map<std::string, uintptr_t>& functions, int64_t blocks) {
             p2p::Driver driver = driver_of(calls, context);
             for (const char* name : gemm::kernel_names()) {
               driver.functions.push_back(reinterpret_cast<void*>(functions.at(name)));
             }
             return std::make_shared<gemm::Launcher>(std::make_shared<p2p::DriverStarter>(driver),
                                                     calls.at("cuTensorMapEncodeTiled"), blocks);
           }),
           py::arg("calls"), py::arg("context"), py::arg("functions"), py::arg("blocks"))
      .def("rows",
           [](const gemm::Launcher& self, const Words& rows, const Words& w, bool transposed, int64_t counts_at,
              int64_t experts, const Words& out, const Words& act, std::array<int64_t, 4> slots, Glu glu,
              uintptr_t stream) {
             py::gil_scoped_release release;
             self.rows(rows_of({rows, w, out, act}, transposed, counts_at, experts, slots, glu), stream);
           })
      .def("listed",
           [](const gemm::Launcher& self, const std::array<Words, 5>& matrices, bool transposed, int64_t experts,
              const std::array<int64_t, 4>& slots, Glu glu, const std::array<int64_t, 18>& list, bool published,
              int64_t blocks, uintptr_t stream) {
             py::gil_scoped_release release;
             const auto& [rows, w, out, act, own] = matrices;
             const auto product = rows_of({rows, w, out, act}, transposed, 0, experts, slots, glu);
             self.listed({product, matrices_of(own), list, published, blocks}, stream);
           })
      .def("swiglu_gradient",
           [](const gemm::Launcher& self, const Words& grad, const Words& w, int64_t counts_at, int64_t experts,
              const std::array<Words, 3>& matrices, std::array<int64_t, 3> weights, Glu glu, uintptr_t stream) {
             py::gil_scoped_release release;
             self.swiglu_gradient(gradient_of(grad, w, counts_at, experts, matrices, weights, glu), stream);
           })
      .def("weights",
           [](const gemm::Launcher& self, const Words& a, const Words& b, int64_t counts_at, int64_t experts,
              const Words& out, bool add, uintptr_t stream) {
             py::gil_scoped_release release;
             self.weights({matrices_of(a), matrices_of(b), matrices_of(out), counts_at, experts, add}, stream);
           })
      .def("rows_fp8",
           [](const gemm::Launcher& self, const std::array<Words, 3>& matrices, std::array<int64_t, 3> scales,
              std::array<int64_t, 3> w_scales, std::array<int64_t, 4> counts, uintptr_t stream) {
             py::gil_scoped_release release;
             const auto& [rows, w, out] = matrices;
             self.rows_fp8({matrices_of(rows), matrices_of(w), matrices_of(out), scales[0], scales[1], scales[2],
                            w_scales[0], w_scales[1], w_scales[2], counts[0], counts[1], counts[2], counts[3]},
                           stream);
           });
  bind_record(m);
}

}  // namespace moe_comm
