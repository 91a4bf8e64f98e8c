"""Dispatch arithmetic in plain torch: the reference of every backend, and the fallback if no kernel takes the tensors.

All sums are fp32 in a fixed order, so every backend gives these bits:
    y[t]      = ((0 + w[t,0] * r0) + w[t,1] * r1) + ...           multiply, round, add, round; one cast at the end
Dot products are those of ``kernels/row_weights.py``.
A slot is one of the K (token, expert) pairs of a token, and its place is the index of its row. A dropped slot (place
-1) adds nothing, whatever its weight is. The wide dtype, in which rows are summed, is fp32, and fp64 for fp64 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_comm.dispatch.types import DROPPED
from moe_comm.kernels.autograd import accumulate_dtype
from moe_comm.kernels.native import core, on_cpu
from moe_comm.kernels.row_weights import lane_dot, scale
from moe_comm.runtime.memory import address, warm_rows


def count_slots(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Count the slots of each expert.

    Returns:
        [E + 4] int64: slots of each expert; dropped slots; invalid slots (id below -1 or not below E); flat index and
        id of the first invalid slot. One tensor, so that one copy transfers it to the CPU.
    """
    flat = ids_TK.reshape(-1).long()
    if not flat.numel():
        return torch.zeros(num_experts + 4, dtype=torch.int64, device=flat.device)
    bad = (flat < -1) | (flat >= num_experts)
    key = torch.where(bad, num_experts + 1, torch.where(flat < 0, num_experts, flat))
    counts = torch.zeros(num_experts + 2, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    first = bad.to(torch.uint8).argmax().view(1)
    return torch.cat((counts, first, flat[first]))


def order_slots(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Order the T*K slots by (expert, token, slot), slots without an expert last.

    Returns:
        order: [T * K] int64 flat slots.
        place_TK: [T, K] int64 place of each slot in that order; -1 for a slot without an expert.
    """
    flat = ids_TK.reshape(-1).long()
    dropped = (flat < 0) | (flat >= num_experts)
    order = torch.sort(torch.where(dropped, num_experts, flat), stable=True).indices
    place = torch.empty_like(flat)
    place[order] = torch.arange(flat.numel(), device=flat.device)
    return order, place.masked_fill_(dropped, -1).view(ids_TK.shape)


def transpose_blocks(counts_AB: Tensor, num_rows: int) -> Tensor:
    """Return the position in an (a, b)-ordered list of blocks of each row of the (b, a)-ordered list.

        counts [[2, 1],     (a, b) order: a0b0 a0b0 a0b1 a1b0        (b, a) order: a0b0 a0b0 a1b0 a0b1
                [1, 0]]                    0    1    2    3                         0    1    3    2   = result

    Args:
        counts_AB: [A, B] int64 number of rows of each block, on the device of the result.
        num_rows: their sum, known on the CPU.

    Returns:
        [num_rows] int64: ``rows_ba = rows_ab[result]``.
    """
    flat = counts_AB.flatten()
    start_AB = (flat.cumsum(0) - flat).view(counts_AB.shape)
    sizes = counts_AB.T.flatten()
    shift = start_AB.T.flatten() - (sizes.cumsum(0) - sizes)
    place = torch.arange(num_rows, device=counts_AB.device)
    return place + torch.repeat_interleave(shift, sizes, output_size=num_rows)


def take_rows(rows_RD: Tensor, place_T: Tensor) -> Tensor:
    """Return the rows at ``place_T`` in the wide dtype; zeros where it is -1."""
    wide = accumulate_dtype(rows_RD.dtype)
    if not rows_RD.shape[0]:
        return rows_RD.new_zeros(place_T.shape[0], rows_RD.shape[1], dtype=wide)
    rows = rows_RD[place_T.clamp(min=0)].to(wide)
    return rows.masked_fill_((place_T < 0).unsqueeze(1), 0.0)


def weighted_sum(rows_RD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """Return [T, D], the sum of each token's rows in slot order. ``weights_TK`` is in the wide dtype, or None for 1."""
    wide, shape = accumulate_dtype(rows_RD.dtype), (place_TK.shape[0], rows_RD.shape[1])
    total = warm_rows(*shape, wide, rows_RD.device).zero_()
    if rows_RD.shape[0]:
        dropped_KT, from_KT = (place_TK < 0).T.contiguous(), place_TK.clamp(min=0).T.contiguous()
        weights_KT = None if weights_TK is None else weights_TK.T.to(wide).masked_fill(dropped_KT, 0.0)
        taken_TD = warm_rows(*shape, rows_RD.dtype, rows_RD.device)  # reused for all slots
        for k in range(place_TK.shape[1]):
            row = torch.index_select(rows_RD, 0, from_KT[k], out=taken_TD).to(wide)
            row.masked_fill_(dropped_KT[k].unsqueeze(1), 0.0)
            total += row if weights_KT is None else row.mul_(weights_KT[k].unsqueeze(1))
    return total.to(rows_RD.dtype)


def spread(grad_TD: Tensor, place_TK: Tensor, weights_TK: Tensor, num_rows: int) -> Tensor:
    """Return [R, D], the gradient of each row: its token's gradient times its weight."""
    grad_RD = grad_TD.new_empty(num_rows + 1, grad_TD.shape[1])  # the last row takes the dropped slots
    place_TK = torch.where(place_TK < 0, num_rows, place_TK)
    for k in range(place_TK.shape[1]):
        grad_RD[place_TK[:, k]] = scale(grad_TD, weights_TK[:, k])
    return grad_RD[:num_rows]


def weight_grad(grad_TD: Tensor, rows_RD: Tensor, place_TK: Tensor) -> Tensor:
    """Return [T, K], the gradient of the weights: dot products of rows and their token's gradient; 0 where dropped."""
    grads = [lane_dot(grad_TD, take_rows(rows_RD, place_TK[:, k])) for k in range(place_TK.shape[1])]
    return torch.stack(grads, dim=1).masked_fill_(place_TK < 0, 0.0)


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
