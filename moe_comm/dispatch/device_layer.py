"""A whole call of a layer over ``local`` on a GPU is one autograd function (``whole_layer.py``).

From the third call with the same shapes, its launches are one native call in forward, and one in backward
(``kernels/triton/program.py``). The kernels and the bits are those of the router's functions and of ``DeviceCall``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moe_comm.dispatch.backends.local import InvalidIds
from moe_comm.dispatch.device_call import (
    backward_of_experts,
    dense,
    forward_of_experts,
    launches_of_backward,
    place,
    sum_of_slots,
)
from moe_comm.dispatch.expert_call import sends_weights
from moe_comm.dispatch.whole_layer import (
    OPERATORS_OF_ROUTE_BACKWARD,
    DeviceRouting,
    WholeCall,
    route,
    route_backward,
    run_whole,
)
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.autograd import with_main_grads
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.tensor_cores import takes_slots
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS

if TYPE_CHECKING:
    from moe_comm.kernels.triton.program import Program

FORWARD_OPERATORS = 9
"""Operators of a forward pass: logits, top-k, two for the places, copies, three of the experts, sum."""


@lru_cache(maxsize=1)
def _programs() -> tuple[Program, Program]:
    from moe_comm.kernels.triton.program import Program  # needs Triton

    return Program(_forward), Program(_backward)


def _forward(
    x_TD: Tensor, source: Tensor, w13: Tensor, w2: Tensor, b13: Tensor | None, b2: Tensor | None,
    first: Tensor | None, second: Tensor | None, fault: Tensor, rule: Any, num_experts: int, activation: Activation,
    kept: tuple[bool, bool, bool], ordered: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return y, the row counts, and what backward needs.

    first, second: ``DeviceRouting.others``. kept: whether there is a backward pass, and whether it needs h and the
    outputs of the experts. ordered: whether a kernel takes rows by slot.
    """
    logits_TE, ids_TK, weights_TK = route(x_TD, source, (first, second), rule)
    assert ids_TK is not None
    place_TK, counts, order = place(ids_TK, fault, num_experts, ordered)
    h_RG, out_RD = forward_of_experts(x_TD, place_TK, counts, order, w13, w2, b13, b2, activation)
    (y_TD,) = sum_of_slots(out_RD, place_TK, weights_TK)
    keeps, keeps_h, keeps_out = kept
    of_rows = (place_TK, order) if keeps else (None,) * 2
    routed = (logits_TE, ids_TK, weights_TK) if keeps and rule is not None else (None,) * 3
    return y_TD, counts, *of_rows, *routed, h_RG if keeps_h else None, out_RD if keeps_out else None


def _backward(
    grad_TD: Tensor, place_TK: Tensor, counts: Tensor, order: Tensor | None, weights_TK: Tensor, x_TD: Tensor,
    w13: Tensor, w2: Tensor, b13: Tensor | None, b2: Tensor | None, h_RG: Tensor | None, out_RD: Tensor | None,
    weight_ED: Tensor | None, logits_TE: Tensor | None, ids_TK: Tensor | None, rule: Any, activation: Activation,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, the source of the routing, and the tensors of the experts. needs: whether these, and
    last the routing weights, need theirs. weight_ED, logits_TE, ids_TK: of a router."""
    needs_x, needs_source, *needs_experts, needs_weights = needs
    grad_x_TD, grad_TK, *grads = backward_of_experts(
        grad_TD, place_TK, counts, order, weights_TK, x_TD, w13, w2, b13, b2, h_RG, out_RD, activation,
        (needs_x, needs_weights, *needs_experts),
    )  # fmt: skip
    routed = logits_TE, ids_TK, weight_ED
    grad_source = route_backward(grad_TK, routed, x_TD, rule, (needs_x, needs_source), grad_x_TD)
    return grad_x_TD, grad_source, *grads


@dataclass(eq=False, slots=True)
class _LocalCall(WholeCall):
    """kept: as in ``_forward``. parameters: w13 and w2, or None for other tensors: with ``main_grad``, hooks of saved
    tensors must not replace them. counts: of the rows, after the forward pass."""

    rule: Any
    others: tuple[Tensor | None, Tensor | None]
    sizes: tuple[int, int]
    activation: Activation
    kept: tuple[bool, bool, bool]
    invalid: InvalidIds
    label: str
    parameters: tuple[nn.Parameter | None, ...]
    counts: Tensor = field(init=False)
    rows: tuple[Tensor, Tensor, Tensor | None] = field(init=False)

    def run_forward(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        rule, (top_k, experts) = self.rule, self.sizes
        inputs = *tensors, *self.others, self.invalid.report(top_k, experts)
        number = FORWARD_OPERATORS if rule is not None else FORWARD_OPERATORS - 2
        y_TD, self.counts, place_TK, order, *saved = _programs()[0](
            number, inputs, rule, experts, self.activation, self.kept, takes_slots(tensors[0])
        )
        self.rows = place_TK, self.counts, order
        return y_TD, tuple(saved)

    def run_backward(
        self, grad_TD: Tensor | None, saved: tuple[Any, ...], needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        assert grad_TD is not None
        self.invalid.check()
        rule, activation = self.rule, self.activation
        x_TD, source, w13, w2, b13, b2, logits_TE, ids_TK, weights_TK, h_RG, out_RD = saved
        w13, w2 = with_main_grads((w13, w2), self.parameters)
        needs_x, needs_source, needs_w13, needs_w2, *needs_biases = needs
        needs_weights = needs_source or (needs_x and rule is not None)
        place_TK, counts, order = self.rows
        inputs = (
            dense(grad_TD), place_TK, counts, order, source if rule is None else weights_TK, x_TD, w13, w2, b13, b2,
            h_RG, out_RD if needs_weights else None, None if rule is None else source, logits_TE, ids_TK,
        )  # fmt: skip
        constants = rule, activation, (*needs, needs_weights)
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=self.label):
            if (needs_w13 and hasattr(w13, "main_grad")) or (needs_w2 and hasattr(w2, "main_grad")):
                return _backward(*inputs, *constants)
            needed = needs_x, needs_weights, needs_w13, needs_w2, *needs_biases
            number = launches_of_backward(sends_weights(x_TD.dtype), h_RG is None, needed, b2 is not None)
            number += OPERATORS_OF_ROUTE_BACKWARD * (needs_weights and rule is not None)
            return _programs()[1](number, inputs, *constants)


def device_layer(
    x_TD: Tensor, routing: DeviceRouting, mlp: ExpertMLP, invalid: InvalidIds, label: str
) -> tuple[Tensor, Tensor, int]:
    """Run a layer on tokens that are dense along D, with weights of their 16-bit dtype, all of it on one GPU.

    Returns:
        [T, D] output; [E + 2] int64 on the device: rows of each expert, dropped and invalid slots; and the bytes of
        outputs and inputs of the activation that are kept for backward.

    Raises:
        InputError, RoutingError: the weights do not match, or invalid logits in an earlier call.
    """
    mlp.check_weights(x_TD)
    source, (w13, w2, b13, b2) = routing.source, mlp.tensors
    # Not ``needs_autograd``, which makes three calls.
    grad = torch.is_grad_enabled()
    keeps_weights = grad and (source.requires_grad or (x_TD.requires_grad and routing.rule is not None))
    keeps = keeps_weights or (grad and (x_TD.requires_grad or w13.requires_grad or w2.requires_grad))
    for bias in (b13, b2):  # a generator is slower
        keeps = keeps or (grad and bias is not None and bias.requires_grad)
    keeps_h = keeps and not mlp.recompute
    keeps_out = keeps_weights and x_TD.dtype is not torch.bfloat16 and not sends_weights(x_TD.dtype)
    parameters = w13 if isinstance(w13, nn.Parameter) else None, w2 if isinstance(w2, nn.Parameter) else None
    kept = keeps, keeps_h, keeps_out
    call = _LocalCall(routing.rule, routing.others, routing.sizes, mlp.activation, kept, invalid, label, parameters)
    with EVENTS.span(Kind.COMPUTE, "experts", layer=label):
        if not keeps:
            return call.run_forward(x_TD, source, w13, w2, b13, b2)[0], call.counts, 0
        y_TD = run_whole(call, x_TD, source, w13, w2, b13, b2)
    columns = keeps_h * w13.shape[1] + keeps_out * x_TD.shape[1]
    return y_TD, call.counts, x_TD.shape[0] * routing.sizes[0] * columns * x_TD.element_size()
