#pragma once

#include <pybind11/pybind11.h>

namespace moe_comm {

void bind_layer(pybind11::module_& m);

}  // namespace moe_comm
