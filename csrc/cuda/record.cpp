#include "cuda/record.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace moe_comm {
namespace p2p {

namespace {

// cuTensorMapEncodeTiled and its constants.
using Encode = int (*)(void* map, int dtype, uint32_t rank, void* at, const uint64_t* sizes, const uint64_t* strides,
                       const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion,
                       int fill);
constexpr int kPromotion128 = 2;

// Memory of an argument. A tensor map has 128 bytes.
struct alignas(64) Slot {
  unsigned char bytes[128];
};

int encode(uintptr_t function, Slot* map, const Matrix& m, int64_t at) {
  const uint64_t sizes[] = {static_cast<uint64_t>(m.columns), static_cast<uint64_t>(m.rows)};
  const auto stride = static_cast<uint64_t>(m.stride * m.element_bytes);
  const uint64_t strides[] = {stride, stride * sizes[1]};
  const uint32_t box[] = {m.box_columns, m.box_rows}, ones[] = {1, 1};
  return reinterpret_cast<Encode>(function)(map, m.dtype, 2, reinterpret_cast<void*>(at), sizes, strides, box, ones, 0,
                                            m.swizzle, kPromotion128, 0);
}

}  // namespace

Record::Record(Driver driver, uintptr_t encode, std::vector<Buffer> buffers)
    : driver_(std::move(driver)), encode_(encode), buffers_(std::move(buffers)) {}

void Record::add(RecordedKernel kernel) {
  for (const Argument& argument : kernel.arguments) {
    if (argument.buffer >= static_cast<int64_t>(buffers_.size())) {
      throw std::invalid_argument("a recorded kernel uses buffer " + std::to_string(argument.buffer) + " of " +
                                  std::to_string(buffers_.size()));
    }
  }
  steps_.push_back({std::move(kernel), {}});
}

void Record::add(Launcher launcher) { steps_.push_back({{}, std::move(launcher)}); }

void Record::run(const Addresses& bases, uintptr_t stream) const {
  Addresses addresses;
  addresses.reserve(buffers_.size());
  for (const Buffer& buffer : buffers_) addresses.push_back(bases.at(static_cast<size_t>(buffer.base)) + buffer.offset);
  InContext context(driver_);
  for (const Step& step : steps_) {
    if (step.launcher) {
      step.launcher(addresses, stream);
    } else {
      launch(step.kernel, addresses, stream);
    }
  }
  context.leave();
}

void Record::launch(const RecordedKernel& kernel, const Addresses& addresses, uintptr_t stream) const {
  std::vector<Slot> slots(kernel.arguments.size());
  std::vector<void*> arguments;
  arguments.reserve(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    const Argument& argument = kernel.arguments[i];
    arguments.push_back(&slots[i]);
    const int64_t at = argument.buffer < 0 ? 0 : addresses[static_cast<size_t>(argument.buffer)];
    if (argument.is_matrix) {
      check_driver(driver_, "cuTensorMapEncodeTiled", encode(encode_, &slots[i], argument.matrix, at));
    } else if (argument.buffer >= 0) {
      std::memcpy(&slots[i], &at, sizeof at);
    } else {
      std::memcpy(&slots[i], &argument.value, sizeof argument.value);
    }
  }
  launch_kernel(driver_, kernel.function, kernel.grid, kernel.threads, kernel.shared_bytes, stream, arguments.data());
}

}  // namespace p2p
}  // namespace moe_comm
