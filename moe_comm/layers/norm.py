"""Root-mean-square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_comm.errors import InputError


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, as in Llama's family.

    Computed in fp32 (float64 for float64) and rounded once to the dtype of x, so 16-bit results are closer to the
    exact ones than Hugging Face's, which round before the weight comes in; in fp32 they are the same.

    Under sequence parallelism the weight is replicated and its gradient covers this rank's tokens.

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
        """Ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[.., hidden] to the same shape and dtype.

        Raises:
            InputError: x has another width.
        """
        if x.shape[-1:] != (self.hidden,):
            raise InputError(f"an RMSNorm of width {self.hidden} takes [.., {self.hidden}]; got {tuple(x.shape)}")
        if x.dtype == self.weight.dtype:
            return F.rms_norm(x, (self.hidden,), self.weight, self.eps).to(x.dtype)
        # bf16 tokens and fp32 weights, for example: torch would return fp32, or refuse.
        wide = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        return F.rms_norm(x.to(wide), (self.hidden,), self.weight.to(wide), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.hidden}, eps={self.eps:g}"
