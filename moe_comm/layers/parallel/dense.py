"""The norm, and the dense feed-forward block: tensor-parallel, its width F is split over the ranks.

x, own tokens ──gather──▶ all tokens ──w13 [2F/W, D]──▶ gate | up ──silu(gate) * up──▶ ──w2 [D, F/W]──▶ partial y
                                                                               ──reduce-scatter──▶ y, own tokens
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_comm.errors import InputError
from moe_comm.kernels.activations import Activation, SwiGLU, activation_of
from moe_comm.kernels.rms_norm import rms_norm
from moe_comm.kernels.swiglu import swiglu
from moe_comm.layers.parallel.collectives import group_size
from moe_comm.layers.parallel.linear import check_width, column_linear, row_linear, size_per_rank, take_shard
from moe_comm.layers.parallel.module import ParallelModule
from moe_comm.layers.parallel.recompute import recomputed
from moe_comm.overlap.options import Overlap
from moe_comm.topology import Sharding, Split


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, as in Llama's family.

    Computed in fp32 (float64 for float64) and rounded once to the dtype of x. So 16-bit results are more accurate than
    Hugging Face's, which round before the multiplication by the weight; fp32 results are the same. Under sequence
    parallelism the weight is replicated and its gradient covers this rank's tokens.

    Args:
        hidden: width of the last dimension.

    Attributes:
        weight: [hidden].
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-6,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.eps = hidden, eps
        self.weight = nn.Parameter(torch.ones(hidden, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [.., hidden]; the result has the same shape and dtype."""
        if x.shape[-1:] != (self.hidden,):
            raise InputError(f"an RMSNorm of width {self.hidden} expects [.., {self.hidden}]; got {tuple(x.shape)}")
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps:g}"


class DenseMLP(ParallelModule):
    """activation(x @ w13.T) @ w2.T, as in Llama's family with ``swiglu`` (arXiv 2002.05202).

    Args:
        hidden: D.
        ffn: F of the full block.
        group: tensor-parallel group; None: one rank holds the full block.
        activation: a name in ``ACTIVATIONS`` or an ``Activation``; w13 has 2F rows if it is gated, else F.
        sequence_dim: dimension in which input and output tokens are split over the ranks. None: all ranks have all
            tokens, and gradients of replicated parameters elsewhere are complete on each rank (``linear.py``).
        overlap: how the gather and the reduce-scatter overlap with the GEMMs; None: no overlap.

    Attributes:
        w13: [2F / W, D], this rank's gate rows, then its up rows (alternating for an interleaved activation); [F / W,
            D] if the activation is not gated.
        w2: [D, F / W].

    Raises:
        ConfigError: the number of ranks does not divide F, or the activation is unknown.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        group: ProcessGroup | None = None,
        activation: str | Activation = "swiglu",
        *,
        sequence_dim: int | None = 1,
        overlap: Overlap | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.ffn, self.group, self.sequence_dim = hidden, ffn, group, sequence_dim
        self.overlap = overlap
        self.activation = activation_of(activation)
        local_ffn = size_per_rank(ffn, group, "the width (ffn) of a dense block")
        width_h = 2 * local_ffn if self.activation.gated else local_ffn
        self.w13 = nn.Parameter(torch.empty(width_h, hidden, dtype=dtype, device=device))
        self.w2 = nn.Parameter(torch.empty(hidden, local_ffn, dtype=dtype, device=device))
        self.reset_parameters()

    @classmethod
    def from_linears(
        cls,
        gate: nn.Linear,
        up: nn.Linear,
        down: nn.Linear,
        group: ProcessGroup | None = None,
        activation: str | Activation = "swiglu",
        *,
        sequence_dim: int | None = 1,
        overlap: Overlap | None = None,
    ) -> DenseMLP:
        """Build a gated block with this rank's part of three linears, which are equal on all ranks. Copies the weights.

        Raises:
            InputError: a linear has a bias, the shapes do not match, or the activation is not gated.
            ConfigError: the number of ranks does not divide F.
        """
        shapes = [tuple(linear.weight.shape) for linear in (gate, up, down)]
        if shapes[0] != shapes[1] or shapes[2] != shapes[0][::-1]:
            raise InputError(f"gate and up must be [F, D] and down [D, F]; got {shapes[0]}, {shapes[1]}, {shapes[2]}")
        if any(linear.bias is not None for linear in (gate, up, down)):
            raise InputError("DenseMLP has no biases; use ColumnParallelLinear and RowParallelLinear for these linears")
        width, hidden = shapes[0]
        block = cls(hidden, width, group, activation, sequence_dim=sequence_dim, overlap=overlap, device="meta")
        if not block.activation.gated:
            raise InputError(f"a block of gate, up and down needs a gated activation; got {block.activation.name}")
        pairs = torch.stack((gate.weight.detach(), up.weight.detach()))
        w13 = (pairs.transpose(0, 1) if block.activation.interleaved else pairs).flatten(0, 1)
        (split,) = block.shardings()["w13"].splits
        block.w13 = nn.Parameter(take_shard(w13, split, group), gate.weight.requires_grad)
        block.w2 = nn.Parameter(take_shard(down.weight, Split(1, "tp"), group), down.weight.requires_grad)
        return block

    def reset_parameters(self, std: float = 0.02) -> None:
        """Initialize the weights from a normal distribution, independently on each rank."""
        for weight in (self.w13, self.w2):
            nn.init.normal_(weight, std=std)

    def shardings(self) -> dict[str, Sharding]:
        """Return the sharding of each parameter."""
        rows = 2 * self.ffn if self.activation.gated else self.ffn
        # Gate and up are split separately; if they are interleaved, one split keeps the pairs together.
        segments = 2 if self.activation.gated and not self.activation.interleaved else 1
        return {
            "w13": Sharding((rows, self.hidden), (Split(0, "tp", segments),)),
            "w2": Sharding((self.hidden, self.ffn), (Split(1, "tp"),)),
        }

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Map [B, S / W, D] to the same shape (any number of leading dimensions). Collective."""
        check_width(x_BSD, self.hidden, "a dense block")
        h_BSG = column_linear(x_BSD, self.w13, self.group, self.sequence_dim, self.overlap)
        h_TG = h_BSG.flatten(0, -2)
        act_TF = recomputed(swiglu, h_TG) if isinstance(self.activation, SwiGLU) else self.activation(h_TG)
        act_BSF = act_TF.view(*h_BSG.shape[:-1], act_TF.shape[-1])
        return row_linear(act_BSF, self.w2, self.group, self.sequence_dim, self.overlap)

    def extra_repr(self) -> str:
        return (
            f"hidden={self.hidden}, ffn={self.ffn}/{group_size(self.group)}, activation={self.activation.name}, "
            f"sequence_dim={self.sequence_dim}"
        )
