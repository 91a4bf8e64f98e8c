"""SwiGLU: act = silu(gate) * up with gate | up side by side in one row (arXiv 2002.05202).

    h_RG    [R, 2F]   gate = columns 0..F, up = columns F..2F
    act_RF  [R, F]    gate * sigmoid(gate) * up, computed in fp32 (float64 for float64), rounded once

Each way is a single pass over memory, in the native core on the CPU and in Triton on a GPU; the plain-torch reference
beside them runs on every device and dtype. In all, a row's bits depend on that row alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.errors import InputError
from moe_comm.kernels import native
from moe_comm.kernels.native import for_triton
from moe_comm.kernels.pointwise import sigmoid_values

NATIVE_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@lru_cache(maxsize=1)
def _native() -> Any:
    """The native core, or None where it is not built; the reference then runs instead."""
    try:
        from moe_comm import _C
    except ImportError:
        return None
    return _C


def _runs_in_triton(*tensors: Tensor) -> bool:
    dtype = tensors[0].dtype
    return (
        for_triton(*tensors) and dtype in NATIVE_DTYPES and all(t.dtype == dtype and t.stride(1) == 1 for t in tensors)
    )


def _check(h_RG: Tensor, *rows_RF: Tensor) -> None:
    rows, width = h_RG.shape[0], h_RG.shape[1] // 2
    if h_RG.shape[1] % 2 or any(tuple(t.shape) != (rows, width) for t in rows_RF):
        given = ", ".join(str(tuple(t.shape)) for t in (h_RG, *rows_RF))
        raise InputError(f"swiglu needs h [R, 2F] and rows [R, F]; got {given}")


def swiglu_forward(h_RG: Tensor, out_RF: Tensor) -> None:
    """Write silu(gate) * up into ``out_RF``.

    Args:
        h_RG: [R, 2F] gate | up; rows may be any distance apart.
        out_RF: [R, F] of the same dtype, contiguous.
    """
    code = NATIVE_DTYPES.get(h_RG.dtype)
    if (
        code is not None
        and h_RG.device.type == "cpu"
        and h_RG.shape == (out_RF.shape[0], 2 * out_RF.shape[1])
        and out_RF.dtype == h_RG.dtype
        and h_RG.stride(1) == 1
        and out_RF.is_contiguous()
        and (core := _native()) is not None
        and "cpu" not in native.TRITON_DEVICES
    ):
        rows, width = out_RF.shape
        core.swiglu_forward(
            h_RG.data_ptr(), h_RG.stride(0), out_RF.data_ptr(), rows, width, code, torch.get_num_threads()
        )
        return
    _check(h_RG, out_RF)
    if _runs_in_triton(h_RG, out_RF):
        from moe_comm.kernels.triton import swiglu as on_gpu

        on_gpu.swiglu_forward(h_RG, out_RF)
        return
    swiglu_forward_reference(h_RG, out_RF)


def swiglu_backward(h_RG: Tensor, grad_RF: Tensor, grad_h_RG: Tensor, act_RF: Tensor | None) -> None:
    """Write the gradient of ``h_RG`` into ``grad_h_RG`` and, if given, the activation again into ``act_RF``.

    Recomputing the activation here costs nothing beside the reads, and the forward pass need not keep it.

    Args:
        h_RG: [R, 2F] what the forward pass was given.
        grad_RF: [R, F] gradient of the activation, contiguous; may be the same memory as ``act_RF``.
        grad_h_RG: [R, 2F] contiguous; may be the same memory as ``h_RG``.
        act_RF: [R, F] contiguous.
    """
    code = NATIVE_DTYPES.get(h_RG.dtype)
    if (
        code is not None
        and h_RG.device.type == "cpu"
        and h_RG.shape == (grad_RF.shape[0], 2 * grad_RF.shape[1]) == grad_h_RG.shape
        and h_RG.dtype == grad_RF.dtype == grad_h_RG.dtype
        and h_RG.stride(1) == 1
        and grad_RF.is_contiguous()
        and grad_h_RG.is_contiguous()
        and (
            act_RF is None or (act_RF.shape == grad_RF.shape and act_RF.dtype == h_RG.dtype and act_RF.is_contiguous())
        )
        and (core := _native()) is not None
        and "cpu" not in native.TRITON_DEVICES
    ):
        rows, width = grad_RF.shape
        core.swiglu_backward(
            h_RG.data_ptr(),
            h_RG.stride(0),
            grad_RF.data_ptr(),
            grad_h_RG.data_ptr(),
            0 if act_RF is None else act_RF.data_ptr(),
            rows,
            width,
            code,
            torch.get_num_threads(),
        )
        return
    _check(h_RG, grad_RF, *(() if act_RF is None else (act_RF,)))
    tensors = (h_RG, grad_RF, grad_h_RG) if act_RF is None else (h_RG, grad_RF, grad_h_RG, act_RF)
    if _runs_in_triton(*tensors):
        from moe_comm.kernels.triton import swiglu as on_gpu

        on_gpu.swiglu_backward(h_RG, grad_RF, grad_h_RG, act_RF)
        return
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
    """Differentiable SwiGLU: [R, 2F] gate | up to [R, F]."""
    return _SwiGLU.apply(h_RG)  # type: ignore[no-any-return]
