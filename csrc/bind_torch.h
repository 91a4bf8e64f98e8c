// Reads tensors of torch through DLPack's C exchange API. An argument that is a tensor then needs no method of torch.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace moe_comm {

// A matrix in CPU memory with dense rows. `tensor` keeps the memory: the argument, or a copy with dense rows.
struct TensorMatrix {
  pybind11::object tensor;
  char* data = nullptr;
  int64_t rows = 0, columns = 0, stride = 0;  // stride in bytes
  int dtype = 0;                              // of kernels.h
};

// A stack of matrices [E, N, K], or of vectors [E, N] (K 1), in CPU memory. Strides are in bytes.
struct TensorStack {
  uintptr_t data = 0;
  int64_t sizes[3] = {0, 0, 0}, strides[3] = {0, 0, 0};
  int dtype = -1;  // of kernels.h
};

// Return a stack of fp32, bf16 or fp16; raises InputError for other tensors. The caller keeps the tensor.
TensorStack stack_of(pybind11::handle tensor);
// Return a matrix of fp32, bf16 or fp16; raises InputError for other tensors. The values must be in memory (is_plain).
TensorMatrix matrix_of(pybind11::handle tensor);
// Return a dense matrix [rows, columns] of fp32; raises InputError for other tensors.
TensorMatrix dense_floats(pybind11::handle tensor, int64_t rows, int64_t columns);
// Return a dense matrix of int64, the values of a matrix of integers.
TensorMatrix dense_integers(pybind11::handle tensor);

void bind_torch(pybind11::module_& m);

}  // namespace moe_comm
