"""Activations between the two GEMMs of an expert, by name or as a function.

An activation maps h_RG to act_RF: G = 2F if it is gated (a GLU), else G = F. Forward and backward write to buffers that
all experts of a layer share.

The bits of a row do not depend on the other rows (see ``pointwise.py``), so neither on the number of ranks, nor on the
row ranges in which an expert is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import ConfigError
from moe_comm.kernels.native import TRITON_DEVICES, for_triton
from moe_comm.kernels.pointwise import gelu, gelu_tanh, in_whole_vectors, sigmoid, silu
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

    @property
    def glu(self) -> tuple[float, float] | None:
        """``gpu.gemm.Glu`` of GPU kernels that compute it behind a GEMM; None if there are none."""
        return None

    def __call__(self, h_RG: Tensor) -> Tensor:
        """Return the activation of ``h_RG``; differentiable. A row has the same bits in every batch."""
        return in_whole_vectors(self.fn, h_RG, h_RG.shape[1] // (2 if self.gated else 1))

    def forward(self, h_RG: Tensor, out_RF: Tensor) -> None:
        """Write the activation of ``h_RG`` into ``out_RF``."""
        with torch.no_grad():
            out_RF.copy_(self(h_RG))

    def backward(self, h_RG: Tensor, grad_RF: Tensor, grad_h_RG: Tensor, act_RF: Tensor) -> None:
        """Write the gradient of ``h_RG`` into ``grad_h_RG`` and the activation into ``act_RF``.

        ``grad_h_RG`` may be the memory of ``h_RG``; ``act_RF`` may be that of ``grad_RF``.
        """
        with torch.enable_grad():
            leaf = h_RG.detach().requires_grad_()
            act = self(leaf)
            (grad,) = torch.autograd.grad(act, leaf, grad_RF)
        grad_h_RG.copy_(grad)
        act_RF.copy_(act.detach())


class Composed(Activation):
    """An activation composed of operators whose bits do not depend on the position of an element."""

    def __call__(self, h_RG: Tensor) -> Tensor:
        return self.fn(h_RG)

    def __deepcopy__(self, memo: Any) -> Composed:
        return self  # copies of a layer share its recorded launches, which are found by the activation


class SwiGLU(Composed):
    """silu(gate) * up with gate and up as halves: one pass over memory for forward and for backward."""

    forward = staticmethod(swiglu_forward)
    backward = staticmethod(swiglu_backward)

    glu = 0.0, 0.0


@dataclass(frozen=True)
class ClampedSwiGLU(Composed):
    """gpt-oss's GLU: gate and up interleaved and clamped, (up + 1) * gate * sigmoid(alpha * gate).

    On a GPU, one pass over memory for forward and for backward, in fp32, rounded once.

    Args:
        alpha, limit: the limit of gate and of the size of up is positive.
    """

    alpha: float = 1.702
    limit: float = 7.0

    @property
    def glu(self) -> tuple[float, float] | None:
        return (self.alpha, self.limit) if self.limit > 0 else None

    def forward(self, h_RG: Tensor, out_RF: Tensor) -> None:
        if (glu := self.glu) is not None and _has_kernels(h_RG, out_RF):
            from moe_comm.kernels.triton import swiglu  # needs Triton

            swiglu.swiglu_forward(h_RG, out_RF, glu)
        else:
            super().forward(h_RG, out_RF)

    def backward(self, h_RG: Tensor, grad_RF: Tensor, grad_h_RG: Tensor, act_RF: Tensor) -> None:
        if (glu := self.glu) is not None and _has_kernels(h_RG, grad_RF, grad_h_RG, act_RF):
            from moe_comm.kernels.triton import swiglu  # needs Triton

            swiglu.swiglu_backward(h_RG, grad_RF, grad_h_RG, act_RF, glu)
        else:
            super().backward(h_RG, grad_RF, grad_h_RG, act_RF)


def _has_kernels(h_RG: Tensor, *others: Tensor) -> bool:
    """Return whether Triton kernels support these tensors."""
    return (
        h_RG.device.type in TRITON_DEVICES
        and h_RG.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(t.dtype == h_RG.dtype and t.stride(-1) == 1 for t in (h_RG, *others))
        and for_triton(h_RG, *others)
    )


def glu(act_fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function act_fn(gate) * up with gate and up as halves, as in Hugging Face's experts."""
    return partial(_glu, act_fn)


def _glu(act_fn: Callable[[Tensor], Tensor], h_RG: Tensor) -> Tensor:
    gate, up = h_RG.chunk(2, dim=-1)
    return act_fn(gate) * up


def clamped_swiglu(alpha: float = 1.702, limit: float = 7.0) -> Activation:
    """Return gpt-oss's GLU: gate and up interleaved and clamped, (up + 1) * gate * sigmoid(alpha * gate)."""
    return _clamped(alpha, limit)


@lru_cache(typed=True)  # layers with equal activations share recorded launches
def _clamped(alpha: float, limit: float) -> Activation:
    name, fn = f"clamped_swiglu({alpha}, {limit})", partial(_clamped_swiglu, alpha, limit)
    return ClampedSwiGLU(name, fn, interleaved=True, alpha=alpha, limit=limit)


def _clamped_swiglu(alpha: float, limit: float, h_RG: Tensor) -> Tensor:
    gate = h_RG[..., ::2].clamp(max=limit)
    up = h_RG[..., 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * (gate * sigmoid(gate * alpha))


def _relu2(x: Tensor) -> Tensor:
    return torch.square(torch.relu(x))


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": SwiGLU("swiglu", glu(silu)),
    "geglu": Composed("geglu", glu(gelu)),
    "geglu_tanh": Composed("geglu_tanh", glu(gelu_tanh)),
    "reglu": Composed("reglu", glu(torch.relu)),
    "clamped_swiglu": clamped_swiglu(),
    "silu": Composed("silu", silu, gated=False),
    "gelu": Composed("gelu", gelu, gated=False),
    "gelu_tanh": Composed("gelu_tanh", gelu_tanh, gated=False),
    "relu": Composed("relu", torch.relu, gated=False),
    "relu2": Composed("relu2", _relu2, gated=False),
}


def activation_of(activation: str | Activation) -> Activation:
    """Return the activation with that name, or ``activation`` itself."""
    if isinstance(activation, Activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"unknown activation {activation!r}; known: {', '.join(ACTIVATIONS)}. "
            "Pass any other function as Activation(name, fn, gated)."
        )
    return ACTIVATIONS[activation]
