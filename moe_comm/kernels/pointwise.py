"""Sigmoid whose bits for an element do not depend on where in the tensor the element stands.

``torch.sigmoid`` and ``silu`` handle the last few elements of a thread's share with another formula than the rest,
so a token's result can change with the number of tokens beside it. ``torch.exp`` does not, and negation, addition
and division are exactly rounded everywhere: composed of these, every element gets the same bits in any batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def sigmoid_values(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in the dtype of ``x``, without autograd. exp may overflow to inf; the quotient is then 0."""
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = sigmoid_values(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return grad * ((1.0 - y) * y)


def sigmoid(x: Tensor) -> Tensor:
    """Differentiable sigmoid of any shape and floating dtype; see the module's text."""
    return _Sigmoid.apply(x)  # type: ignore[no-any-return]
