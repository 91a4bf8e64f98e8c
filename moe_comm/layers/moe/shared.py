"""Shared experts, which process all tokens, and zero-computation experts, for which no rows are sent."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_comm.dispatch import DROPPED
from moe_comm.kernels.activations import Activation, SwiGLU, activation_of
from moe_comm.kernels.autograd import cast_parameter, compute_dtype
from moe_comm.kernels.pointwise import sigmoid
from moe_comm.kernels.row_invariant import row_invariant_linear
from moe_comm.kernels.swiglu import swiglu
from moe_comm.layers.parallel.recompute import recomputed


class SharedExpert(nn.Module):
    """A dense MLP that is added to the routed experts, with an optional sigmoid gate (Qwen2-MoE).

    n shared experts of width F are one of width n * F (DeepSeek-V3). The result for a token has the same bits in every
    batch, so it does not depend on the number of ranks (``kernels/activations.py`` lists the activations).

    Args:
        hidden: D.
        ffn: F.
        activation: a name in ``ACTIVATIONS`` or an ``Activation``; G = 2F if it is gated, else F.
        gate: scale the output of each token by a learned sigmoid gate.

    Attributes:
        w13: [G, D], gate rows first.
        w2: [D, F].
        gate: [1, D] or None.
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
        """Initialize the weights from a normal distribution."""
        for weight in (self.w13, self.w2, self.gate):
            if weight is not None:
                nn.init.normal_(weight, std=std, generator=generator)

    def extra_repr(self) -> str:
        gated = self.gate is not None
        return f"hidden={self.hidden}, ffn={self.ffn}, activation={self.activation.name}, gate={gated}"

    def forward(self, x_TD: Tensor) -> Tensor:
        """Map [T, D] to [T, D], in autocast's dtype if autocast is on."""
        x_TD = x_TD.to(compute_dtype(x_TD))
        h_TG = row_invariant_linear(x_TD, cast_parameter(self.w13, x_TD))
        act_TF = recomputed(swiglu, h_TG) if isinstance(self.activation, SwiGLU) else self.activation(h_TG)
        y_TD = row_invariant_linear(act_TF, cast_parameter(self.w2, x_TD))
        if self.gate is None:
            return y_TD
        return sigmoid(row_invariant_linear(x_TD, cast_parameter(self.gate, x_TD))) * y_TD


def split_zero_experts(
    ids_TK: Tensor, weights_TK: Tensor, num_experts: int, num_identity: int
) -> tuple[Tensor, Tensor]:
    """Remove zero-computation experts (LongCat-Flash, arXiv 2509.01322) from the routing.

        ids   0 .. E-1   real experts        E .. E+I-1   identity: adds weight * x        E+I ..   adds nothing

    Returns:
        ids_TK with -1 in the slots of zero-computation experts, so that no rows are sent for them; and [T, 1] the sum
        of the weights of each token's identity experts.
    """
    identity_TK = (ids_TK >= num_experts) & (ids_TK < num_experts + num_identity)
    # Add columns one by one: the order of the sum over K must not depend on T.
    identity_weights_TK = weights_TK.masked_fill(~identity_TK, 0.0)
    weight_T1 = identity_weights_TK[:, :1]
    for k in range(1, identity_weights_TK.shape[1]):
        weight_T1 = weight_T1 + identity_weights_TK[:, k : k + 1]
    return ids_TK.masked_fill(ids_TK >= num_experts, DROPPED), weight_T1
