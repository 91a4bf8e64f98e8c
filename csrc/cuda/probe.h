// What the CUDA part of this build is, and which devices it finds. Free of CUDA headers: any C++ file may include it.
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
  bool kernel_ran = false;  // a kernel of this build ran here and gave the right answer
  std::string error;        // why not, empty if it did
  std::vector<int> peers;   // devices whose memory this one can address directly
};

struct CudaProbe {
  int runtime_version = 0;  // 13000 for CUDA 13.0; the runtime is linked in
  int driver_version = 0;   // newest CUDA the installed driver serves; 0 if there is no driver
  std::string archs;        // what the kernels were compiled for
  std::string error;        // why no device was found, empty if one was
  std::vector<CudaDevice> devices;
};

// What the kernels were compiled for, "sm_80,sm_90a"; asks no device.
std::string cuda_archs();

// Never throws on account of a missing driver or device: then driver_version is 0 and devices is empty.
CudaProbe cuda_probe();

// The same as one JSON object.
std::string cuda_probe_json();

}  // namespace moe_comm
