"""A reference MoE layer: a plain loop over tokens and experts that shares no code with the package."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def silu_glu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def loop_over_experts(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w13_EGD: Tensor,
    w2_EDF: Tensor,
    act: Callable[[Tensor], Tensor] = silu_glu,
    b13_EG: Tensor | None = None,
    b2_ED: Tensor | None = None,
) -> Tensor:
    """Return the differentiable output [T, D]. G is 2F for a gated ``act``, else F. Slots with id -1 are skipped."""
    y_TD = torch.zeros_like(x_TD)
    for t in range(x_TD.shape[0]):
        total = torch.zeros_like(x_TD[t])
        for k in range(ids_TK.shape[1]):
            e = int(ids_TK[t, k])
            if e < 0:
                continue
            h = w13_EGD[e] @ x_TD[t]
            out = w2_EDF[e] @ act(h if b13_EG is None else h + b13_EG[e])
            total = total + weights_TK[t, k] * (out if b2_ED is None else out + b2_ED[e])
        y_TD = y_TD.index_put((torch.tensor([t]),), total[None], accumulate=True)
    return y_TD
