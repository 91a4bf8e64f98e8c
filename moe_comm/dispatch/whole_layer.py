"""A whole call of a layer on a GPU is one autograd function: routing, dispatch, experts and combine.

    over ``local``                                   ``device_layer.py``
    over ``peer_to_peer`` with ``capacity_rows``     ``peer_to_peer/peer_layer.py``

The router is a part of the call, or its results are given:

    x_TD ──router──▶ logits_TE ──top-k──▶ ids_TK, weights_TK ──▶ dispatch, experts, combine ──▶ y_TD

The gradient of the tokens by the router is added to that by the experts in the kernel that computes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_comm.kernels.autograd import needed_gradients, once_differentiable


@dataclass(frozen=True, eq=False, slots=True)
class DeviceRouting:
    """The routing of a call.

    Attributes:
        source: the weights of the router [E, D], or given routing weights [T, K] (fp32, contiguous): the tensor that
            gets a gradient.
        others: of a router, the bias that is added for the selection [E] or None, and int64 [E] to which slots are
            counted or None; given expert ids [T, K] (int64, contiguous) and None.
        rule: a ``layers.RouterConfig``; None: the routing is given.
        sizes: K, and the number of experts.
    """

    source: Tensor
    others: tuple[Tensor | None, Tensor | None]
    rule: Any
    sizes: tuple[int, int]


Routed = tuple[Tensor | None, Tensor | None, Tensor | None]


def route(x_TD: Tensor, source: Tensor, others: tuple[Tensor | None, Tensor | None], rule: Any) -> Routed:
    """Return logits, ids and routing weights of ``DeviceRouting``; the logits are None if it is given."""
    if rule is None:
        return None, others[0], source
    from moe_comm.kernels.triton.linear import linear  # needs Triton
    from moe_comm.kernels.triton.router import select

    logits_TE = linear(x_TD, source)
    ids_TK, weights_TK, _ = select(logits_TE, *others, rule, False)
    return logits_TE, ids_TK, weights_TK


OPERATORS_OF_ROUTE_BACKWARD = 2
"""Operators of ``route_backward`` with a router: of the logits, and of both products."""


def route_backward(
    grad_TK: Tensor | None,
    routed: Routed,
    x_TD: Tensor,
    rule: Any,
    needs: tuple[bool, bool],
    grad_x_TD: Tensor | None,
) -> Tensor | None:
    """Return the gradient of ``DeviceRouting.source``, and add that of the tokens to ``grad_x_TD``.

    Args:
        grad_TK: of the routing weights; None if neither the tokens nor the source need it.
        routed: logits, ids, and the weights of the router.
        needs: whether the tokens and the source need a gradient.
    """
    if grad_TK is None or rule is None:
        return grad_TK
    from moe_comm.kernels.triton.linear import counters, linear_gradients  # needs Triton
    from moe_comm.kernels.triton.router import select_backward

    logits_TE, ids_TK, weight_ED = routed
    assert logits_TE is not None
    assert ids_TK is not None
    assert weight_ED is not None
    ended = counters(x_TD, weight_ED) if needs[1] else None
    (grad_TE,) = select_backward(logits_TE, ids_TK, grad_TK, None, rule, ended)
    return linear_gradients(grad_TE, x_TD, weight_ED, needs, grad_x_TD, ended)[1]


class WholeCall(ABC):
    """A call with a backward pass. It keeps what backward needs besides tensors that autograd saves.

    collective: whether other ranks wait for the backward pass of this one.
    """

    collective: ClassVar[bool] = False
    __slots__ = ()

    @abstractmethod
    def run_forward(self, *tensors: Any) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Return the output and the tensors to save.

        tensors: tokens, ``DeviceRouting.source``, and those of the experts: w13, w2, b13 or None and b2 or None.
        """

    @abstractmethod
    def run_backward(
        self, grad_TD: Tensor | None, saved: tuple[Any, ...], needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors of ``run_forward``, which ``saved`` begins with."""


class _WholeLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: WholeCall, *tensors: Tensor | None) -> Tensor:
        y_TD, saved = call.run_forward(*tensors)
        ctx.save_for_backward(*tensors, *saved)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor | None) -> tuple[Tensor | None, ...]:
        call: WholeCall = ctx.call
        if grad_TD is None and not call.collective:
            return (None,) * 7
        return None, *call.run_backward(grad_TD, ctx.saved_tensors, needed_gradients(ctx)[1:])


run_whole = _WholeLayer.apply
"""Takes the call and the tensors of ``WholeCall.run_forward``, and returns the output."""
