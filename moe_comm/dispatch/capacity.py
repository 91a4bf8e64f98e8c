"""Capacity: a bound on the rows that one expert takes; what is over it is dropped and counted.

    limit = ceil(factor * T * K / E)        T tokens, K slots each, E experts

scope "rank": T and the limit are those of each source rank (as in GShard, arXiv 2006.16668, section 3.2). Ranks need
    not talk to apply it, but which slots are dropped depends on how the tokens are spread over ranks.
scope "batch": T and the limit are those of the whole micro-batch. Every rank learns all ids (and weights, where they
    decide) and each token's place in the batch, and decides alike, so that the same slots are dropped at every mapping:

        rank 0   tokens 0 1 4 5  ┐ ids, weights,  ┌ all ranks: tokens 0 .. 7 in order, one decision ┐  rank 0 keeps its
        rank 1   tokens 2 3 6 7  ┘ places         └                                                 ┘  own four, ...

    That costs an exchange of 8 * (K + 1) bytes a token, 8 * (2 K + 1) with weights, and the sort of all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_comm.comm.channel import Channel
from moe_comm.dispatch.types import DROPPED
from moe_comm.errors import ConfigError, InputError, RankMismatch

Policy = Literal["position", "probability"]
Scope = Literal["rank", "batch"]


@dataclass(frozen=True)
class Capacity:
    """factor: 1 is room for a perfectly balanced load. policy: who stays when an expert is over its limit.

    ``position`` keeps the earliest (token, slot); ``probability`` the largest weights, the earliest of equal ones.
    scope: whether each rank bounds what it sends, or all ranks together what an expert takes; see the module's text.
    """

    factor: float
    policy: Policy = "position"
    scope: Scope = "rank"

    def __post_init__(self) -> None:
        if not (self.factor > 0 and math.isfinite(self.factor)):
            raise ConfigError(
                f"capacity factor must be positive and finite; got {self.factor}. Leave capacity out to drop nothing."
            )
        for name, kind in (("policy", Policy), ("scope", Scope)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"capacity {name} must be one of {', '.join(get_args(kind))}; got {getattr(self, name)!r}"
                )

    def limit(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Rows that one expert takes of ``num_tokens`` tokens: those of a rank, or of the batch."""
        # Exact: in floating point 1.1 * 10 * 1 / 1 is a little more than 11 and would round up to 12.
        return math.ceil(Fraction(str(self.factor)) * num_tokens * top_k / num_experts)


def apply_capacity(
    ids_TK: Tensor,
    weights_TK: Tensor,
    num_experts: int,
    capacity: Capacity,
    channel: Channel | None = None,
    token_index_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Drop the slots that are over their expert's limit. Collective over ``channel`` with the scope "batch".

    Args:
        ids_TK: [T, K] int32 or int64 expert ids; negative ones and those out of range stay as they are, for
            dispatch to judge, and take no room.
        weights_TK: [T, K] routing weights; read by the policy ``probability`` only. NaN counts as the largest.
        channel: to the ranks that hold the batch's tokens; None: they are all here. Not used with the scope "rank".
        token_index_T: [T] int64 place of each token in the batch, which decides what is earlier. None: tokens stand
            in order of rank, and as given within a rank.

    Returns:
        ids_TK: a new tensor with -1 in dropped slots.
        num_dropped: scalar int64 tensor, on the device of the ids: slots dropped here, without those that came as -1.

    Raises:
        InputError: shapes differ, or the token index is not [T] int64; on every rank.
        RankMismatch: ranks have different K, or only some of them a token index; on every rank.
        PeerDied, PeerTimeout: a rank is gone, or did not call in time.
    """
    fault = _fault(ids_TK, weights_TK, token_index_T)
    everywhere = capacity.scope == "batch" and channel is not None and channel.world > 1
    if fault is not None and not everywhere:
        raise fault
    key_TK = ids_TK.long()
    if everywhere:
        assert channel is not None
        over = _over_anywhere(key_TK, weights_TK, num_experts, capacity, channel, token_index_T, fault)
    elif capacity.scope == "batch" and token_index_T is not None:
        order = torch.sort(token_index_T, stable=True).indices
        over = torch.empty_like(key_TK, dtype=torch.bool)
        over[order] = _over(key_TK[order], weights_TK.detach()[order], num_experts, capacity)
    else:
        over = _over(key_TK, weights_TK.detach(), num_experts, capacity)
    return ids_TK.masked_fill(over, DROPPED), over.sum()


def _fault(ids_TK: Tensor, weights_TK: Tensor, token_index_T: Tensor | None) -> InputError | None:
    if ids_TK.dim() != 2 or ids_TK.shape != weights_TK.shape:
        return InputError(
            f"apply_capacity needs ids and weights [T, K]; got {tuple(ids_TK.shape)} and {tuple(weights_TK.shape)}"
        )
    index = token_index_T
    if index is not None and (tuple(index.shape) != ids_TK.shape[:1] or index.dtype != torch.int64):
        return InputError(
            f"the token index must be [{ids_TK.shape[0]}] int64, a place for each token; "
            f"got {tuple(index.shape)} {index.dtype}"
        )
    return None


def _over(ids_TK: Tensor, weights_TK: Tensor, num_experts: int, capacity: Capacity) -> Tensor:
    """[T, K] bool: the slots over their expert's limit, of tokens that stand in order."""
    limit = capacity.limit(ids_TK.shape[0], ids_TK.shape[1], num_experts)
    flat = ids_TK.reshape(-1)
    key = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    by_merit = torch.arange(flat.numel(), device=flat.device)
    if capacity.policy == "probability":
        by_merit = torch.sort(weights_TK.reshape(-1), descending=True, stable=True).indices
    order = by_merit[torch.sort(key[by_merit], stable=True).indices]
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    first = counts.cumsum(0) - counts
    rank_in_expert = torch.empty_like(flat)
    rank_in_expert[order] = torch.arange(flat.numel(), device=flat.device) - first[key[order]]
    return ((rank_in_expert >= limit) & (key < num_experts)).view(ids_TK.shape)


def _over_anywhere(
    ids_TK: Tensor,
    weights_TK: Tensor,
    num_experts: int,
    capacity: Capacity,
    channel: Channel,
    token_index_T: Tensor | None,
    fault: InputError | None,
) -> Tensor:
    """[T, K] bool: this rank's slots over the limits of all ranks' tokens together."""
    description = "deciding drops over the whole batch"
    shape = (0, 0) if fault is not None else tuple(ids_TK.shape)
    told = torch.tensor([*shape, token_index_T is not None, fault is not None], device=ids_TK.device)
    sizes, widths, indexed, faults = channel.all_gather(told, description).T.tolist()
    if fault is not None:
        raise fault
    if any(faults):
        raise InputError(f"rank {faults.index(1)} gave ids, weights or a token index that do not fit; see its error")
    for name, given in (("top-k", widths), ("having a token index", indexed)):
        if len(set(given)) > 1:
            raise RankMismatch(f"ranks disagree on {name} in {description}: {given} by rank")

    tokens, top_k = ids_TK.shape
    weighted = capacity.policy == "probability"
    # Every rank sends as many rows as the longest has: one message of equal parts.
    sent = ids_TK.new_zeros(max(sizes), 1 + top_k * (1 + weighted))
    if token_index_T is not None:
        sent[:tokens, 0] = token_index_T
    sent[:tokens, 1 : 1 + top_k] = ids_TK
    if weighted:
        sent[:tokens, 1 + top_k :] = weights_TK.detach().double().contiguous().view(torch.int64)
    gathered = channel.all_gather(sent, description)
    rows = torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])

    order = torch.sort(rows[:, 0], stable=True).indices
    rows = rows[order]
    weights = rows[:, 1 + top_k :].contiguous().view(torch.float64)
    over = torch.empty(rows.shape[0], top_k, dtype=torch.bool, device=rows.device)
    over[order] = _over(rows[:, 1 : 1 + top_k], weights, num_experts, capacity)
    start = sum(sizes[: channel.rank])
    return over[start : start + tokens]
