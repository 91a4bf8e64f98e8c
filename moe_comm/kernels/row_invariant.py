"""A linear layer whose result for a row does not depend on how many other rows are in the batch.

BLAS picks another kernel, with another order of additions, for few rows, for the ragged edge of a tile, and for
rows at odd addresses (measured with MKL: 1 to 3 rows differ from 4 and more; with 7 outputs, rows differ by their
place modulo 4; in double precision many sizes do). With rows, inputs and outputs all rounded up to whole tiles the
difference is gone. A router needs this: else a token's logits, and with them its experts, would change with the
number of ranks that the batch is spread over.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.kernels.autocast import without_autocast
from moe_comm.kernels.wanted import wanted_gradients

TILE = 16
"""Rows, inputs and outputs are multiples of this. 8 is enough for the kernels seen; 16 is a vector of AVX-512."""


def _padded(a_MN: Tensor, rows: int, columns: int) -> Tensor:
    more_rows, more_columns = rows - a_MN.shape[0], columns - a_MN.shape[1]
    return F.pad(a_MN, (0, more_columns, 0, more_rows)) if more_rows or more_columns else a_MN


def _up(n: int) -> int:
    return -(-n // TILE) * TILE


def row_invariant_mm(a_MK: Tensor, b_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """[M, N] = a @ b; each row has the same bits for every M and wherever it stands. No autograd.

    Only the ragged last rows are copied if K and N are multiples of ``TILE`` and ``a`` starts on a cache line; else
    everything is. out: a dense [M, N] to write to.
    """
    with without_autocast(a_MK):  # which would leave a product into ``out`` alone
        return _row_invariant_mm(a_MK, b_KN, out)


def _row_invariant_mm(a_MK: Tensor, b_KN: Tensor, out: Tensor | None) -> Tensor:
    m, k, n = a_MK.shape[0], a_MK.shape[1], b_KN.shape[1]
    direct = out is not None and n % TILE == 0
    out_MN = out if out is not None and direct else a_MK.new_empty(m, _up(n))
    if out_MN.numel():
        if k % TILE or n % TILE:
            b_KN = _padded(b_KN, _up(k), _up(n))
        if a_MK.shape[1] % TILE or a_MK.data_ptr() % 64:
            a_MK = _padded(a_MK, _up(m), _up(k)).contiguous()
            a_MK = a_MK.clone() if a_MK.data_ptr() % 64 else a_MK
        whole = a_MK.shape[0] // TILE * TILE
        if whole > m:
            out_MN.copy_(torch.mm(a_MK, b_KN)[:m])
        elif whole:
            torch.mm(a_MK[:whole], b_KN, out=out_MN[:whole])
        if whole < m:
            out_MN[whole:] = torch.mm(_padded(a_MK[whole:], TILE, k), b_KN)[: m - whole]
    if out is not None:
        return out if direct else out.copy_(out_MN[:, :n])
    # A dense result: functions of whole tensors treat strided ones differently.
    return out_MN if n == out_MN.shape[1] else out_MN[:, :n].contiguous()


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
        needs_x, needs_w, needs_b = wanted_gradients(ctx)
        with without_autocast(x_TD):
            return (
                row_invariant_mm(grad_TE, w_ED) if needs_x else None,
                grad_TE.t() @ x_TD if needs_w else None,
                grad_TE.sum(0) if needs_b else None,
            )


def row_invariant_linear(x_TD: Tensor, w_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """x @ w.T + bias; output rows and input-gradient rows have the same bits in any batch.

    Args:
        x_TD: [T, D]; T may be zero.
        w_ED: [E, D] of the same dtype. Its gradient is a plain sum over the rows, which does depend on the batch.
        bias_E: [E].

    Returns:
        [T, E] in the dtype of ``x_TD``.
    """
    return _RowInvariantLinear.apply(x_TD, w_ED, bias_E)  # type: ignore[no-any-return]
