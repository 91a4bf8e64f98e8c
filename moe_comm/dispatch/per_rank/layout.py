"""Where the slots of tokens are sent, and what received rows say of the experts of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_comm.dispatch.slots import sums
from moe_comm.dispatch.types import DROPPED
from moe_comm.kernels.native import core, on_cpu
from moe_comm.tensor_memory import address
from moe_comm.topology import ExpertPlacement

SENDER_WORDS = 2
"""Words of each row in front of the caller's: source rank and token."""


@dataclass(frozen=True)
class RankLayout:
    """Where the slots of this rank's tokens are sent.

    Attributes:
        ranks_TN: int64 ranks of each token, in the order of the last slots that they own; then -1. N is the smaller one
            of K and W.
        per_rank_W, per_expert_E: int32 tokens for each rank, and slots of each expert.
        in_rank_TW: bool.
    """

    ranks_TN: Tensor
    per_rank_W: Tensor
    per_expert_E: Tensor
    in_rank_TW: Tensor


def rank_layout(ids_TK: Tensor, num_experts: int, world: int) -> RankLayout:
    """Return the layout of expert ids, int32 or int64, that are -1 or valid."""
    (tokens, top_k), device = ids_TK.shape, ids_TK.device
    owner_E = _owners(num_experts, world, device)
    if on_cpu(ids_TK):
        ids_TK, ranks_TN = ids_TK.contiguous(), torch.empty(tokens, min(top_k, world), dtype=torch.int64, device="cpu")
        per_rank_W, per_expert_E = (torch.zeros(size, dtype=torch.int32, device="cpu") for size in (world, num_experts))
        in_rank_TW = torch.zeros(tokens, world, dtype=torch.bool, device="cpu")
        outputs = (
            address(per_rank_W, torch.int32),
            address(per_expert_E, torch.int32),
            address(in_rank_TW, torch.bool),
            address(ranks_TN, torch.int64),
        )
        ids, owner = address(ids_TK, ids_TK.dtype), address(owner_E, torch.int32, (num_experts,))
        core().rank_layout(ids, (tokens, top_k), ids_TK.itemsize, owner, world, outputs)
        return RankLayout(ranks_TN, per_rank_W, per_expert_E, in_rank_TW)
    owner_TK = F.pad(owner_E, (1, 0), value=DROPPED)[ids_TK.long() + 1].long()
    repeated_TK = torch.stack([(owner_TK[:, k + 1 :] == owner_TK[:, k, None]).any(1) for k in range(top_k)], 1)
    in_rank_TW = (owner_TK.unsqueeze(2) == torch.arange(world, device=device)).any(1)
    per_expert_E = torch.bincount(ids_TK.flatten() + 1, minlength=1 + num_experts)[1:].int()
    last_TK = owner_TK.masked_fill(repeated_TK, DROPPED)
    order_TN = (last_TK < 0).byte().argsort(dim=1, stable=True)[:, :world]
    return RankLayout(last_TK.gather(1, order_TN), in_rank_TW.sum(0, dtype=torch.int32), per_expert_E, in_rank_TW)


@cache
def _owners(num_experts: int, world: int, device: torch.device) -> Tensor:
    """Return [E] int32, the rank of each expert."""
    counts = torch.tensor(ExpertPlacement.of(num_experts, world).experts_per_rank, dtype=torch.int64, device="cpu")
    return torch.arange(world, dtype=torch.int32, device="cpu").repeat_interleave(counts).to(device)


def local_slots(
    words_RX: Tensor, top_k: int, own: range, dtype: torch.dtype, weighted: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return what received words say of the experts ``own`` of this rank.

    Args:
        words_RX: int32: those of the sender, K expert ids and, if ``weighted``, the bits of K weights.

    Returns:
        [R, K] local ids in ``dtype``, int32 or int64, -1 for experts of other ranks; [R, K] fp32 weights, 0 there, or
        None; [L] int64 slots of each expert.
    """
    rows, first = len(words_RX), SENDER_WORDS
    if on_cpu(words_RX) and words_RX.is_contiguous():
        local_RK = torch.empty(rows, top_k, dtype=dtype, device="cpu")
        weights_RK = torch.empty(rows, top_k, dtype=torch.float32, device="cpu") if weighted else None
        counts_L = torch.empty(len(own), dtype=torch.int64, device="cpu")
        outputs = (
            address(local_RK, dtype),
            address(weights_RK, torch.float32, local_RK.shape),
            address(counts_L, torch.int64),
        )
        shape = rows, words_RX.shape[1], top_k
        core().local_slots(address(words_RX, torch.int32), shape, (own.start, len(own)), dtype.itemsize, outputs)
        return local_RK, weights_RK, counts_L
    ids_RK, bits_RK = words_RX[:, first : first + top_k], words_RX[:, first + top_k : first + 2 * top_k]
    others_RK = (ids_RK < own.start) | (ids_RK >= own.stop)
    local_RK = (ids_RK - own.start).masked_fill(others_RK, DROPPED)
    counts_L = torch.bincount(local_RK.flatten() + 1, minlength=1 + len(own))[1:]
    weights_RK = bits_RK.masked_fill(others_RK, 0).view(torch.float32) if weighted else None
    return local_RK.to(dtype), weights_RK, counts_L


def expert_places(local_RK: Tensor, counts_L: Tensor, starts_L: Tensor) -> Tensor:
    """Return [R, K] int64: the place of each slot among rows by expert, which start at ``starts_L``; else -1."""
    if not len(counts_L):
        return torch.full(local_RK.shape, DROPPED, dtype=torch.int64, device=local_RK.device)
    _, place_RK = sums.order(local_RK, len(counts_L))
    shift_L = starts_L - (counts_L.cumsum(0) - counts_L)
    return torch.where(local_RK < 0, DROPPED, place_RK + shift_L[local_RK.clamp(min=0).long()])
