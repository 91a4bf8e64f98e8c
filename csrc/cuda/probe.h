// Reports the CUDA part of this build and the available devices. Includes no CUDA headers, so any C++ file may include
// it.
#pragma once

#include <string>
#include <vector>

namespace moe_comm {

struct CudaDevice {
  int index = 0;
  std::string name;
  int major = 0;
  int minor = 0;
  int multiprocessors = 0;
  long long memory_bytes = 0;
  bool kernel_ran = false;  // a kernel of this build ran here and returned the correct result
  std::string error;        // why it did not run; empty if it did
  std::vector<int> peers;   // devices with memory that this device can address directly
};

struct CudaProbe {
  int runtime_version = 0;  // 13000 for CUDA 13.0; the version of the linked runtime
  int driver_version = 0;   // newest CUDA version that the installed driver supports; 0 without a driver
  std::string archs;        // architectures that the kernels were compiled for
  std::string error;        // why no device was found; empty if one was
  std::vector<CudaDevice> devices;
};

// Architectures that the kernels were compiled for, as "sm_80,sm_90a". Does not query a device.
std::string cuda_archs();

// Does not throw if the driver or a device is missing: then driver_version is 0 and devices is empty.
CudaProbe cuda_probe();

// The result of cuda_probe as one JSON object.
std::string cuda_probe_json();

}  // namespace moe_comm
