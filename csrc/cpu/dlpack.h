// The subset of DLPack's stable C ABI (github.com/dmlc/dlpack) that is needed to pass a heap block to torch, and to
// read tensors of torch.
#pragma once

#include <cstdint>

extern "C" {

struct DLDevice {
  int32_t device_type;  // 1: CPU
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;  // 2: IEEE float, 4: bfloat16
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // null: dense, row-major
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor*);
};

// Version 1: functions for the objects of a type, in the capsule "dlpack_exchange_api" of the type.
struct DLPackExchangeAPI {
  uint32_t major, minor;
  const DLPackExchangeAPI* previous;
  void (*unused[3])();
  int (*describe)(void* object, DLTensor* out);  // without ownership; an error of Python if it is not 0
  void (*unused_stream)();
};
}
