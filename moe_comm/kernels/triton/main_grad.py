"""Weight gradients that are accumulated in fp32, in the convention of Megatron-LM.

Megatron's data parallelism gives each parameter a buffer ``main_grad``, which collects the gradients of all
micro-batches in fp32. If the operator does not support it, backward writes a gradient in the dtype of the weights, and
a hook adds it:

    with a hook     write bf16, read bf16, read and write fp32     12 B per weight, each gradient rounded to bf16
    here            read and write fp32                             8 B per weight, no rounding to bf16
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.kernels.triton.grouped_mm import grouped_weight_grad_into


def main_grad_of(w_END: Tensor) -> Tensor | None:
    """Return the attribute ``main_grad`` of a parameter if it is an fp32 tensor of its shape and device, else None."""
    main = getattr(w_END, "main_grad", None)
    if not isinstance(main, Tensor) or main.dtype != torch.float32:
        return None
    return main if main.shape == w_END.shape and main.device == w_END.device else None


def weight_grad(w_END: Tensor, grad_RN: Tensor, rows_RD: Tensor, counts_E: Tensor) -> Tensor | None:
    """Return the gradient of ``w_END``, or add it to ``w_END.main_grad`` if the parameter has one.

    In the second case the result is None: autograd then accumulates nothing, and its hooks run without a gradient. If
    the parameter has an attribute ``grad_added_to_main_grad``, which Megatron's data parallelism sets to False, the
    attribute becomes True and the result is a dummy, because Megatron's hooks require a gradient. The dummy is not
    initialised, or is zero if ``w_END.zero_out_wgrad`` is set.

    Arguments and errors are those of ``grouped_weight_grad_into``.
    """
    main_END = main_grad_of(w_END)
    if main_END is None:
        grad_END = torch.empty_like(w_END)
        grouped_weight_grad_into(grad_RN, rows_RD, counts_E, grad_END)
        return grad_END
    grouped_weight_grad_into(grad_RN, rows_RD, counts_E, main_END, add=True)
    if not hasattr(w_END, "grad_added_to_main_grad"):
        return None
    w_END.grad_added_to_main_grad = True
    return torch.zeros_like(w_END) if getattr(w_END, "zero_out_wgrad", False) else torch.empty_like(w_END)
