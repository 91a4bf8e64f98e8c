"""Activations between the two GEMMs of an expert, by name or as a function.

An activation maps h_RG to act_RF: G = 2F if it is gated (a GLU), else G = F. Forward and backward write to buffers that
all experts of a layer share.

Routed experts run one by one, so their bits do not depend on the placement of experts. For a shared expert the bits
must also not depend on the batch. That holds for the SwiGLUs, relu and exact gelu in fp32. torch's tanh gelu and silu
round the last elements of a tensor differently (see ``pointwise.py``).
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

    Args:
        name: Name, for messages.
        fn: Maps [R, G] to [R, F], row by row.
        gated: Whether G = 2F; else G = F.
        interleaved: Whether gate and up of a gated activation alternate (gate 0, up 0, gate 1, ...) instead of being
            halves. Expert tensor parallelism needs it to shard the weights.
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
    """silu(gate) * up with gate and up as halves: one pass over memory for forward and for backward."""

    forward = staticmethod(swiglu_forward)
    backward = staticmethod(swiglu_backward)


def glu(act_fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function act_fn(gate) * up with gate and up as halves, as in Hugging Face's experts."""

    def fn(h_RG: Tensor) -> Tensor:
        gate, up = h_RG.chunk(2, dim=-1)
        return act_fn(gate) * up

    return fn


def clamped_swiglu(alpha: float = 1.702, limit: float = 7.0) -> Activation:
    """Return gpt-oss's GLU: gate and up interleaved and clamped, (up + 1) * gate * sigmoid(alpha * gate)."""

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
    """Return the activation with that name, or ``activation`` itself.

    Raises:
        ConfigError: the name is unknown.
    """
    if isinstance(activation, Activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}. "
            "Pass any other function as Activation(name, fn, gated)."
        )
    return ACTIVATIONS[activation]
