// Wraps memory as a matrix that torch imports through DLPack.
#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>
#include <utility>

#include "cpu/dlpack.h"

namespace moe_comm {

// `on_release` is called when torch releases the last tensor that uses the memory, on any thread.
struct Matrix {
  DLManagedTensor managed{};
  int64_t shape[2]{};
  std::function<void()> on_release;

  static void release(DLManagedTensor* self) {
    auto* matrix = static_cast<Matrix*>(self->manager_ctx);
    matrix->on_release();
    delete matrix;
  }
};

inline pybind11::capsule matrix_tensor(void* data, int64_t rows, int64_t columns, DLDataType dtype, DLDevice device,
                                       std::function<void()> on_release) {
  auto matrix = std::make_unique<Matrix>();
  matrix->shape[0] = rows;
  matrix->shape[1] = columns;
  DLTensor& tensor = matrix->managed.dl_tensor;
  tensor.data = data;
  tensor.device = device;
  tensor.ndim = 2;
  tensor.dtype = dtype;
  tensor.shape = matrix->shape;
  matrix->managed.manager_ctx = matrix.get();
  matrix->managed.deleter = &Matrix::release;
  matrix->on_release = std::move(on_release);
  PyObject* capsule = PyCapsule_New(&matrix->managed, "dltensor", [](PyObject* self) {
    // Torch renames a capsule when it imports it. A capsule that is still named "dltensor" was not imported.
    if (PyCapsule_IsValid(self, "dltensor")) {
      auto* managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(self, "dltensor"));
      managed->deleter(managed);
    }
  });
  if (!capsule) throw pybind11::error_already_set();
  matrix.release();
  return pybind11::reinterpret_steal<pybind11::capsule>(capsule);
}

}  // namespace moe_comm
