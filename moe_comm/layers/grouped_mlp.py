"""The experts' two matrix products over all local experts, as one autograd function.

    rows_RD ──w13──▶ h_RG ──activation──▶ act ──w2──▶ out_RD         expert by expert

Every product writes straight into its slice of the result. The activation lives in scratch memory of one expert's
size, so that it is still in the cache when the next product reads it; backward computes it again beside its own
gradient. What is kept for backward is rows_RD and h_RG, or rows_RD alone with ``recompute``.

An expert's products have the same shapes at every number of ranks, and so the same bits, provided that their
operands and results stand at equally aligned addresses: BLAS adds in another order at odd ones. Slices that do not
(widths that are not a multiple of 64 bytes) are copied.

On a GPU, 16-bit experts without biases run all at once (``grouped_mlp_gpu.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.errors import InputError
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.expert_mm import align, each_expert, expert_mm, product_into
from moe_comm.kernels.wanted import wanted_gradients
from moe_comm.layers.grouped_mlp_gpu import DeviceCall, grouped_mlp_on_gpu, takes
from moe_comm.layers.recorded import Guard, recorded
from moe_comm.runtime.memory import Alloc, warm_like, warm_rows


@dataclass(frozen=True)
class _Call:
    """What does not change between forward and backward.

    sizes: rows of each expert. keep_h: keep the first product for backward.
    """

    sizes: tuple[int, ...]
    activation: Activation
    alloc: Alloc
    keep_h: bool
    label: str = ""
    guard: Guard = nullcontext


class _GroupedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        w13_EGD: Tensor,
        w2_EDF: Tensor,
        b13_EG: Tensor | None,
        b2_ED: Tensor | None,
        call: _Call,
    ) -> Tensor:
        experts, width_h, _ = w13_EGD.shape
        width = w2_EDF.shape[2]
        dtype, device = rows_RD.dtype, rows_RD.device
        largest = max(call.sizes, default=0)
        out_RD = call.alloc(rows_RD.shape[0], w2_EDF.shape[1], dtype, device)
        keep = call.keep_h
        h_RG = warm_rows(rows_RD.shape[0] if keep else largest, width_h, dtype, device)
        scratch_RF = warm_rows(largest, width, dtype, device)
        aligned_rows, aligned_w13, aligned_w2 = align(rows_RD), align(w13_EGD), align(w2_EDF)
        w13, w2 = w13_EGD.unbind(0), w2_EDF.unbind(0)
        b13, b2 = each_expert(b13_EG, experts), each_expert(b2_ED, experts)
        rows, out = rows_RD.split(call.sizes), out_RD.split(call.sizes)
        kept = h_RG.split(call.sizes) if keep else None
        for e, size in enumerate(call.sizes):
            if not size:
                continue
            h = h_RG[:size] if kept is None else kept[e]
            act = scratch_RF[:size]
            expert_mm(aligned_rows(rows[e]), aligned_w13(w13[e]).t(), h, b13[e])
            call.activation.forward(h, act)
            expert_mm(act, aligned_w2(w2[e]).t(), out[e], b2[e])
        ctx.save_for_backward(rows_RD, w13_EGD, w2_EDF, b13_EG, b2_ED, h_RG if keep else None)
        ctx.call = call
        return out_RD

    @staticmethod
    @once_differentiable
    @recorded
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        rows_RD, w13_EGD, w2_EDF, b13_EG, b2_ED, h_RG = ctx.saved_tensors
        call: _Call = ctx.call
        needs_rows, needs_w13, needs_w2, needs_b13, needs_b2, _ = wanted_gradients(ctx)
        experts, width_h, hidden = w13_EGD.shape
        width = w2_EDF.shape[2]
        dtype, device = rows_RD.dtype, rows_RD.device
        largest = max(call.sizes, default=0)
        grad_RD = grad_RD if grad_RD.stride(-1) == 1 else grad_RD.contiguous()

        grad_rows_RD = call.alloc(rows_RD.shape[0], hidden, dtype, device) if needs_rows else None
        grad_w13 = warm_like(w13_EGD) if needs_w13 else None
        grad_w2 = warm_like(w2_EDF) if needs_w2 else None
        grad_b13 = torch.empty_like(b13_EG) if needs_b13 else None
        grad_b2 = torch.empty_like(b2_ED) if needs_b2 else None
        act_RF = warm_rows(largest, width, dtype, device)
        grad_h_RG = warm_rows(largest, width_h, dtype, device)
        again_RG = warm_rows(largest, width_h, dtype, device) if h_RG is None else None

        w13, w2, b13 = w13_EGD.unbind(0), w2_EDF.unbind(0), each_expert(b13_EG, experts)
        gw13, gw2, gb13, gb2 = (each_expert(g, experts) for g in (grad_w13, grad_w2, grad_b13, grad_b2))
        through = needs_rows or needs_w13 or needs_b13
        aligned_rows, aligned_grad = align(rows_RD), align(grad_RD)
        aligned_w13, aligned_w2 = align(w13_EGD), align(w2_EDF)
        every_rows, every_grad = rows_RD.split(call.sizes), grad_RD.split(call.sizes)
        every_h = None if h_RG is None else h_RG.split(call.sizes)
        every_grad_rows = None if grad_rows_RD is None else grad_rows_RD.split(call.sizes)
        for e, size in enumerate(call.sizes):
            if not size:
                # Zeros, not None: an optimizer or a reduction over ranks treats the expert like any other.
                for empty in (gw13[e], gw2[e], gb13[e], gb2[e]):
                    if empty is not None:
                        empty.zero_()
                continue
            rows, grad = aligned_rows(every_rows[e]), aligned_grad(every_grad[e])
            w13_GD, w2_DF = w13[e], w2[e]
            act, grad_h = act_RF[:size], grad_h_RG[:size]
            if every_h is not None:
                h = every_h[e]
            else:
                assert again_RG is not None
                h = again_RG[:size]
                expert_mm(rows, aligned_w13(w13_GD).t(), h, b13[e])
            if through:
                expert_mm(grad, aligned_w2(w2_DF), act)
                # The activation takes the place of its gradient, which is read first.
                call.activation.backward(h, act, grad_h, act)
            elif needs_w2:
                call.activation.forward(h, act)
            if (into := gw2[e]) is not None:
                product_into(grad.t(), act, into)
            if (into := gb2[e]) is not None:
                torch.sum(grad, 0, out=into)
            if (into := gw13[e]) is not None:
                product_into(grad_h.t(), rows, into)
            if (into := gb13[e]) is not None:
                torch.sum(grad_h, 0, out=into)
            if every_grad_rows is not None:
                expert_mm(grad_h, aligned_w13(w13_GD), every_grad_rows[e])
        return grad_rows_RD, grad_w13, grad_w2, grad_b13, grad_b2, None


def grouped_mlp(
    rows_RD: Tensor,
    rows_per_expert: Sequence[int],
    w13_EGD: Tensor,
    w2_EDF: Tensor,
    b13_EG: Tensor | None,
    b2_ED: Tensor | None,
    activation: Activation,
    alloc: Alloc = warm_rows,
    recompute: bool = False,
    label: str = "",
    guard: Guard = nullcontext,
) -> Tensor:
    """Each expert's MLP on its own rows: activation(rows @ w13[e].T + b13[e]) @ w2[e].T + b2[e].

    Args:
        rows_RD: [R, D], expert after expert, as ``dispatch`` gives them.
        rows_per_expert: rows of each of the E experts; zero is allowed. They add up to R.
        w13_EGD, w2_EDF: weights of the same dtype as the rows; any strides (a transposed view is used as it is, and
            its gradient has the same strides).
        b13_EG, b2_ED: biases or None.
        activation: [R, G] to [R, F].
        alloc: takes the output and the rows' gradient, which other ranks may read in place.
        recompute: keep only the rows for backward, at the price of one matrix product more there.
        label: name of the layer, for the span of backward.
        guard: entered around backward; ``Dispatcher.abort_on_error`` tells the other ranks of an exception there.

    Returns:
        [R, D]. Gradients of experts without rows are zeros. Not differentiable twice.

    Raises:
        InputError: shapes or dtypes do not fit.
    """
    experts, width_h, hidden = w13_EGD.shape
    width = w2_EDF.shape[2]
    expected_h = 2 * width if activation.gated else width
    if rows_RD.dim() != 2 or rows_RD.shape[1] != hidden:
        raise InputError(f"experts of hidden size {hidden} need rows [R, {hidden}]; got {tuple(rows_RD.shape)}")
    if len(rows_per_expert) != experts or sum(rows_per_expert) != rows_RD.shape[0]:
        raise InputError(
            f"rows_per_expert must hold {experts} counts that add up to {rows_RD.shape[0]} rows; "
            f"got {list(rows_per_expert)} (sum {sum(rows_per_expert)})"
        )
    if w2_EDF.shape[0] != experts or width_h != expected_h:
        raise InputError(
            f"{activation.name} with w2 {tuple(w2_EDF.shape)} needs w13 [{w2_EDF.shape[0]}, {expected_h}, D]; "
            f"got {tuple(w13_EGD.shape)}"
        )
    dtypes = {t.dtype for t in (rows_RD, w13_EGD, w2_EDF, b13_EG, b2_ED) if t is not None}
    if len(dtypes) > 1:
        raise InputError(
            f"rows are {rows_RD.dtype} and the experts' weights {w13_EGD.dtype}; "
            "convert one of them, or run under torch.autocast"
        )
    # Inside the function grad mode is always off, so whether backward will come is asked here.
    inputs = (rows_RD, w13_EGD, w2_EDF, b13_EG, b2_ED)
    backward = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    if b13_EG is None and b2_ED is None and takes(rows_RD, w13_EGD, w2_EDF):
        counts_E = torch.tensor(rows_per_expert, dtype=torch.int64).to(rows_RD.device, non_blocking=True)
        on_gpu = DeviceCall(activation, alloc, backward and not recompute, label, guard)
        return grouped_mlp_on_gpu(rows_RD, w13_EGD, w2_EDF, counts_E, on_gpu)
    call = _Call(tuple(rows_per_expert), activation, alloc, backward and not recompute, label, guard)
    return _GroupedMLP.apply(*inputs, call)  # type: ignore[no-any-return]
