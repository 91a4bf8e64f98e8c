"""GEMMs of BLAS whose rows have the same bits in every batch, for what the native core does not multiply.

BLAS uses another kernel, with another order of additions, for few rows, for the last rows of a tile, and for rows at
unaligned addresses. (Measured with MKL: 1 to 3 rows differ from 4 and more; with 7 outputs, rows differ by their index
modulo 4; in double precision many sizes differ.) With rows, inputs and outputs padded to whole tiles the bits are
equal.

``expert_mm`` copies less if widths are multiples of ``TILE``: it pads only if there are few rows, and copies only
operands that do not start on a cache line.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.kernels.autograd import without_autocast

TILE = 16
"""Rows, inputs and outputs are padded to multiples of this: one AVX-512 vector. The kernels of MKL and oneDNN need
8."""
ALIGNMENT = 64
"""Alignment of operands in bytes: one cache line."""
MIN_ROWS = 4
"""Number of rows from which MKL and oneDNN give a row the same bits in every GEMM."""
SMALL = 16**3
"""Products of M, K and N up to which torch does not call oneDNN for bf16, but adds in another order."""


def _padded(a_MN: Tensor, rows: int, columns: int) -> Tensor:
    more_rows, more_columns = rows - a_MN.shape[0], columns - a_MN.shape[1]
    return F.pad(a_MN, (0, more_columns, 0, more_rows)) if more_rows or more_columns else a_MN


def row_invariant_mm(a_MK: Tensor, b_KN: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a @ b, [M, N]. Each row has the same bits for every M and every position. No autograd.

    If K and N are multiples of ``TILE`` and ``a`` starts on a cache line, only the last M % ``TILE`` rows are copied;
    else all operands are.

    Args:
        out: A dense [M, N] for the result, or None.
    """
    device = a_MK.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # autocast does not cast a GEMM with ``out``
        with without_autocast(a_MK):
            return row_invariant_mm(a_MK, b_KN, out)
    m, k, n = a_MK.shape[0], a_MK.shape[1], b_KN.shape[1]
    padded_m, padded_k, padded_n = m + -m % TILE, k + -k % TILE, n + -n % TILE
    direct, whole_tiles = out is not None and n == padded_n, k == padded_k and n == padded_n
    out_MN = out if out is not None and direct else a_MK.new_empty(m, padded_n)
    if out_MN.numel():
        if not whole_tiles:
            b_KN = F.pad(b_KN, (0, padded_n - n, 0, padded_k - k))
        if k != padded_k or a_MK.data_ptr() % ALIGNMENT:
            a_MK = _padded(a_MK, padded_m, padded_k).contiguous()
            a_MK = a_MK.clone() if a_MK.data_ptr() % ALIGNMENT else a_MK
        tiled = a_MK.shape[0] // TILE * TILE
        if tiled > m:
            out_MN.copy_(torch.mm(a_MK, b_KN)[:m])
        elif tiled:
            torch.mm(a_MK[:tiled], b_KN, out=out_MN[:tiled])
        if tiled < m:
            out_MN[tiled:] = torch.mm(F.pad(a_MK[tiled:], (0, 0, 0, TILE + tiled - m)), b_KN)[: m - tiled]
    if out is not None:
        return out if direct else out.copy_(out_MN[:, :n])
    # Return a dense tensor: torch computes pointwise functions of strided tensors differently.
    return out_MN if n == padded_n else out_MN[:, :n].contiguous()


def aligned(x: Tensor) -> Tensor:
    """Return ``x``, or an aligned copy."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def is_small(rows: int, b_KN: Tensor) -> bool:
    """Return whether torch adds in another order in a product with so few ``rows`` than with more."""
    return b_KN.dtype is torch.bfloat16 and rows * b_KN.numel() <= SMALL


def _enough_rows(b_KN: Tensor) -> int:
    """Return a number of rows from which a row has the same bits in every GEMM with ``b``."""
    return max(MIN_ROWS, SMALL // max(b_KN.numel(), 1) + 1) if is_small(MIN_ROWS, b_KN) else MIN_ROWS


def expert_mm(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, bias_N: Tensor | None = None) -> None:
    """Compute out = a @ b + bias, with aligned ``a`` and ``b``. On CPUs a row has the same bits for every M."""
    rows = a_MK.shape[0]
    if a_MK.is_cpu and (a_MK.shape[1] % TILE or out_MN.shape[1] % TILE):
        row_invariant_mm(a_MK, b_KN, out_MN)
        if bias_N is not None:
            out_MN.add_(bias_N)
    elif rows < MIN_ROWS or is_small(rows, b_KN):
        padded = F.pad(a_MK, (0, 0, 0, _enough_rows(b_KN) - rows))
        few_FN = torch.mm(padded, b_KN) if bias_N is None else torch.addmm(bias_N, padded, b_KN)
        out_MN.copy_(few_FN[:rows])
    elif bias_N is None and out_MN.data_ptr() % ALIGNMENT == 0:
        torch.mm(a_MK, b_KN, out=out_MN)
    else:
        product_into(a_MK, b_KN, out_MN, bias_N)


def add_product(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor) -> None:
    """Compute out += a @ b, with aligned ``a`` and ``b``. On CPUs a row has the same bits for every M."""
    rows = a_MK.shape[0]
    # A sum that BLAS adds to a product, and one of two tensors, may be rounded differently. So all rows of a matrix use
    # one of them, at every address.
    if a_MK.is_cpu and (a_MK.shape[1] % TILE or out_MN.shape[1] % TILE):
        product_MN = torch.empty_like(out_MN)
        row_invariant_mm(a_MK, b_KN, product_MN)
        out_MN.add_(product_MN)
    elif rows < MIN_ROWS or is_small(rows, b_KN):
        padding = (0, 0, 0, _enough_rows(b_KN) - rows)
        out_MN.copy_(F.pad(out_MN, padding).addmm_(F.pad(a_MK, padding), b_KN)[:rows])
    elif out_MN.data_ptr() % ALIGNMENT:
        out_MN.copy_(out_MN.clone().addmm_(a_MK, b_KN))
    else:
        out_MN.addmm_(a_MK, b_KN)


def product_into(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, bias_N: Tensor | None = None) -> None:
    """Compute out = a @ b + bias for weight gradients, where the bits may depend on M."""
    result_MN = out_MN if out_MN.data_ptr() % ALIGNMENT == 0 else torch.empty_like(out_MN)
    if bias_N is None:
        torch.mm(a_MK, b_KN, out=result_MN)
    else:
        torch.addmm(bias_N, a_MK, b_KN, out=result_MN)
    if result_MN is not out_MN:
        out_MN.copy_(result_MN)
