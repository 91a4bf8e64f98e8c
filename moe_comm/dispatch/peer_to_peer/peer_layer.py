"""A whole call of a layer over ``peer_to_peer`` with ``capacity_rows`` is one autograd function, router included.

    forward    x ──router──▶ ids, weights ──dispatch──▶ rows ──experts──▶ outputs ──combine──▶ y
    backward   grad_y, weights ──▶ at the experts: gradients of outputs ──experts──▶ of rows ──sum──▶ grad_x
                                   <activation, its gradient> of each row ──────────▶ grad_weights ──▶ router

From the third call with the same shapes, the launches of each pass are one native call: ``dispatch/device_layer.py``
does the same over ``local``. The CPU waits for nothing. Kernels, operations between ranks and bits are those of the
calls of ``expert_call.uncounted_call``, so ranks may choose differently. Rows are kept for backward, outputs are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.comm.header import DISPATCH_FIXED, EXTRA, EXTRA_BACKWARD
from moe_comm.dispatch.device_call import dense
from moe_comm.dispatch.device_layer import DeviceRouter
from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.peer_to_peer.primitives import KernelOperation
from moe_comm.dispatch.peer_to_peer.repeated import HeaderFields, PassNumbers
from moe_comm.gpu.protocol import chunk_of
from moe_comm.kernels import expert_mlp_gpu
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.autograd import needed_gradients, once_differentiable
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.row_weights import RowWeights
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS

FORWARD_OPERATORS = 7
"""Operators of a forward pass: logits, top-k, dispatch, three of the experts, combine."""


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """What backward needs besides tensors. trained: whether the tokens, and the routing weights, require gradients, as
    the ranks compare it."""

    layer: PeerLayer
    rule: Any
    activation: Activation
    dispatch: int
    trained: tuple[bool, bool]


class PeerLayer:
    """The calls of the layer ``label`` over a dispatcher."""

    def __init__(self, dispatcher: PeerToPeerDispatcher, label: str) -> None:
        from moe_comm.kernels.triton.program import Program  # needs Triton

        self.dispatcher, self.label = dispatcher, label
        self.forward, self.backward = Program(self._forward), Program(self._backward)

    def __call__(self, x_TD: Tensor, router: DeviceRouter, mlp: ExpertMLP) -> tuple[Tensor, Tensor, Tensor, int]:
        """Run the layer on bf16 tokens that are dense along D, with weights of their dtype. Collective.

        Returns:
            [T, D] output; [E] int64 rows of each of this rank's experts; [T, K] places of the slots, -1 if dropped; and
            the bytes that are kept for backward, without the tokens.

        Raises:
            InputError: the weights do not match.
            PeerError, HeapError: as ``dispatch_uncounted``.
        """
        mlp.check_weights(x_TD)
        dispatcher, weight_ED, rule, (w13, w2, _, _) = self.dispatcher, router.weight_ED, router.rule, mlp.tensors
        assert w13 is not None
        assert w2 is not None
        grad = torch.is_grad_enabled()
        needs_x, keeps_routing = grad and x_TD.requires_grad, grad and (x_TD.requires_grad or weight_ED.requires_grad)
        keeps = keeps_routing or (grad and (w13.requires_grad or w2.requires_grad))
        trained, placement = dispatcher.trained, dispatcher._placement_digest()
        fields = HeaderFields(DISPATCH_FIXED, 0, self.label, needs_x, 0, trained, placement)
        operation = dispatcher.new_operation(fields, (x_TD.shape[1], x_TD.dtype), rule.top_k)
        dispatcher.count_operations(1)  # combine
        kept = keeps, keeps and not mlp.recompute
        constants = fields, rule, mlp.activation, kept
        call = _Call(self, rule, mlp.activation, operation.seq, (needs_x, keeps_routing))
        inputs = x_TD, weight_ED, w13, w2, router.bias_E, router.load_E
        with EVENTS.span(Kind.COMPUTE, "experts", layer=self.label):
            if not keeps:
                (y_TD, counts_E, place_TK, *_), _ = self.run_forward(operation, inputs, constants)
                return y_TD, counts_E, place_TK, 0
            y_TD, counts_E, place_TK = _PeerLayer.apply(*inputs, call, operation, constants)
        capacity = dispatcher.peer_options.capacity_rows or 0
        columns = x_TD.shape[1] + w13.shape[1] * (not mlp.recompute)
        return y_TD, counts_E, place_TK, capacity * columns * x_TD.element_size()

    def run_forward(
        self, operation: Operation, inputs: tuple[Tensor | None, ...], constants: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Tensor]:
        """Run ``_forward`` in ``operation``. Also return the rows of this rank's experts."""
        dispatcher, x_TD = self.dispatcher, inputs[0]
        assert x_TD is not None
        shape = x_TD.shape[1], x_TD.dtype
        with KernelOperation(dispatcher, operation):
            rows_CD, out_CD = dispatcher.heap_rows(operation, shape, shape)
            numbers = PassNumbers(operation.seq, operation.seq)
            chunks = -(-x_TD.shape[0] * operation.top_k // chunk_of(x_TD.shape[0], operation.top_k))
            run = self.forward if dispatcher.memory.operations.reserve(2, chunks) else _without_record(self._forward)
            results = run(FORWARD_OPERATORS, (*inputs, rows_CD, out_CD), *constants, numbers=numbers)
            dispatcher._check_if_blocking()
        return results, rows_CD

    def run_backward(
        self, operation: Operation, inputs: tuple[Tensor | None, ...], needs_dots: bool, number: int,
        constants: tuple[Any, ...],
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Run ``_backward``, of ``number`` operators. operation: the first one of the pass, which sends weights."""
        dispatcher = self.dispatcher
        with KernelOperation(dispatcher, operation):
            grad_TD = inputs[0]
            assert grad_TD is not None
            shapes = [(grad_TD.shape[1], grad_TD.dtype), *[(1, torch.float32)] * (1 + needs_dots)]
            grad_CD, weights_C1, *dots = dispatcher.heap_rows(operation, *shapes)
            numbers = PassNumbers(operation.seq - 1, operation.of_call)
            run = self.backward if dispatcher.memory.operations.reserve(4, 0) else _without_record(self._backward)
            received = grad_CD, weights_C1, *(dots or (None,))
            results = run(number, (*inputs, *received), *constants, numbers=numbers)
            dispatcher._check_if_blocking()
        return results

    def _forward(
        self, x_TD: Tensor, weight_ED: Tensor, w13: Tensor, w2: Tensor, bias_E: Tensor | None, load_E: Tensor | None,
        rows_CD: Tensor, out_CD: Tensor, fields: HeaderFields, rule: Any, activation: Activation,
        kept: tuple[bool, bool], *numbers: int,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return y, the row counts and places, and what backward needs. kept: whether there is a backward pass, and
        whether it needs the inputs of the activation."""
        from moe_comm.kernels.triton.linear import linear  # needs Triton
        from moe_comm.kernels.triton.router import select

        dispatcher, of_pass = self.dispatcher, PassNumbers(*numbers)
        logits_TE = linear(x_TD, weight_ED)
        ids_TK, weights_TK, _ = select(logits_TE, bias_E, load_E, rule, False)
        place_TK, counts_E = dispatcher.queue_dispatch(x_TD, ids_TK, rows_CD, fields, of_pass)
        h_CG = expert_mlp_gpu.forward(ExpertMLP((w13, w2, None, None), activation), rows_CD, counts_E, out_CD)
        keeps, keeps_h = kept
        fields = HeaderFields("combine", 1, self.label, keeps)
        y_TD = dispatcher.queue_sum(out_CD, place_TK, weights_TK, fields, of_pass)
        of_routing = (logits_TE, ids_TK, weights_TK) if keeps else (None,) * 3
        return y_TD, counts_E, place_TK, *of_routing, h_CG if keeps_h else None

    def _backward(
        self, grad_TD: Tensor, place_TK: Tensor, counts_E: Tensor, weights_TK: Tensor, x_TD: Tensor, weight_ED: Tensor,
        w13: Tensor, w2: Tensor, logits_TE: Tensor, ids_TK: Tensor, h_CG: Tensor | None, rows_CD: Tensor,
        grad_CD: Tensor, weights_C1: Tensor, dots_C1: Tensor | None, rule: Any, activation: Activation,
        compared: bool, needs: tuple[bool, ...], *numbers: int,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return the gradients of x, the router's weight, w13 and w2. needs: whether x, the routing weights, the
        router, w13 and w2 need theirs. compared: whether the routing weights require gradients."""
        from moe_comm.kernels.triton.linear import linear_gradients  # needs Triton
        from moe_comm.kernels.triton.router import select_backward

        needs_x, needs_weights, needs_router, *needs_experts = needs
        dispatcher, of_pass, label, place_S1 = self.dispatcher, PassNumbers(*numbers), self.label, place_TK.view(-1, 1)
        dispatcher.queue_spread(weights_TK.view(-1, 1), place_S1, weights_C1, HeaderFields(EXTRA, 1, label), of_pass)
        fields = HeaderFields("combine backward", 0, label, compared, 1)
        dispatcher.queue_spread(grad_TD, place_TK, grad_CD, fields, of_pass)
        weights = RowWeights(weights_C1.view(-1), None, None if dots_C1 is None else dots_C1.view(-1))
        of_rows = HeaderFields("dispatch backward", 2, label)
        moves = (
            lambda _: rows_CD,
            lambda grad_rows_CD: dispatcher.queue_sum(grad_rows_CD, place_TK, None, of_rows, of_pass),
        )
        mlp = ExpertMLP((w13, w2, None, None), activation)
        grad_x_TD, grad_w13, grad_w2 = expert_mlp_gpu.backward_in_one_buffer(
            mlp, h_CG, grad_CD, counts_E, (needs_x, *needs_experts), moves, weights
        )
        grad_ED = None
        if needs_weights:
            assert dots_C1 is not None
            fields = HeaderFields(EXTRA_BACKWARD, 3 + needs_x, label)
            grad_TK = dispatcher.queue_sum(dots_C1, place_S1, None, fields, of_pass).view(place_TK.shape)
            (grad_TE,) = select_backward(logits_TE, ids_TK, grad_TK, None, rule)
            _, grad_ED = linear_gradients(grad_TE, x_TD, weight_ED, (needs_x, needs_router), grad_x_TD)
        return grad_x_TD, grad_ED, grad_w13, grad_w2


def peer_layer(dispatcher: PeerToPeerDispatcher, label: str) -> PeerLayer:
    """Return the calls of the layer ``label``."""
    found = dispatcher.whole_layers.get(label)
    if found is None:
        found = dispatcher.whole_layers[label] = PeerLayer(dispatcher, label)
    return found


def _operators_of_backward(recomputes: bool, needs: tuple[bool, ...]) -> int:
    """Return the number of operators of ``PeerLayer._backward``."""
    needs_x, needs_weights, needs_router, needs_w13, needs_w2 = needs
    activation = 2 if needs_x or needs_weights or needs_w13 else 2 * needs_w2
    return 2 + recomputes + activation + 2 * needs_x + needs_w13 + needs_w2 + 3 * needs_weights + needs_router


def _without_record(body: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return a call of a program's body that is not repeated."""
    return lambda _, inputs, *constants, numbers: body(*inputs, *constants, *numbers)


class _PeerLayer(torch.autograd.Function):
    """The output of the layer, the row counts and the places of slots."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_ED: Tensor,
        w13: Tensor,
        w2: Tensor,
        bias_E: Tensor | None,
        load_E: Tensor | None,
        call: _Call,
        operation: Operation,
        constants: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = x_TD, weight_ED, w13, w2, bias_E, load_E
        (y_TD, counts_E, place_TK, *saved), rows_CD = call.layer.run_forward(operation, inputs, constants)
        ctx.save_for_backward(x_TD, weight_ED, w13, w2, *saved, rows_CD)
        ctx.call, ctx.rows = call, (place_TK, counts_E)
        ctx.mark_non_differentiable(counts_E, place_TK)
        ctx.set_materialize_grads(False)
        return y_TD, counts_E, place_TK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        x_TD, weight_ED, w13, w2, logits_TE, ids_TK, weights_TK, h_CG, rows_CD = ctx.saved_tensors
        layer, dispatcher, (place_TK, counts_E) = call.layer, call.layer.dispatcher, ctx.rows
        label, (of_x, of_weights) = layer.label, call.trained
        returns_x, needs_router, needs_w13, needs_w2 = needed_gradients(ctx)[:4]
        returns = returns_x or needs_router
        needs = returns and of_x, returns and of_weights, needs_router, needs_w13, needs_w2
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=label), dispatcher.abort_on_error(label):
            grad_TD = torch.zeros_like(x_TD) if grad_TD is None else dense(grad_TD)
            # The operations of ``send_gradients`` and ``return_gradients``, which begin before those that they contain.
            dispatcher.count_operations(1)
            fields = HeaderFields(EXTRA, 1, label)
            operation = dispatcher.new_operation(fields, (1, torch.float32), 1, call.dispatch)
            if returns:
                dispatcher.count_operations(needs[0] + 2 * needs[1])
            inputs = (
                grad_TD, place_TK, counts_E, weights_TK, x_TD, weight_ED, w13, w2, logits_TE, ids_TK, h_CG, rows_CD,
            )  # fmt: skip
            constants = call.rule, call.activation, of_weights, needs
            number = _operators_of_backward(h_CG is None, needs)
            grads = layer.run_backward(operation, inputs, needs[1], number, constants)
        return *grads, *[None] * 5
