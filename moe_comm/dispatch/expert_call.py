"""A call of a layer's experts without overlap: dispatch, the experts on all their rows, combine.

    rows_RD ──w13──▶ h_RG ──activation──▶ act ──w2──▶ out_RD         expert by expert

Each GEMM writes directly into its slice of the result. The activation is in a scratch buffer for a batch of experts, so
it is still in the cache when the next GEMM reads it; backward recomputes it together with its gradient. Saved for
backward are rows_RD and h_RG, or rows_RD alone with ``recompute``.

On the CPU the first GEMM reads the tokens of all ranks in place, if the dispatcher supports it (``InPlace``). Then x_TD
is saved instead of rows_RD, and backward dispatches the tokens again.

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
from moe_comm.dispatch.types import Dispatched, DispatchHandle
from moe_comm.errors import InputError
from moe_comm.kernels.autograd import compute_dtype, needed_gradients, once_differentiable
from moe_comm.kernels.expert_mlp import Alloc, BackwardInputs, ExpertMLP, LocalExperts, Saved
from moe_comm.kernels.fp8 import ScaledRows
from moe_comm.kernels.native import TRITON_DEVICES
from moe_comm.kernels.token_rows import TokenRows
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS
from moe_comm.runtime.memory import warm_like, warm_rows

Guard = Callable[[], AbstractContextManager[None]]
"""Returns the context of a backward pass, e.g. ``Dispatcher.abort_on_error``."""


def _version(x: Tensor) -> int:
    """Return the number of changes in place of a tensor; inference tensors do not count them."""
    return 0 if x.is_inference() else x._version


class InPlace:
    """A dispatch whose rows the experts read in place, and what its autograd functions pass to each other.

    Attributes:
        grad_RD: the gradient of the rows, from backward of the experts to that of the dispatch.
        needs_x: whether the tokens need a gradient.
        dense: whether ``ExpertCall.rows`` is a copy of the rows, for hooks; else it is empty.
    """

    def __init__(
        self, dispatcher: Dispatcher, x_TD: Tensor, rows: TokenRows, handle: DispatchHandle, dense: bool
    ) -> None:
        self.dispatcher, self.handle, self.dense = dispatcher, handle, dense
        self._shared: tuple[Tensor, TokenRows] | None = (x_TD.detach(), rows)
        self._version = _version(x_TD)
        self._kept: TokenRows | None = None
        self.grad_RD: Tensor | None = None
        self.needs_x = x_TD.requires_grad and torch.is_grad_enabled()

    @property
    def rows(self) -> TokenRows:
        """The rows of this rank's experts, until these have read them."""
        assert self._shared is not None
        return self._shared[1]

    def connected(self, x_TD: Tensor) -> Tensor:
        """Return ``ExpertCall.rows``: what stands for the rows in the autograd graph."""
        rows = self.rows.dense() if self.dense else torch.empty(0, dtype=x_TD.dtype, device=x_TD.device)
        return _DispatchInPlace.apply(x_TD, rows, self)  # type: ignore[no-any-return]

    def take(self) -> tuple[Tensor, TokenRows]:
        """Return the tokens of this rank and the rows of its experts, for the experts."""
        assert self._shared is not None
        shared, self._shared = self._shared, None
        if _version(shared[0]) != self._version:
            raise InputError(
                f"the tokens of layer {self.handle.label!r} were changed in place before its experts read them"
            )
        return shared

    def rows_again(self, x_TD: Tensor, needed: bool, later: bool, needs: tuple[bool, bool]) -> TokenRows:
        """Return the rows for a backward pass; rows that cannot be read, if no pass reads them. Collective otherwise.

        A pipeline schedule computes the gradients of inputs and of weights in two passes, and ranks may run the second
        passes of their layers in different orders. So the first one keeps the rows for it.

        Args:
            x_TD: The tokens of this rank.
            needed, later: Whether this pass, or any pass, reads the rows; the same on every rank.
            needs: Whether this pass computes gradients of inputs, and of weights.
        """
        needs_inputs, needs_weights = needs
        kept, self._kept = self._kept, None
        if kept is not None and not needs_inputs:
            return kept
        if not needed and not later:
            return TokenRows.unreadable(self.handle.num_rows, self.handle.hidden, self.handle.dtype)
        rows = self.dispatcher.dispatch_again(x_TD, self.handle)
        if not needs_weights:
            self._kept = rows
        return rows


class _DispatchInPlace(torch.autograd.Function):
    """The dispatch that has been run. Its backward sums the gradients of each token's rows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows: Tensor, run: InPlace) -> Tensor:
        ctx.run = run
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run: InPlace = ctx.run
        grad_RD, run.grad_RD = grad if run.dense else run.grad_RD, None
        if grad_RD is None or not run.needs_x:
            return None, None, None
        return run.dispatcher.dispatch_backward(grad_RD, run.handle), None, None


@dataclass(frozen=True, eq=False)
class _Backward:
    """What backward needs besides tensors. counts_E: rows per expert, if the experts run in one launch on a GPU.
    in_place: the dispatch whose rows the experts read in place."""

    experts: LocalExperts
    sizes: tuple[int, ...]
    alloc: Alloc
    counts_E: Tensor | None
    label: str
    guard: Guard
    in_place: InPlace | None = None


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
        if call.counts_E is not None and mlp is not None and mlp.gemm_dtype != "fp8":
            from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

            rows_RD = rows_RD if rows_RD.stride(1) == 1 else rows_RD.contiguous()
            out_RD = call.alloc(rows_RD.shape[0], experts.columns, rows_RD.dtype, rows_RD.device)
            h_RG = expert_mlp_gpu.forward(mlp, rows_RD, call.counts_E, out_RD)
            saved: Saved = rows_RD, None, h_RG if keep and not mlp.recompute else None
        elif (run := call.in_place) is not None:
            x_TD, rows = run.take()
            out_RD = call.alloc(rows.shape[0], experts.columns, rows.dtype, rows.device)
            mlp_pass = experts.forward(rows, out_RD, call.sizes, keep, warm_rows)
            mlp_pass.all_rows()
            saved = x_TD, *mlp_pass.saved[1:]
        else:
            out_RD = call.alloc(rows_RD.shape[0], experts.columns, rows_RD.dtype, rows_RD.device)
            mlp_pass = experts.forward(rows_RD if scaled is None else scaled, out_RD, call.sizes, keep, warm_rows)
            mlp_pass.all_rows()
            saved = mlp_pass.saved
        ctx.save_for_backward(*saved, *tensors)
        ctx.call = call
        return out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        call: _Backward = ctx.call
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=call.label), call.guard():
            rows_RD, scale_RB, saved_RG, *tensors = ctx.saved_tensors
            needs_rows, _, _, _, _, *needs = needed_gradients(ctx)
            experts = call.experts.with_tensors(tensors)
            grad_RD = grad_RD if grad_RD.stride(-1) == 1 else grad_RD.contiguous()
            if (run := call.in_place) is not None:
                trained, recomputes = ctx.needs_input_grad[5:], saved_RG is None
                later = any(trained) if recomputes else trained[0]
                rows_RD = run.rows_again(rows_RD, needs[0] or recomputes, later, (needs_rows, any(needs)))
                needs_rows = needs_rows and run.needs_x
            elif isinstance(experts, ExpertMLP):
                rows_RD, saved_RG = experts.backward_inputs(rows_RD, scale_RB, saved_RG, call.sizes, grad_RD.dtype)
            rows, width = rows_RD.shape
            grad_rows = call.alloc(rows, width, rows_RD.dtype, rows_RD.device) if needs_rows else None
            if call.counts_E is None:
                needed = zip(tensors, needs, strict=True)
                grads = [warm_like(t) if t is not None and need else None for t, need in needed]
                inputs = BackwardInputs(
                    rows_RD, saved_RG, grad_RD, call.sizes, grad_rows, tuple(needs), warm_rows, at_once=True
                )
                experts.backward(inputs).all_rows(grads)
            else:
                assert isinstance(experts, ExpertMLP)
                from moe_comm.kernels import expert_mlp_gpu  # only where rows are on a GPU

                of_weights = expert_mlp_gpu.backward(
                    experts, rows_RD, saved_RG, grad_RD, call.counts_E, grad_rows, needs
                )
                grads = [*of_weights, *[None] * (len(tensors) - len(of_weights))]
            if run is not None and not run.dense:
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
    in_place: InPlace | None = None,
) -> Tensor:
    """Run each expert on its own rows. Differentiable once.

    Args:
        rows_RD: [R, D], sorted by expert as ``dispatch`` returns them, in the dtype of the weights.
        rows_per_expert: Rows of each of the E experts; zero is allowed. The sum is R.
        alloc: Allocates the output and the rows' gradient, which other ranks may read in place.
        label: Name of the layer, for the span of backward.
        guard: Context of backward.
        scaled: The rows for experts with fp8 GEMMs, which then do not read ``rows_RD``. None: quantize ``rows_RD``.
        in_place: The dispatch whose rows are read in place; ``rows_RD`` is its empty tensor.

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
    call = _Backward(experts.with_tensors(), tuple(rows_per_expert), alloc, counts_E, label, guard, in_place)
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
    """

    rows: Tensor
    handle: DispatchHandle
    skips_empty_slots = True

    def __init__(
        self, dispatcher: Dispatcher, dispatched: Dispatched, weights_TK: Tensor, in_place: InPlace | None = None
    ) -> None:
        self._dispatcher, self.handle, self._weights_TK = dispatcher, dispatched.handle, weights_TK
        self._in_place = in_place
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
        in_place, self._in_place = self._in_place, None
        if in_place is None:
            mlp.check(rows, rows_per_expert)
        else:
            # FSDP returns an alias.
            same = rows.shape == self.rows.shape and rows.data_ptr() == self.rows.data_ptr()
            if not same or _version(rows) != self._rows_version:
                raise InputError(
                    f"a hook replaced or changed the rows of the experts of layer {label!r}, which are read in place. "
                    "Change the tokens before the layer, or the outputs of the experts"
                )
            mlp.check(in_place.rows, rows_per_expert)
        # A bound method of this object would keep its rows alive as long as the autograd graph.
        guard = partial(dispatcher.abort_on_error, label)
        scaled, self._scaled = self._scaled, None  # autograd keeps what backward needs
        return grouped(mlp, rows, rows_per_expert, dispatcher.empty_rows, label, guard, scaled, in_place)

    def combine(self, rows: Tensor) -> Tensor:
        """Return the weighted sum of the expert outputs of each token, [T, D]."""
        return self._dispatcher.combine(rows, self._weights_TK, self.handle)

    def abort(self, error: Exception) -> None:
        """Report an exception between dispatch and combine to the other ranks; see ``Dispatcher.abort``."""
        self._dispatcher.abort(error, label=self.handle.label)

    def abort_on_error(self) -> AbstractContextManager[None]:
        """Return a context manager that calls ``abort`` for an exception that leaves the ``with`` block."""
        return AbortOnError(self.abort)


def serial_call(
    dispatcher: Dispatcher,
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    label: str = "",
    scaled: bool = False,
    in_place: bool = False,
    dense: bool = False,
) -> ExpertCall:
    """Dispatch, for experts that overlap nothing. Collective. Arguments and errors are those of ``Dispatcher``.

    Args:
        in_place: Experts read the tokens in place if the dispatcher supports it; the same on every rank.
        dense: ``ExpertCall.rows`` is a copy of the rows also then, which hooks read and must not replace. Ranks may
            differ.
    """
    # Backward of experts that read tokens in place is collective, and it does not run on a rank without experts.
    everywhere = min(dispatcher.placement.experts_per_rank, default=0) > 0
    if scaled or not in_place or not everywhere or not dispatcher.reads_in_place(x_TD):
        return ExpertCall(dispatcher, dispatcher.dispatch(x_TD, ids_TK, label=label, scaled=scaled), weights_TK)
    rows, handle = dispatcher.dispatch_in_place(x_TD, ids_TK, label=label)
    with dispatcher.abort_on_error(label):
        run = InPlace(dispatcher, x_TD, rows, handle, dense)
        connected = run.connected(x_TD)
    return ExpertCall(dispatcher, Dispatched(connected, handle), weights_TK, run)
