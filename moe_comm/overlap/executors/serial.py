"""The serial executor: dispatch, then the experts over all their rows as one autograd function, then combine.

    rows_RD ──w13──▶ h_RG ──activation──▶ act ──w2──▶ out_RD         expert by expert

Each GEMM writes directly into its slice of the result. The activation is in a scratch buffer of one expert's size, so
it is still in the cache when the next GEMM reads it; backward recomputes it together with its gradient. Saved for
backward are rows_RD and h_RG, or rows_RD alone with ``recompute``. The arithmetic is in ``kernels/expert_mlp.py``. On a
GPU, 16-bit experts without biases run in one launch (``kernels/expert_mlp_gpu.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import Dispatched, DispatchHandle
from moe_comm.kernels import expert_mlp_fp8
from moe_comm.kernels.autograd import compute_dtype, needed_gradients, once_differentiable
from moe_comm.kernels.expert_mlp import Alloc, BackwardInputs, ExpertMLP, LocalExperts
from moe_comm.kernels.fp8 import ScaledRows, quantize_rows
from moe_comm.kernels.native import TRITON_DEVICES
from moe_comm.overlap.executors.base import ExpertCall
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.memory import warm_like, warm_rows

Guard = Callable[[], AbstractContextManager[None]]
"""Returns the context of a backward pass, e.g. ``Dispatcher.abort_on_error``."""


@dataclass(frozen=True, eq=False)
class _Call:
    """Arguments that forward and backward share.

    experts: without their tensors. save_hidden: save the hidden rows for backward. counts_E: rows per expert, if the
    experts run in one launch on a GPU.
    """

    experts: LocalExperts
    sizes: tuple[int, ...]
    alloc: Alloc
    save_hidden: bool
    label: str
    guard: Guard
    counts_E: Tensor | None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        values_RD: Tensor | None,
        scale_RB: Tensor | None,
        call: _Call,
        *tensors: Tensor | None,
    ) -> Tensor:
        experts = call.experts.with_tensors(tensors)
        if values_RD is None and call.counts_E is not None and rows_RD.stride(1) != 1:
            rows_RD = rows_RD.contiguous()
        out_RD = call.alloc(rows_RD.shape[0], experts.columns, rows_RD.dtype, rows_RD.device)
        if call.counts_E is None or values_RD is not None:
            rows = rows_RD if values_RD is None or scale_RB is None else ScaledRows(values_RD, scale_RB)
            mlp_pass = expert_mlp_fp8.forward_pass(experts, rows, out_RD, call.sizes, call.save_hidden, warm_rows)
            mlp_pass.all_rows()
            saved_RG = mlp_pass.saved_RG
        else:
            assert isinstance(experts, ExpertMLP)
            from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

            h_RG = expert_mlp_gpu.forward(experts, rows_RD, call.counts_E, out_RD)
            saved_RG = h_RG if call.save_hidden else None
        ctx.save_for_backward(rows_RD if values_RD is None else values_RD, scale_RB, saved_RG, *tensors)
        ctx.call = call
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=call.label), call.guard():
            rows_RD, scale_RB, saved_RG, *tensors = ctx.saved_tensors
            needs_rows, _, _, _, *needs = needed_gradients(ctx)
            experts = call.experts.with_tensors(tensors)
            grad_RD = grad_RD if grad_RD.stride(-1) == 1 else grad_RD.contiguous()
            if scale_RB is not None:
                assert isinstance(experts, ExpertMLP)
                scaled = ScaledRows(rows_RD, scale_RB)
                rows_RD, saved_RG = expert_mlp_fp8.backward_inputs(experts, scaled, saved_RG, call.sizes, grad_RD.dtype)
            rows, width = rows_RD.shape
            grad_rows = call.alloc(rows, width, rows_RD.dtype, rows_RD.device) if needs_rows else None
            if call.counts_E is None:
                needed = zip(tensors, needs, strict=True)
                grads = [warm_like(t) if t is not None and need else None for t, need in needed]
                inputs = BackwardInputs(
                    rows_RD, saved_RG, grad_RD, call.sizes, grad_rows, tuple(needs), warm_rows, per_expert=True
                )
                experts.backward(inputs).all_rows(grads)
            else:
                assert isinstance(experts, ExpertMLP)
                from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

                of_weights = expert_mlp_gpu.backward(
                    experts, rows_RD, saved_RG, grad_RD, call.counts_E, grad_rows, needs
                )
                grads = [*of_weights, *[None] * (len(tensors) - len(of_weights))]
            return grad_rows, None, None, None, *grads


def grouped(
    experts: LocalExperts,
    rows_RD: Tensor,
    rows_per_expert: Sequence[int],
    alloc: Alloc = warm_rows,
    label: str = "",
    guard: Guard = nullcontext,
    scaled: ScaledRows | None = None,
) -> Tensor:
    """Run each expert on its own rows. Differentiable once.

    Args:
        rows_RD: [R, D], sorted by expert as ``dispatch`` returns them, in the dtype of the weights.
        rows_per_expert: Rows of each of the E experts; zero is allowed. The sum is R.
        alloc: Allocates the output and the rows' gradient, which other ranks may read in place.
        label: Name of the layer, for the span of backward.
        guard: Context of backward.
        scaled: The rows for experts with fp8 GEMMs, which then do not read ``rows_RD``. None: quantize ``rows_RD``.

    Returns:
        [R, columns]. Gradients of experts without rows are zeros.
    """
    tensors = experts.tensors
    # Grad mode is off inside the autograd function, so check here whether there will be a backward pass.
    has_backward = False
    if torch.is_grad_enabled():
        for t in (rows_RD, *tensors):  # a generator is slower
            has_backward = has_backward or (t is not None and t.requires_grad)
    if isinstance(experts, ExpertMLP) and experts.gemm_dtype == "fp8":
        scaled = quantize_rows(rows_RD.detach()) if scaled is None else scaled
    else:
        scaled = None
    counts_E = None
    if isinstance(experts, ExpertMLP) and rows_RD.device.type in TRITON_DEVICES:
        from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

        if expert_mlp_gpu.takes(experts, rows_RD):
            counts_E = torch.tensor(rows_per_expert, dtype=torch.int64, device="cpu").to(
                rows_RD.device, non_blocking=True
            )
    call = _Call(
        experts.with_tensors(),
        tuple(rows_per_expert),
        alloc,
        has_backward and not experts.recomputes,
        label,
        guard,
        counts_E,
    )
    values_RD, scale_RB = (None, None) if scaled is None else (scaled.values_RD, scaled.scale_RB)
    return _Grouped.apply(rows_RD, values_RD, scale_RB, call, *tensors)  # type: ignore[no-any-return]


def run_mlp(rows_RD: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP, alloc: Alloc = warm_rows) -> Tensor:
    """Run ``grouped`` for an MLP without a dispatch, in the compute dtype of autocast.

    Raises:
        InputError: shapes or dtypes do not match.
    """
    rows_RD = rows_RD.to(compute_dtype(rows_RD))
    mlp.check(rows_RD, rows_per_expert)
    return grouped(mlp, rows_RD, rows_per_expert, alloc)


def grouped_mlp(rows_RD: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP, alloc: Alloc = warm_rows) -> Tensor:
    """Apply each expert's MLP to its own rows: activation(rows @ w13[e].T + b13[e]) @ w2[e].T + b2[e].

    Args:
        rows_RD: [R, D], grouped by expert, as ``dispatch`` returns them.
        rows_per_expert: number of rows of each of the E experts, zero included. The sum is R.
        mlp: weights, biases and activation of the experts. The weights have the dtype of the rows and any strides.
        alloc: allocates the output and the gradient of the rows, which other ranks may read in place.

    Returns:
        [R, D]. Gradients of experts without rows are zero. Not differentiable twice.

    Raises:
        InputError: shapes or dtypes do not match.
    """
    mlp.check(rows_RD, rows_per_expert)
    return grouped(mlp, rows_RD, rows_per_expert, alloc)


def serial_call(
    dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, label: str, scaled: bool = False
) -> SerialCall:
    """Dispatch the rows of one call of a layer for the serial executor. scaled: for experts with fp8 GEMMs."""
    return SerialCall(dispatcher, dispatcher.dispatch(x_TD, ids_TK, label=label, scaled=scaled), weights_TK)


class SerialCall(ExpertCall):
    """One call of the serial executor. No rows are in flight between its steps."""

    skips_empty_slots = True

    def __init__(self, dispatcher: Dispatcher, dispatched: Dispatched, weights_TK: Tensor) -> None:
        self._dispatcher, self._handle, self._weights_TK = dispatcher, dispatched.handle, weights_TK
        self.rows, self._scaled = dispatched.rows_RD, dispatched.scaled

    @property
    def handle(self) -> DispatchHandle:
        return self._handle

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        dispatcher, label = self._dispatcher, self._handle.label
        mlp.check(rows, rows_per_expert)
        # A bound method of this object would keep its rows alive as long as the autograd graph.
        guard = partial(dispatcher.abort_on_error, label)
        scaled, self._scaled = self._scaled, None  # autograd keeps what backward needs
        return grouped(mlp, rows, rows_per_expert, dispatcher.empty_rows, label, guard, scaled)

    def combine(self, rows: Tensor) -> Tensor:
        return self._dispatcher.combine(rows, self._weights_TK, self._handle)

    def abort_on_error(self) -> AbstractContextManager[None]:
        return self._dispatcher.abort_on_error(self._handle.label)
