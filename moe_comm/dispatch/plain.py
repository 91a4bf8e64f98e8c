"""Dispatch arithmetic in plain torch: the reference of every backend, and what runs on CUDA tensors for now.

All sums are fp32 in a fixed order, so every backend gives these bits:
    y[t]      = ((0 + w[t,0] * r0) + w[t,1] * r1) + ...           multiply, round, add, round; one cast at the end
    dot(a, b) = 32 lanes, lane l adds the products l, l + 32, ... in order; then lanes are added in halves
                (l + 16, l + 8, ..., l + 1), which is what a warp does with shuffles
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 32


def sort_slots(ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the T*K slots by (expert, token, slot).

    Returns:
        kept: [R] flat slots in that order, dropped slots left out.
        place_TK: [T, K] int64 place of each slot in that order; -1 where dropped.
        counts_E: [E] int64 rows of each expert.
    """
    flat = ids_TK.reshape(-1)
    key = torch.where(flat < 0, num_experts, flat).long()
    counts_E = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    order = torch.sort(key, stable=True).indices
    kept = order[: key.numel() - int((flat < 0).sum())]
    place = torch.full_like(key, -1)
    place[kept] = torch.arange(kept.numel(), device=key.device)
    return kept, place.view(ids_TK.shape), counts_E


def take_rows(rows_RD: Tensor, place_T: Tensor) -> Tensor:
    """fp32 rows at ``place_T``; zeros where it is -1. (64-bit floats stay as they are.)"""
    wide = rows_RD.dtype if rows_RD.dtype == torch.float64 else torch.float32
    if not rows_RD.shape[0]:
        return rows_RD.new_zeros(place_T.shape[0], rows_RD.shape[1], dtype=wide)
    rows = rows_RD[place_T.clamp(min=0)].to(wide)
    return rows.masked_fill_((place_T < 0).unsqueeze(1), 0.0)


def weighted_sum(rows_RD: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """[T, D] sum of each token's rows in slot order, in the dtype of ``rows_RD``; weights fp32 or None for ones."""
    wide = rows_RD.dtype if rows_RD.dtype == torch.float64 else torch.float32
    total = rows_RD.new_zeros(place_TK.shape[0], rows_RD.shape[1], dtype=wide)
    for k in range(place_TK.shape[1]):
        row = take_rows(rows_RD, place_TK[:, k])
        total += row if weights_TK is None else row.mul_(weights_TK[:, k, None])
    return total.to(rows_RD.dtype)


def spread(grad_TD: Tensor, place_TK: Tensor, weights_TK: Tensor, num_rows: int) -> Tensor:
    """[R, D] gradient of each row: its token's gradient times its weight."""
    grad_RD = grad_TD.new_empty(num_rows, grad_TD.shape[1])
    for k in range(place_TK.shape[1]):
        live = place_TK[:, k] >= 0
        grad_RD[place_TK[live, k]] = (grad_TD[live] * weights_TK[live, k, None]).to(grad_TD.dtype)
    return grad_RD


def weight_grad(grad_TD: Tensor, rows_RD: Tensor, place_TK: Tensor) -> Tensor:
    """[T, K] gradient of the routing weights: dot product of each row with its token's gradient."""
    grads = [lane_dot(grad_TD, take_rows(rows_RD, place_TK[:, k])) for k in range(place_TK.shape[1])]
    return torch.stack(grads, dim=1)


def lane_dot(a_TD: Tensor, b_TD: Tensor) -> Tensor:
    """[T] row-wise dot product in the lane order described above."""
    product = a_TD.to(b_TD.dtype) * b_TD
    product = F.pad(product, (0, -product.shape[1] % LANES)).unflatten(1, (-1, LANES))
    lanes = product.new_zeros(product.shape[0], LANES)
    for step in range(product.shape[1]):
        lanes += product[:, step]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
