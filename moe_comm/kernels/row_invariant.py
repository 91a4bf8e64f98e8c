"""A linear layer whose rows have the same bits in every batch, for routers and shared experts.

Otherwise a token's logits, and so its experts, could change with the number of ranks. So on the CPU the products run in
the native core (``cpu_gemm.py``): BLAS chooses the order of additions by the number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_comm.kernels.autograd import needed_gradients, once_differentiable, without_autocast
from moe_comm.kernels.cpu_gemm import ExpertWeights
from moe_comm.kernels.native import for_triton


def row_invariant_mm(a_MK: Tensor, b_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b, [M, N], in their dtype, also under autocast. No autograd.

    In the native core each row has the same bits for every M, every position, and every slice of columns. On other
    devices, and on a CPU without the native core, torch computes the product, and the bits may depend on M.

    Args:
        out: An [M, N] with dense rows for the result, or None.
    """
    out_MN = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1]) if out is None else out
    ExpertWeights(b_KN.t()[None]).multiply(a_MK, out_MN, (a_MK.shape[0],))
    return out_MN


class _RowInvariantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TD, w_ED)
        y_TE = row_invariant_mm(x_TD, w_ED.t())
        return y_TE if bias_E is None else y_TE.add_(bias_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, w_ED = ctx.saved_tensors
        needs_x, needs_w, needs_b = needed_gradients(ctx)
        with without_autocast(x_TD):
            return (
                row_invariant_mm(grad_TE, w_ED) if needs_x else None,
                grad_TE.t() @ x_TD if needs_w else None,
                grad_TE.sum(0) if needs_b else None,
            )


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_ED: Tensor) -> Tensor:
        from moe_comm.kernels.triton.linear import repeated_linear, takes  # needs Triton

        ctx.save_for_backward(x_TD, w_ED)
        if takes(x_TD, w_ED):
            return repeated_linear(x_TD, w_ED)
        return row_invariant_mm(x_TD.float(), w_ED.float().t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        from moe_comm.kernels.triton.linear import repeated_gradients, takes  # needs Triton

        x_TD, w_ED = ctx.saved_tensors
        needs_x, needs_w = needed_gradients(ctx)
        if takes(x_TD, w_ED, grad_TE) and for_triton(grad_TE, x_TD, w_ED):
            return repeated_gradients(grad_TE, x_TD, w_ED, (needs_x, needs_w))
        with without_autocast(x_TD):
            return (
                row_invariant_mm(grad_TE, w_ED.float()).to(x_TD.dtype) if needs_x else None,
                (grad_TE.t() @ x_TD.float()).to(w_ED.dtype) if needs_w else None,
            )


def wide_linear(x_TD: Tensor, w_ED: Tensor) -> Tensor:
    """Return ``row_invariant_linear`` of 16-bit tokens on a GPU in fp32, with gradients in the dtypes of the operands.

    16-bit weights are multiplied by tensor cores, with exact products, and so are gradients. No fp32 copy of the tokens
    is kept.
    """
    return _WideLinear.apply(x_TD, w_ED)  # type: ignore[no-any-return]


def row_invariant_linear(x_TD: Tensor, w_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Return x @ w.T + bias. Output rows and input-gradient rows have the same bits in every batch.

    Args:
        x_TD: [T, D]; T may be zero.
        w_ED: [E, D] of the same dtype. Its gradient is a plain sum over the rows, which depends on the batch.

    Returns:
        [T, E] in the dtype of ``x_TD``.
    """
    return _RowInvariantLinear.apply(x_TD, w_ED, bias_E)  # type: ignore[no-any-return]
