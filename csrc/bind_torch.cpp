#include "bind_torch.h"

#include <stdexcept>
#include <string>

#include "cpu/dlpack.h"
#include "cpu/kernels.h"

namespace py = pybind11;

namespace moe_comm {
namespace {

constexpr uint8_t kInt = 0, kFloat = 2, kBFloat = 4;  // type codes of DLPack
constexpr int32_t kCpu = 1, kCuda = 2;                // devices of DLPack

// What `torch.Tensor` offers. Kept until the process ends.
struct Torch {
  const DLPackExchangeAPI* api;
  PyTypeObject *tensor, *parameter;
  PyObject* is_neg;  // the name of the method

  static const Torch& get() {
    // Not the initializer of the variable: a thread that waits for one holds the GIL, which the constructor may
    // release.
    static const Torch* torch = nullptr;
    if (!torch) torch = new Torch();
    return *torch;
  }

 private:
  Torch() {
    py::object type = py::module_::import("torch").attr("Tensor");
    py::object parameter_type = py::module_::import("torch.nn").attr("Parameter");
    py::object capsule = type.attr("__dlpack_c_exchange_api__");
    api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!api) throw py::error_already_set();
    if (api->major != 1 || !api->describe) throw std::runtime_error("torch has an unknown version of DLPack");
    tensor = reinterpret_cast<PyTypeObject*>(type.release().ptr());
    parameter = reinterpret_cast<PyTypeObject*>(parameter_type.release().ptr());
    is_neg = PyUnicode_InternFromString("is_neg");
  }
};

bool is_type(const DLTensor& t, uint8_t code, uint8_t bits) {
  return t.dtype.code == code && t.dtype.bits == bits && t.dtype.lanes == 1;
}

bool is_number(const DLTensor& t) {
  return is_type(t, kFloat, 32) || is_type(t, kBFloat, 16) || is_type(t, kFloat, 16) || is_type(t, kFloat, 64) ||
         is_type(t, kInt, 64) || is_type(t, kInt, 32);
}

// Whether all are tensors, and not of a subclass, whose values are in memory. False for some others, too.
bool is_plain(const py::list& tensors) {
  const Torch& torch = Torch::get();
  for (py::handle x : tensors) {
    if (Py_TYPE(x.ptr()) != torch.tensor && Py_TYPE(x.ptr()) != torch.parameter) return false;
    DLTensor t;
    if (torch.api->describe(x.ptr(), &t) != 0) {  // no strides, or no memory
      PyErr_Clear();
      return false;
    }
    if (!t.data || !is_number(t) || (t.device.device_type != kCpu && t.device.device_type != kCuda)) return false;
    const py::object negative = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(x.ptr(), torch.is_neg));
    if (!negative) throw py::error_already_set();
    if (negative.ptr() != Py_False) return false;
  }
  return true;
}

[[noreturn]] void refuse(py::handle tensor, const std::string& wanted) {
  const py::object kind = py::module_::import("moe_comm.errors").attr("InputError");
  const std::string got =
      py::str("{} {} on {}")
          .attr("format")(tensor.attr("dtype"), py::tuple(tensor.attr("shape")), tensor.attr("device"))
          .cast<std::string>();
  PyErr_SetString(kind.ptr(), ("native code needs " + wanted + " in CPU memory; got " + got).c_str());
  throw py::error_already_set();
}

DLTensor described(py::handle tensor) {
  DLTensor t;
  if (Torch::get().api->describe(tensor.ptr(), &t) != 0) throw py::error_already_set();
  return t;
}

int dtype_of(const DLTensor& t) {
  return is_type(t, kFloat, 32)    ? kFloat32
         : is_type(t, kBFloat, 16) ? kBFloat16
         : is_type(t, kFloat, 16)  ? kFloat16
                                   : -1;
}

bool has_dense_rows(const DLTensor& t) {
  return (t.shape[1] <= 1 || t.shape[0] == 0 || t.strides[1] == 1) && t.strides[0] >= 0;
}

TensorMatrix as_matrix(py::handle tensor, const DLTensor& t, int dtype) {
  const int64_t bytes = t.dtype.bits / 8;
  return {py::reinterpret_borrow<py::object>(tensor),
          static_cast<char*>(t.data) + t.byte_offset,
          t.shape[0],
          t.shape[1],
          t.shape[0] > 1 ? t.strides[0] * bytes : t.shape[1] * bytes,
          dtype};
}

bool is_matrix(const DLTensor& t) {
  return t.ndim == 2 && t.device.device_type == kCpu && (t.data || t.shape[0] == 0 || t.shape[1] == 0);
}

bool is_dense(const DLTensor& t) {
  return has_dense_rows(t) && (t.shape[0] <= 1 || t.shape[1] == 0 || t.strides[0] == t.shape[1]);
}

}  // namespace

TensorStack stack_of(py::handle tensor) {
  const DLTensor t = described(tensor);
  TensorStack stack;
  stack.dtype = dtype_of(t);
  if ((t.ndim != 2 && t.ndim != 3) || t.device.device_type != kCpu || stack.dtype < 0) {
    refuse(tensor, "weights of experts in float32, bfloat16 or float16");
  }
  stack.data = reinterpret_cast<uintptr_t>(t.data) + t.byte_offset;
  stack.sizes[2] = 1;
  for (int i = 0; i < t.ndim; ++i) {
    stack.sizes[i] = t.shape[i];
    stack.strides[i] = t.strides[i] * (t.dtype.bits / 8);
  }
  return stack;
}

TensorMatrix matrix_of(py::handle tensor) {
  const DLTensor t = described(tensor);
  const int dtype = dtype_of(t);
  if (!is_matrix(t) || dtype < 0) refuse(tensor, "a matrix of float32, bfloat16 or float16");
  if (has_dense_rows(t)) return as_matrix(tensor, t, dtype);
  const py::object copy = tensor.attr("contiguous")();
  return as_matrix(copy, described(copy), dtype);
}

TensorMatrix dense_floats(py::handle tensor, int64_t rows, int64_t columns) {
  const DLTensor t = described(tensor);
  if (!is_matrix(t) || !is_type(t, kFloat, 32) || t.shape[0] != rows || t.shape[1] != columns) {
    refuse(tensor, "float32 [" + std::to_string(rows) + ", " + std::to_string(columns) + "]");
  }
  if (is_dense(t)) return as_matrix(tensor, t, kFloat32);
  const py::object copy = tensor.attr("contiguous")();
  return as_matrix(copy, described(copy), kFloat32);
}

TensorMatrix dense_integers(py::handle tensor) {
  const DLTensor t = described(tensor);
  if (!is_matrix(t) || t.dtype.code != kInt) refuse(tensor, "a matrix of integers");
  if (is_type(t, kInt, 64) && is_dense(t)) return as_matrix(tensor, t, -1);
  const py::object copy = tensor.attr("long")().attr("contiguous")();
  return as_matrix(copy, described(copy), -1);
}

void bind_torch(py::module_& m) {
  m.def("is_plain", &is_plain,
        "Return whether all are tensors, not of a subclass, of numbers that are at their addresses.");
}

}  // namespace moe_comm
