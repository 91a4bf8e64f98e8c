// Python bindings of the GEMMs on GPUs.
#include "bind_gpu_gemm.h"

#include <pybind11/stl.h>

#include <array>
#include <memory>

#include "bind_p2p.h"
#include "cuda/gemm/launch.h"

namespace py = pybind11;

namespace moe_comm {

namespace {

using Words = std::array<int64_t, 5>;

gemm::Matrices matrices_of(const Words& words) { return {words[0], words[1], words[2], words[3], words[4]}; }

}  // namespace

void bind_gpu_gemm(py::module_& m) {
  m.def("gpu_gemm_code", [] { return py::bytes(gemm::compiled_kernels()); });
  m.def("gpu_gemm_kernels", [] {
    std::vector<std::string> names;
    for (const char* name : gemm::kernel_names()) names.push_back(name);
    return names;
  });
  py::class_<gemm::Launcher>(m, "GpuGemm")
      .def(py::init([](const std::map<std::string, uintptr_t>& calls, uintptr_t context,
                       const std::map<std::string, uintptr_t>& functions, int64_t blocks) {
             p2p::Driver driver = driver_of(calls, context);
             for (const char* name : gemm::kernel_names()) {
               driver.functions.push_back(reinterpret_cast<void*>(functions.at(name)));
             }
             return std::make_unique<gemm::Launcher>(std::make_shared<p2p::DriverStarter>(driver),
                                                     calls.at("cuTensorMapEncodeTiled"), blocks);
           }),
           py::arg("calls"), py::arg("context"), py::arg("functions"), py::arg("blocks"))
      .def("rows",
           [](const gemm::Launcher& self, const Words& rows, const Words& w, bool transposed, int64_t counts_at,
              int64_t experts, const Words& out, const Words& act, std::array<int64_t, 2> slots, uintptr_t stream) {
             py::gil_scoped_release release;
             self.rows({matrices_of(rows), matrices_of(w), matrices_of(out), matrices_of(act), counts_at, experts,
                        transposed, slots[0], slots[1]},
                       stream);
           })
      .def("swiglu_gradient",
           [](const gemm::Launcher& self, const Words& grad, const Words& w, int64_t counts_at, int64_t experts,
              const std::array<Words, 3>& matrices, std::array<int64_t, 3> weights, uintptr_t stream) {
             py::gil_scoped_release release;
             const auto& [h, grad_h, act] = matrices;
             self.swiglu_gradient({matrices_of(grad), matrices_of(w), matrices_of(h), matrices_of(grad_h),
                                   matrices_of(act), counts_at, experts, weights[0], weights[1], weights[2]},
                                  stream);
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
}

}  // namespace moe_comm
