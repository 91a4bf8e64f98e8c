"""Capacity: a bound on the rows that one rank sends to one expert; what is over it is dropped and counted.

The bound is per source rank (as in GShard, arXiv 2006.16668, section 3.2), so ranks need not talk to apply it:

    limit = ceil(factor * T * K / E)        T tokens of this rank, K slots each, E experts
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_comm.dispatch.base import DROPPED
from moe_comm.errors import ConfigError, InputError

Policy = Literal["position", "probability"]


@dataclass(frozen=True)
class Capacity:
    """factor: 1 is room for a perfectly balanced load. policy: who stays when an expert is over its limit.

    ``position`` keeps the earliest (token, slot); ``probability`` the largest weights, the earliest of equal ones.
    """

    factor: float
    policy: Policy = "position"

    def __post_init__(self) -> None:
        if not (self.factor > 0 and math.isfinite(self.factor)):
            raise ConfigError(
                f"capacity factor must be positive and finite; got {self.factor}. Leave capacity out to drop nothing."
            )
        if self.policy not in get_args(Policy):
            raise ConfigError(f"capacity policy must be one of {', '.join(get_args(Policy))}; got {self.policy!r}")

    def limit(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Rows that one expert takes from a rank with ``num_tokens`` tokens."""
        # Exact: in floating point 1.1 * 10 * 1 / 1 is a little more than 11 and would round up to 12.
        return math.ceil(Fraction(str(self.factor)) * num_tokens * top_k / num_experts)


def apply_capacity(ids_TK: Tensor, weights_TK: Tensor, num_experts: int, capacity: Capacity) -> tuple[Tensor, Tensor]:
    """Drop the slots that are over their expert's limit.

    Args:
        ids_TK: [T, K] int32 or int64 expert ids; negative ones and those out of range stay as they are, for
            dispatch to judge, and take no room.
        weights_TK: [T, K] routing weights; read by the policy ``probability`` only. NaN counts as the largest.

    Returns:
        ids_TK: a new tensor with -1 in dropped slots.
        num_dropped: scalar int64 tensor, on the device of the ids: slots dropped here, without those that came as -1.

    Raises:
        InputError: shapes differ.
    """
    if ids_TK.dim() != 2 or ids_TK.shape != weights_TK.shape:
        raise InputError(
            f"apply_capacity needs ids and weights [T, K]; got {tuple(ids_TK.shape)} and {tuple(weights_TK.shape)}"
        )
    limit = capacity.limit(ids_TK.shape[0], ids_TK.shape[1], num_experts)
    flat = ids_TK.reshape(-1).long()
    key = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
    by_merit = torch.arange(flat.numel(), device=flat.device)
    if capacity.policy == "probability":
        by_merit = torch.sort(weights_TK.detach().reshape(-1), descending=True, stable=True).indices
    order = by_merit[torch.sort(key[by_merit], stable=True).indices]
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    first = counts.cumsum(0) - counts
    rank_in_expert = torch.empty_like(flat)
    rank_in_expert[order] = torch.arange(flat.numel(), device=flat.device) - first[key[order]]
    over = ((rank_in_expert >= limit) & (key < num_experts)).view(ids_TK.shape)
    return ids_TK.masked_fill(over, DROPPED), over.sum()
