"""Shared experts, which every token goes through, and zero-computation experts, which no row travels to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_comm.dispatch import DROPPED
from moe_comm.kernels.activations import Activation, SwiGLU, activation_of
from moe_comm.kernels.autocast import cast_parameter, compute_dtype
from moe_comm.kernels.pointwise import sigmoid
from moe_comm.kernels.row_invariant import row_invariant_linear
from moe_comm.kernels.swiglu import swiglu
from moe_comm.layers.parallel.recompute import again


class SharedExpert(nn.Module):
    """A dense MLP beside the routed experts, with a sigmoid gate where ``gate`` is set (Qwen2-MoE).

    Several shared experts of width F are one of width n * F (DeepSeek-V3). For one token the result has the same
    bits in every batch, so it is the same at every number of ranks (for which activations: ``kernels/activations.py``).

    Attributes:
        w13: [G, D], gate rows first. w2: [D, F]. gate: [1, D] or None.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        activation: str | Activation = "swiglu",
        *,
        gate: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.ffn = hidden, ffn
        self.activation = activation_of(activation)
        width_h = 2 * ffn if self.activation.gated else ffn
        self.w13 = nn.Parameter(torch.empty(width_h, hidden, dtype=dtype, device=device))
        self.w2 = nn.Parameter(torch.empty(hidden, ffn, dtype=dtype, device=device))
        self.gate = nn.Parameter(torch.empty(1, hidden, dtype=dtype, device=device)) if gate else None
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Normal weights."""
        for weight in (self.w13, self.w2, self.gate):
            if weight is not None:
                nn.init.normal_(weight, std=std, generator=generator)

    def extra_repr(self) -> str:
        gated = self.gate is not None
        return f"hidden={self.hidden}, ffn={self.ffn}, activation={self.activation.name}, gate={gated}"

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] to [T, D], in autocast's dtype if it is on."""
        x_TD = x_TD.to(compute_dtype(x_TD))
        h_TG = row_invariant_linear(x_TD, cast_parameter(self.w13, x_TD))
        act_TF = again(swiglu, h_TG) if isinstance(self.activation, SwiGLU) else self.activation.fn(h_TG)
        y_TD = row_invariant_linear(act_TF, cast_parameter(self.w2, x_TD))
        if self.gate is None:
            return y_TD
        return sigmoid(row_invariant_linear(x_TD, cast_parameter(self.gate, x_TD))) * y_TD


def split_zero_experts(
    ids_TK: Tensor, weights_TK: Tensor, num_experts: int, num_identity: int
) -> tuple[Tensor, Tensor]:
    """Take zero-computation experts (LongCat-Flash, arXiv 2509.01322) out of the routing.

        ids   0 .. E-1   real experts        E .. E+I-1   identity: adds weight * x        E+I ..   adds nothing

    Returns:
        ids_TK: with -1 in the slots of zero-computation experts, so that nothing travels for them.
        weight_T1: [T, 1] sum of the weights of each token's identity experts.
    """
    identity_TK = (ids_TK >= num_experts) & (ids_TK < num_experts + num_identity)
    # One column after the other: the order of a sum over K must not depend on T.
    kept_TK = weights_TK.masked_fill(~identity_TK, 0.0)
    weight_T1 = kept_TK[:, :1]
    for k in range(1, kept_TK.shape[1]):
        weight_T1 = weight_T1 + kept_TK[:, k : k + 1]
    return ids_TK.masked_fill(ids_TK >= num_experts, DROPPED), weight_T1
