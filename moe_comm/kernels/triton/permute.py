"""Copies tokens to the rows of their experts and back on one rank; differentiable.

    x_TD ──permute──▶ rows_RD = x[token_R]        backward: a sum over each token's rows
    rows_RD ──unpermute──▶ y_TD = weighted sum    backward: spread, and dot products for the weights

``order_slots`` of ``dispatch/slots/plain.py`` computes both indices: ``token_R = order[:R] // K``, and ``place_TK``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.once_differentiable import once_differentiable
from moe_comm.kernels.triton.scale_rows import spread
from moe_comm.kernels.triton.take_rows import take_rows
from moe_comm.kernels.triton.weighted_sum import weighted_sum


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, token_R: Tensor, place_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_TK)
        return take_rows(x_TD, token_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        return weighted_sum(grad_RD.contiguous(), ctx.saved_tensors[0], None), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, place_TK: Tensor, weights_TK: Tensor) -> Tensor:
        y_TD = weighted_sum(rows_RD, place_TK, weights_TK)
        ctx.num_rows = rows_RD.shape[0]
        ctx.save_for_backward(place_TK, weights_TK, rows_RD if ctx.needs_input_grad[2] else None)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, Tensor | None]:
        place_TK, weights_TK, rows_RD = ctx.saved_tensors
        grad_RD, grad_TK = spread(grad_TD.contiguous(), place_TK, weights_TK, ctx.num_rows, rows_RD)
        return grad_RD, None, grad_TK


def permute(x_TD: Tensor, token_R: Tensor, place_TK: Tensor) -> Tensor:
    """Return x[token_R], [R, D]. A token's gradient is the sum of those of its rows, in slot order, in fp32.

    Args:
        x_TD: [T, D] fp32, bf16 or fp16.
        token_R: [R] int64 token of each row.
        place_TK: [T, K] int64 row of each slot, or -1.

    Raises:
        InputError: shapes or dtypes are not supported.
        ConfigError: CPU tensors, and kernels are not interpreted.
    """
    if place_TK.dim() != 2 or place_TK.shape[0] != x_TD.shape[0]:
        raise InputError(
            f"permute of {x_TD.shape[0]} tokens needs places [{x_TD.shape[0]}, K]; got {tuple(place_TK.shape)}"
        )
    return _Permute.apply(x_TD, token_R, place_TK)  # type: ignore[no-any-return]


def unpermute(rows_RD: Tensor, place_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return [T, D], the weighted sum of each token's rows. Arguments and errors as in ``weighted_sum``.

    Each row must belong to one slot. The gradients of other rows are undefined.
    """
    return _Unpermute.apply(rows_RD, place_TK, weights_TK)  # type: ignore[no-any-return]
