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


def weight_grad_into(w_END: Tensor, grad_RN: Tensor, rows_RD: Tensor, counts_E: Tensor, out_END: Tensor) -> None:
    """Write the gradient of ``w_END`` into ``out_END``, or add it to ``w_END.main_grad`` if the parameter has one.

    In the second case ``w_END.grad_added_to_main_grad`` becomes True, which tells the hooks of Megatron that the
    gradient from autograd is a dummy: it only makes the hooks run. ``out_END`` is then not written, or zeroed if
    ``w_END.zero_out_wgrad`` is set.

    Other arguments and errors are those of ``grouped_weight_grad_into``.
    """
    main_END = main_grad_of(w_END)
    if main_END is None:
        grouped_weight_grad_into(grad_RN, rows_RD, counts_E, out_END)
        return
    grouped_weight_grad_into(grad_RN, rows_RD, counts_E, main_END, add=True)
    w_END.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(w_END, "zero_out_wgrad", False):
        out_END.zero_()
