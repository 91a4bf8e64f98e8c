// Launches that are recorded once and then repeated, in one call, with other addresses.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "cuda/starters.h"

namespace moe_comm {
namespace p2p {

// A matrix that a kernel loads by TMA. Sizes and strides are in elements, rows first.
struct Matrix {
  int dtype = 0, swizzle = 0;  // as for cuTensorMapEncodeTiled
  int64_t element_bytes = 0, rows = 0, columns = 0, stride = 0;
  uint32_t box_rows = 0, box_columns = 0;
};

// An argument of a kernel: a value of up to 8 bytes, or the address of a buffer, or the tensor map of a matrix in one.
struct Argument {
  uint64_t value = 0;
  int64_t buffer = -1;
  bool is_matrix = false;
  Matrix matrix;
};

struct RecordedKernel {
  void* function = nullptr;
  Grid grid = {1, 1, 1};
  unsigned threads = 0, shared_bytes = 0;
  std::vector<Argument> arguments;
};

// A buffer: an offset in bytes from one of the addresses that `run` is given.
struct Buffer {
  int64_t base = 0, offset = 0;
};

class Record {
 public:
  using Addresses = std::vector<int64_t>;
  // Launches kernels on buffers at these addresses, on a stream.
  using Launcher = std::function<void(const Addresses&, uintptr_t)>;

  // encode: cuTensorMapEncodeTiled.
  Record(Driver driver, uintptr_t encode, std::vector<Buffer> buffers);
  // Add a launch. Throws std::invalid_argument for a buffer that does not exist.
  void add(RecordedKernel kernel);
  void add(Launcher launcher);
  int64_t size() const { return static_cast<int64_t>(steps_.size()); }
  // Launch all of it on `stream`, in order. Throws LaunchError for the first one that was not launched. Thread-safe.
  void run(const Addresses& bases, uintptr_t stream) const;

 private:
  struct Step {
    RecordedKernel kernel;
    Launcher launcher;  // if not empty, instead of the kernel
  };

  void launch(const RecordedKernel& kernel, const Addresses& addresses, uintptr_t stream) const;

  const Driver driver_;
  const uintptr_t encode_;
  const std::vector<Buffer> buffers_;
  std::vector<Step> steps_;
};

}  // namespace p2p
}  // namespace moe_comm
