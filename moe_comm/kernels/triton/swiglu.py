"""SwiGLU and its gradient, one pass over memory each. Reference: ``kernels/swiglu.py``, up to the rounding of exp.

h_RG [R, 2F]  gate | up     act = gate * sigmoid(gate) * up, in fp32, rounded once

Multiplications and additions are not fused, so that the kernels in ``quantize.py`` get the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.triton.device import int64, rounded, sigmoid
from moe_comm.kernels.triton.launch import DTYPES, check_rows, check_tensors, launch, tile

TILE_ELEMENTS = 1024


@triton.jit
def gate_gradient(gate, up, grad):  # type: ignore[no-untyped-def]
    """Return the gradient of ``gate`` in fp32: d silu / d gate = s + gate * s * (1 - s)."""
    s = sigmoid(gate)
    return grad * up * (s + s * gate * (1.0 - s))


@triton.jit
def swiglu_kernel(  # type: ignore[no-untyped-def]
    h_ptr,  # [rows, 2 * width]
    h_stride,
    out_ptr,  # [rows, width]
    out_stride, rows, width,
    ELEMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (int64(tl.program_id(0)) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    from_ptr = h_ptr + row * h_stride + column
    gate = tl.load(from_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(from_ptr + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, rounded(sigmoid(gate) * gate * up, ELEMENT), mask=inside)


@triton.jit
def swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    h_ptr,  # [rows, 2 * width]
    h_stride,
    grad_ptr,  # [rows, width]
    grad_stride,
    grad_h_ptr,  # [rows, 2 * width]; may be h_ptr
    grad_h_stride,
    act_ptr,  # [rows, width]; may be grad_ptr; any pointer unless RECOMPUTE
    act_stride, rows, width,
    ELEMENT: tl.constexpr, RECOMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each element is read and written by one thread, so results may overwrite inputs."""
    row = (int64(tl.program_id(0)) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    from_ptr = h_ptr + row * h_stride + column
    gate = tl.load(from_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(from_ptr + width, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    silu = sigmoid(gate) * gate
    to_ptr = grad_h_ptr + row * grad_h_stride + column
    tl.store(to_ptr, rounded(gate_gradient(gate, up, grad), ELEMENT), mask=inside)
    tl.store(to_ptr + width, rounded(grad * silu, ELEMENT), mask=inside)
    if RECOMPUTE:
        tl.store(act_ptr + row * act_stride + column, rounded(silu * up, ELEMENT), mask=inside)


def check_swiglu(operator: str, h_RG: Tensor, **rows_RX: Tensor | None) -> None:
    """Check that ``h`` is [R, 2F] and the others are [R, F] (``grad_h``: [R, 2F]) of its dtype."""
    check_tensors(operator, h_RG, *rows_RX.values())
    check_rows(operator, "h", h_RG)
    if h_RG.shape[1] % 2:
        raise InputError(f"{operator} needs h [R, 2F], gate | up; got {tuple(h_RG.shape)}")
    for name, rows in rows_RX.items():
        if rows is None:
            continue
        check_rows(operator, name, rows)
        shape = (h_RG.shape[0], h_RG.shape[1] // (1 if name == "grad_h" else 2))
        if tuple(rows.shape) != shape or rows.dtype != h_RG.dtype:
            raise InputError(
                f"{operator} of h {tuple(h_RG.shape)} needs {name} {shape} of {h_RG.dtype}; "
                f"got {tuple(rows.shape)} of {rows.dtype}"
            )


def swiglu_forward(h_RG: Tensor, out_RF: Tensor) -> None:
    """Write silu(gate) * up into ``out_RF``. Arguments and errors as in ``check_swiglu``."""
    check_swiglu("swiglu_forward", h_RG, out=out_RF)
    if not out_RF.numel():
        return
    rows, columns = tile(out_RF.shape[1], TILE_ELEMENTS)
    launch(
        swiglu_kernel, (-(-out_RF.shape[0] // rows), -(-out_RF.shape[1] // columns)), h_RG,
        (h_RG, h_RG.stride(0), out_RF, out_RF.stride(0), *out_RF.shape),
        ELEMENT=DTYPES[h_RG.dtype], ROWS=rows, COLUMNS=columns, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def swiglu_backward(h_RG: Tensor, grad_RF: Tensor, grad_h_RG: Tensor, act_RF: Tensor | None) -> None:
    """Write the gradient of ``h_RG`` and, if given, the recomputed activation. Errors as in ``check_swiglu``.

    ``grad_h_RG`` may share memory with ``h_RG``, and ``act_RF`` with ``grad_RF``.
    """
    check_swiglu("swiglu_backward", h_RG, grad=grad_RF, grad_h=grad_h_RG, act=act_RF)
    if not grad_RF.numel():
        return
    act = grad_RF if act_RF is None else act_RF
    rows, columns = tile(grad_RF.shape[1], TILE_ELEMENTS)
    launch(
        swiglu_backward_kernel, (-(-grad_RF.shape[0] // rows), -(-grad_RF.shape[1] // columns)), h_RG,
        (h_RG, h_RG.stride(0), grad_RF, grad_RF.stride(0), grad_h_RG, grad_h_RG.stride(0), act, act.stride(0),
         *grad_RF.shape),
        ELEMENT=DTYPES[h_RG.dtype], RECOMPUTE=act_RF is not None, ROWS=rows, COLUMNS=columns,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
