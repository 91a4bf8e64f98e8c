"""``grouped_mlp`` on a GPU: all experts' rows in one launch for each product, by ``kernels/triton/grouped_mm.py``.

    forward    h = rows @ w13.T          act = activation(h)         out = act @ w2.T
    backward   grad_act = grad @ w2      grad_h, act again           grad_rows = grad_h @ w13
                                         grad_w2 = grad.T @ act      grad_w13 = grad_h.T @ rows

Each line is a launch or two, whatever the number of experts, and none asks the device for counts.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.kernels.activations import Activation
from moe_comm.kernels.native import for_triton
from moe_comm.kernels.wanted import wanted_gradients
from moe_comm.layers.recorded import Guard, recorded
from moe_comm.runtime.memory import Alloc, warm_like

DTYPES = (torch.bfloat16, torch.float16)
"""fp32 stays with cuBLAS, expert by expert: these kernels have no tensor cores for it."""


OLDEST = (8, 0)
"""Compute capability; GPUs before it have no products of bf16."""


@dataclass(frozen=True)
class DeviceCall:
    """What does not change between forward and backward. keep_h: keep the first product for backward."""

    activation: Activation
    alloc: Alloc
    keep_h: bool
    label: str = ""
    guard: Guard = nullcontext


def takes(rows_RD: Tensor, w13_EGD: Tensor, w2_EDF: Tensor) -> bool:
    """Whether these experts, which have no biases, run here."""
    wanted = rows_RD.dtype in DTYPES and w13_EGD.shape[0] > 0 and for_triton(rows_RD, w13_EGD, w2_EDF)
    return wanted and _has_tensor_cores(rows_RD.device)


@lru_cache
def _has_tensor_cores(device: torch.device) -> bool:
    """For what the kernels multiply, and with their memory; on the CPU they are interpreted."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= OLDEST


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, counts_E: Tensor, call: DeviceCall
    ) -> Tensor:
        from moe_comm.kernels.triton.grouped_mm import grouped_mm_into

        rows_RD = rows_RD if rows_RD.stride(1) == 1 else rows_RD.contiguous()
        num_rows, dtype, device = rows_RD.shape[0], rows_RD.dtype, rows_RD.device
        out_RD = call.alloc(num_rows, w2_EDF.shape[1], dtype, device)
        h_RG = rows_RD.new_empty(num_rows, w13_EGD.shape[1])
        act_RF = rows_RD.new_empty(num_rows, w2_EDF.shape[2])
        grouped_mm_into(rows_RD, w13_EGD, counts_E, h_RG)
        call.activation.forward(h_RG, act_RF)
        grouped_mm_into(act_RF, w2_EDF, counts_E, out_RD)
        ctx.save_for_backward(rows_RD, w13_EGD, w2_EDF, counts_E, h_RG if call.keep_h else None)
        ctx.call = call
        return out_RD

    @staticmethod
    @once_differentiable
    @recorded
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        from moe_comm.kernels.triton.grouped_mm import grouped_mm_into, grouped_weight_grad_into

        rows_RD, w13_EGD, w2_EDF, counts_E, h_RG = ctx.saved_tensors
        call: DeviceCall = ctx.call
        needs_rows, needs_w13, needs_w2, _, _ = wanted_gradients(ctx)
        grad_RD = grad_RD if grad_RD.stride(-1) == 1 else grad_RD.contiguous()
        num_rows = rows_RD.shape[0]
        if h_RG is None:
            h_RG = rows_RD.new_empty(num_rows, w13_EGD.shape[1])
            grouped_mm_into(rows_RD, w13_EGD, counts_E, h_RG)
        act_RF = rows_RD.new_empty(num_rows, w2_EDF.shape[2])
        grad_h_RG = torch.empty_like(h_RG) if needs_rows or needs_w13 else None
        if grad_h_RG is not None:
            grouped_mm_into(grad_RD, w2_EDF.transpose(1, 2), counts_E, act_RF)
            # The activation takes the place of its gradient.
            call.activation.backward(h_RG, act_RF, grad_h_RG, act_RF)
        elif needs_w2:
            call.activation.forward(h_RG, act_RF)
        grad_w13 = grad_w2 = grad_rows_RD = None
        if needs_w2:
            grad_w2 = warm_like(w2_EDF)
            grouped_weight_grad_into(grad_RD, act_RF, counts_E, grad_w2)
        if grad_h_RG is not None and needs_w13:
            grad_w13 = warm_like(w13_EGD)
            grouped_weight_grad_into(grad_h_RG, rows_RD, counts_E, grad_w13)
        if grad_h_RG is not None and needs_rows:
            grad_rows_RD = call.alloc(num_rows, rows_RD.shape[1], rows_RD.dtype, rows_RD.device)
            grouped_mm_into(grad_h_RG, w13_EGD.transpose(1, 2), counts_E, grad_rows_RD)
        return grad_rows_RD, grad_w13, grad_w2, None, None


def grouped_mlp_on_gpu(rows_RD: Tensor, w13_EGD: Tensor, w2_EDF: Tensor, counts_E: Tensor, call: DeviceCall) -> Tensor:
    """``grouped_mlp``, which checks the shapes, without biases.

    Args:
        counts_E: int64 rows of each expert, on the device. Rows beyond their sum are left as they are.
    """
    return _GroupedMLP.apply(rows_RD, w13_EGD, w2_EDF, counts_E, call)  # type: ignore[no-any-return]
