"""SwiGLU (arXiv 2002.05202): act = silu(gate) * up. A row of the input contains gate and then up.

    h_RG    [R, 2F]   gate = h[:, :F], up = h[:, F:]
    act_RF  [R, F]    gate * sigmoid(gate) * up, computed in fp32 (float64 for float64), rounded once

Forward and backward each read and write memory once. They run in the native core on a CPU, and in Triton on a GPU. A
reference in plain torch supports every device and dtype. The bits of a row do not depend on other rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.kernels.autograd import once_differentiable
from moe_comm.kernels.native import TRITON_DEVICES, core, for_triton
from moe_comm.kernels.pointwise import sigmoid_values
from moe_comm.runtime.memory import DTYPE_CODES, address, readable, row_address


def _shape_error(h_RG: Tensor, rows_RF: Tensor) -> InputError:
    return InputError(f"swiglu needs h [R, 2F] and rows [R, F]; got {tuple(h_RG.shape)}, {tuple(rows_RF.shape)}")


def swiglu_forward(h_RG: Tensor, out_RF: Tensor) -> None:
    """Write silu(gate) * up into ``out_RF``.

    Args:
        h_RG: [R, 2F] gate | up; any row stride.
        out_RF: [R, F] of the same dtype, contiguous.
    """
    rows, width = out_RF.shape
    if h_RG.shape != (rows, 2 * width):
        raise _shape_error(h_RG, out_RF)
    dtype = h_RG.dtype
    if dtype not in DTYPE_CODES or h_RG.stride(1) != 1 or out_RF.dtype != dtype or not out_RF.is_contiguous():
        swiglu_forward_reference(h_RG, out_RF)
    elif h_RG.device.type in TRITON_DEVICES and for_triton(h_RG, out_RF):
        from moe_comm.kernels.triton import swiglu as on_gpu  # needs Triton

        on_gpu.swiglu_forward(h_RG, out_RF)
    elif h_RG.is_cpu and (native := core()) is not None:
        # Shapes, dtypes and strides are checked. Native code cannot negate, and 0 is the address of no memory.
        h, out = h_RG.data_ptr(), out_RF.data_ptr()
        if (rows and width and not (h and out)) or h_RG.is_neg() or out_RF.is_neg() or not out_RF.is_cpu:
            raise InputError("swiglu needs tensors whose values are in CPU memory")
        native.swiglu_forward(h, h_RG.stride(0), out, rows, width, DTYPE_CODES[dtype], torch.get_num_threads())
    else:
        swiglu_forward_reference(h_RG, out_RF)


def swiglu_backward(h_RG: Tensor, grad_RF: Tensor, grad_h_RG: Tensor, act_RF: Tensor | None) -> None:
    """Write the gradient of ``h_RG`` into ``grad_h_RG`` and, if given, the recomputed activation into ``act_RF``.

    Backward reads gate and up anyway, so it recomputes the activation without additional reads, and the forward pass
    need not save it.

    Args:
        h_RG: [R, 2F] input of the forward pass.
        grad_RF: [R, F] gradient of the activation, contiguous; may share memory with ``act_RF``.
        grad_h_RG: [R, 2F] contiguous; may share memory with ``h_RG``.
        act_RF: [R, F] contiguous, or None.
    """
    rows, width = grad_RF.shape
    if h_RG.shape != (rows, 2 * width) or (act_RF is not None and act_RF.shape != (rows, width)):
        raise _shape_error(h_RG, grad_RF if act_RF is None else act_RF)
    others = (grad_RF, grad_h_RG) if act_RF is None else (grad_RF, grad_h_RG, act_RF)
    fits = h_RG.dtype in DTYPE_CODES and h_RG.stride(1) == 1
    for t in others:
        fits = fits and t.dtype == h_RG.dtype and t.is_contiguous()
    if not fits:
        swiglu_backward_reference(h_RG, grad_RF, grad_h_RG, act_RF)
    elif h_RG.device.type in TRITON_DEVICES and for_triton(h_RG, *others):
        from moe_comm.kernels.triton import swiglu as on_gpu  # needs Triton

        on_gpu.swiglu_backward(h_RG, grad_RF, grad_h_RG, act_RF)
    elif h_RG.is_cpu and (native := core()) is not None:
        native.swiglu_backward(
            row_address(h_RG, h_RG.dtype)[0],
            h_RG.stride(0),
            address(grad_RF, h_RG.dtype),
            address(grad_h_RG, h_RG.dtype, h_RG.shape),
            address(act_RF, h_RG.dtype),
            *grad_RF.shape,
            DTYPE_CODES[h_RG.dtype],
            torch.get_num_threads(),
        )
    else:
        swiglu_backward_reference(h_RG, grad_RF, grad_h_RG, act_RF)


def swiglu_forward_reference(h_RG: Tensor, out_RF: Tensor) -> None:
    """``swiglu_forward`` in plain torch."""
    wide = torch.promote_types(h_RG.dtype, torch.float32)
    gate, up = h_RG.to(wide).chunk(2, dim=1)
    out_RF.copy_(sigmoid_values(gate).mul_(gate).mul_(up))


def swiglu_backward_reference(h_RG: Tensor, grad_RF: Tensor, grad_h_RG: Tensor, act_RF: Tensor | None) -> None:
    """``swiglu_backward`` in plain torch."""
    wide = torch.promote_types(h_RG.dtype, torch.float32)
    gate, up = h_RG.to(wide).chunk(2, dim=1)
    grad = grad_RF.to(wide)
    s = sigmoid_values(gate)
    silu = s * gate
    act = silu * up
    grad_up = grad * silu
    # d silu / d gate = s + gate * s * (1 - s)
    grad_gate = (grad * up).mul_(s + silu.mul_(1.0 - s))
    width = gate.shape[1]
    grad_h_RG[:, :width].copy_(grad_gate)
    grad_h_RG[:, width:].copy_(grad_up)
    if act_RF is not None:
        act_RF.copy_(act)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_RG: Tensor) -> Tensor:
        out_RF = h_RG.new_empty(h_RG.shape[0], h_RG.shape[1] // 2)
        swiglu_forward(h_RG, out_RF)
        ctx.save_for_backward(h_RG)
        return out_RF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RF: Tensor) -> Tensor:
        (h_RG,) = ctx.saved_tensors
        grad_h_RG = torch.empty_like(h_RG, memory_format=torch.contiguous_format)
        swiglu_backward(h_RG, grad_RF.contiguous(), grad_h_RG, None)
        return grad_h_RG


def swiglu(h_RG: Tensor) -> Tensor:
    """Return SwiGLU of [R, 2F] gate | up as [R, F]; differentiable once."""
    if not torch.compiler.is_compiling():
        h_RG = readable(h_RG, "h")
    return _SwiGLU.apply(h_RG)  # type: ignore[no-any-return]
