"""Expert ids of routers that return a mask."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_comm.dispatch.types import DROPPED


def ids_of_mask(mask_TE: Tensor, top_k: int) -> tuple[Tensor, int]:
    """Return the experts of each token in ascending order, [T, top_k] int64, then -1; and the most experts of a token.

    If the latter is more than ``top_k``, the ids are not valid.
    """
    (tokens, num_experts), device = mask_TE.shape, mask_TE.device
    count_T = mask_TE.sum(-1, dtype=torch.int32)
    used_TK = torch.arange(top_k, device=device) < count_T.unsqueeze(1)
    most = int(count_T.max()) if tokens else 0
    ids_TK = torch.full(used_TK.shape, DROPPED, device=device)
    if most > top_k:
        return ids_TK, most
    first_T = torch.arange(0, mask_TE.numel(), num_experts, device=device)
    expert_N = _true_positions(mask_TE) - first_T.repeat_interleave(count_T)
    return ids_TK.masked_scatter_(used_TK, expert_N), most


def _true_positions(mask_TE: Tensor) -> Tensor:
    """Return the positions of True in the flat mask, int64. On CPU, NumPy finds them four times faster than torch."""
    if mask_TE.is_cpu:
        return torch.from_numpy(np.flatnonzero(mask_TE.numpy()))
    return mask_TE.flatten().nonzero().squeeze(1)
