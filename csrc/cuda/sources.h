// The source text of the device code in this build, for NVRTC. CMake generates the function definition.
#pragma once

#include <map>
#include <string>

namespace moe_comm {

// Map from path relative to csrc, as used in #include, to file content.
std::map<std::string, std::string> cuda_sources();

}  // namespace moe_comm
