// The text of the device code that this build was made from, for NVRTC. The function itself is written by CMake.
#pragma once

#include <map>
#include <string>

namespace moe_comm {

// Paths below csrc, as #include has them, and what they hold.
std::map<std::string, std::string> cuda_sources();

}  // namespace moe_comm
