"""SwiGLU and its gradient, one pass over memory each. Reference: ``kernels/swiglu.py``, up to the rounding of exp.

h_RG [R, 2F]  gate | up          act = gate * sigmoid(gate) * up, in fp32, rounded once
              gate, up, gate ... act = (up + 1) * gate * sigmoid(alpha * gate), CLAMPED: ``activations.ClampedSwiGLU``

``swiglu_backward_weighted`` also multiplies by routing weights, and computes their gradients, with the bits of
``swiglu_backward`` followed by ``row_weights.scale_`` of its two results. Multiplications and additions are not fused,
so that these kernels and those in ``quantize.py`` have the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.gpu.gemm import SWIGLU, Glu
from moe_comm.kernels.triton.device import int64, rounded, sigmoid, sum_of_lanes
from moe_comm.kernels.triton.launch import DTYPES, check_rows, check_tensors, launch, tile

Weights = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""A ``row_weights.RowWeights``: its module imports this package."""
TILE_ELEMENTS = 1024
SLOTS = 16
STEPS = 4
"""Blocks of 32 columns that a program loads at once for a dot product."""


@triton.jit
def gate_gradient(gate, up, grad):  # type: ignore[no-untyped-def]
    """Return the gradient of ``gate`` in fp32: d silu / d gate = s + gate * s * (1 - s)."""
    s = sigmoid(gate)
    return grad * up * (s + s * gate * (1.0 - s))


@triton.jit
def _clamped(gate, up, limit):  # type: ignore[no-untyped-def]
    """Return both within the limit; NaN stays NaN."""
    up = tl.where(up > limit, limit, up)
    return tl.where(gate > limit, limit, gate), tl.where(up < -limit, -limit, up)


@triton.jit
def activated(gate, up, alpha, limit, CLAMPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the activation in fp32."""
    if CLAMPED:
        gate, up = _clamped(gate, up, limit)
        act = sigmoid(gate * alpha) * gate * (up + 1.0)
    else:
        act = sigmoid(gate) * gate * up
    return act


@triton.jit
def activated_gradient(gate, up, grad, alpha, limit, CLAMPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the activation, and the gradients of gate and up, in fp32."""
    if CLAMPED:
        of_gate, of_up = _clamped(gate, up, limit)
        more = of_up + 1.0
        s = sigmoid(of_gate * alpha)
        silu = s * of_gate
        act = silu * more
        of_gate = tl.where(gate > limit, 0.0, grad * more * (s + alpha * (silu * (1.0 - s))))
        of_up = tl.where((up > limit) | (up < -limit), 0.0, grad * silu)
    else:
        silu = sigmoid(gate) * gate
        act = silu * up
        of_gate = gate_gradient(gate, up, grad)
        of_up = grad * silu
    return act, of_gate, of_up


@triton.jit
def swiglu_kernel(  # type: ignore[no-untyped-def]
    h_ptr,  # [rows, 2 * width]
    h_stride,
    out_ptr,  # [rows, width]
    out_stride, rows, width,
    alpha, limit,  # of the clamped form
    ELEMENT: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (int64(tl.program_id(0)) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    from_ptr = h_ptr + row * h_stride + column * (2 if CLAMPED else 1)
    gate = tl.load(from_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(from_ptr + (1 if CLAMPED else width), mask=inside, other=0.0).to(tl.float32)
    act = activated(gate, up, alpha, limit, CLAMPED)
    tl.store(out_ptr + row * out_stride + column, rounded(act, ELEMENT), mask=inside)


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
    alpha, limit,  # of the clamped form
    ELEMENT: tl.constexpr, CLAMPED: tl.constexpr, RECOMPUTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each element is read and written by one thread, so results may overwrite inputs."""
    row = (int64(tl.program_id(0)) * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < width)
    from_ptr = h_ptr + row * h_stride + column * (2 if CLAMPED else 1)
    gate = tl.load(from_ptr, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(from_ptr + (1 if CLAMPED else width), mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    act, of_gate, of_up = activated_gradient(gate, up, grad, alpha, limit, CLAMPED)
    to_ptr = grad_h_ptr + row * grad_h_stride + column * (2 if CLAMPED else 1)
    tl.store(to_ptr, rounded(of_gate, ELEMENT), mask=inside)
    tl.store(to_ptr + (1 if CLAMPED else width), rounded(of_up, ELEMENT), mask=inside)
    if RECOMPUTE:
        tl.store(act_ptr + row * act_stride + column, rounded(act, ELEMENT), mask=inside)


@triton.jit
def weighted_swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    h_ptr,  # [rows, 2 * width]
    h_stride,
    grad_ptr,  # [rows, width]
    grad_stride,
    grad_h_ptr,  # [rows, 2 * width]; may be h_ptr
    grad_h_stride,
    act_ptr,  # [rows, width]; may be grad_ptr
    act_stride,
    weights_ptr,  # [slots] fp32
    place_ptr,  # [slots] int64 row of each slot; unless PLACED any pointer, and the row is the slot
    dots_ptr,  # [slots] fp32; any pointer unless DOTTED
    slots, width,
    alpha, limit,  # of the clamped form
    ELEMENT: tl.constexpr, CLAMPED: tl.constexpr, PLACED: tl.constexpr, DOTTED: tl.constexpr, SLOTS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """As ``swiglu_backward_kernel`` for the rows of SLOTS slots per program, times the weights of the slots."""
    slot = int64(tl.program_id(0)) * SLOTS + tl.arange(0, SLOTS)
    live = slot < slots
    row = slot
    if PLACED:
        row = tl.load(place_ptr + slot, mask=live, other=-1)
    valid = live & (row >= 0)
    weight = tl.load(weights_ptr + slot, mask=valid, other=0.0)[:, None]
    from_ptr, of_grad_ptr = h_ptr + (row * h_stride)[:, None], grad_ptr + (row * grad_stride)[:, None]
    to_ptr, to_act_ptr = grad_h_ptr + (row * grad_h_stride)[:, None], act_ptr + (row * act_stride)[:, None]
    lanes = tl.zeros((SLOTS, 32), tl.float32)
    for first in range(0, width, 32 * STEPS):
        for step in tl.static_range(STEPS):
            column = (first + step * 32 + tl.arange(0, 32))[None, :]
            mask = valid[:, None] & (column < width)
            of_h = column * (2 if CLAMPED else 1)
            of_h_up = of_h + (1 if CLAMPED else width)
            gate = tl.load(from_ptr + of_h, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(from_ptr + of_h_up, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(of_grad_ptr + column, mask=mask, other=0.0).to(tl.float32)
            act, of_gate, of_up = activated_gradient(gate, up, grad, alpha, limit, CLAMPED)
            act = rounded(act, ELEMENT).to(tl.float32)
            of_gate = rounded(of_gate, ELEMENT).to(tl.float32)
            of_up = rounded(of_up, ELEMENT).to(tl.float32)
            if DOTTED:
                lanes += act * grad
            tl.store(to_ptr + of_h, rounded(of_gate * weight, ELEMENT), mask=mask)
            tl.store(to_ptr + of_h_up, rounded(of_up * weight, ELEMENT), mask=mask)
            tl.store(to_act_ptr + column, rounded(act * weight, ELEMENT), mask=mask)
    if DOTTED:
        tl.store(dots_ptr + slot, sum_of_lanes(lanes, SLOTS), mask=live)


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


def swiglu_forward(h_RG: Tensor, out_RF: Tensor, glu: Glu = SWIGLU) -> None:
    """Write the activation ``glu`` into ``out_RF``. Arguments and errors as in ``check_swiglu``."""
    check_swiglu("swiglu_forward", h_RG, out=out_RF)
    if not out_RF.numel():
        return
    rows, columns = tile(out_RF.shape[1], TILE_ELEMENTS)
    launch(
        swiglu_kernel, (-(-out_RF.shape[0] // rows), -(-out_RF.shape[1] // columns)), h_RG,
        (h_RG, h_RG.stride(0), out_RF, out_RF.stride(0), *out_RF.shape, *glu),
        ELEMENT=DTYPES[h_RG.dtype], CLAMPED=glu != SWIGLU, ROWS=rows, COLUMNS=columns,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def swiglu_backward(h_RG: Tensor, grad_RF: Tensor, grad_h_RG: Tensor, act_RF: Tensor | None, glu: Glu = SWIGLU) -> None:
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
         *grad_RF.shape, *glu),
        ELEMENT=DTYPES[h_RG.dtype], CLAMPED=glu != SWIGLU, RECOMPUTE=act_RF is not None,
        ROWS=rows, COLUMNS=columns, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def swiglu_backward_weighted(
    h_RG: Tensor,
    grad_RF: Tensor,
    grad_h_RG: Tensor,
    act_RF: Tensor,
    weights: Weights,
    glu: Glu = SWIGLU,
) -> None:
    """Write the gradient of ``h_RG`` and the activation, times the weights of rows, and the gradients of these.

    Other arguments and errors as in ``swiglu_backward``. Rows without a slot are not written.

    Args:
        weights: a ``row_weights.RowWeights``.
    """
    operator = "swiglu_backward_weighted"
    check_swiglu(operator, h_RG, grad=grad_RF, grad_h=grad_h_RG, act=act_RF)
    weights_N, place_N, dots_N, _ = weights
    check_tensors(operator, h_RG, weights_N, place_N, dots_N)
    slots = weights_N.numel()
    fits = weights_N.dtype == torch.float32 and all(t.is_contiguous() for t in weights[:3] if t is not None)
    if place_N is None:
        fits = fits and slots == h_RG.shape[0]
    else:
        fits = fits and place_N.dtype == torch.int64 and place_N.numel() == slots
    if not fits or (dots_N is not None and (dots_N.dtype, dots_N.numel()) != (torch.float32, slots)):
        raise InputError(f"{operator} needs a contiguous fp32 weight, int64 place and fp32 gradient of each slot")
    if not slots or not grad_RF.shape[1]:
        if dots_N is not None:
            dots_N.zero_()
        return
    launch(
        weighted_swiglu_backward_kernel, (-(-slots // SLOTS),), h_RG,
        (h_RG, h_RG.stride(0), grad_RF, grad_RF.stride(0), grad_h_RG, grad_h_RG.stride(0), act_RF, act_RF.stride(0),
         weights_N, weights_N if place_N is None else place_N, weights_N if dots_N is None else dots_N,
         slots, grad_RF.shape[1], *glu),
        ELEMENT=DTYPES[h_RG.dtype], CLAMPED=glu != SWIGLU, PLACED=place_N is not None, DOTTED=dots_N is not None,
        SLOTS=SLOTS, STEPS=STEPS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
