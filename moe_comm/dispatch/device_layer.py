"""A whole call of a layer over ``local`` on a GPU is one autograd function: router, dispatch, experts and combine.

    x_TD ──router──▶ logits_TE ──top-k──▶ ids_TK, weights_TK ──▶ the call of ``device_call.py`` ──▶ y_TD

From the third call with the same shapes, its launches are one native call in forward, and one in backward
(``kernels/triton/program.py``). The kernels and the bits are those of the router's functions and of ``DeviceCall``. The
gradient of the tokens by the router is added to that by the experts in the kernel that computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from moe_comm.kernels.activations import Activation
from moe_comm.kernels.autograd import (
    needed_gradients,
    once_differentiable,
    with_main_grads,
)
from moe_comm.kernels.expert_mlp import ExpertMLP
from moe_comm.kernels.tensor_cores import takes_slots
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS

if TYPE_CHECKING:
    from moe_comm.kernels.triton.program import Program

FORWARD_OPERATORS = 9
"""Operators of a forward pass: logits, top-k, two for the places, copies, three of the experts, sum."""


@dataclass(frozen=True, eq=False, slots=True)
class DeviceRouter:
    """The router of a call. rule: a ``layers.RouterConfig``. load_E: int64, to which slots are counted, or None."""

    weight_ED: Tensor
    bias_E: Tensor | None
    load_E: Tensor | None
    rule: Any


@dataclass(frozen=True, eq=False, slots=True)
class DeviceLayerCall:
    """What a call needs besides tensors. kept, ordered: as in ``_forward``."""

    rule: Any
    activation: Activation
    kept: tuple[bool, bool, bool]
    ordered: bool
    invalid: InvalidIds
    label: str


@lru_cache(maxsize=1)
def _programs() -> tuple[Program, Program]:
    from moe_comm.kernels.triton.program import Program  # needs Triton

    return Program(_forward), Program(_backward)


def _forward(
    x_TD: Tensor, weight_ED: Tensor, w13: Tensor, w2: Tensor, bias_E: Tensor | None, load_E: Tensor | None,
    fault: Tensor, rule: Any, activation: Activation, kept: tuple[bool, bool, bool], ordered: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return y, the row counts, and what backward needs.

    kept: whether there is a backward pass, and whether it needs h and the outputs of the experts. ordered: whether a
    kernel takes rows by slot.
    """
    from moe_comm.kernels.triton.linear import linear  # needs Triton
    from moe_comm.kernels.triton.router import select

    logits_TE = linear(x_TD, weight_ED)
    ids_TK, weights_TK, _ = select(logits_TE, bias_E, load_E, rule, False)
    place_TK, counts, order = place(ids_TK, fault, rule.num_choices, ordered)
    h_RG, out_RD = forward_of_experts(x_TD, place_TK, counts, order, w13, w2, activation)
    (y_TD,) = sum_of_slots(out_RD, place_TK, weights_TK)
    keeps, keeps_h, keeps_out = kept
    of_routing = (logits_TE, ids_TK, weights_TK, place_TK, order) if keeps else (None,) * 5
    return y_TD, counts, *of_routing, h_RG if keeps_h else None, out_RD if keeps_out else None


def _backward(
    grad_TD: Tensor, place_TK: Tensor, counts: Tensor, order: Tensor | None, weights_TK: Tensor, x_TD: Tensor,
    w13: Tensor, w2: Tensor, h_RG: Tensor | None, out_RD: Tensor | None, weight_ED: Tensor, logits_TE: Tensor,
    ids_TK: Tensor, rule: Any, activation: Activation, needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return the gradients of x, the router's weight, w13 and w2. needs: whether these are needed."""
    from moe_comm.kernels.triton.linear import linear_gradients  # needs Triton
    from moe_comm.kernels.triton.router import select_backward

    needs_x, needs_router, needs_w13, needs_w2 = needs
    needs_weights = needs_x or needs_router
    grad_x_TD, grad_TK, grad_w13, grad_w2 = backward_of_experts(
        grad_TD, place_TK, counts, order, weights_TK, x_TD, w13, w2, h_RG, out_RD, activation,
        (needs_x, needs_weights, needs_w13, needs_w2),
    )  # fmt: skip
    grad_ED = None
    if needs_weights:
        (grad_TE,) = select_backward(logits_TE, ids_TK, grad_TK, None, rule)
        _, grad_ED = linear_gradients(grad_TE, x_TD, weight_ED, (needs_x, needs_router), grad_x_TD)
    return grad_x_TD, grad_ED, grad_w13, grad_w2


class _DeviceLayer(torch.autograd.Function):
    """The output of the layer, and the row counts."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_ED: Tensor,
        w13: Tensor,
        w2: Tensor,
        others: tuple[Tensor | None, ...],
        call: DeviceLayerCall,
    ) -> tuple[Tensor, Tensor]:
        y_TD, counts, logits_TE, ids_TK, weights_TK, place_TK, order, h_RG, out_RD = _programs()[0](
            FORWARD_OPERATORS, (x_TD, weight_ED, w13, w2, *others), call.rule, call.activation, call.kept, call.ordered
        )
        ctx.save_for_backward(x_TD, weight_ED, w13, w2, logits_TE, ids_TK, weights_TK, h_RG, out_RD)
        # With ``main_grad``, hooks of saved tensors must not replace the parameters.
        parameters = w13 if isinstance(w13, nn.Parameter) else None, w2 if isinstance(w2, nn.Parameter) else None
        ctx.call, ctx.rows, ctx.parameters = call, (place_TK, counts, order), parameters
        ctx.mark_non_differentiable(counts)
        ctx.set_materialize_grads(False)
        return y_TD, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad_TD is None:
            return (None,) * 6
        call: DeviceLayerCall = ctx.call
        call.invalid.check()
        x_TD, weight_ED, w13, w2, logits_TE, ids_TK, weights_TK, h_RG, out_RD = ctx.saved_tensors
        w13, w2 = with_main_grads((w13, w2), ctx.parameters)
        needs = needs_x, needs_router, needs_w13, needs_w2 = needed_gradients(ctx)[:4]
        needs_weights = needs_x or needs_router
        place_TK, counts, order = ctx.rows
        inputs = (
            dense(grad_TD), place_TK, counts, order, weights_TK, x_TD, w13, w2, h_RG, out_RD if needs_weights else None,
            weight_ED, logits_TE, ids_TK,
        )  # fmt: skip
        with EVENTS.span(Kind.COMPUTE, "backward of experts", layer=call.label):
            if (needs_w13 and hasattr(w13, "main_grad")) or (needs_w2 and hasattr(w2, "main_grad")):
                return *_backward(*inputs, call.rule, call.activation, needs), None, None
            number = launches_of_backward(
                sends_weights(x_TD.dtype), h_RG is None, (needs_x, needs_weights, needs_w13, needs_w2)
            )
            number += 2 * needs_weights + needs_router
            return *_programs()[1](number, inputs, call.rule, call.activation, needs), None, None


def device_layer(
    x_TD: Tensor, router: DeviceRouter, mlp: ExpertMLP, invalid: InvalidIds, label: str
) -> tuple[Tensor, Tensor, int]:
    """Run a layer on tokens that are dense along D, with weights of their 16-bit dtype, all of it on one GPU.

    Returns:
        [T, D] output; [E + 2] int64 on the device: rows of each expert, dropped and invalid slots; and the bytes of
        outputs and inputs of the activation that are kept for backward.

    Raises:
        InputError, RoutingError: the weights do not match, or invalid logits in an earlier call.
    """
    mlp.check_weights(x_TD)
    weight_ED, rule, (w13, w2, _, _) = router.weight_ED, router.rule, mlp.tensors
    assert w13 is not None
    assert w2 is not None
    others = router.bias_E, router.load_E, invalid.report(rule.top_k, rule.num_choices)
    # Not ``needs_autograd``, which makes three calls.
    keeps_routing = torch.is_grad_enabled() and (x_TD.requires_grad or weight_ED.requires_grad)
    keeps = keeps_routing or (torch.is_grad_enabled() and (w13.requires_grad or w2.requires_grad))
    ordered = takes_slots(x_TD)
    with EVENTS.span(Kind.COMPUTE, "experts", layer=label):
        if not keeps:
            y_TD, counts, *_ = _programs()[0](
                FORWARD_OPERATORS, (x_TD, weight_ED, w13, w2, *others), rule, mlp.activation, (False,) * 3, ordered
            )
            return y_TD, counts, 0
        keeps_h, keeps_out = not mlp.recompute, keeps_routing and not sends_weights(x_TD.dtype)
        call = DeviceLayerCall(rule, mlp.activation, (True, keeps_h, keeps_out), ordered, invalid, label)
        y_TD, counts = _DeviceLayer.apply(x_TD, weight_ED, w13, w2, others, call)
    columns = keeps_h * w13.shape[1] + keeps_out * x_TD.shape[1]
    return y_TD, counts, x_TD.shape[0] * rule.top_k * columns * x_TD.element_size()
