"""What the autograd functions of a call without overlap pass to each other, so that outputs of experts are not kept.

    forward    x, weights ──dispatch──▶ rows ──experts──▶ outputs ──combine──▶ y
    backward   grad_x, grad_weights ◀── gradients of rows, dots ◀── grad_y and x of each row, its weight ◀── grad_y

``dispatch/expert_call.py`` has the autograd function of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_comm.dispatch.dispatcher import Dispatcher
from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import InputError
from moe_comm.kernels.autograd import once_differentiable
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.row_weights import scale_
from moe_comm.kernels.token_rows import Rows, TokenRows


def version_of(x: Tensor) -> int:
    """Return the number of changes in place of a tensor; inference tensors do not count them."""
    return 0 if x.is_inference() else x._version


class SerialRun:
    """A call whose backward passes need no outputs of the experts.

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
        self._version, self._rows = version_of(x_TD), rows
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
            handle.extra = dispatcher.extra_routes(ids_TK, handle)

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
        # FSDP freezes the weights of ranks without experts.
        self.again = bool(mlp.recompute or self._trained & 1 or mlp.tensors[0].requires_grad)

    def computed(self, out_RD: Tensor) -> Tensor:
        """Store the outputs of the experts, and return them."""
        self.outputs = None if self.observed else (out_RD.detach(), version_of(out_RD))
        return out_RD

    def is_unchanged(self, out_RD: Tensor) -> bool:
        """Return whether these are the outputs that the experts have computed."""
        outputs, self.outputs = self.outputs, None
        if outputs is None or (out_RD.grad_fn is None and (self.needs_x or self.needs_weights)):
            return False
        computed_RD, version = outputs
        same = computed_RD.data_ptr() == out_RD.data_ptr() and computed_RD.stride() == out_RD.stride()
        return same and computed_RD.shape == out_RD.shape and version == version_of(out_RD)

    def take(self) -> tuple[Tensor, TokenRows]:
        """Return the tokens of this rank and the rows of its experts, for the experts."""
        rows, self._rows = self.rows, None
        if fault := self.changed():
            raise fault
        assert self._x_TD is not None
        return self._x_TD, rows

    def changed(self) -> InputError | None:
        """Return the error of tokens that were changed after the dispatch."""
        if self._x_TD is None or version_of(self._x_TD) == self._version:
            return None
        return InputError(
            f"the tokens of layer {self.handle.label!r} were changed in place between its dispatch and its combine"
        )

    def tokens(self) -> Tensor | None:
        """Return the tokens that the combine saves for backward, and release them."""
        x_TD, self._x_TD = self._x_TD, None
        return x_TD if self.again else None

    def combine(self, out_RD: Tensor, connected: Tensor, weights_TK: Tensor, kept: bool) -> Tensor:
        """Combine outputs, which autograd keeps if ``kept``. connected: ``ExpertCall.rows``."""
        return _Combine.apply(out_RD, connected, weights_TK.detach(), self, kept)  # type: ignore[no-any-return]

    def take_gradients(self, grad_RD: Tensor, later: bool) -> tuple[Rows, Tensor | None]:
        """Return the gradient of each row, and its weight, for a backward pass of the experts.

        A pipeline schedule computes the gradients of inputs and of weights in two passes. The second one does not run
        the backward of the combine, so the first one keeps what that has sent.

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
        dispatcher, needs = run.dispatcher, run.needs_weights
        with dispatcher.abort_on_error(run.handle.label):  # the caller may have changed the tokens in place
            wide_TK, out_RD, x_TD = ctx.saved_tensors
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
