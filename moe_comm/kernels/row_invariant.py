"""Matrix products whose rows have the same bits in any batch: of a linear layer, and of one expert among others.

BLAS picks another kernel, with another order of additions, for few rows, for the ragged edge of a tile, and for
rows at odd addresses (measured with MKL: 1 to 3 rows differ from 4 and more; with 7 outputs, rows differ by their
place modulo 4; in double precision many sizes do). With rows, inputs and outputs all rounded up to whole tiles the
difference is gone. A router needs this: else a token's logits, and with them its experts, would change with the
number of ranks that the batch is spread over.

``expert_mm`` copies less where widths are multiples of ``TILE``: only few rows are padded, and only what does not stand
on a cache line is copied.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.kernels.autocast import without_autocast
from moe_comm.kernels.needed_grads import wanted_gradients

TILE = 16
"""Rows, inputs and outputs are multiples of this. 8 is enough for the kernels seen; 16 is a vector of AVX-512."""
ALIGNMENT = 64
FEW = 4
"""Rows from which the kernels seen (MKL, oneDNN) give a row the same bits in every product."""


def _padded(a_MN: Tensor, rows: int, columns: int) -> Tensor:
    more_rows, more_columns = rows - a_MN.shape[0], columns - a_MN.shape[1]
    return F.pad(a_MN, (0, more_columns, 0, more_rows)) if more_rows or more_columns else a_MN


def row_invariant_mm(a_MK: Tensor, b_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """[M, N] = a @ b; each row has the same bits for every M and wherever it stands. No autograd.

    Only the ragged last rows are copied if K and N are multiples of ``TILE`` and ``a`` starts on a cache line; else
    everything is. out: a dense [M, N] to write to.
    """
    device = a_MK.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # it would leave a product into ``out`` alone
        with without_autocast(a_MK):
            return row_invariant_mm(a_MK, b_KN, out)
    m, k, n = a_MK.shape[0], a_MK.shape[1], b_KN.shape[1]
    whole_m, whole_k, whole_n = m + -m % TILE, k + -k % TILE, n + -n % TILE
    direct, dense = out is not None and n == whole_n, k == whole_k and n == whole_n
    out_MN = out if out is not None and direct else a_MK.new_empty(m, whole_n)
    if out_MN.numel():
        if not dense:
            b_KN = _padded(b_KN, whole_k, whole_n)
        if k != whole_k or a_MK.data_ptr() % ALIGNMENT:
            a_MK = _padded(a_MK, whole_m, whole_k).contiguous()
            a_MK = a_MK.clone() if a_MK.data_ptr() % ALIGNMENT else a_MK
        whole = a_MK.shape[0] // TILE * TILE
        if whole > m:
            out_MN.copy_(torch.mm(a_MK, b_KN)[:m])
        elif whole:
            torch.mm(a_MK[:whole], b_KN, out=out_MN[:whole])
        if whole < m:
            out_MN[whole:] = torch.mm(_padded(a_MK[whole:], TILE, whole_k), b_KN)[: m - whole]
    if out is not None:
        return out if direct else out.copy_(out_MN[:, :n])
    # A dense result: functions of whole tensors treat strided ones differently.
    return out_MN if n == whole_n else out_MN[:, :n].contiguous()


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


def are_aligned(*tensors: Tensor) -> bool:
    """Whether all slices of each along its first dimension are. There may be hundreds, so they are asked once."""
    for x in tensors:  # noqa: SIM110 - a generator would cost more than what it yields
        if x.data_ptr() % ALIGNMENT or x.stride(0) * x.element_size() % ALIGNMENT:
            return False
    return True


def aligned(x: Tensor) -> Tensor:
    """``x``, or a copy that is aligned."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def expert_mm(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, bias_N: Tensor | None = None) -> None:
    """out = a @ b + bias. ``a`` and ``b`` are aligned. On CPUs the same bits for a row of ``a`` for every M."""
    rows = a_MK.shape[0]
    if a_MK.is_cpu and (a_MK.shape[1] % TILE or out_MN.shape[1] % TILE):
        row_invariant_mm(a_MK, b_KN, out_MN)
        if bias_N is not None:
            out_MN.add_(bias_N)
    elif rows < FEW:
        padded = F.pad(a_MK, (0, 0, 0, FEW - rows))
        few_FN = torch.mm(padded, b_KN) if bias_N is None else torch.addmm(bias_N, padded, b_KN)
        out_MN.copy_(few_FN[:rows])
    elif bias_N is None and out_MN.data_ptr() % ALIGNMENT == 0:
        torch.mm(a_MK, b_KN, out=out_MN)
    else:
        product_into(a_MK, b_KN, out_MN, bias_N)


def product_into(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, bias_N: Tensor | None = None) -> None:
    """out = a @ b + bias, where M is no number of rows: for gradients of weights."""
    into = out_MN if out_MN.data_ptr() % ALIGNMENT == 0 else torch.empty_like(out_MN)
    if bias_N is None:
        torch.mm(a_MK, b_KN, out=into)
    else:
        torch.addmm(bias_N, a_MK, b_KN, out=into)
    if into is not out_MN:
        out_MN.copy_(into)
