"""Padding: the tokens of a call that a mask excludes are removed before the router and are zeros in the output.

    x  a b _ c _   mask 1 1 0 1 0   ─▶  a b c  ─▶ router, dispatch, experts, combine ─▶  y0 y1 y2  ─▶  y0 y1 0 y2 0

So padding is not routed, counted, sent or computed, and real tokens have the bits of a call without padding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import InputError
from moe_comm.layers.moe.router import Routing


@dataclass(frozen=True, eq=False)
class RealTokens:
    """The tokens of a call that are not padding.

    Attributes:
        mask_N: [N] bool of all tokens, True for real ones.
        index_T: [T] int64, the positions of the real tokens.
    """

    mask_N: Tensor
    index_T: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> RealTokens | None:
        """Return the real tokens of a bool mask of any shape; None if there is no padding."""
        mask_N = mask.reshape(-1)
        index_T = mask_N.nonzero().squeeze(1)
        return None if index_T.shape[0] == mask_N.shape[0] else cls(mask_N, index_T)

    def take(self, rows: Tensor) -> Tensor:
        """Return the rows [T, ...] of the real tokens from those of all tokens [N, ...]."""
        return rows.index_select(0, self.index_T)

    def take_routing(self, routing: Routing) -> Routing:
        """Return the routing of the real tokens."""
        logits_TE = None if routing.logits_TE is None else self.take(routing.logits_TE)
        return routing._replace(
            ids_TK=self.take(routing.ids_TK), weights_TK=self.take(routing.weights_TK), logits_TE=logits_TE
        )

    def spread(self, y_TD: Tensor) -> Tensor:
        """Return the rows of all tokens [N, D]: ``y_TD``, and zeros for padding."""
        return y_TD.new_zeros(self.mask_N.shape[0], y_TD.shape[1]).index_copy_(0, self.index_T, y_TD)


def mask_fault(mask: Any, x: Tensor, routing: Routing | None) -> InputError | None:
    """Return the error of a mask that does not fit the tokens ``x`` [..., D] or their routing."""
    shape, tokens = tuple(x.shape[:-1]), math.prod(x.shape[:-1])
    shapes = dict.fromkeys((shape, (tokens,)))  # equal for x [T, D]
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
        given = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        return InputError(f"the mask must be bool {' or '.join(map(str, shapes))}, True for real tokens; got {given}")
    if mask.device != x.device:
        return InputError(f"the mask must be on the device of x, {x.device}; got {mask.device}")
    if routing is not None and routing.ids_TK.shape[:1] != (tokens,):
        return InputError(f"with a mask, the routing must have all {tokens} tokens; got {routing.ids_TK.shape[0]}")
    return None
