"""A whole expert-parallel layer in flight: dispatch, both grouped GEMMs and combine, forward and backward.

    begin           rows leave in chunks             what the caller computes between these calls (a shared expert,
    compute         own rows, then each chunk:       another micro-batch's attention) runs while rows are under way;
                    both products; its results       in backward, too, for autograd runs it between the same two
                    leave at once                    operators in the other order
    result          the sums

Each call is an autograd function of its own. The backward pass of ``result`` sends the gradients, that of ``compute``
follows them as they arrive, and that of ``begin`` sums what comes back. Between them runs a thread of empty tensors:

    x, weights ──begin──▶ [] ──compute──▶ [] ──result──▶ y

Forward and backward hide the two transfers of each together: combine's chunks follow dispatch's as soon as they are
computed, so results travel while later rows still arrive (COMET, arXiv 2502.19811, has a kernel for each; Lancet and
Tutel have this form). In backward the gradients of the experts' weights, whole products once an expert's rows are all
there, fill the waits. Bits are those of ``grouped_mlp`` between dispatch and combine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_comm.comm.channel import Coming
from moe_comm.dispatch.all_to_all import AllToAllDispatcher
from moe_comm.dispatch.types import Layout
from moe_comm.errors import InputError
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.expert_mm import align, each_expert, expert_mm
from moe_comm.kernels.wanted import wanted_gradients
from moe_comm.overlap.chunked import Overlap
from moe_comm.overlap.crossing import Piece
from moe_comm.overlap.expert_products import ExpertGradients, weights_fault
from moe_comm.overlap.matmul_combine import Gradients
from moe_comm.overlap.passage import Homeward, Outward, Passage, follow
from moe_comm.runtime.memory import warm_rows

FIRST_PRODUCTS = 2
"""Products of width F that an expert has for a row before the last one: gate and up."""


@dataclass(frozen=True, eq=False)
class MLPWeights:
    """Of this rank's E experts: w13 [E, G, D], w2 [E, D, F], b13 [E, G] and b2 [E, D] or None; any strides.

    recompute: keep only the rows for backward, at the price of one product more there.
    """

    w13_EGD: Tensor
    w2_EDF: Tensor
    b13_EG: Tensor | None
    b2_ED: Tensor | None
    activation: Activation
    recompute: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.w13_EGD, self.w2_EDF, self.b13_EG, self.b2_ED


@dataclass(eq=False)
class _State:
    """What is under way, handed from one of the three functions to the next."""

    passage: Passage
    wide_TK: Tensor
    weights_dtype: torch.dtype
    needs_x: bool
    needs_dots: bool
    outward: Outward | None = None
    homeward: Homeward | None = None
    gradients: Gradients | None = None
    dots: Coming | None = None


class ExpertFlight:
    """One call of the layer. ``begin``, then ``compute``, then ``result``; every rank alike.

    Attributes:
        thread: empty; what joins the three in autograd.
    """

    def __init__(self, state: _State, thread: Tensor) -> None:
        self._state, self.thread = state, thread

    @classmethod
    def begin(
        cls,
        dispatcher: AllToAllDispatcher,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        overlap: Overlap | None = None,
        *,
        width: int = 0,
        label: str = "",
    ) -> ExpertFlight:
        """Let the rows leave.

        Args:
            x_TD, ids_TK, label: as ``Dispatcher.dispatch`` takes them. weights_TK: [T, K] routing weights.
            overlap: chunks; no result and no gradient depends on them.
            width: F of the experts, from which "auto" learns how much there is to hide behind; alike on every rank.

        Raises:
            ConfigError: Triton is asked for, which has kernels for the two operators only.
            InputError, RoutingError, RankMismatch: on every rank, before rows move.
            PeerDied, PeerTimeout: a rank is gone, or did not call in time.
        """
        passage = cls.agree(dispatcher, x_TD, ids_TK, weights_TK, overlap or Overlap(), width=width, label=label)
        return cls.over(passage, x_TD, weights_TK)

    @staticmethod
    def agree(
        dispatcher: AllToAllDispatcher,
        x_TD: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        overlap: Overlap,
        *,
        width: int,
        label: str,
    ) -> Passage:
        """The first half of ``begin``: nothing has left yet."""
        overlap.check_fused("a whole expert layer")
        if weights_TK.shape != ids_TK.shape or weights_TK.device != x_TD.device:
            fault = InputError(
                f"weights must be {tuple(ids_TK.shape)} on {x_TD.device}, like the ids; got {tuple(weights_TK.shape)} "
                f"on {weights_TK.device}"
            )
            dispatcher.refuse(fault, x_TD, label=label)
        weights_grad = torch.is_grad_enabled() and weights_TK.requires_grad
        first = FIRST_PRODUCTS * width
        return Passage.open(
            dispatcher, x_TD, ids_TK, overlap, width=first, width_back=width, weights_grad=weights_grad, label=label
        )

    @classmethod
    def over(cls, passage: Passage, x_TD: Tensor, weights_TK: Tensor) -> ExpertFlight:
        """The second half."""
        # A copy, for the caller's may be changed in place before backward.
        wide_TK = weights_TK.detach().to(passage.wide, copy=True)
        grad = torch.is_grad_enabled()
        state = _State(
            passage, wide_TK, weights_TK.dtype, grad and x_TD.requires_grad, grad and weights_TK.requires_grad
        )
        return cls(state, _Begin.apply(x_TD, weights_TK, state))

    @property
    def layout(self) -> Layout:
        """Of the rows under way."""
        return self._state.passage.layout

    def compute(self, weights: MLPWeights) -> None:
        """Run the experts on the rows as they arrive, and let the results leave.

        Raises:
            InputError: the weights do not fit the rows; on this rank only.
            PeerDied, PeerTimeout: a rank is gone, or its rows do not come.
        """
        if (fault := self._fault(weights)) is not None:
            raise fault
        inputs = (self.thread, *weights.tensors)
        backward = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        call = _Call(weights.activation, keep_h=backward and not weights.recompute)
        self.thread = _Compute.apply(*inputs, self._state, call)

    def abort_on_error(self) -> AbstractContextManager[None]:
        """Tell the other ranks of an exception in the ``with`` block; they would wait for this one."""
        return _abort_on_error(self._state)

    def _fault(self, weights: MLPWeights) -> InputError | None:
        dispatcher, hidden = self._state.passage.dispatcher, self.layout.hidden
        w13, w2 = weights.w13_EGD, weights.w2_EDF
        like = self.thread.new_empty(0, hidden)
        width = w2.shape[-1] * (2 if weights.activation.gated else 1)
        fault = weights_fault(dispatcher, w13, like, "an expert layer")
        if fault is None and (w2.shape != (w13.shape[0], hidden, w2.shape[-1]) or w13.shape[1] != width):
            fault = InputError(
                f"{weights.activation.name} needs w2 [{w13.shape[0]}, {hidden}, F] and, with w2 {tuple(w2.shape)}, w13 "
                f"[{w13.shape[0]}, {width}, {hidden}]; got {tuple(w13.shape)}"
            )
        if fault is None and w2.dtype != w13.dtype:
            fault = InputError(f"w13 is {w13.dtype} and w2 {w2.dtype}; convert one of them")
        for name, bias, wanted in (("b13", weights.b13_EG, w13.shape[:2]), ("b2", weights.b2_ED, w2.shape[:2])):
            if bias is not None and (bias.shape != wanted or bias.dtype != w13.dtype):
                fault = fault or InputError(
                    f"{name} must be {tuple(wanted)} {w13.dtype}; got {tuple(bias.shape)} {bias.dtype}"
                )
        return fault

    def result(self) -> Tensor:
        """[T, D] the weighted sum of each token's experts.

        Raises:
            PeerDied, PeerTimeout: a rank is gone, or its results do not come.
        """
        return _Result.apply(self.thread, self._state)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Call:
    activation: Activation
    keep_h: bool


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, state: _State) -> Tensor:
        width = x_TD.shape[1]
        state.outward = Outward(state.passage, x_TD, state.passage.opening, _rows_like(x_TD, width))
        ctx.state = state
        return x_TD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        state: _State = ctx.state
        homeward, dots = state.homeward, state.dots
        state.homeward = state.dots = None
        grad_TK = None if dots is None else dots().to(state.weights_dtype)
        return None if homeward is None else homeward.summed(None), grad_TK, None


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, thread: Tensor, state: _State) -> Tensor:
        homeward = state.homeward
        assert homeward is not None
        state.homeward = None
        ctx.state = state
        return homeward.summed(state.wide_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        state: _State = ctx.state
        state.gradients = Gradients(state.passage, grad_TD, state.wide_TK, state.needs_dots)
        return grad_TD.new_empty(0), None


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        thread: Tensor,
        w13_EGD: Tensor,
        w2_EDF: Tensor,
        b13_EG: Tensor | None,
        b2_ED: Tensor | None,
        state: _State,
        call: _Call,
    ) -> Tensor:
        passage, outward = state.passage, state.outward
        assert outward is not None
        state.outward = None
        rows_RD, num = outward.rows_RD, passage.layout.num_rows
        results_RD = _rows_like(rows_RD, w2_EDF.shape[1])(num)
        homeward = Homeward(passage, results_RD, passage.header("combine"))
        largest = max((piece.end - piece.first for piece in passage.crossing.experts), default=0)
        h_RG = _rows_like(rows_RD, w13_EGD.shape[1])(num if call.keep_h else largest)
        act_RF = _rows_like(rows_RD, w2_EDF.shape[2])(largest)
        aligned, aligned_w13, aligned_w2 = align(rows_RD), align(w13_EGD), align(w2_EDF)
        b13, b2 = (each_expert(bias, w13_EGD.shape[0]) for bias in (b13_EG, b2_ED))

        def compute(piece: Piece) -> None:
            e, size = piece.expert, piece.end - piece.first
            h, act = h_RG[piece.rows] if call.keep_h else h_RG[:size], act_RF[:size]
            expert_mm(aligned(rows_RD[piece.rows]), aligned_w13(w13_EGD[e]).t(), h, b13[e])
            call.activation.forward(h, act)
            expert_mm(act, aligned_w2(w2_EDF[e]).t(), results_RD[piece.rows], b2[e])

        follow(outward, passage.crossing, compute, homeward.start)
        passage.check(rows_RD)
        state.homeward = homeward
        kept = results_RD if state.needs_dots else None
        ctx.save_for_backward(rows_RD, h_RG if call.keep_h else None, kept, w13_EGD, w2_EDF, b13_EG, b2_ED)
        ctx.state, ctx.call, ctx.factors = state, call, None
        return thread.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, thread_grad: Tensor) -> tuple[Tensor | None, ...]:
        state: _State = ctx.state
        wanted = wanted_gradients(ctx)
        if state.gradients is not None:
            with _abort_on_error(state):
                ctx.factors = _follow_back(ctx, state.gradients, wanted[1:3])
            state.gradients = None
        factors: _Factors | None = ctx.factors
        assert factors is not None
        sizes = state.passage.layout.rows_per_expert
        found = (
            factors.w13.result() if factors.w13 is not None and wanted[1] else None,
            factors.w2.result() if factors.w2 is not None and wanted[2] else None,
            _sums(factors.grad_h_RG, sizes, factors.b13_EG) if factors.b13_EG is not None and wanted[3] else None,
            _sums(factors.grad_RD, sizes, factors.b2_ED) if factors.b2_ED is not None and wanted[4] else None,
        )
        if any(wanted[1:5]) or not any(ctx.needs_input_grad[1:5]):
            ctx.factors = None
        return thread_grad, *found, None, None


def _abort_on_error(state: _State) -> AbstractContextManager[None]:
    passage = state.passage
    return passage.dispatcher.abort_on_error(passage.layout.label, in_flight=True)


@dataclass(eq=False)
class _Factors:
    """What the gradients of the weights are made of. A schedule may ask for them later than for the rows' gradient."""

    grad_RD: Tensor
    grad_h_RG: Tensor
    w13: ExpertGradients | None
    w2: ExpertGradients | None
    b13_EG: Tensor | None
    b2_ED: Tensor | None


def _follow_back(ctx: Any, gradients: Gradients, wanted: Sequence[bool]) -> _Factors:
    """Follow the gradients as they arrive; send those of the rows home. wanted: now, the gradients of w13 and w2."""
    # Once only: activation checkpointing gives them no second time.
    rows_RD, h_RG, results_RD, w13_EGD, w2_EDF, b13_EG, b2_ED = ctx.saved_tensors
    state: _State = ctx.state
    passage, activation, layout = state.passage, ctx.call.activation, state.passage.layout
    num, grad_RD = layout.num_rows, gradients.rows_RD
    grad_h_RG = _rows_like(rows_RD, w13_EGD.shape[1])(num)
    act_RF = _rows_like(rows_RD, w2_EDF.shape[2])(num)
    aligned, aligned_w13, aligned_w2 = align(rows_RD), align(w13_EGD), align(w2_EDF)
    aligned_grad, aligned_grad_h = align(grad_RD), align(grad_h_RG)
    b13 = each_expert(b13_EG, w13_EGD.shape[0])
    _, needs_w13, needs_w2, *_ = ctx.needs_input_grad
    grads = (
        ExpertGradients(layout.rows_per_expert, grad_h_RG, rows_RD, w13_EGD) if needs_w13 else None,
        ExpertGradients(layout.rows_per_expert, grad_RD, act_RF, w2_EDF) if needs_w2 else None,
    )
    homeward = None
    if state.needs_x:
        grad_rows_RD = _rows_like(rows_RD, rows_RD.shape[1])(num)
        homeward = Homeward(passage, grad_rows_RD, passage.header("dispatch backward"))

    def compute(piece: Piece) -> None:
        e, act, grad_h = piece.expert, act_RF[piece.rows], grad_h_RG[piece.rows]
        grad = gradients.scaled(piece, results_RD)
        if h_RG is not None:
            h = h_RG[piece.rows]
        else:
            h = grad_h  # whose place it takes, and which is written once it has been read
            expert_mm(aligned(rows_RD[piece.rows]), aligned_w13(w13_EGD[e]).t(), h, b13[e])
        expert_mm(aligned_grad(grad), aligned_w2(w2_EDF[e]), act)
        activation.backward(h, act, grad_h, act)
        if homeward is not None:
            expert_mm(aligned_grad_h(grad_h), aligned_w13(w13_EGD[e]), grad_rows_RD[piece.rows])
        for grad_w in grads:
            if grad_w is not None:
                grad_w.computed(piece)

    def spare() -> bool:
        return any(grad_w.one() for grad_w, now in zip(grads, wanted, strict=True) if grad_w is not None and now)

    follow(gradients, passage.crossing, compute, homeward.start if homeward is not None else lambda chunk: None, spare)
    state.homeward, state.dots = homeward, gradients.start_dots(results_RD)
    return _Factors(grad_RD, grad_h_RG, *grads, b13_EG, b2_ED)


def _rows_like(x: Tensor, width: int) -> Callable[[int], Tensor]:
    return lambda rows: warm_rows(rows, width, x.dtype, x.device)


def _sums(grad_RX: Tensor, rows_per_expert: tuple[int, ...], like_EX: Tensor | None) -> Tensor:
    """[E, X] the gradient of a bias."""
    assert like_EX is not None
    found = torch.zeros_like(like_EX)
    for grad, into in zip(grad_RX.split(rows_per_expert), found, strict=True):
        if grad.shape[0]:
            torch.sum(grad, 0, out=into)
    return found
