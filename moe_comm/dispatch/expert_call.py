"""A call of a layer's experts without overlap: dispatch, the experts on all their rows, combine.

    rows_RD ──w13──▶ h_RG ──activation──▶ act ──w2──▶ out_RD         expert by expert

Each GEMM writes directly into its slice of the result. The activation is in a scratch buffer for a batch of experts, so
it is still in the cache when the next GEMM reads it; backward recomputes it together with its gradient. Saved for
backward are rows_RD and h_RG, or rows_RD alone with ``recompute``.

On the CPU the first GEMM reads the tokens of all ranks in place, if the dispatcher supports it. Then x_TD is saved
instead of rows_RD, and the operation of backward that sends the gradients of outputs sends the tokens again. Outputs
are not saved: backward computes the gradients of the routing weights at the experts (``MLPBackward``).

The arithmetic is in ``kernels/expert_mlp.py``. On a GPU, 16-bit experts run in one launch
(``kernels/expert_mlp_gpu.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_comm.comm.channel import AbortOnError
from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.serial_run import SerialRun, version_of
from moe_comm.dispatch.types import DeviceCounts, Dispatched, DispatchHandle
from moe_comm.errors import InputError
from moe_comm.kernels.autograd import (
    compute_dtype,
    needed_gradients,
    once_differentiable,
    parameters_among,
    with_main_grads,
)
from moe_comm.kernels.expert_mlp import Alloc, BackwardInputs, ExpertMLP, LocalExperts
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.kernels.native import TRITON_DEVICES
from moe_comm.kernels.row_weights import RowWeights
from moe_comm.kernels.token_rows import Rows
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.memory import warm_rows

Guard = Callable[[], AbstractContextManager[None]]
"""Returns the context of a backward pass, e.g. ``Dispatcher.abort_on_error``."""


def sends_weights(dtype: torch.dtype, scaled: bool = False) -> bool:
    """Return whether experts with rows of ``dtype`` multiply gradients by the routing weights; equal on every rank.

    In fp16 the gradient of an activation could overflow before it is multiplied by a small weight. Outputs of experts
    with fp8 GEMMs (``scaled``) are not those of the weights with which backward computes.
    """
    return dtype != torch.float16 and not scaled


@dataclass(frozen=True, eq=False)
class _Backward:
    """What backward needs besides tensors. counts_E: rows per expert, if the experts run in one launch on a GPU.
    uncounted: the host does not know them, and the number of rows is that of the layer's other calls."""

    experts: LocalExperts
    sizes: tuple[int, ...]
    alloc: Alloc
    counts_E: Tensor | None
    label: str
    guard: Guard
    run: SerialRun | None = None
    uncounted: bool = False


class _Grouped(torch.autograd.Function):
    """Run experts on all their rows. ``rows_RD`` gets the gradient also if the experts read ``scaled`` or rows in place
    instead."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        scaled: ScaledRows | None,
        experts: LocalExperts,
        keep: bool,
        call: _Backward,
        *tensors: Tensor | None,
    ) -> Tensor:
        mlp = experts if isinstance(experts, ExpertMLP) else None
        saved: tuple[Rows | None, Tensor | None, Tensor | None]
        if call.counts_E is not None and mlp is not None and mlp.gemm_dtype != "fp8":
            from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

            rows_RD = rows_RD if rows_RD.stride(1) == 1 else rows_RD.contiguous()
            out_RD = call.alloc(rows_RD.shape[0], experts.columns, rows_RD.dtype, rows_RD.device)
            forward = expert_mlp_gpu.repeated_forward if call.uncounted else expert_mlp_gpu.forward
            h_RG = forward(mlp, rows_RD, call.counts_E, out_RD)
            saved = rows_RD, None, h_RG if keep and not mlp.recompute else None
        elif (run := call.run) is not None and run.in_place:
            x_TD, rows = run.take()
            out_RD = call.alloc(rows.shape[0], experts.columns, rows.dtype, rows.device)
            mlp_pass = experts.forward(rows, out_RD, call.sizes, keep, warm_rows)
            mlp_pass.all_rows()
            saved = x_TD if run.observed else None, *mlp_pass.saved[1:]
        else:
            out_RD = call.alloc(rows_RD.shape[0], experts.columns, rows_RD.dtype, rows_RD.device)
            mlp_pass = experts.forward(rows_RD if scaled is None else scaled, out_RD, call.sizes, keep, warm_rows)
            mlp_pass.all_rows()
            saved = mlp_pass.saved
        ctx.save_for_backward(*saved, *tensors)
        ctx.call, ctx.parameters = call, parameters_among(*tensors)
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        call: _Backward = ctx.call
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=call.label), call.guard():
            rows_RD, scale_RB, saved_RG, *tensors = ctx.saved_tensors
            needs_rows, _, _, _, _, *needs = needed_gradients(ctx)
            experts = call.experts.with_tensors(with_main_grads(tensors, ctx.parameters))
            run, trained = call.run, ctx.needs_input_grad[5:]
            gradients: Rows = grad_RD
            weights_R = dots_R = None
            later = any(trained) and not any(needs)
            if run is not None:
                gradients, weights_R = run.take_gradients(grad_RD, later)
            if isinstance(gradients, Tensor) and gradients.stride(-1) != 1:
                gradients = gradients.contiguous()
            needs_dots = weights_R is not None and needs_rows and run is not None and run.needs_weights
            if run is not None and run.in_place:
                rows_RD = run.take_rows(rows_RD, later)
            else:
                rows_RD, saved_RG = experts.backward_inputs(rows_RD, scale_RB, saved_RG, call.sizes, grad_RD.dtype)
            rows, width = rows_RD.shape
            if run is not None:
                needs_rows = needs_rows and run.needs_x
            if needs_dots:
                assert weights_R is not None
                dots_R = torch.empty_like(weights_R)
            grad_rows = call.alloc(rows, width, rows_RD.dtype, rows_RD.device) if needs_rows else None
            if call.counts_E is None:
                grads = experts.new_gradients(needs)
                inputs = BackwardInputs(
                    rows_RD,
                    saved_RG,
                    gradients,
                    call.sizes,
                    grad_rows,
                    tuple(needs),
                    warm_rows,
                    at_once=True,
                    weights_R=weights_R,
                    dots_R=dots_R,
                )
                experts.backward(inputs).all_rows(grads)
                grads = experts.for_autograd(grads)
            else:
                assert isinstance(experts, ExpertMLP)
                from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

                assert isinstance(gradients, Tensor)
                weights = None if weights_R is None else RowWeights(weights_R, None, dots_R)
                backward = expert_mlp_gpu.repeated_backward if call.uncounted else expert_mlp_gpu.backward
                of_weights = backward(experts, rows_RD, saved_RG, gradients, call.counts_E, grad_rows, needs, weights)
                grads = [*of_weights, *[None] * (len(tensors) - len(of_weights))]
            if dots_R is not None:
                assert run is not None
                run.dots_R = dots_R
            if run is not None and run.in_place and not run.observed:
                run.grad_RD, grad_rows = grad_rows, grad_RD.new_empty(0)
            return grad_rows, None, None, None, None, *grads


def grouped(
    experts: LocalExperts,
    rows_RD: Tensor,
    rows_per_expert: Sequence[int],
    alloc: Alloc = warm_rows,
    label: str = "",
    guard: Guard = nullcontext,
    scaled: ScaledRows | None = None,
    run: SerialRun | None = None,
) -> Tensor:
    """Run each expert on its own rows. Differentiable once.

    Args:
        rows_RD: [R, D], sorted by expert as ``dispatch`` returns them, in the dtype of the weights.
        rows_per_expert: Rows of each of the E experts; zero is allowed. The sum is R, or less for ``DeviceCounts``,
            which need experts that ``expert_mlp_gpu`` takes.
        alloc: Allocates the output and the rows' gradient, which other ranks may read in place.
        label: Name of the layer, for the span of backward.
        guard: Context of backward.
        scaled: The rows for experts with fp8 GEMMs, which then do not read ``rows_RD``. None: quantize ``rows_RD``.
        run: The call that dispatched the rows. If they are read in place, ``rows_RD`` is its empty tensor.

    Returns:
        [R, columns]. Gradients of experts without rows are zeros.
    """
    tensors = experts.tensors
    # Grad mode is off inside the autograd function, so check here whether there will be a backward pass.
    has_backward = False
    if torch.is_grad_enabled():
        for t in (rows_RD, *tensors):  # a generator is slower
            has_backward = has_backward or (t is not None and t.requires_grad)
    counts_E, uncounted = None, isinstance(rows_per_expert, DeviceCounts)
    if isinstance(rows_per_expert, DeviceCounts):
        counts_E, rows_per_expert = rows_per_expert.on_device, ()
    elif isinstance(experts, ExpertMLP) and rows_RD.device.type in TRITON_DEVICES:
        from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

        if expert_mlp_gpu.takes(experts, rows_RD):
            counts_E = torch.tensor(rows_per_expert, dtype=torch.int64, device="cpu").to(
                rows_RD.device, non_blocking=True
            )
    call = _Backward(experts.with_tensors(), tuple(rows_per_expert), alloc, counts_E, label, guard, run, uncounted)
    return _Grouped.apply(rows_RD, scaled, experts, has_backward, call, *tensors)  # type: ignore[no-any-return]


def run_mlp(rows_RD: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP, alloc: Alloc = warm_rows) -> Tensor:
    """Run ``grouped`` for an MLP without a dispatch, in the compute dtype of autocast."""
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


class ExpertCall:
    """One forward call of a layer with experts, whose dispatch has been started. This class overlaps nothing.

    The executors that overlap (``overlap/executors``) are subclasses. Every rank calls ``compute``, then ``combine``,
    once each:

        rows = call.compute(call.rows, call.handle.rows_per_expert, mlp)
        y_TD = call.combine(rows)

    Both raise PeerDied or PeerTimeout if a rank failed, or its rows were not received in time.

    Attributes:
        rows: [R, D] rows of this rank's experts. If experts read them in place, or the executor overlaps computation
            with the dispatch, ``rows`` is an empty tensor that only connects the autograd functions of dispatch and
            compute.
        handle: the dispatch handle.
        lent: which experts the layer lends to other ranks for this call; None without ``MoELayer.balance``.
        saved_bytes: bytes of rows, inputs of the activation and outputs that autograd keeps for backward, after
            ``combine``; 0 without a backward pass.
    """

    rows: Tensor
    handle: DispatchHandle
    lent: Any = None
    saved_bytes = 0

    def __init__(
        self, dispatcher: Dispatcher, dispatched: Dispatched, weights_TK: Tensor, run: SerialRun | None = None
    ) -> None:
        self._dispatcher, self.handle, self._weights_TK = dispatcher, dispatched.handle, weights_TK
        self._serial = run
        self.rows, self._scaled = dispatched.rows_RD, dispatched.scaled
        self._rows_version = version_of(self.rows)

    def complete(self) -> None:
        """Complete the dispatch, so that other operations of the group can run before ``compute``."""

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        """Run the expert MLPs.

        Args:
            rows: ``self.rows``, or what a hook returned for it.
            rows_per_expert: number of rows of each local expert.
            mlp: parameters of the experts, in the dtype of ``rows``.

        Returns:
            The argument of ``combine``: [R, D] outputs of the experts, or an empty tensor if ``self.rows`` is empty.

        Raises:
            InputError: the parameters do not match the rows; raised on this rank only.
        """
        dispatcher, label = self._dispatcher, self.handle.label
        run = self._serial
        if isinstance(rows_per_expert, DeviceCounts):
            mlp.check_weights(rows)
        elif run is None or not run.in_place:
            mlp.check(rows, rows_per_expert)
        else:
            # FSDP returns an alias.
            same = rows.shape == self.rows.shape and rows.data_ptr() == self.rows.data_ptr()
            if not same or version_of(rows) != self._rows_version:
                raise InputError(
                    f"a hook replaced or changed the rows of the experts of layer {label!r}, which are read in place. "
                    "Change the tokens before the layer, or the outputs of the experts"
                )
            run.check(mlp, rows_per_expert)
        # A bound method of this object would keep its rows alive as long as the autograd graph.
        guard = partial(dispatcher.abort_on_error, label)
        scaled, self._scaled = self._scaled, None  # autograd keeps what backward needs
        out_RD = grouped(mlp, rows, rows_per_expert, dispatcher.empty_rows, label, guard, scaled, run)
        if out_RD.requires_grad:
            kept = rows.nbytes if scaled is None else scaled.values_RD.nbytes + scaled.scale_RB.nbytes
            kept = 0 if run is not None and run.in_place else kept
            self.saved_bytes = saved_bytes(self.handle, mlp, kept, run is None)
        return out_RD if run is None else run.computed(out_RD)

    def combine(self, rows: Tensor) -> Tensor:
        """Return the weighted sum of the expert outputs of each token, [T, D]."""
        dispatcher, run, self._serial = self._dispatcher, self._serial, None
        if run is None:
            return dispatcher.combine(rows, self._weights_TK, self.handle)
        rows, weights_TK = dispatcher.combinable(rows, self._weights_TK, self.handle)
        if not torch.is_grad_enabled() or not (rows.requires_grad or weights_TK.requires_grad):
            return dispatcher.combine_forward(rows, weights_TK, self.handle, False)[0]
        if fault := run.changed():
            dispatcher.refuse_operation("combine", self.handle, fault)
        if kept := not run.is_unchanged(rows):
            self.saved_bytes += rows.nbytes
        return run.combine(rows, self.rows, weights_TK, kept)

    def abort(self, error: Exception) -> None:
        """Report an exception between dispatch and combine to the other ranks; see ``Dispatcher.abort``."""
        self._dispatcher.abort(error, label=self.handle.label)

    def abort_on_error(self) -> AbstractContextManager[None]:
        """Return a context manager that calls ``abort`` for an exception that leaves the ``with`` block."""
        return AbortOnError(self.abort)


def saved_bytes(handle: DispatchHandle, mlp: ExpertMLP, of_rows: int, outputs: bool) -> int:
    """Return ``ExpertCall.saved_bytes`` of a call that keeps ``of_rows`` bytes of rows, and its outputs."""
    columns = (0 if mlp.recompute else mlp.tensors[0].shape[1]) + (handle.hidden if outputs else 0)
    return handle.num_rows * columns * handle.dtype.itemsize + of_rows


def serial_call(
    dispatcher: Dispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    label: str = "",
    scaled: bool = False,
    in_place: bool = False,
    observed: bool = False,
) -> ExpertCall:
    """Dispatch, for experts that overlap nothing. Collective. Arguments and errors are those of ``Dispatcher``.

    Args:
        in_place: Experts read the tokens in place if the dispatcher supports it; the same on every rank.
        observed: Hooks may read the rows, which are then a copy that they must not replace, or read or replace the
            outputs of the experts (``SerialRun.observed``). Ranks may differ.
    """
    in_place = in_place and x_TD.device.type not in TRITON_DEVICES and sends_weights(x_TD.dtype, scaled)
    if not in_place or not dispatcher.reads_in_place(x_TD):
        dispatched = dispatcher.dispatch(x_TD, ids_TK, label=label, scaled=scaled)
        return call_of(dispatcher, dispatched, x_TD, ids_TK, weights_TK, observed)
    rows, handle = dispatcher.dispatch_in_place(x_TD, ids_TK, label=label)
    with dispatcher.abort_on_error(label):
        run = SerialRun(dispatcher, handle, (x_TD, ids_TK, weights_TK), observed, rows)
        connected = run.connected(x_TD, weights_TK, None)
    return ExpertCall(dispatcher, Dispatched(connected, handle), weights_TK, run)


def uncounted_call(
    dispatcher: Dispatcher, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, *, label: str, observed: bool
) -> ExpertCall:
    """Run ``serial_call`` with ``Dispatcher.dispatch_uncounted``, for experts that ``expert_mlp_gpu`` takes."""
    dispatched = dispatcher.dispatch_uncounted(x_TD, ids_TK, label)
    return call_of(dispatcher, dispatched, x_TD, ids_TK, weights_TK, observed)


def call_of(
    dispatcher: Dispatcher, dispatched: Dispatched, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, observed: bool
) -> ExpertCall:
    """Return the call whose rows have been dispatched; see ``serial_call``."""
    if not sends_weights(x_TD.dtype, dispatched.scaled is not None):
        return ExpertCall(dispatcher, dispatched, weights_TK)
    handle = dispatched.handle
    with dispatcher.abort_on_error(handle.label):
        run = SerialRun(dispatcher, handle, (x_TD, ids_TK, weights_TK), observed)
        rows_RD = run.connected(x_TD, weights_TK, dispatched.rows_RD.detach())
    return ExpertCall(dispatcher, Dispatched(rows_RD, handle), weights_TK, run)
