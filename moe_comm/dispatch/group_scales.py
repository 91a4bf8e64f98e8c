"""Scales per channel for groups of 128 rows: gradients as MegaScale-MoE quantises them (arXiv 2505.11432).

The scales of a group are as long as a row, so they do not travel in rows but beside them, once for each group. A group
holds rows of one rank for one expert only, at most 128 that stand one after another: its scales have one destination,
and both ends know from the exchanged counts which row is in which group. Nothing else is sent.

    rank 0 sends   e0: 130 rows   e1: 5 rows │ e2: 0 rows   e3: 128 rows
    groups            0 (128)  1 (2)  2 (5)  │                 3 (128)
    scales         ─────── 3 rows ─────────▶ rank 0          1 row ─▶ rank 1

    bytes = rows * (D to 16) + groups * 4 D        3% more than the values if groups are full, 4 times them if they
                                                   hold a single row: for few and large experts

Which rows share a group depends on how tokens are cut over ranks, and so do the bits. A NaN or an infinity becomes NaN
by itself and leaves its group alone: it is another token's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_comm.dispatch.wire_dtype import E4M3, WireDtype, bytes_per_row, narrowed, scales_for
from moe_comm.runtime.memory import as_dtype

GROUP = 128
"""Rows that share scales."""


@dataclass(frozen=True)
class Groups:
    """group_R: group of each row, in order. per_rank: groups that go to, or come from, each rank."""

    group_R: Tensor
    per_rank: tuple[int, ...]

    @classmethod
    def of(cls, blocks: npt.NDArray[np.int64], offsets: Sequence[int], device: torch.device) -> Groups:
        """Cut blocks of rows that stand one after another.

        Args:
            blocks: rows in each block.
            offsets: first block of each rank, and their number at the end.
        """
        rows_B = torch.from_numpy(blocks.copy())
        groups_B = (rows_B + GROUP - 1) // GROUP
        per_rank = tuple(int(groups_B[lo:hi].sum()) for lo, hi in pairwise(offsets))
        num_rows = int(rows_B.sum())
        start_B, first_B = rows_B.cumsum(0) - rows_B, groups_B.cumsum(0) - groups_B
        facts_3B = torch.stack((rows_B, start_B, first_B)).to(device, non_blocking=True)
        start_R, first_R = torch.repeat_interleave(facts_3B[1:], facts_3B[0], dim=1, output_size=num_rows)
        return cls(first_R + (torch.arange(num_rows, device=device) - start_R) // GROUP, per_rank)


def encode_groups(rows_RD: Tensor, groups: Groups, wire_dtype: WireDtype) -> tuple[Tensor, Tensor]:
    """Rows without their scales, as 8-byte words [R, ceil(D / 16) * 2]; and [G, D] fp32 scales."""
    num_rows, hidden = rows_RD.shape
    wide_RD = rows_RD.to(torch.float32)
    known_RD = wide_RD.isfinite()
    most_GD = wide_RD.new_zeros(sum(groups.per_rank), hidden)
    where_RD = groups.group_R.unsqueeze(1).expand(num_rows, hidden)
    most_GD.scatter_reduce_(0, where_RD, wide_RD.abs().masked_fill(~known_RD, 0.0), "amax")
    scale_GD = scales_for(most_GD, wire_dtype.power_of_two)
    packed_RB = torch.zeros(
        num_rows, bytes_per_row(hidden, wire_dtype, rows_RD.dtype), dtype=torch.uint8, device=rows_RD.device
    )
    scaled_RD = (wide_RD / scale_GD[groups.group_R]).masked_fill_(~known_RD, torch.nan)
    packed_RB[:, :hidden].view(E4M3).copy_(scaled_RD)
    return as_dtype(torch.int64, packed_RB), scale_GD


def decode_groups(packed_RX: Tensor, scale_GD: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """The inverse of ``encode_groups`` up to rounding: [R, D] rows of ``dtype``."""
    values_RD = as_dtype(torch.uint8, packed_RX)[:, : scale_GD.shape[1]].view(E4M3).to(torch.float32)
    return narrowed(values_RD.mul_(scale_GD[groups.group_R]), dtype)


def rounded_in_groups(rows_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """Rows rounded in groups of those that stand one after another: where they are moved in place."""
    if not rows_RD.numel():
        return rows_RD
    groups = Groups.of(np.array([rows_RD.shape[0]]), (0, 1), rows_RD.device)
    packed_RX, scale_GD = encode_groups(rows_RD, groups, wire_dtype)
    return decode_groups(packed_RX, scale_GD, groups, rows_RD.dtype)


__all__ = ["GROUP", "Groups", "decode_groups", "encode_groups", "rounded_in_groups"]
