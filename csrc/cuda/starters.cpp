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
  void* before = nullptr;
  check("cuCtxGetCurrent", driver_.get_context(&before));
  if (before != driver_.context) check("cuCtxSetCurrent", driver_.set_context(driver_.context));
  const auto number = static_cast<size_t>(kernel);
  void* function = driver_.functions[number];
  const char* name = "cuFuncSetAttribute";
  int status = 0;
  if (launch.shared_bytes > shared_[number]) {
    status = driver_.set_attribute(function, kMostDynamicSharedBytes, static_cast<int>(launch.shared_bytes));
    if (status == 0) shared_[number] = launch.shared_bytes;
  }
  if (status == 0) {
    name = "cuLaunchKernel";
    void* arguments[] = {const_cast<void*>(args)};
    status = driver_.launch(function, static_cast<unsigned>(launch.blocks), 1, 1, static_cast<unsigned>(launch.threads),
                            1, 1, static_cast<unsigned>(launch.shared_bytes), reinterpret_cast<void*>(launch.stream),
                            arguments, nullptr);
  }
  // If the thread had no context, it keeps this one; torch would set the same.
  if (before != nullptr && before != driver_.context) check("cuCtxSetCurrent", driver_.set_context(before));
  check(name, status);
}

void DriverStarter::check(const char* name, int status) const {
  if (status == 0) return;
  std::string words;
  for (const auto ask : {driver_.error_name, driver_.error_words}) {
    const char* text = nullptr;
    if (ask(status, &text) == 0 && text != nullptr && *text) words += (words.empty() ? " (" : ": ") + std::string(text);
  }
  if (!words.empty()) words += ")";
  throw LaunchError(std::string("the CUDA driver answers ") + name + " with error " + std::to_string(status) + words);
}

}  // namespace p2p
}  // namespace moe_comm
