"""A call of a layer's experts without overlap: dispatch, the experts on all their rows, combine.

    rows_RD ──w13──▶ h_RG ──activation──▶ act ──w2──▶ out_RD         expert by expert

Each GEMM writes directly into its slice of the result. The activation is in a scratch buffer for a batch of experts, so
it is still in the cache when the next GEMM reads it; backward recomputes it together with its gradient. Saved for
backward are rows_RD and h_RG, or rows_RD alone with ``recompute``.

On the CPU the first GEMM reads the tokens of all ranks in place, if the dispatcher supports it. Then x_TD is saved
instead of rows_RD, and the operation of backward that sends the gradients of outputs sends the tokens again. Outputs
are not saved: backward computes the gradients of the routing weights at the experts (``MLPBackward``).

The arithmetic is in ``kernels/expert_mlp.py``. On a GPU, 16-bit experts without biases run in one launch
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
from moe_comm.dispatch.types import Dispatched, DispatchHandle, ExtraRoutes
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
from moe_comm.kernels.row_weights import RowWeights, scale_
from moe_comm.kernels.token_rows import Rows, TokenRows
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.memory import warm_like, warm_rows

Guard = Callable[[], AbstractContextManager[None]]
"""Returns the context of a backward pass, e.g. ``Dispatcher.abort_on_error``."""


def _version(x: Tensor) -> int:
    """Return the number of changes in place of a tensor; inference tensors do not count them."""
    return 0 if x.is_inference() else x._version


def scales_late(dtype: torch.dtype) -> bool:
    """Return whether experts can multiply gradients of ``dtype`` by the routing weights. In fp16 the gradient of an
    activation could overflow before it is multiplied by a small weight."""
    return dtype != torch.float16


def sends_weights(x_TD: Tensor, scaled: bool) -> bool:
    """Return whether experts multiply gradients by the routing weights; equal on every rank.

    Outputs of experts with fp8 GEMMs (``scaled``) are not those of the weights with which backward computes.
    """
    return scales_late(x_TD.dtype) and not scaled


class SerialRun:
    """A call whose backward passes need no outputs of the experts, and what its autograd functions pass to each other.

        forward    x, weights ──dispatch──▶ rows ──experts──▶ outputs ──combine──▶ y
        backward   grad_x, grad_weights ◀── gradients of rows, dots ◀── grad_y and x of each row, its weight ◀── grad_y

    Attributes:
        in_place: whether the experts read the tokens in place.
        observed: whether other code may read or replace the outputs of the experts or their gradient. Then this rank
            keeps the outputs. Ranks may differ. If experts read in place, ``ExpertCall.rows`` is a copy of the rows.
        needs_x, needs_weights: whether the tokens and the routing weights need a gradient.
        outputs: of the experts, until they are combined.
        again: whether a backward pass reads the rows, which are then sent again if they were read in place; the same
            on every rank.
        grad_RD: the gradient of rows that are read in place, from backward of the experts to that of the dispatch.
        gradients: from backward of the combine to that of the experts: the gradient of each row's token, and its
            weight. None: the gradient of the outputs is an argument.
        rows_again: with ``gradients``: the rows, if they were read in place.
        dots_R: the gradient of each row's weight, for backward of the dispatch.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        handle: DispatchHandle,
        tensors: tuple[Tensor, Tensor, Tensor],
        observed: bool,
        rows: TokenRows | None = None,
    ) -> None:
        x_TD, ids_TK, weights_TK = tensors
        self.dispatcher, self.handle, self.observed, self.in_place = dispatcher, handle, observed, rows is not None
        self._x_TD = x_TD.detach() if self.in_place else None
        self._version, self._rows = _version(x_TD), rows
        self._trained = dispatcher.trained
        self.again = False
        self.grad_RD: Tensor | None = None
        self.gradients: tuple[Rows, Tensor] | None = None
        self.rows_again: TokenRows | None = None
        self.dots_R: Tensor | None = None
        self.outputs: tuple[Tensor, int] | None = None
        grad = torch.is_grad_enabled()
        self.needs_x, self.needs_weights = grad and x_TD.requires_grad, grad and weights_TK.requires_grad
        if grad and not self.in_place:
            handle.extra = ExtraRoutes(1, ids_TK.detach().clone().reshape(-1, 1))  # the caller may change its tensor

    @property
    def rows(self) -> TokenRows:
        """The rows of this rank's experts, until these have read them."""
        assert self._rows is not None
        return self._rows

    def connected(self, x_TD: Tensor, weights_TK: Tensor, rows_RD: Tensor | None) -> Tensor:
        """Return ``ExpertCall.rows``: the rows, or what stands for them in the autograd graph."""
        if rows_RD is None:
            rows_RD = self.rows.dense() if self.observed else torch.empty(0, dtype=x_TD.dtype, device=x_TD.device)
        if not self.needs_x and not self.needs_weights:
            return rows_RD
        return _Dispatch.apply(x_TD, weights_TK, rows_RD, self)  # type: ignore[no-any-return]

    def check(self, mlp: ExpertMLP, rows_per_expert: Sequence[int]) -> None:
        """Check the parameters of the experts that read the rows in place, before they do."""
        mlp.check(self.rows, rows_per_expert)
        w13_EGD = mlp.tensors[0]
        # FSDP freezes the weights of ranks without experts.
        trained = self._trained & 1 or (w13_EGD is not None and w13_EGD.requires_grad)
        self.again = bool(mlp.recompute or trained)

    def computed(self, out_RD: Tensor) -> Tensor:
        """Store the outputs of the experts, and return them."""
        self.outputs = None if self.observed else (out_RD.detach(), _version(out_RD))
        return out_RD

    def is_unchanged(self, out_RD: Tensor) -> bool:
        """Return whether these are the outputs that the experts have computed."""
        outputs, self.outputs = self.outputs, None
        if outputs is None or (out_RD.grad_fn is None and (self.needs_x or self.needs_weights)):
            return False
        computed_RD, version = outputs
        same = computed_RD.data_ptr() == out_RD.data_ptr() and computed_RD.stride() == out_RD.stride()
        return same and computed_RD.shape == out_RD.shape and version == _version(out_RD)

    def take(self) -> tuple[Tensor, TokenRows]:
        """Return the tokens of this rank and the rows of its experts, for the experts."""
        rows, self._rows = self.rows, None
        if fault := self.changed():
            raise fault
        assert self._x_TD is not None
        return self._x_TD, rows

    def changed(self) -> InputError | None:
        """Return the error of tokens that were changed after the dispatch."""
        if self._x_TD is None or _version(self._x_TD) == self._version:
            return None
        return InputError(
            f"the tokens of layer {self.handle.label!r} were changed in place between its dispatch and its combine"
        )

    def tokens(self) -> Tensor | None:
        """Return the tokens that the combine saves for backward, and release them."""
        x_TD, self._x_TD = self._x_TD, None
        return x_TD if self.again else None

    def take_gradients(self, grad_RD: Tensor, later: bool) -> tuple[Rows, Tensor | None]:
        """Return the gradient of each row, and its weight, for a backward pass of the experts.

        A pipeline schedule computes the gradients of inputs and of weights in two passes, and ranks may run the second
        passes of their layers in different orders. So the first one keeps what the backward of the combine has sent.

        Args:
            later: Whether a later pass may compute the gradients of the weights.
        """
        gradients, weights_R = self.gradients or (grad_RD, None)
        if not later:
            self.gradients = None
        return gradients, weights_R

    def take_rows(self, x_TD: Tensor | None, later: bool) -> TokenRows:
        """Return the rows that were read in place, for a backward pass; rows that nothing reads, without ``again``.

        Args:
            x_TD: The tokens of this rank, if a pass may compute gradients of outputs that were not combined. Such a
                pass sends the tokens in an operation of its own.
            later: As in ``take_gradients``.
        """
        handle, rows = self.handle, self.rows_again
        if not self.again:
            return TokenRows.unreadable(handle.num_rows, handle.hidden, handle.dtype)
        if rows is None:
            assert x_TD is not None
            rows = self.dispatcher.dispatch_again(x_TD, handle)
        self.rows_again = rows if later else None
        return rows


class _Dispatch(torch.autograd.Function):
    """The dispatch that has been run. Its backward sums the gradients of each token's rows, and returns those of the
    routing weights."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, rows: Tensor, run: SerialRun) -> Tensor:
        ctx.run, ctx.weights_dtype = run, weights_TK.dtype
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: SerialRun = ctx.run
        dense = not run.in_place or run.observed
        grad_RD, run.grad_RD = grad if dense else run.grad_RD, None
        dots_R, run.dots_R = run.dots_R, None
        if not run.needs_x:
            grad_RD = None
        if not run.needs_weights:
            grad_TD = None if grad_RD is None else run.dispatcher.dispatch_backward(grad_RD, run.handle)
            return grad_TD, None, None, None
        if dots_R is None:  # the outputs of the experts have no history
            wide = torch.promote_types(run.handle.dtype, torch.float32)
            dots_R = torch.zeros(run.handle.num_rows, dtype=wide, device=run.handle.device)
        grad_TD, grad_TK = run.dispatcher.return_gradients(grad_RD, dots_R, run.handle)
        return grad_TD, grad_TK.to(ctx.weights_dtype), None, None


class _Combine(torch.autograd.Function):
    """The combine of outputs that are not kept. ``rows``: of ``_Dispatch``, whose backward is collective.

    If other code has replaced or may have read the outputs, they are kept. The gradient of a weight is then computed
    from the output, as ``Dispatcher.combine`` does. Backward also sends the tokens that experts have read in place.
    """

    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, rows: Tensor, weights_TK: Tensor, run: SerialRun, kept: bool) -> Tensor:
        y_TD, wide_TK = run.dispatcher.combine_forward(out_RD, weights_TK, run.handle, True)
        ctx.save_for_backward(wide_TK, out_RD if kept else None, run.tokens())
        ctx.run = run
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        run: SerialRun = ctx.run
        wide_TK, out_RD, x_TD = ctx.saved_tensors
        dispatcher, needs = run.dispatcher, run.needs_weights
        rows_RD: Rows
        if run.in_place:
            sent = dispatcher.share_gradients(grad_TD, x_TD, wide_TK, needs, run.handle)
            rows_RD, run.rows_again, weights_R = sent
        else:
            rows_RD, weights_R = dispatcher.send_gradients(grad_TD, wide_TK, needs, run.handle)
        run.gradients = run.dots_R = None
        if out_RD is not None:
            with dispatcher.abort_on_error(run.handle.label):
                rows_RD = rows_RD if isinstance(rows_RD, Tensor) else rows_RD.dense()
                run.dots_R = scale_(rows_RD, weights_R, out_RD)
                return rows_RD, None, None, None, None
        run.gradients = rows_RD, weights_R
        if isinstance(rows_RD, Tensor):
            return rows_RD, None, None, None, None
        return grad_TD.new_zeros(1, 1).expand(rows_RD.shape), None, None, None, None


@dataclass(frozen=True, eq=False)
class _Backward:
    """What backward needs besides tensors. counts_E: rows per expert, if the experts run in one launch on a GPU."""

    experts: LocalExperts
    sizes: tuple[int, ...]
    alloc: Alloc
    counts_E: Tensor | None
    label: str
    guard: Guard
    run: SerialRun | None = None


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
            h_RG = expert_mlp_gpu.forward(mlp, rows_RD, call.counts_E, out_RD)
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
            elif isinstance(experts, ExpertMLP):
                rows_RD, saved_RG = experts.backward_inputs(rows_RD, scale_RB, saved_RG, call.sizes, grad_RD.dtype)
            rows, width = rows_RD.shape
            if run is not None:
                needs_rows = needs_rows and run.needs_x
            if needs_dots:
                assert weights_R is not None
                dots_R = torch.empty_like(weights_R)
            grad_rows = call.alloc(rows, width, rows_RD.dtype, rows_RD.device) if needs_rows else None
            if call.counts_E is None:
                needed = zip(tensors, needs, strict=True)
                grads = [warm_like(t) if t is not None and need else None for t, need in needed]
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
            else:
                assert isinstance(experts, ExpertMLP)
                from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

                assert isinstance(gradients, Tensor)
                weights = None if weights_R is None else RowWeights(weights_R, None, dots_R)
                of_weights = expert_mlp_gpu.backward(
                    experts, rows_RD, saved_RG, gradients, call.counts_E, grad_rows, needs, weights
                )
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
        rows_per_expert: Rows of each of the E experts; zero is allowed. The sum is R.
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
    counts_E = None
    if isinstance(experts, ExpertMLP) and rows_RD.device.type in TRITON_DEVICES:
        from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

        if expert_mlp_gpu.takes(experts, rows_RD):
            counts_E = torch.tensor(rows_per_expert, dtype=torch.int64, device="cpu").to(
                rows_RD.device, non_blocking=True
            )
    call = _Backward(experts.with_tensors(), tuple(rows_per_expert), alloc, counts_E, label, guard, run)
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
        skips_empty_slots: whether ``compute`` accepts parameters without those of the last experts, if these have no
            rows, with the counts of the others.
        saved_bytes: bytes of rows, inputs of the activation and outputs that autograd keeps for backward, after
            ``combine``; 0 without a backward pass.
    """

    rows: Tensor
    handle: DispatchHandle
    skips_empty_slots = True
    saved_bytes = 0

    def __init__(
        self, dispatcher: Dispatcher, dispatched: Dispatched, weights_TK: Tensor, run: SerialRun | None = None
    ) -> None:
        self._dispatcher, self.handle, self._weights_TK = dispatcher, dispatched.handle, weights_TK
        self._serial = run
        self.rows, self._scaled = dispatched.rows_RD, dispatched.scaled
        self._rows_version = _version(self.rows)

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
        if run is None or not run.in_place:
            mlp.check(rows, rows_per_expert)
        else:
            # FSDP returns an alias.
            same = rows.shape == self.rows.shape and rows.data_ptr() == self.rows.data_ptr()
            if not same or _version(rows) != self._rows_version:
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
        return _Combine.apply(rows, self.rows, weights_TK.detach(), run, kept)  # type: ignore[no-any-return]

    def abort(self, error: Exception) -> None:
        """Report an exception between dispatch and combine to the other ranks; see ``Dispatcher.abort``."""
        self._dispatcher.abort(error, label=self.handle.label)

    def abort_on_error(self) -> AbstractContextManager[None]:
        """Return a context manager that calls ``abort`` for an exception that leaves the ``with`` block."""
        return AbortOnError(self.abort)


def saved_bytes(handle: DispatchHandle, mlp: ExpertMLP, of_rows: int, outputs: bool) -> int:
    """Return ``ExpertCall.saved_bytes`` of a call that keeps ``of_rows`` bytes of rows, and its outputs."""
    w13_EGD = mlp.tensors[0]
    assert w13_EGD is not None
    columns = (0 if mlp.recompute else w13_EGD.shape[1]) + (handle.hidden if outputs else 0)
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
    in_place = in_place and x_TD.device.type not in TRITON_DEVICES and sends_weights(x_TD, scaled)
    if not in_place or not dispatcher.reads_in_place(x_TD):
        dispatched = dispatcher.dispatch(x_TD, ids_TK, label=label, scaled=scaled)
        return call_of(dispatcher, dispatched, x_TD, ids_TK, weights_TK, observed)
    rows, handle = dispatcher.dispatch_in_place(x_TD, ids_TK, label=label)
    with dispatcher.abort_on_error(label):
        run = SerialRun(dispatcher, handle, (x_TD, ids_TK, weights_TK), observed, rows)
        connected = run.connected(x_TD, weights_TK, None)
    return ExpertCall(dispatcher, Dispatched(connected, handle), weights_TK, run)


def call_of(
    dispatcher: Dispatcher, dispatched: Dispatched, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, observed: bool
) -> ExpertCall:
    """Return the call whose rows have been dispatched; see ``serial_call``."""
    if not sends_weights(x_TD, dispatched.scaled is not None):
        return ExpertCall(dispatcher, dispatched, weights_TK)
    handle = dispatched.handle
    with dispatcher.abort_on_error(handle.label):
        run = SerialRun(dispatcher, handle, (x_TD, ids_TK, weights_TK), observed)
        rows_RD = run.connected(x_TD, weights_TK, dispatched.rows_RD.detach())
    return ExpertCall(dispatcher, Dispatched(rows_RD, handle), weights_TK, run)
