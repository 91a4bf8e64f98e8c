"""The pipelined executor: experts compute row ranges as they complete, and results return as they are computed.

    dispatch        rows begin to move               what the caller computes between these calls (a shared expert,
    experts         own rows, then each part:        another micro-batch's attention) runs while rows are in transfer;
                    all products; its results        in backward, too, for autograd runs it between the same two
                    return at once                   operators in the other order
    combine         the sums

Each step is an autograd function of its own. The backward pass of ``combine`` sends the gradients, that of ``experts``
computes them as they complete, and that of ``dispatch`` sums what comes back. An empty tensor, the autograd token,
joins them in the graph:

    x, weights ──dispatch──▶ [] ──experts──▶ [] ──combine──▶ y           a whole layer
    x          ──dispatch──▶ [] ──experts──▶ h                           dispatch_matmul
       weights ──dispatch──▶ [] ──experts(h)──▶ [] ──combine──▶ y        matmul_combine

Forward and backward hide the two transfers of each together: combine's parts follow dispatch's as soon as they are
computed, so results return while later rows still arrive (COMET, arXiv 2502.19811, has a kernel for each; Lancet and
Tutel have this form). In backward the gradients of the experts' weights, whole products once an expert's rows are all
computed, fill the waits. Bits are those of the serial executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.dispatch.types import DispatchHandle
from moe_comm.errors import InputError
from moe_comm.kernels.expert_mlp import ExpertBackward, ExpertMLP, LocalExperts, Wanted, by_expert
from moe_comm.kernels.needed_grads import wanted_gradients
from moe_comm.overlap.chunk_plan import Board, Parts, Piece
from moe_comm.overlap.executors.base import ExpertCall
from moe_comm.overlap.executors.transport import RowDispatch, RowReturn, RowSend, SentGradients
from moe_comm.runtime.memory import warm_like, warm_rows

Start = Callable[[Tensor], RowSend]
"""Begins to send the rows of tokens [T, D] to their experts."""


def run_ranges(
    parts: Parts,
    send: RowSend | None,
    back: RowReturn | None,
    compute: Callable[[Piece], None],
    spare: Callable[[], bool] = lambda: False,
) -> None:
    """Compute all rows, part by part, and mark each part as computed.

    Args:
        send: the rows' way here: they are computed as they complete, own rows while no others have. None: all rows are
            here; those whose results return first come first, own rows last.
        back: the results' way back; None: they stay here.
        compute: computes one row range.
        spare: does a part of other work while there are no rows to compute; False: there is none.
    """

    def computed(done: Sequence[int], pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            compute(piece)
        if back is not None:
            for part in done:
                back.computed(part)

    if send is None:
        for group in parts.groups:
            computed(group, parts.of(group))
        for piece in parts.own:
            compute(piece)
        return
    board, left = Board(parts), sum(map(len, parts.groups))
    while left:
        done = send.take(wait=False)
        if not done:
            if (own := board.own()) is not None:
                compute(own)
                continue
            if spare():
                continue
            done = send.take(wait=True)
        left -= len(done)
        computed(done, board.arrived(done))
    while (own := board.own()) is not None:
        compute(own)
    send.close()


@dataclass(eq=False)
class _Run:
    """What one call's autograd functions hand to each other. Backward may run more than once.

    forward, backward: the dispatch, in the chunks of either direction.
    start: begins to send the tokens' rows; None: no rows are dispatched.
    returns: whether results are combined.
    needs_x, needs_weights: whether the tokens and the routing weights need a gradient.
    requires_grad: whether anything does; compared between ranks in combine.
    guard: the context of the experts' backward pass.
    """

    forward: RowDispatch
    backward: RowDispatch
    start: Start | None
    returns: bool
    wide_TK: Tensor | None = None
    weights_dtype: torch.dtype = torch.float32
    needs_x: bool = False
    needs_weights: bool = False
    requires_grad: bool = False
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    send: RowSend | None = None
    back: RowReturn | None = None
    gradients: SentGradients | None = None
    returning: RowReturn | None = None
    weights_grad: Callable[[], Tensor | None] = lambda: None


class _Dispatch(torch.autograd.Function):
    """Tokens and routing weights to the token of the graph."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor | None, weights_TK: Tensor | None, run: _Run) -> Tensor:
        ctx.run = run
        handle = run.forward.handle
        if x_TD is not None and run.start is not None:
            run.send = run.start(x_TD)
            run.start = None
        return torch.empty(0, dtype=handle.dtype, device=handle.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        returning, weights_grad = run.returning, run.weights_grad
        run.returning, run.weights_grad = None, lambda: None
        grad_TK = weights_grad() if run.needs_weights else None
        grad_TK = None if grad_TK is None else grad_TK.to(run.weights_dtype)
        return None if returning is None else returning.result(None), grad_TK, None


class _Combine(torch.autograd.Function):
    """The token of the graph to each token's sum."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, run: _Run) -> Tensor:
        back = run.back
        assert back is not None
        run.back = None
        ctx.run = run
        return back.result(run.wide_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        assert run.wide_TK is not None
        run.gradients = run.backward.send_gradients(grad_TD, run.wide_TK, run.needs_weights)
        return grad_TD.new_empty(0), None


class _Experts(torch.autograd.Function):
    """rows_in: the token of the graph, and the rows if they are not dispatched. Returns the token, or the outputs."""

    @staticmethod
    def forward(
        ctx: Any, token: Tensor, given_RD: Tensor | None, run: _Run, settings: LocalExperts, keep: bool, *tensors: Any
    ) -> Tensor:
        dispatch, send, back = run.forward, run.send, None
        run.send = None
        handle, experts = dispatch.handle, settings.with_tensors(tensors)
        try:
            if send is not None:
                send.open(None)
            if run.returns:
                back = dispatch.send_back("combine", (run.requires_grad, run.needs_weights), send)
            rows_RD = given_RD if send is None else send.rows_RD
            assert rows_RD is not None
            out_RD = _rows(rows_RD, experts.columns) if back is None else back.rows_RD
            passing = experts.forward(rows_RD, out_RD, handle.rows_per_expert, keep, warm_rows)
            run_ranges(dispatch.parts, send, back, lambda piece: passing.row_range(piece.expert, piece.rows))
            if back is not None:
                back.close(run.wide_TK, lambda: False)
        except BaseException as error:
            _abandon(error, send, back)
            raise
        run.back = back
        kept_RD = out_RD if run.returns and run.needs_weights else None
        ctx.save_for_backward(rows_RD, passing.saved_RG, kept_RD, *tensors)
        ctx.run, ctx.settings, ctx.later = run, settings, None
        return token.new_empty(0) if run.returns else out_RD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        wants_token, wants_rows, _, _, _, *wanted = wanted_gradients(ctx)
        grad_rows_RD = None
        if ctx.later is None or run.gradients is not None or not run.returns:
            with run.guard():
                ctx.later = _Backward(ctx, grad_RD, wants_token, wants_rows, wanted)
            grad_rows_RD = ctx.later.grad_rows_RD
        found = ctx.later.weights(wanted)
        ctx.later.grad_rows_RD = None
        needs = ctx.needs_input_grad[5:]
        if any(wanted) or not any(needs):
            ctx.later = None
        token_grad = grad_RD.new_empty(0) if ctx.needs_input_grad[0] else None
        return token_grad, grad_rows_RD if wants_rows else None, None, None, None, *found


class _Backward:
    """The backward pass of the experts; keeps what gradients of weights need, which a schedule may ask for later.

    Attributes:
        grad_rows_RD: the gradient of rows that were not dispatched, but given.
    """

    def __init__(self, ctx: Any, grad_RD: Tensor, wants_token: bool, wants_rows: bool, wanted: Sequence[bool]) -> None:
        # Once only: activation checkpointing gives them no second time.
        rows_RD, saved_RG, results_RD, *tensors = ctx.saved_tensors
        run: _Run = ctx.run
        dispatch, send, back = run.backward, run.gradients, None
        run.gradients = None
        needs = tuple(ctx.needs_input_grad[5:])
        self._tensors, self._sizes = tensors, dispatch.handle.rows_per_expert
        self._found: list[Tensor | None] = [None] * len(tensors)
        self.grad_rows_RD: Tensor | None = None
        try:
            if send is not None:
                send.open(results_RD)
            if run.needs_x and wants_token:
                back = dispatch.send_back("dispatch backward", (False, False), send)
            elif wants_rows:
                self.grad_rows_RD = _rows(rows_RD, rows_RD.shape[1])
            into = self.grad_rows_RD if back is None else back.rows_RD
            grad_RD = grad_RD.contiguous() if send is None else send.rows_RD
            experts = ctx.settings.with_tensors(tensors)
            self._pass: ExpertBackward = experts.backward(
                rows_RD, saved_RG, grad_RD, self._sizes, Wanted(into, needs), warm_rows, False
            )
            self._left = list(self._sizes)
            self._due = deque(expert for expert, size in enumerate(self._sizes) if not size)
            self._allocate(wanted)
            if send is None and back is None:  # nothing to wait for
                for expert, piece in _whole(self._sizes):
                    self._pass.row_range(expert, piece)
                self._due = deque(range(len(self._sizes)))
            else:
                spare = self._one if any(wanted) else lambda: False
                run_ranges(dispatch.parts, send, back, lambda piece: self._compute(piece, send), spare)
                if back is not None:
                    back.close(None, spare)
        except BaseException as error:
            _abandon(error, send, back)
            raise
        run.returning = back
        if send is not None:
            run.weights_grad = send.start_weights()

    def weights(self, wanted: Sequence[bool]) -> list[Tensor | None]:
        """The wanted gradients of weights; None for the others."""
        if any(wanted):
            missing = [now and found is None for now, found in zip(wanted, self._found, strict=True)]
            if any(missing):
                self._due = deque(range(len(self._sizes)))
                self._allocate(missing)
            while self._one():
                pass
        return [found if now else None for now, found in zip(wanted, self._found, strict=True)]

    def _allocate(self, wanted: Sequence[bool]) -> None:
        for place, (t, now) in enumerate(zip(self._tensors, wanted, strict=True)):
            if t is not None and now:
                self._found[place] = warm_like(t)
        now_found = [found if now else None for found, now in zip(self._found, wanted, strict=True)]
        self._into = list(zip(*by_expert(now_found, len(self._sizes)), strict=True))

    def _compute(self, piece: Piece, send: RowSend | None) -> None:
        if send is not None:
            send.prepare(piece)
        self._pass.row_range(piece.expert, piece.rows)
        self._left[piece.expert] -= piece.end - piece.first
        if not self._left[piece.expert]:
            self._due.append(piece.expert)

    def _one(self) -> bool:
        """Compute the gradients of one expert's weights, whose rows are all computed; False: there is none."""
        if not self._due:
            return False
        expert = self._due.popleft()
        self._pass.weights_of(expert, self._into[expert])
        return True


def _whole(sizes: Sequence[int]) -> list[tuple[int, slice]]:
    first, found = 0, []
    for expert, size in enumerate(sizes):
        if size:
            found.append((expert, slice(first, first + size)))
        first += size
    return found


def _abandon(error: BaseException, send: RowSend | None, back: RowReturn | None) -> None:
    if send is not None:
        send.abandon(error)
    if back is not None:
        back.abandon(error)


def _rows(like: Tensor, width: int) -> Tensor:
    return warm_rows(like.shape[0], width, like.dtype, like.device)


def _grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class PipelinedCall(ExpertCall):
    """One call of a whole layer; ``rows`` is the autograd token."""

    def __init__(self, dispatch: RowDispatch, start: Start, x_TD: Tensor, weights_TK: Tensor) -> None:
        # A copy, for the caller's may be changed in place before backward.
        wide_TK = weights_TK.detach().to(dispatch.wide, copy=True)
        run = _Run(dispatch, dispatch, start, True, wide_TK, weights_TK.dtype, _grad(x_TD), _grad(weights_TK))
        run.guard = lambda: dispatch.abort_on_error(None)
        self._dispatch, self._run = dispatch, run
        self.rows = _Dispatch.apply(x_TD, weights_TK, run)

    @property
    def handle(self) -> DispatchHandle:
        return self._dispatch.handle

    def complete(self) -> None:
        if not self._dispatch.in_flight and self._run.send is not None:
            self._run.send.close()

    def compute(self, rows: Tensor, rows_per_expert: Sequence[int], mlp: ExpertMLP) -> Tensor:
        dispatch, run = self._dispatch, self._run
        local, w13 = len(dispatch.dispatcher.local_experts), mlp.tensors[0]
        assert w13 is not None
        if w13.shape[0] != local or w13.shape[2] != dispatch.handle.hidden or w13.device != dispatch.handle.device:
            raise InputError(
                f"an expert layer needs weights [{local}, .., {dispatch.handle.hidden}] of this rank's experts on "
                f"{dispatch.handle.device}; got {tuple(w13.shape)} on {w13.device}"
            )
        mlp.check_weights(rows)
        run.requires_grad = _grad(rows, *mlp.tensors)
        keep = run.requires_grad and not mlp.recomputes
        return _Experts.apply(rows, None, run, mlp.with_tensors(), keep, *mlp.tensors)  # type: ignore[no-any-return]

    def combine(self, rows: Tensor) -> Tensor:
        return _Combine.apply(rows, self._run)  # type: ignore[no-any-return]

    def abort_on_error(self) -> AbstractContextManager[None]:
        return self._dispatch.abort_on_error(self._run.send)


def pipelined_dispatch(dispatch: RowDispatch, start: Start, x_TD: Tensor, experts: LocalExperts) -> Tensor:
    """[R, columns] dispatch, and one product of the rows as they complete. start: begins to send the rows."""
    forward, backward = dispatch.each_way("dispatch_matmul", experts.columns)
    run = _Run(forward, backward, start, False, needs_x=_grad(x_TD))
    token = _Dispatch.apply(x_TD, None, run)
    return _Experts.apply(token, None, run, experts.with_tensors(), False, *experts.tensors)  # type: ignore[no-any-return]


def pipelined_combine(dispatch: RowDispatch, rows_RF: Tensor, experts: LocalExperts, weights_TK: Tensor) -> Tensor:
    """[T, D] one product of the rows, and the combine of its results as they are computed."""
    forward, backward = dispatch.each_way("matmul_combine", rows_RF.shape[1])
    wide_TK = weights_TK.detach().to(dispatch.wide)
    run = _Run(forward, backward, None, True, wide_TK, weights_TK.dtype, needs_weights=_grad(weights_TK))
    run.requires_grad = _grad(rows_RF, weights_TK, *experts.tensors)
    token = _Dispatch.apply(None, weights_TK, run)
    rows_RF = rows_RF.contiguous()
    token = _Experts.apply(token, rows_RF, run, experts.with_tensors(), False, *experts.tensors)
    return _Combine.apply(token, run)  # type: ignore[no-any-return]
