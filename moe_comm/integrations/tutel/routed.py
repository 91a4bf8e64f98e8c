"""Dispatch, experts and combine with the routes that Tutel's ``extract_critical`` returns.

    Tutel      routes ─▶ [E, C, D] with empty slots ─▶ all-to-all ─▶ experts ─▶ all-to-all ─▶ weigh, sum
    moe_comm   routes ─▶ dispatch the rows in use ─▶ [L, M, D] ─▶ experts ─▶ combine

C is the capacity, L the number of local experts, M the number of rows of the local expert that has the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moe_comm.dispatch import DROPPED, Dispatcher

Experts = Callable[[Tensor], Tensor]
LABEL = "tutel moe_layer"


def run_experts(
    dispatcher: Dispatcher, x_TD: Tensor, routes: Sequence[Any], experts: Experts, *, is_postscore: bool = True
) -> Tensor:
    """Return [T, D]: the outputs of each token's experts, weighted and added. Collective.

    Args:
        routes: number of experts, then K lists of [T]: ids, positions among the rows that this rank sends to the
            expert, and weights; then the capacity, from which on a position is dropped. Entries beyond T are ignored.
        experts: a function of [L, M, D] that returns the same shape. M is at least 1. Rows that no token uses are zero.
        is_postscore: multiply the outputs of the experts by the weights. False: multiply their inputs.

    Raises:
        InputError: the experts return another shape.
        RoutingError, RankMismatch, PeerRaised, PeerDied, PeerTimeout: as ``Dispatcher.dispatch``.
    """
    _, *per_slot, capacity = routes[:5]
    ids_TK, positions_TK, weights_TK = (torch.stack(tuple(slots), 1)[: len(x_TD)] for slots in per_slot)
    ids_TK = ids_TK.masked_fill(positions_TK >= capacity, DROPPED)
    extra_TK1 = None if is_postscore else weights_TK.float().unsqueeze(2)
    sent = dispatcher.dispatch(x_TD, ids_TK, label=LABEL, extra_TKX=extra_TK1)
    rows_RD = sent.rows_RD
    if sent.extra_RX is not None:
        rows_RD, weights_TK = (rows_RD * sent.extra_RX).to(x_TD.dtype), torch.ones_like(weights_TK)
    with dispatcher.abort_on_error(LABEL):
        out_RD = _in_batch(experts, rows_RD, sent.handle.rows_per_expert)
    return dispatcher.combine(out_RD.to(x_TD.dtype), weights_TK, sent.handle)


def _in_batch(experts: Experts, rows_RD: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Return [R, D]. An expert without rows runs on one row of zeros, so that its parameters have gradients."""
    most = max(counts)
    even = len(rows_RD) == len(counts) * most
    rows_LMD = rows_RD.unflatten(0, (len(counts), most)) if even else pad_sequence(rows_RD.split(counts), True)
    out_LMD = experts(rows_LMD if most else F.pad(rows_LMD, (0, 0, 0, 1)))
    if even:
        return out_LMD[:, :most].flatten(0, 1)
    return torch.cat([out_MD[:count] for out_MD, count in zip(out_LMD, counts, strict=True)])
