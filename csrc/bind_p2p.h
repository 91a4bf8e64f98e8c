#pragma once

#include <pybind11/pybind11.h>

namespace moe_comm {

void bind_p2p(pybind11::module_& m);

}  // namespace moe_comm
