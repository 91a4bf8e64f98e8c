"""Expert ids of routers that return a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.dispatch.types import DROPPED
from moe_comm.kernels.native import core, on_cpu
from moe_comm.tensor_memory import address


def ids_of_mask(mask_TE: Tensor, top_k: int) -> tuple[Tensor, int]:
    """Return the experts of each token in ascending order, [T, top_k] int64, then -1; and the most experts of a token.

    If the latter is more than ``top_k``, the ids are not valid.
    """
    (tokens, num_experts), device = mask_TE.shape, mask_TE.device
    if on_cpu(mask_TE):
        mask_TE, ids_TK = mask_TE.contiguous(), torch.empty(tokens, top_k, dtype=torch.int64, device="cpu")
        mask, ids = address(mask_TE, torch.bool), address(ids_TK, torch.int64)
        return ids_TK, core().ids_of_mask(mask, (tokens, num_experts, top_k), ids)
    count_T = mask_TE.sum(-1, dtype=torch.int32)
    used_TK = torch.arange(top_k, device=device) < count_T.unsqueeze(1)
    most = int(count_T.max()) if tokens else 0
    ids_TK = torch.full(used_TK.shape, DROPPED, dtype=torch.int64, device=device)
    if most > top_k:
        return ids_TK, most
    return ids_TK.masked_scatter_(used_TK, mask_TE.nonzero()[:, 1]), most
