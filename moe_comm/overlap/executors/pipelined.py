"""The pipelined executor: experts compute row ranges as they complete, and results return as they are computed.

    dispatch        starts to send the rows
    experts         runs all GEMMs of own rows, then of each segment (``transport.py``) once it is complete; sends its
                    results at once
    combine         waits for the results and returns the weighted sums

Work of the caller between these steps (a shared expert, attention of another micro-batch) runs while rows are in
flight. The same holds in backward, because autograd runs this work between the same two operators in reverse order.

Each step is an autograd function. The backward pass of ``combine`` sends the gradients, that of ``experts`` computes
them as they complete, and that of ``dispatch`` sums the returned gradients. An empty tensor, the autograd token,
connects the functions in the graph:

    x, weights ──dispatch──▶ [] ──experts──▶ [] ──combine──▶ y           a whole layer
    x          ──dispatch──▶ [] ──experts──▶ h                           dispatch_matmul
       weights ──dispatch──▶ [] ──experts(h)──▶ [] ──combine──▶ y        matmul_combine

Forward and backward each overlap both transfers: combine's segments follow dispatch's as soon as they are computed, so
results return while later rows are still received (so do Lancet and Tutel; COMET, arXiv 2502.19811, has one kernel for
each transfer). In backward, the weight gradients of an expert are whole GEMMs once all its rows are
computed, and overlap the waits. The bits are those of the serial executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from moe_comm.comm.channel import AbortOnError
from moe_comm.dispatch.expert_call import ExpertCall, saved_bytes, sends_weights
from moe_comm.dispatch.wire_dtype import SAME, WireDtype, bytes_per_row, pack, scaled_format, unpack_scaled
from moe_comm.errors import InputError
from moe_comm.kernels.autograd import needed_gradients, needs_autograd, once_differentiable
from moe_comm.kernels.expert_mlp import BackwardInputs, ExpertBackward, ExpertMLP, LocalExperts
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.overlap.chunk_plan import PendingOwnRows, RowRange, RowSegments
from moe_comm.overlap.executors.transport import RowDispatch, RowReturn, RowSend, SentGradients
from moe_comm.runtime.memory import as_tensors, warm_rows

Sums = Callable[[Tensor | None], Tensor]
"""Returns [T, D], the sums of the results, times weights [T, K] if given; ``RowReturn.result``."""


def run_ranges(
    segments: RowSegments,
    send: RowSend | None,
    back: RowReturn | None,
    compute: Callable[[RowRange], None],
    other_work: Callable[[], bool] = lambda: False,
) -> None:
    """Compute all rows, segment by segment, and mark each segment as computed.

    Args:
        send: The transfer of the rows to this rank. Rows are computed as they complete, own rows while no others are
            complete. None: all rows are complete; they are computed in the order of ``segments.groups``, own rows last.
        back: The transfer of the results; None if they stay on this rank.
        compute: Computes one row range.
        other_work: Does one unit of other work while there are no rows to compute; returns False if none is left.
    """

    def compute_all(completed: Sequence[int], ranges: Sequence[RowRange]) -> None:
        for row_range in ranges:
            compute(row_range)
        if back is not None:
            for segment in completed:
                back.mark_computed(segment)

    if send is None:
        for group in segments.groups:
            compute_all(group, segments.merged(group))
        for row_range in segments.own:
            compute(row_range)
        return
    # Received segments have priority, because their results must still be sent. Without any, compute own rows, then do
    # other work, then wait.
    pending_own, num_pending = PendingOwnRows(segments), sum(map(len, segments.groups))
    while num_pending:
        completed = send.poll(wait=False)
        if not completed:
            if (own_range := pending_own.pop()) is not None:
                compute(own_range)
                continue
            if other_work():
                continue
            completed = send.poll(wait=True)
        num_pending -= len(completed)
        compute_all(completed, pending_own.join(completed))
    while (own_range := pending_own.pop()) is not None:
        compute(own_range)
    send.close()


@dataclass(eq=False)
class Run:
    """State that the autograd functions of one call share. Backward may run more than once.

    forward, backward: the dispatch, with the chunks of each direction.
    returns: whether results are combined.
    needs_x, needs_weights: whether the tokens and the routing weights need a gradient.
    unscaled: whether experts multiply gradients by the routing weights, so that their outputs are not kept.
    requires_grad: whether any input does; compared between ranks in combine.
    guard: context of the experts' backward pass.
    wide_TK, weights_dtype: routing weights in the dtype of the sums, and their own dtype.
    send, gradients: pending transfers of the rows in forward, None if no rows are dispatched, and of the gradients in
        backward.
    back, returning: wait for the sums of the results, and of the gradients.
    weights_grad: waits for the gradient of the routing weights.
    """

    forward: RowDispatch
    backward: RowDispatch
    returns: bool
    wide_TK: Tensor | None = None
    weights_dtype: torch.dtype = torch.float32
    needs_x: bool = False
    needs_weights: bool = False
    unscaled: bool = False
    requires_grad: bool = False
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    send: RowSend | None = None
    back: Sums | None = None
    gradients: SentGradients | None = None
    returning: Sums | None = None
    weights_grad: Callable[[], Tensor | None] = lambda: None


class _Dispatch(torch.autograd.Function):
    """Connect the tokens and the routing weights to the autograd token, which is returned."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor | None, weights_TK: Tensor | None, run: Run) -> Tensor:
        ctx.run = run
        handle = run.forward.handle
        return torch.empty(0, dtype=handle.dtype, device=handle.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        returning, weights_grad = run.returning, run.weights_grad
        run.returning, run.weights_grad = None, lambda: None
        grad_TK = weights_grad() if run.needs_weights else None
        grad_TK = None if grad_TK is None else grad_TK.to(run.weights_dtype)
        return None if returning is None else returning(None), grad_TK, None


class _Combine(torch.autograd.Function):
    """Return the sums of the results, from the autograd token."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, run: Run) -> Tensor:
        back = run.back
        assert back is not None
        run.back = None
        ctx.run = run
        return back(run.wide_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        assert run.wide_TK is not None
        (grad_TD,), fault = as_tensors(gradient=grad_TD)
        if fault is not None:
            run.backward.refuse("combine backward", fault)
        run.gradients = run.backward.send_gradients(grad_TD, run.wide_TK, run.needs_weights, run.unscaled)
        return grad_TD.new_empty(0), None


class _Experts(torch.autograd.Function):
    """Run the experts. Takes the autograd token, and the rows if they are not dispatched. Returns the token, or the
    outputs if they are not combined."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, input_RD: Tensor | None, run: Run, settings: LocalExperts, keep_h: bool, *tensors: Any
    ) -> Tensor:
        dispatch, send, back = run.forward, run.send, None
        run.send = None
        experts = settings.with_tensors(tensors)
        try:
            # Start both transfers: results return while later rows are still received.
            if send is not None:
                send.start(None)
            if run.returns:
                back = dispatch.start_return("combine", (run.requires_grad, run.needs_weights), send)
            rows: Tensor | ScaledRows | None = input_RD if send is None else send.scaled or send.rows_RD
            assert rows is not None
            quantized = None
            if isinstance(rows, Tensor) and isinstance(experts, ExpertMLP) and experts.gemm_dtype == "fp8":
                quantized = QuantizedRanges(rows, dispatch.dispatcher.options.wire_dtypes.of("dispatch"))
                rows = quantized.rows
            if back is None:
                assert isinstance(rows, Tensor)
                out_RD = _rows(rows, experts.columns)
            else:
                out_RD = back.rows_RD
            sizes = _sizes(dispatch, experts)
            mlp_pass = experts.forward(rows, out_RD, sizes, keep_h, warm_rows)

            def compute(row_range: RowRange) -> None:
                if quantized is not None:
                    quantized.quantize(row_range.rows)
                mlp_pass.row_range(row_range.expert, row_range.rows)

            # Compute segments as they complete. Each is returned when it is computed.
            run_ranges(dispatch.segments, send, back, compute)
            if back is not None:
                back.close(run.wide_TK, lambda: False)
        except BaseException as error:
            _abort(error, send, back)
            raise
        run.back = None if back is None else back.result
        saved_out_RD = out_RD if run.returns and run.needs_weights and not run.unscaled else None
        ctx.save_for_backward(*mlp_pass.saved, saved_out_RD, *tensors)
        ctx.run, ctx.settings, ctx.pending_backward = run, settings, None
        return token.new_empty(0) if run.returns else out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        needs_token, needs_rows, _, _, _, *needs_weights = needed_gradients(ctx)
        grad_rows_RD = None
        # A pipeline schedule may request input and weight gradients in two backward passes. Gradients are sent only in
        # the first one, so the second one uses its state.
        if ctx.pending_backward is None or run.gradients is not None or not run.returns:
            with run.guard():
                ctx.pending_backward = _Backward(ctx, grad_RD, needs_token, needs_rows, needs_weights)
            grad_rows_RD = ctx.pending_backward.grad_rows_RD
        weight_grads = ctx.pending_backward.weight_gradients(needs_weights)
        ctx.pending_backward.grad_rows_RD = None
        if any(needs_weights) or not any(ctx.needs_input_grad[5:]):
            ctx.pending_backward = None
        token_grad = grad_RD.new_empty(0) if ctx.needs_input_grad[0] else None
        return token_grad, grad_rows_RD if needs_rows else None, None, None, None, *weight_grads


class _Backward:
    """The backward pass of the experts. It keeps what the weight gradients need, which a pipeline schedule may request
    in a later backward pass.

    Attributes:
        grad_rows_RD: the gradient of rows that were inputs and not dispatched.
    """

    def __init__(
        self, ctx: Any, grad_RD: Tensor, needs_token: bool, needs_rows: bool, needs_weights: Sequence[bool]
    ) -> None:
        # Read once only: with activation checkpointing, a second read raises.
        rows_RD, scale_RB, saved_RG, results_RD, *tensors = ctx.saved_tensors
        run: Run = ctx.run
        dispatch, send, back = run.backward, run.gradients, None
        run.gradients = None
        needs = tuple(ctx.needs_input_grad[5:])
        experts = ctx.settings.with_tensors(tensors)
        self._experts, self._sizes = experts, _sizes(dispatch, experts)
        self._grads: list[Tensor | None] = [None] * len(tensors)
        self.grad_rows_RD: Tensor | None = None
        try:
            if send is not None:
                send.start(results_RD)
            if run.needs_x and needs_token:
                back = dispatch.start_return("dispatch backward", (False, False), send)
            elif needs_rows:
                self.grad_rows_RD = _rows(rows_RD, rows_RD.shape[1])
            grad_out_RD = self.grad_rows_RD if back is None else back.rows_RD
            grad_RD = grad_RD.contiguous() if send is None else send.rows_RD
            dtype = dispatch.handle.dtype
            rows_RD, saved_RG = experts.backward_inputs(rows_RD, scale_RB, saved_RG, self._sizes, dtype)
            weights_R = None if send is None else send.weights_R
            dots_R = torch.empty_like(weights_R) if weights_R is not None and run.needs_weights else None
            inputs = BackwardInputs(
                rows_RD,
                saved_RG,
                grad_RD,
                self._sizes,
                grad_out_RD,
                needs,
                warm_rows,
                at_once=False,
                weights_R=weights_R,
                dots_R=dots_R,
            )
            self._pass: ExpertBackward = experts.backward(inputs)
            self._pending_rows = list(self._sizes)
            self._ready_experts = deque(expert for expert, size in enumerate(self._sizes) if not size)
            self._allocate(needs_weights)
            if send is None and back is None:  # no transfers
                for expert, row_range in _expert_slices(self._sizes):
                    self._pass.row_range(expert, row_range)
                self._ready_experts = deque(range(len(self._sizes)))
            else:
                other_work = self._next_expert if any(needs_weights) else lambda: False
                run_ranges(dispatch.segments, send, back, lambda row_range: self._compute(row_range, send), other_work)
                if back is not None:
                    back.close(None, other_work)
        except BaseException as error:
            _abort(error, send, back)
            raise
        run.returning = None if back is None else back.result
        if send is not None:
            run.weights_grad = send.start_weight_gradient(dots_R)

    def weight_gradients(self, needed: Sequence[bool]) -> list[Tensor | None]:
        """Return the needed gradients of weights; None for the others."""
        if any(needed):
            missing = [is_needed and grad is None for is_needed, grad in zip(needed, self._grads, strict=True)]
            if any(missing):
                self._ready_experts = deque(range(len(self._sizes)))
                self._allocate(missing)
            while self._next_expert():
                pass
        grads = [grad if is_needed else None for is_needed, grad in zip(needed, self._grads, strict=True)]
        returned: list[Tensor | None] = self._experts.for_autograd(grads)
        return returned

    def _allocate(self, needed: Sequence[bool]) -> None:
        for index, grad in enumerate(self._experts.new_gradients(needed)):
            if grad is not None:
                self._grads[index] = grad
        self._outputs = [grad if is_needed else None for grad, is_needed in zip(self._grads, needed, strict=True)]

    def _compute(self, row_range: RowRange, send: RowSend | None) -> None:
        if send is not None:
            send.prepare(row_range)
        self._pass.row_range(row_range.expert, row_range.rows)
        self._pending_rows[row_range.expert] -= row_range.end - row_range.first
        if not self._pending_rows[row_range.expert]:
            self._ready_experts.append(row_range.expert)

    def _next_expert(self) -> bool:
        """Compute the weight gradients of one expert whose rows are all computed; return False if there is none."""
        if not self._ready_experts:
            return False
        expert = self._ready_experts.popleft()
        self._pass.weights_of(expert, self._outputs)
        return True


def _sizes(dispatch: RowDispatch, experts: LocalExperts) -> tuple[int, ...]:
    """Return the rows of each expert that has parameters."""
    return dispatch.handle.rows_per_expert[: experts.num_experts]


def _expert_slices(sizes: Sequence[int]) -> list[tuple[int, slice]]:
    """Return the rows of each expert that has any."""
    return [
        (e, slice(end - size, end)) for e, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)) if size
    ]


def _abort(error: BaseException, send: RowSend | None, back: RowReturn | None) -> None:
    if send is not None:
        send.abort(error)
    if back is not None:
        back.abort(error)


def _rows(like: Tensor, width: int) -> Tensor:
    return warm_rows(like.shape[0], width, like.dtype, like.device)


class PipelinedCall(ExpertCall):
    """One call of a whole layer; ``rows`` is the autograd token."""

    def __init__(
        self, dispatch: RowDispatch, send: RowSend, x_TD: Tensor, weights_TK: Tensor, scaled: bool = False
    ) -> None:
        # A copy: the caller may change its tensor in place before backward.
        wide_TK = weights_TK.detach().to(dispatch.sum_dtype, copy=True)
        run = Run(dispatch, dispatch, True, wide_TK, weights_TK.dtype, needs_autograd(x_TD), needs_autograd(weights_TK))
        run.send, run.unscaled = send, sends_weights(x_TD.dtype, scaled)
        run.guard = lambda: AbortOnError(dispatch.abort)
        self.handle = dispatch.handle
        self._dispatch, self._run, self._takes_fp8 = dispatch, run, scaled
        self.rows = _Dispatch.apply(x_TD, weights_TK, run)

    def complete(self) -> None:
        if not self._dispatch.in_flight and self._run.send is not None:
            self._run.send.close()

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        dispatch, run = self._dispatch, self._run
        experts, w13 = len(rows_per_expert), mlp.tensors[0]
        if mlp.num_experts != experts or w13.shape[2] != dispatch.handle.hidden or mlp.device != dispatch.handle.device:
            raise InputError(
                f"an expert layer needs weights [{experts}, .., {dispatch.handle.hidden}] of this rank's experts on "
                f"{dispatch.handle.device}; got {tuple(w13.shape)} on {mlp.device}"
            )
        if (mlp.gemm_dtype == "fp8") != self._takes_fp8:
            raise InputError(
                f"rows were dispatched with scaled={self._takes_fp8}; got experts with {mlp.gemm_dtype} GEMMs"
            )
        mlp.check_weights(rows)
        run.requires_grad = needs_autograd(rows, *mlp.tensors)
        token = _run_experts(run, rows, None, mlp, run.requires_grad)
        if token.requires_grad:
            handle, wire_dtype = dispatch.handle, SAME
            if self._takes_fp8:
                wire_dtype = scaled_format(dispatch.dispatcher.options.wire_dtypes.of("dispatch"))
            of_rows = handle.num_rows * bytes_per_row(handle.hidden, wire_dtype, handle.dtype)
            self.saved_bytes = saved_bytes(handle, mlp, of_rows, run.needs_weights and not run.unscaled)
        return token

    def combine(self, rows: Tensor) -> Tensor:
        return _Combine.apply(rows, self._run)  # type: ignore[no-any-return]

    def abort(self, error: Exception) -> None:
        self._dispatch.abort(error, self._run.send)


def _run_experts(run: Run, token: Tensor, rows_RD: Tensor | None, experts: LocalExperts, keep_h: bool) -> Tensor:
    function = run.forward.experts_function or _Experts
    return function.apply(token, rows_RD, run, experts.with_tensors(), keep_h, *experts.tensors)  # type: ignore[no-any-return]


def pipelined_dispatch(
    directions: tuple[RowDispatch, RowDispatch], send: RowSend, x_TD: Tensor, experts: LocalExperts
) -> Tensor:
    """Return [R, columns]: dispatch, and one GEMM of the rows as they complete.

    directions: the dispatch, forward and backward. send: the pending transfer of the rows.
    """
    run = Run(*directions, False, needs_x=needs_autograd(x_TD), send=send)
    token = _Dispatch.apply(x_TD, None, run)
    return _run_experts(run, token, None, experts, False)


def pipelined_combine(
    directions: tuple[RowDispatch, RowDispatch], rows_RF: Tensor, experts: LocalExperts, weights_TK: Tensor
) -> Tensor:
    """Return [T, D]: one GEMM of the rows, and the combine of its results as they are computed."""
    wide_TK = weights_TK.detach().to(directions[0].sum_dtype)
    run = Run(*directions, True, wide_TK, weights_TK.dtype, needs_weights=needs_autograd(weights_TK))
    run.requires_grad = needs_autograd(rows_RF, weights_TK, *experts.tensors)
    token = _Dispatch.apply(None, weights_TK, run)
    token = _run_experts(run, token, rows_RF.contiguous(), experts, False)
    return _Combine.apply(token, run)  # type: ignore[no-any-return]


class QuantizedRanges:
    """Quantizes ranges of ``rows_RD`` in ``scaled_format`` of the wire dtype of dispatch. Other rows may be in flight.

    Attributes:
        rows: the quantized rows. Those of ranges that were not quantized are undefined.
    """

    def __init__(self, rows_RD: Tensor, wire_dtype: WireDtype) -> None:
        (num_rows, hidden), self._format = rows_RD.shape, scaled_format(wire_dtype)
        words = bytes_per_row(hidden, self._format, rows_RD.dtype) // 8
        self._rows_RD, self._packed_RX = rows_RD, warm_rows(num_rows, words, torch.int64, rows_RD.device)
        self.rows = unpack_scaled(self._packed_RX, self._format, hidden)

    def quantize(self, rows: slice) -> None:
        self._packed_RX[rows] = pack(self._rows_RD[rows], self._format)
