// The forms of gemm.h for float64, without row lists and scales: additions over k in sequence, each rounded. One loop
// for all instruction sets, because float64 is used in tests of exactness only.
#pragma once

#include "gemm.h"

namespace moe_comm {
namespace gemm {

void rows_of_doubles(const Groups& groups, const Rows& x, const Stack& w, int64_t columns, const Stack& bias,
                     const Results& out);
void weights_of_doubles(const Groups& groups, const Rows& y, const Rows& x, const Stack& out, bool accumulate);

}  // namespace gemm
}  // namespace moe_comm
