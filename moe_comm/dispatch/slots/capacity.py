"""Expert capacity: limits the rows of each expert, and drops and counts the slots above the limit.

A slot is one of the K (token, expert) pairs of a token.

    limit = ceil(factor * T * K / E)        T tokens, K slots each, E experts

scope "rank": T counts the tokens of each source rank (as in GShard, arXiv 2006.16668, section 3.2). This needs no
    communication, but the dropped slots depend on how tokens are distributed over ranks.
scope "batch": T counts the tokens of the whole micro-batch. Every rank gathers all ids, all positions of tokens in the
    batch (and all weights for the policy "probability") and makes the same decision. The dropped slots are the same for
    every parallel mapping:

        rank 0   tokens 0 1 4 5  ┐ ids, weights,  ┌ each rank decides for tokens 0 .. 7 ┐  rank 0 applies the decision
        rank 1   tokens 2 3 6 7  ┘ positions      └ in order                            ┘  to tokens 0 1 4 5, ...

    This costs an exchange of 8 * (K + 1) bytes per token, 8 * (2 K + 1) with weights, and a sort of all tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_comm.comm.agree import compare
from moe_comm.comm.channel import Channel
from moe_comm.dispatch.types import DROPPED
from moe_comm.errors import ConfigError, InputError

Policy = Literal["position", "probability"]
Scope = Literal["rank", "batch"]


@dataclass(frozen=True)
class Capacity:
    """Capacity limit of the experts.

    Args:
        factor: limit relative to a balanced load; 1 is exactly enough for a balanced load.
        policy: which slots an expert above its limit keeps. "position" keeps the first ones by (token, slot).
            "probability" keeps those with the largest weights; the first one of equal weights.
        scope: whether each rank limits the rows that it sends ("rank"), or all ranks together limit the rows of an
            expert ("batch"). See the module docstring.
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
        """Return the limit of one expert for ``num_tokens`` tokens of a rank or of the batch."""
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
    """Drop the slots above the limit of their expert. Collective over ``channel`` with the scope "batch".

    Args:
        ids_TK: [T, K] int32 or int64 expert ids. Negative and out-of-range ids are not changed and not counted;
            dispatch checks them.
        weights_TK: [T, K] routing weights. Only the policy ``probability`` uses them. NaN counts as the largest.
        num_experts: global number of experts E.
        capacity: the limit.
        channel: channel of the ranks that hold the batch; None if all tokens are here. Only for the scope "batch".
        token_index_T: [T] int64 position of each token in the batch, which defines the order. None orders tokens by
            rank, then by position on the rank.

    Returns:
        ids_TK: a new tensor with -1 in dropped slots.
        num_dropped: scalar int64 tensor on the device of the ids: number of slots dropped by this call on this rank.

    Raises:
        InputError: shapes differ, or the token index is not [T] int64; on every rank.
        RankMismatch: ranks have different K, or only some have a token index; on every rank.
        PeerDied, PeerTimeout: a rank died, or did not call in time.
    """
    fault = _fault(ids_TK, weights_TK, token_index_T)
    gathers = capacity.scope == "batch" and channel is not None and channel.world > 1
    if fault is not None and not gathers:
        raise fault
    key_TK = ids_TK.long()
    if gathers:
        assert channel is not None
        exceeds = _over_batch_limit(key_TK, weights_TK, num_experts, capacity, channel, token_index_T, fault)
    elif capacity.scope == "batch" and token_index_T is not None:
        order = torch.sort(token_index_T, stable=True).indices
        exceeds = torch.empty_like(key_TK, dtype=torch.bool)
        exceeds[order] = _over_limit(key_TK[order], weights_TK.detach()[order], num_experts, capacity)
    else:
        exceeds = _over_limit(key_TK, weights_TK.detach(), num_experts, capacity)
    return ids_TK.masked_fill(exceeds, DROPPED), exceeds.sum()


def _fault(ids_TK: Tensor, weights_TK: Tensor, token_index_T: Tensor | None) -> InputError | None:
    if ids_TK.dim() != 2 or ids_TK.shape != weights_TK.shape:
        return InputError(
            f"apply_capacity needs ids and weights [T, K]; got {tuple(ids_TK.shape)} and {tuple(weights_TK.shape)}"
        )
    index = token_index_T
    if index is not None and (tuple(index.shape) != ids_TK.shape[:1] or index.dtype != torch.int64):
        return InputError(
            f"the token index must be [{ids_TK.shape[0]}] int64, one position per token; "
            f"got {tuple(index.shape)} {index.dtype}"
        )
    return None


def _over_limit(ids_TK: Tensor, weights_TK: Tensor, num_experts: int, capacity: Capacity) -> Tensor:
    """Return [T, K] bool: the slots above the limit of their expert. Tokens are in order of the batch."""
    limit = capacity.limit(ids_TK.shape[0], ids_TK.shape[1], num_experts)
    flat = ids_TK.reshape(-1)
    key = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    priority = torch.arange(flat.numel(), device=flat.device)
    if capacity.policy == "probability":
        priority = torch.sort(weights_TK.reshape(-1), descending=True, stable=True).indices
    # Slots sorted by expert, and by priority within an expert.
    order = priority[torch.sort(key[priority], stable=True).indices]
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    first = counts.cumsum(0) - counts
    rank_in_expert = torch.empty_like(flat)
    rank_in_expert[order] = torch.arange(flat.numel(), device=flat.device) - first[key[order]]
    return ((rank_in_expert >= limit) & (key < num_experts)).view(ids_TK.shape)


def _over_batch_limit(
    ids_TK: Tensor,
    weights_TK: Tensor,
    num_experts: int,
    capacity: Capacity,
    channel: Channel,
    token_index_T: Tensor | None,
    fault: InputError | None,
) -> Tensor:
    """Return [T, K] bool: this rank's slots above the limits over the tokens of all ranks."""
    what = "the capacity limit of a batch"
    tokens, top_k = (0, 0) if fault is not None else ids_TK.shape
    same = {"top-k": top_k, "token index": token_index_T is not None}
    sizes = compare(channel, what, same, {"tokens": tokens}, fault)["tokens"]
    weighted = capacity.policy == "probability"
    # Pad to the largest number of tokens of any rank: an all-gather needs equal sizes.
    sent = ids_TK.new_zeros(max(sizes), 1 + top_k * (1 + weighted))
    if token_index_T is not None:
        sent[:tokens, 0] = token_index_T
    sent[:tokens, 1 : 1 + top_k] = ids_TK
    if weighted:
        sent[:tokens, 1 + top_k :] = weights_TK.detach().double().contiguous().view(torch.int64)
    gathered = channel.all_gather(sent, what)
    rows = torch.cat([block[:size] for block, size in zip(gathered, sizes, strict=True)])

    order = torch.sort(rows[:, 0], stable=True).indices
    rows = rows[order]
    weights = rows[:, 1 + top_k :].contiguous().view(torch.float64)
    exceeds = torch.empty(rows.shape[0], top_k, dtype=torch.bool, device=rows.device)
    exceeds[order] = _over_limit(rows[:, 1 : 1 + top_k], weights, num_experts, capacity)
    start = sum(sizes[: channel.rank])
    return exceeds[start : start + tokens]
