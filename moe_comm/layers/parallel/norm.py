"""Root-mean-square normalization (arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_comm.errors import InputError
from moe_comm.kernels.rms_norm import rms_norm


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
