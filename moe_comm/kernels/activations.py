"""Activations between an expert's two matrix products, by name or as any function.

An activation maps h_RG to act_RF: G = 2F where it is gated (a GLU), else G = F. Forward and backward write into
given memory, which is scratch that all experts of a layer share.

Routed experts are evaluated one by one, so their bits do not depend on how they are spread over ranks. For a shared
expert they must not depend on the batch either: that holds for the SwiGLUs, relu and exact gelu in fp32; torch's tanh
form of gelu and its silu round the last few elements of a tensor differently (see ``pointwise.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.kernels.pointwise import sigmoid
from moe_comm.kernels.swiglu import swiglu_backward, swiglu_forward


@dataclass(frozen=True)
class Activation:
    """A differentiable function of rows, evaluated and differentiated by torch.

    fn: [R, G] -> [R, F], row by row.
    gated: G = 2F. Else G = F.
    interleaved: the two inputs of a gated one stand side by side (gate 0, up 0, gate 1, ...), not in halves; cutting
        an expert over several ranks must know.
    """

    name: str
    fn: Callable[[Tensor], Tensor]
    gated: bool = True
    interleaved: bool = False

    def forward(self, h_RG: Tensor, out_RF: Tensor) -> None:
        """Write the activation of ``h_RG`` into ``out_RF``."""
        with torch.no_grad():
            out_RF.copy_(self.fn(h_RG))

    def backward(self, h_RG: Tensor, grad_RF: Tensor, grad_h_RG: Tensor, act_RF: Tensor) -> None:
        """Write the gradient of ``h_RG`` into ``grad_h_RG`` and the activation into ``act_RF``.

        ``grad_h_RG`` may be the memory of ``h_RG``; ``act_RF`` may be that of ``grad_RF``.
        """
        with torch.enable_grad():
            leaf = h_RG.detach().requires_grad_()
            act = self.fn(leaf)
            (grad,) = torch.autograd.grad(act, leaf, grad_RF)
        grad_h_RG.copy_(grad)
        act_RF.copy_(act.detach())


class SwiGLU(Activation):
    """silu(gate) * up with gate | up in halves: one pass over memory each way."""

    forward = staticmethod(swiglu_forward)
    backward = staticmethod(swiglu_backward)


def glu(act_fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """act_fn(gate) * up with gate | up in halves: what Hugging Face's experts do with their ``act_fn``."""

    def fn(h_RG: Tensor) -> Tensor:
        gate, up = h_RG.chunk(2, dim=-1)
        return act_fn(gate) * up

    return fn


def clamped_swiglu(alpha: float = 1.702, limit: float = 7.0) -> Activation:
    """gpt-oss's GLU: gate and up interleaved, both clamped, (up + 1) * gate * sigmoid(alpha * gate)."""

    def fn(h_RG: Tensor) -> Tensor:
        gate = h_RG[..., ::2].clamp(max=limit)
        up = h_RG[..., 1::2].clamp(min=-limit, max=limit)
        return (up + 1) * (gate * sigmoid(gate * alpha))

    return Activation(f"clamped_swiglu({alpha}, {limit})", fn, interleaved=True)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return torch.square(torch.relu(x))


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": SwiGLU("swiglu", glu(F.silu)),
    "geglu": Activation("geglu", glu(F.gelu)),
    "geglu_tanh": Activation("geglu_tanh", glu(_gelu_tanh)),
    "reglu": Activation("reglu", glu(torch.relu)),
    "clamped_swiglu": clamped_swiglu(),
    "silu": Activation("silu", F.silu, gated=False),
    "gelu": Activation("gelu", F.gelu, gated=False),
    "gelu_tanh": Activation("gelu_tanh", _gelu_tanh, gated=False),
    "relu": Activation("relu", torch.relu, gated=False),
    "relu2": Activation("relu2", _relu2, gated=False),
}


def activation_of(activation: str | Activation) -> Activation:
    """The activation of that name, or the given one.

    Raises:
        ConfigError: the name is not known.
    """
    if isinstance(activation, Activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}. "
            "Any other function can be given as Activation(name, fn, gated)."
        )
    return ACTIVATIONS[activation]
