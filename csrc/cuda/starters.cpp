#include "cuda/starters.h"

namespace moe_comm {
namespace p2p {

namespace {
constexpr int64_t kUnasked = 48 << 10;      // dynamic shared memory that a block gets without a request
constexpr int kMostDynamicSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
}  // namespace

void HostStarter::start(int kernel, const Launch& launch, const void* args) {
  run_on_host(kernel, launch.blocks, args);
}

#ifdef MOE_COMM_WITH_CUDA
void CudaStarter::start(int kernel, const Launch& launch, const void* args) {
  Launch here = launch;
  here.device = device_;
  const std::string error = launch_cuda(kernel, here, args);
  if (!error.empty()) throw LaunchError(std::string("p2p_") + kernel_name(kernel) + " was not launched: " + error);
}
#endif

DriverStarter::DriverStarter(const Driver& driver) : driver_(driver), shared_(driver.functions.size()) {
  for (auto& bytes : shared_) bytes = kUnasked;
}

void DriverStarter::start(int kernel, const Launch& launch, const void* args) {
  InContext context(driver_);
  const auto number = static_cast<size_t>(kernel);
  void* function = driver_.functions[number];
  if (launch.shared_bytes > shared_[number]) {
    const auto bytes = static_cast<int>(launch.shared_bytes);
    check_driver(driver_, "cuFuncSetAttribute", driver_.set_attribute(function, kMostDynamicSharedBytes, bytes));
    shared_[number] = launch.shared_bytes;
  }
  void* arguments[] = {const_cast<void*>(args)};
  launch_kernel(driver_, function, {static_cast<unsigned>(launch.blocks), 1, 1}, static_cast<unsigned>(launch.threads),
                static_cast<unsigned>(launch.shared_bytes), launch.stream, arguments);
  context.leave();
}

void launch_kernel(const Driver& driver, void* function, const Grid& grid, unsigned threads, unsigned shared_bytes,
                   uintptr_t stream, void** arguments) {
  check_driver(driver, "cuLaunchKernel",
               driver.launch(function, grid[0], grid[1], grid[2], threads, 1, 1, shared_bytes,
                             reinterpret_cast<void*>(stream), arguments, nullptr));
}

InContext::InContext(const Driver& driver) : driver_(driver) {
  check_driver(driver, "cuCtxGetCurrent", driver.get_context(&before_));
  if (before_ != driver.context) check_driver(driver, "cuCtxSetCurrent", driver.set_context(driver.context));
}

InContext::~InContext() { restore(); }

void InContext::leave() { check_driver(driver_, "cuCtxSetCurrent", restore()); }

int InContext::restore() {
  void* before = before_;
  before_ = nullptr;
  return before == nullptr || before == driver_.context ? 0 : driver_.set_context(before);
}

void check_driver(const Driver& driver, const char* name, int status) {
  if (status == 0) return;
  std::string words;
  for (const auto ask : {driver.error_name, driver.error_words}) {
    const char* text = nullptr;
    if (ask(status, &text) == 0 && text != nullptr && *text) words += (words.empty() ? " (" : ": ") + std::string(text);
  }
  if (!words.empty()) words += ")";
  throw LaunchError(std::string("the CUDA driver answers ") + name + " with error " + std::to_string(status) + words);
}

}  // namespace p2p
}  // namespace moe_comm
