"""A whole call of a layer over ``peer_to_peer`` with ``capacity_rows`` is one autograd function (``whole_layer.py``).

    forward    x ──routing──▶ ids, weights ──dispatch──▶ rows ──experts──▶ outputs ──combine──▶ y
    backward   grad_y, weights ──▶ at the experts: gradients of outputs ──experts──▶ of rows ──sum──▶ grad_x
                                   <activation, its gradient> of each row ─────────────▶ grad_weights ──▶ routing

A call that lends experts (``lending.py``) plans before its dispatch, with the weights of lent experts in slots after
those of the rank, and adds up the gradients of all slots at the homes after backward:

    forward    ids ──plan──▶ ids of slots, copies of weights ──▶ dispatch, experts, combine
    backward   copies of weights ──▶ as above, gradients of slots in fp32 ──collect──▶ of parameters

From the third call with the same shapes, the launches of each pass are one native call: ``dispatch/device_layer.py``
does the same over ``local``. The CPU waits for nothing. Kernels, operations between ranks and bits are those of the
calls of ``expert_call.uncounted_call``, so ranks may choose differently. Rows are kept for backward, outputs are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_comm.comm.header import DISPATCH_FIXED, LEND, RETURN
from moe_comm.dispatch.device_call import dense
from moe_comm.dispatch.operation import Operation
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.peer_to_peer.lending import NativeCall, NativeLending
from moe_comm.dispatch.peer_to_peer.repeated import HeaderFields, PassNumbers
from moe_comm.dispatch.whole_layer import (
    OPERATORS_OF_ROUTE_BACKWARD,
    DeviceRouting,
    WholeCall,
    route,
    route_backward,
    run_whole,
)
from moe_comm.errors import MoeCommError, mark_known
from moe_comm.gpu.protocol import chunk_of
from moe_comm.kernels import expert_mlp_gpu
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.row_weights import RowWeights
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS

FORWARD_OPERATORS = 7
"""Operators of a forward pass: logits, top-k, dispatch, three of the experts, combine."""


class PeerLayer:
    """The calls of the layer ``label`` over a dispatcher."""

    def __init__(self, dispatcher: PeerToPeerDispatcher, label: str) -> None:
        from moe_comm.kernels.triton.program import Program  # needs Triton

        self.dispatcher, self.label = dispatcher, label
        self.forward, self.backward = Program(self._forward), Program(self._backward)

    def __call__(
        self, x_TD: Tensor, routing: DeviceRouting, mlp: ExpertMLP, lent: NativeCall | None = None
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Run the layer on bf16 tokens that are dense along D, with weights of their dtype. Collective.

        lent: of a call that lends experts, whose ``mlp`` has the stacks of the parameters.

        Returns:
            [T, D] output; [E] int64 rows of each of this rank's experts; [T, K] places of the slots, -1 if dropped; and
            the bytes that are kept for backward, without the tokens.

        Raises:
            InputError: the weights do not match.
            PeerError, HeapError: as ``dispatch_uncounted``.
        """
        mlp.check_weights(x_TD)
        source, (w13, w2, b13, b2) = routing.source, mlp.tensors if lent is None else lent.params
        grad = torch.is_grad_enabled()
        needs_x = grad and x_TD.requires_grad
        needs_weights = (grad and source.requires_grad) or (needs_x and routing.rule is not None)
        keeps = needs_x or needs_weights or (grad and (w13.requires_grad or w2.requires_grad))
        for bias in (b13, b2):  # a generator is slower
            keeps = keeps or (grad and bias is not None and bias.requires_grad)
        kept, trained = (keeps, keeps and not mlp.recompute), (needs_x, needs_weights)
        call = _PeerCall(self, routing, mlp, kept, trained, lent)
        with EVENTS.span(Kind.COMPUTE, "experts", layer=self.label):
            if not keeps:
                return call.run_forward(x_TD, source, w13, w2, b13, b2)[0], *call.rows, 0
            y_TD = run_whole(call, x_TD, source, w13, w2, b13, b2)
        capacity = self.dispatcher.capacity_rows or 0
        columns = x_TD.shape[1] + mlp.tensors[0].shape[1] * (not mlp.recompute)
        return y_TD, *call.rows, capacity * columns * x_TD.element_size()

    def _forward(
        self, x_TD: Tensor, source: Tensor, w13: Tensor, w2: Tensor, b13: Tensor | None, b2: Tensor | None,
        first: Tensor | None, second: Tensor | None, rows_CD: Tensor, out_CD: Tensor, fields: HeaderFields, rule: Any,
        activation: Activation, kept: tuple[bool, bool], lends: NativeLending | None, *numbers: int,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return y, the row counts and places, the plan, and what backward needs. w13, w2, b13, b2: those of all slots.
        first, second: ``DeviceRouting.others``. kept: whether there is a backward pass, and whether it needs the inputs
        of the activation. lends: what the call lends; None: nothing."""
        dispatcher, of_pass = self.dispatcher, PassNumbers(*numbers)
        logits_TE, ids_TK, weights_TK = route(x_TD, source, (first, second), rule)
        assert ids_TK is not None
        slots_TK, plan = ids_TK, None
        if lends is not None:
            slots_TK, plan = self._plan(x_TD, ids_TK, lends, of_pass)
        digest = None if plan is None else plan[1:2]
        place_TK, counts_E = dispatcher.queue_dispatch(x_TD, slots_TK, rows_CD, fields, of_pass, digest)
        h_CG = expert_mlp_gpu.forward(ExpertMLP((w13, w2, b13, b2), activation), rows_CD, counts_E, out_CD)
        keeps, keeps_h = kept
        fields = HeaderFields("combine", fields.ahead + 1, self.label, keeps)
        y_TD, _ = dispatcher.queue_sum(out_CD, place_TK, weights_TK, fields, of_pass)
        routed = (logits_TE, ids_TK, weights_TK) if keeps and rule is not None else (None,) * 3
        return y_TD, counts_E, place_TK, plan, *routed, h_CG if keeps_h else None

    def plan_fields(self, lends: NativeLending) -> HeaderFields:
        """Return the fields of the header of the plan of a call."""
        return HeaderFields(LEND, 0, self.label, placement=lends.homes.digest, experts=lends.homes.experts)

    def _backward(
        self, grad_TD: Tensor, place_TK: Tensor, counts_E: Tensor, weights_TK: Tensor, x_TD: Tensor, w13: Tensor,
        w2: Tensor, b13: Tensor | None, b2: Tensor | None, weight_ED: Tensor | None, logits_TE: Tensor | None,
        ids_TK: Tensor | None, h_CG: Tensor | None, rows_CD: Tensor, plan: Tensor | None, grad_w13: Tensor | None,
        grad_w2: Tensor | None, grad_b13: Tensor | None, grad_b2: Tensor | None, grad_CD: Tensor, weights_C1: Tensor,
        dots_C1: Tensor | None, rule: Any, activation: Activation, compared: bool, needs: tuple[bool, ...],
        lends: tuple[NativeLending, bool] | None, *numbers: int,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """Return the gradients of x, the source of the routing, and the tensors of the experts. needs: whether x, the
        routing weights, the source and these tensors need theirs. weight_ED, logits_TE, ids_TK: of a router. compared:
        whether the routing weights require gradients. grad_w13, grad_w2, grad_b13, grad_b2: outputs for gradients of
        all slots. lends: also whether weights have to be copied into the slots."""
        needs_x, needs_weights, needs_source, *needs_experts = needs
        dispatcher, of_pass, label = self.dispatcher, PassNumbers(*numbers), self.label
        fields = HeaderFields("combine backward", 0, label, compared, 1)
        dispatcher.queue_spread(grad_TD, weights_TK, place_TK, (grad_CD, weights_C1), fields, of_pass)
        weights = RowWeights(weights_C1.view(-1), None, None if dots_C1 is None else dots_C1.view(-1))
        returned = HeaderFields("dispatch backward", 1, label, needs_x and needs_weights, int(needs_weights))
        grad_TK: Tensor | None = None

        def return_rows(grad_rows_CD: Tensor) -> Tensor:
            nonlocal grad_TK
            x_TD, grad_TK = dispatcher.queue_sum(grad_rows_CD, place_TK, None, returned, of_pass, dots_C1, needs_x)
            return x_TD

        mlp, of_slots = ExpertMLP((w13, w2, b13, b2), activation), (grad_w13, grad_w2, grad_b13, grad_b2)
        if lends is not None:
            assert plan is not None
            mlp = replace(mlp, wide=lambda: (of_slots, ()))
            if lends[1]:
                dispatcher.queue_pull(lends[0].homes, lends[0].stacks, plan)
        grad_x_TD, grads = expert_mlp_gpu.backward_in_one_buffer(
            mlp, h_CG, grad_CD, counts_E, (needs_x, *needs_experts), (lambda _: rows_CD, return_rows), weights
        )
        if needs_weights and not needs_x:
            return_rows(grad_CD)
        if lends is not None and any(needs_experts):
            grads = self._collect(lends[0], plan, of_slots, 1 + (needs_x or needs_weights), of_pass)
        routed = logits_TE, ids_TK, weight_ED
        grad_source = route_backward(grad_TK, routed, x_TD, rule, (needs_x, needs_source), grad_x_TD)
        return grad_x_TD, grad_source, *grads

    def _plan(self, x_TD: Tensor, ids_TK: Tensor, lends: NativeLending, numbers: PassNumbers) -> tuple[Tensor, Tensor]:
        """Return the ids of slots, and the plan, whose weights are copied."""
        dispatcher = self.dispatcher
        width, top_k = (x_TD.shape[1], x_TD.dtype), ids_TK.shape[1]
        header = dispatcher.pass_header(self.plan_fields(lends), width, top_k, numbers)
        slots_TK, plan = dispatcher.queue_lend(header, ids_TK, lends.homes, lends.counted)
        dispatcher.queue_pull(lends.homes, lends.stacks, plan)
        return slots_TK, plan

    def _collect(
        self, lends: NativeLending, plan: Tensor | None, of_slots: expert_mlp_gpu.Grads, ahead: int,
        numbers: PassNumbers,
    ) -> expert_mlp_gpu.Grads:  # fmt: skip
        """Return the gradients of the parameters. of_slots: those of all slots. ahead: operations before it."""
        assert plan is not None
        dispatcher, device = self.dispatcher, self.dispatcher.device
        w13, w2, b13, b2 = (None if of is None else torch.empty(of[0], dtype=of[1], device=device) for of in lends.sums)
        sums = [one for one in (w13, w2, b13, b2) if one is not None]
        header = dispatcher.pass_header(HeaderFields(RETURN, ahead, self.label), (0, sums[0].dtype), 1, numbers)
        first = next(one for one in of_slots if one is not None)
        dispatcher.queue_collect(header, lends.homes, plan, first, sums)
        return w13, w2, b13, b2


@dataclass(eq=False, slots=True)
class _PeerCall(WholeCall):
    """A call of a layer.

    trained: whether the tokens, and the routing weights, require gradients, as the ranks compare it. lent: the experts
    that it lends. dispatch: number of its dispatch. rows: counts and places. The last two are set by the forward pass.
    """

    layer: PeerLayer
    routing: DeviceRouting
    mlp: ExpertMLP
    kept: tuple[bool, bool]
    trained: tuple[bool, bool]
    lent: NativeCall | None
    dispatch: int = field(init=False)
    rows: tuple[Tensor, Tensor] = field(init=False)
    collective: ClassVar[bool] = True

    def run_forward(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        layer, x_TD, routing, lent = self.layer, tensors[0], self.routing, self.lent
        dispatcher, shape, top_k, rule = layer.dispatcher, (x_TD.shape[1], x_TD.dtype), routing.sizes[0], routing.rule
        placement, lends = dispatcher._placement_digest(), None if lent is None else lent.lends
        plans = int(lends is not None)
        fields = HeaderFields(DISPATCH_FIXED, plans, layer.label, self.trained[0], 0, dispatcher.trained, placement)
        first = fields if lends is None else layer.plan_fields(lends)
        operation = dispatcher.first_operation(2 + plans, first, shape, top_k)  # dispatch and combine
        self.dispatch = operation.seq + plans
        memory = dispatcher.memory
        memory.begin(operation, dispatcher.options.timeout_s)
        try:
            rows_CD, out_CD = dispatcher.heap_rows(operation, shape, shape)
            chunks = -(-x_TD.shape[0] * top_k // chunk_of(x_TD.shape[0], top_k))
            run = layer.forward if memory.operations.reserve(2 + plans, chunks) else _without_record(layer._forward)
            number = FORWARD_OPERATORS - 2 * (rule is None) + 2 * plans
            if lent is not None:
                tensors = *tensors[:2], *self.mlp.tensors
            y_TD, counts_E, place_TK, plan, *saved = run(
                number, (*tensors, *routing.others, rows_CD, out_CD), fields, rule, self.mlp.activation, self.kept,
                lends, numbers=PassNumbers(operation.seq, self.dispatch),
            )  # fmt: skip
            if lent is not None:
                lent.plan = plan
                lent.use_slots(plan)
            dispatcher._check_if_blocking()
        except MoeCommError as error:
            mark_known(error)
            raise
        finally:
            memory.end()
        self.rows = counts_E, place_TK
        return y_TD, (*saved, rows_CD)

    def run_backward(
        self, grad_TD: Tensor | None, saved: tuple[Any, ...], needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        x_TD, source, w13, w2, b13, b2, logits_TE, ids_TK, weights_TK, h_CG, rows_CD = saved
        layer, rule, (counts_E, place_TK), (of_x, of_weights) = self.layer, self.routing.rule, self.rows, self.trained
        plan, of_slots = None, tuple[Tensor | None, ...]((None,) * 4)
        if self.lent is not None:
            w13, w2, b13, b2 = self.mlp.tensors
            plan = self.lent.plan
        dispatcher, label, (returns_x, needs_source, *needs_experts) = layer.dispatcher, layer.label, needs
        returns = returns_x or needs_source
        needs_weights = returns and of_weights
        if self.lent is not None and any(needs_experts):  # other ranks may need them
            needs_experts = [one is not None for one in self.lent.lends.sums]
        needed = returns and of_x, needs_weights, needs_source, *needs_experts
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=label):
            try:
                grad_TD = torch.zeros_like(x_TD) if grad_TD is None else dense(grad_TD)
                if self.lent is not None and any(needs_experts):
                    of_slots = (*self.lent.new_gradients(),)
                # The operations of ``send_gradients`` and ``return_gradients``, or of ``dispatch_backward``.
                fields, shape = HeaderFields("combine backward", 0, label, of_weights, 1), (x_TD.shape[1], x_TD.dtype)
                number = 1 + (returns and (of_x or of_weights)) + (plan is not None and any(needs_experts))
                operation = dispatcher.first_operation(number, fields, shape, self.routing.sizes[0], self.dispatch)
                inputs = (
                    grad_TD, place_TK, counts_E, source if rule is None else weights_TK, x_TD, w13, w2, b13, b2,
                    None if rule is None else source, logits_TE, ids_TK, h_CG, rows_CD, plan, *of_slots,
                )  # fmt: skip
                return self._launch_backward(operation, shape, inputs, needed)
            except Exception as error:
                dispatcher.abort(error, label=label)
                raise

    def _launch_backward(
        self,
        operation: Operation,
        shape: tuple[int, torch.dtype],
        inputs: tuple[Tensor | None, ...],
        needed: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """Run ``PeerLayer._backward`` in ``operation``. shape: width and dtype of the rows."""
        layer, rule, of_weights, needs_weights = self.layer, self.routing.rule, self.trained[1], needed[1]
        dispatcher, h_CG, lends = layer.dispatcher, inputs[12], None
        memory = dispatcher.memory
        memory.begin(operation, dispatcher.options.timeout_s)
        try:
            received = dispatcher.heap_rows(operation, shape, *[(1, torch.float32)] * (1 + needs_weights))
            run = layer.backward if memory.operations.reserve(3, 0) else _without_record(layer._backward)
            number = _operators_of_backward(h_CG is None, needed) + (needs_weights and inputs[8] is not None)
            number += OPERATORS_OF_ROUTE_BACKWARD * (needs_weights and rule is not None)
            if self.lent is not None:
                lends = self.lent.lends, self.lent.use_slots(self.lent.plan)
                number += lends[1] + any(needed[3:])
            grads = run(
                number, (*inputs, *received, *[None] * (not needs_weights)), rule, self.mlp.activation, of_weights,
                needed, lends, numbers=PassNumbers(operation.seq, operation.of_call),
            )  # fmt: skip
            dispatcher._check_if_blocking()
        except MoeCommError as error:
            mark_known(error)
            raise
        finally:
            memory.end()
        return grads


@lru_cache
def _operators_of_backward(recomputes: bool, needs: tuple[bool, ...]) -> int:
    """Return the number of operators of ``PeerLayer._backward`` without those of the routing."""
    needs_x, needs_weights, _, needs_w13, needs_w2, needs_b13, needs_b2 = needs
    activation = 2 if needs_x or needs_weights or needs_w13 or needs_b13 else 2 * needs_w2
    of_experts = needs_w13 + needs_w2 + needs_b13 + needs_b2
    return 1 + recomputes + activation + needs_x + (needs_x or needs_weights) + of_experts


def _without_record(body: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return a call of a program's body that is not repeated."""
    return lambda _, inputs, *constants, numbers: body(*inputs, *constants, *numbers)
