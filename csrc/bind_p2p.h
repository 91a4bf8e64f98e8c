#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <string>

#include "cuda/starters.h"

namespace moe_comm {

void bind_p2p(pybind11::module_& m);

// calls: addresses of driver functions by name.
p2p::Driver driver_of(const std::map<std::string, uintptr_t>& calls, uintptr_t context);

}  // namespace moe_comm
