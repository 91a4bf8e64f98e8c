"""RMS normalization (arXiv 1910.07467): y = x / sqrt(mean(x²) + eps) * weight, row by row.

torch has no fused CPU kernel: it needs five passes over memory forward and about twelve backward. The native core needs
one pass each. Other devices and dtypes use torch's composition. The bits of a row do not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.kernels.autograd import needed_gradients, once_differentiable
from moe_comm.kernels.native import core, on_cpu
from moe_comm.runtime.memory import DTYPE_CODES, address, materialized

PARTIAL_ROWS = 128
"""The weight gradient is summed over blocks of this many rows, for every number of threads."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the rows of ``x``, computed in fp32 (float64 for float64) and rounded once.

    Args:
        weight: [D], of any dtype.
        eps: Added to the mean square.

    Returns:
        [..., D] in the dtype of ``x``.
    """
    if not torch.compiler.is_compiling():
        x, weight = materialized(x), materialized(weight)
    x = x.contiguous()  # a view of several rows may be strided where that of one row is not, and sums in another order
    if x.dtype in DTYPE_CODES and x.numel() and on_cpu(x, weight):
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return]
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``rms_norm`` in plain torch."""
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        weight = weight.contiguous()
        weight_D = weight.float()
        rows, width = x.numel() // x.shape[-1], x.shape[-1]
        y, scale_R = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device="cpu")
        core().rms_norm_forward(
            address(x, x.dtype),
            address(weight_D, torch.float32, (width,)),
            address(y, x.dtype),
            address(scale_R, torch.float32),
            rows,
            width,
            eps,
            DTYPE_CODES[x.dtype],
            torch.get_num_threads(),
        )
        ctx.save_for_backward(x, weight, scale_R)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale_R = ctx.saved_tensors
        needs_x, needs_weight, _ = needed_gradients(ctx)
        rows, width = scale_R.numel(), x.shape[-1]
        grad, weight_D = grad.contiguous(), weight.float()
        grad_x = torch.empty_like(x) if needs_x else None
        parts_PD = (
            torch.zeros(-(-rows // PARTIAL_ROWS), width, dtype=torch.float32, device="cpu") if needs_weight else None
        )
        core().rms_norm_backward(
            address(x, x.dtype),
            address(weight_D, torch.float32, (width,)),
            address(scale_R, torch.float32),
            address(grad, x.dtype, x.shape),
            address(grad_x, x.dtype),
            address(parts_PD, torch.float32),
            rows,
            PARTIAL_ROWS,
            width,
            DTYPE_CODES[x.dtype],
            torch.get_num_threads(),
        )
        return grad_x, None if parts_PD is None else parts_PD.sum(0).to(weight.dtype), None
