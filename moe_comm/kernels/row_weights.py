"""Products of rows with their routing weights, and dot products of rows, with equal bits on every device.

    dot(a, b) = 32 lanes, lane l adds the products l, l + 32, ... in order; then lanes are added in halves
                (l + 16, l + 8, ..., l + 1), as a warp does with shuffles

The wide dtype, in which rows are multiplied and summed, is fp32, and fp64 for fp64 rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.kernels.autograd import accumulate_dtype
from moe_comm.kernels.native import core, for_triton, on_cpu
from moe_comm.runtime.memory import DTYPE_CODES, address

LANES = 32


class RowWeights(NamedTuple):
    """Routing weights of rows, on a GPU.

    weights_N: wide weight of each slot. place_N: int64 row of each slot, negative for slots without a row; None: slots
    are rows. dots_N: output for the gradients of ``weights_N``, 0 for slots without a row; None if they are not needed.
    slot_R: with ``place_N``, int64 slot of each row, or None if it is not known.
    """

    weights_N: Tensor
    place_N: Tensor | None = None
    dots_N: Tensor | None = None
    slot_R: Tensor | None = None


def scale(rows_RD: Tensor, weights_R: Tensor) -> Tensor:
    """Multiply rows by their weights in the wide dtype, and cast the product back once."""
    return (rows_RD * weights_R.to(accumulate_dtype(rows_RD.dtype)).unsqueeze(1)).to(rows_RD.dtype)


def lane_dot(a_TD: Tensor, b_TD: Tensor) -> Tensor:
    """Return [T], the row-wise dot product in the order above, in the wide dtype."""
    wide = accumulate_dtype(b_TD.dtype)
    product = a_TD.to(wide) * b_TD.to(wide)
    product = F.pad(product, (0, -product.shape[1] % LANES)).unflatten(1, (-1, LANES))
    lanes: Tensor = product.new_zeros(product.shape[0], LANES)
    for step in range(product.shape[1]):
        lanes += product[:, step]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def scale_(rows_RD: Tensor, weights_R: Tensor, partner_RD: Tensor | None = None) -> Tensor | None:
    """Multiply rows [R, D] (dense) by their wide weights in place, as ``scale`` does.

    Returns [R] ``lane_dot`` of the unscaled rows and ``partner_RD``; None without ``partner_RD``.
    """
    inputs = (rows_RD, weights_R) if partner_RD is None else (rows_RD, weights_R, partner_RD)
    if rows_RD.dtype in DTYPE_CODES and weights_R.dtype == torch.float32 and for_triton(*inputs):
        from moe_comm.kernels.triton.rows import scale_rows_  # needs Triton

        if partner_RD is not None and partner_RD.stride(1) != 1:  # such as the gradient of ``sum()``, one number
            partner_RD = partner_RD.contiguous()
        return scale_rows_(rows_RD, weights_R, partner_RD)
    native_supported = all(x.is_contiguous() for x in inputs) and rows_RD.dtype in DTYPE_CODES and rows_RD.numel()
    if not native_supported or weights_R.dtype != torch.float32 or not on_cpu(*inputs):
        dots_R = None if partner_RD is None else lane_dot(rows_RD, partner_RD)
        rows_RD.copy_(scale(rows_RD, weights_R))
        return dots_R
    dots_R = None if partner_RD is None else weights_R.new_empty(rows_RD.shape[0])
    core().scale_rows(
        address(rows_RD, rows_RD.dtype),
        address(weights_R, torch.float32, rows_RD.shape[:1]),
        address(partner_RD, rows_RD.dtype, rows_RD.shape),
        address(dots_R, torch.float32),
        tuple(rows_RD.shape),
        DTYPE_CODES[rows_RD.dtype],
        torch.get_num_threads(),
    )
    return dots_R
