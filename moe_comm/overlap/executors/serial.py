"""The serial executor: dispatch, the experts over all their rows as one autograd function, and combine.

    rows_RD ──w13──▶ h_RG ──activation──▶ act ──w2──▶ out_RD         expert by expert

Every product writes straight into its slice of the result. The activation lives in scratch memory of one expert's
size, so that it is still in the cache when the next product reads it; backward computes it again beside its own
gradient. What is kept for backward is rows_RD and h_RG, or rows_RD alone with ``recompute``. The arithmetic is in
``kernels/expert_mlp.py``; on a GPU, 16-bit experts without biases run all at once (``kernels/expert_mlp_gpu.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.dispatch.base import Dispatcher
from moe_comm.dispatch.types import Dispatched, DispatchHandle
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.autocast import compute_dtype
from moe_comm.kernels.expert_mlp import Alloc, ExpertMLP, LocalExperts, Wanted
from moe_comm.kernels.native import TRITON_DEVICES
from moe_comm.kernels.needed_grads import wanted_gradients
from moe_comm.overlap.executors.base import ExpertCall
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.memory import warm_like, warm_rows

Guard = Callable[[], AbstractContextManager[None]]
"""Makes the context of a backward pass; ``Dispatcher.abort_on_error`` reports an exception there to the other ranks."""


@dataclass(frozen=True, eq=False)
class _Call:
    """What does not change between forward and backward.

    experts: without their tensors. keep: save the hidden rows for backward. counts_E: where the rows run on a GPU, all
    at once.
    """

    experts: LocalExperts
    sizes: tuple[int, ...]
    alloc: Alloc
    keep: bool
    label: str
    guard: Guard
    counts_E: Tensor | None


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, call: _Call, *tensors: Tensor | None) -> Tensor:
        experts = call.experts.with_tensors(tensors)
        if call.counts_E is not None and rows_RD.stride(1) != 1:
            rows_RD = rows_RD.contiguous()
        out_RD = call.alloc(rows_RD.shape[0], experts.columns, rows_RD.dtype, rows_RD.device)
        if call.counts_E is None:
            passing = experts.forward(rows_RD, out_RD, call.sizes, call.keep, warm_rows)
            passing.all_rows()
            saved_RG = passing.saved_RG
        else:
            assert isinstance(experts, ExpertMLP)
            from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

            h_RG = expert_mlp_gpu.forward(experts, rows_RD, call.counts_E, out_RD)
            saved_RG = h_RG if call.keep else None
        ctx.save_for_backward(rows_RD, saved_RG, *tensors)
        ctx.call = call
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=call.label), call.guard():
            rows_RD, saved_RG, *tensors = ctx.saved_tensors
            needs_rows, _, *needs = wanted_gradients(ctx)
            experts = call.experts.with_tensors(tensors)
            grad_RD = grad_RD if grad_RD.stride(-1) == 1 else grad_RD.contiguous()
            rows, width = rows_RD.shape
            into = call.alloc(rows, width, rows_RD.dtype, rows_RD.device) if needs_rows else None
            grads = [warm_like(t) if t is not None and now else None for t, now in zip(tensors, needs, strict=True)]
            if call.counts_E is None:
                wanted = Wanted(into, tuple(needs))
                experts.backward(rows_RD, saved_RG, grad_RD, call.sizes, wanted, warm_rows, True).all_rows(grads)
            else:
                assert isinstance(experts, ExpertMLP)
                from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

                expert_mlp_gpu.backward(experts, rows_RD, saved_RG, grad_RD, call.counts_E, into, grads)
            return into, None, *grads


def grouped(
    experts: LocalExperts,
    rows_RD: Tensor,
    rows_per_expert: Sequence[int],
    alloc: Alloc = warm_rows,
    label: str = "",
    guard: Guard = nullcontext,
) -> Tensor:
    """Run each expert on its own rows. Differentiable once.

    Args:
        rows_RD: [R, D], expert after expert, as ``dispatch`` gives them, in the dtype of the weights.
        rows_per_expert: rows of each of the E experts; zero is allowed. They add up to R.
        alloc: takes the output and the rows' gradient, which other ranks may read in place.
        label: name of the layer, for the span of backward.
        guard: entered around backward.

    Returns:
        [R, columns]. Gradients of experts without rows are zeros.
    """
    tensors = experts.tensors
    # Inside the function grad mode is always off, so whether backward will come is asked here.
    backward = torch.is_grad_enabled() and (
        rows_RD.requires_grad or any(t is not None and t.requires_grad for t in tensors)
    )
    counts_E = None
    if isinstance(experts, ExpertMLP) and rows_RD.device.type in TRITON_DEVICES:
        from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

        if expert_mlp_gpu.takes(experts, rows_RD):
            counts_E = torch.tensor(rows_per_expert, dtype=torch.int64).to(rows_RD.device, non_blocking=True)
    call = _Call(
        experts.with_tensors(),
        tuple(rows_per_expert),
        alloc,
        backward and not experts.recomputes,
        label,
        guard,
        counts_E,
    )
    return _Grouped.apply(rows_RD, call, *tensors)  # type: ignore[no-any-return]


def run_mlp(rows_RD: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP, alloc: Alloc = warm_rows) -> Tensor:
    """``grouped`` for an MLP outside of any dispatch, in the dtype of its parameters' products.

    Raises:
        InputError: shapes or dtypes do not fit.
    """
    rows_RD = rows_RD.to(compute_dtype(rows_RD))
    mlp.check(rows_RD, rows_per_expert)
    return grouped(mlp, rows_RD, rows_per_expert, alloc)


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

    Returns:
        [R, D]. Gradients of experts without rows are zeros. Not differentiable twice.

    Raises:
        InputError: shapes or dtypes do not fit.
    """
    mlp = ExpertMLP((w13_EGD, w2_EDF, b13_EG, b2_ED), activation, recompute)
    mlp.check(rows_RD, rows_per_expert)
    return grouped(mlp, rows_RD, rows_per_expert, alloc)


def serial_call(dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, label: str) -> SerialCall:
    """Dispatch the rows of one call of a layer, as ``executors.choice.dispatch_rows`` does with this executor."""
    return SerialCall(dispatcher, dispatcher.dispatch(x_TD, ids_TK, label=label), weights_TK)


class SerialCall(ExpertCall):
    """Nothing is in transfer between the calls."""

    def __init__(self, dispatcher: Dispatcher, dispatched: Dispatched, weights_TK: Tensor) -> None:
        self._dispatcher, self._layout, self._weights_TK = dispatcher, dispatched.handle, weights_TK
        self.rows = dispatched.rows_RD

    @property
    def handle(self) -> DispatchHandle:
        return self._layout

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        dispatcher, label = self._dispatcher, self._layout.label
        mlp.check(rows, rows_per_expert)
        # Not a guard of this object, which holds the rows.
        guard = partial(dispatcher.abort_on_error, label)
        return grouped(mlp, rows, rows_per_expert, dispatcher.empty_rows, label, guard)

    def combine(self, rows: Tensor) -> Tensor:
        return self._dispatcher.combine(rows, self._weights_TK, self._layout)

    def abort_on_error(self) -> AbstractContextManager[None]:
        return self._dispatcher.abort_on_error(self._layout.label)
