// The instructions of hopper.h on a CPU, for tests without a GPU (csrc/tests/gemm). From the PTX ISA 8.7 and from what
// was measured on an H200 (strides of MN-major descriptors).
//
// A block runs as 384 fibers, one for each thread, in one thread of the CPU; several blocks run in several. A fiber
// runs until it waits, for others of its warp, warp group or block, for an mbarrier, or for copies. Which one runs next
// is drawn. TMA's copies and wgmma's reads of shared memory happen at a drawn time between the instruction and the wait
// for it, so a missing wait gives wrong results. If all fibers wait, the model throws.
//
// Under ThreadSanitizer each fiber and each copy is a thread (model_order.h), which only mbarriers, bar.sync,
// __syncwarp and waits for copies order. It then finds accesses without such an order in any schedule.
//
// Not modelled: proxies except for copy_16 (fence_async, barriers_ready), registers (setmaxnreg, wgmma.fence).
#pragma once

#include "cuda/gemm/model_products.h"
