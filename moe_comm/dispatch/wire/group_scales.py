"""fp8 rows with one scale per channel for each group of up to 128 rows, for gradients.

MegaScale-MoE (arXiv 2505.11432) quantises gradients like this. The scales of a group have the length of a row. They are
sent separately from the rows, once per group. A group holds up to 128 consecutive rows of one source rank and one
expert. Its scales have one destination, and both sides compute the groups from the exchanged counts.

    rank 0 sends   e0: 130 rows   e1: 5 rows │ e2: 0 rows   e3: 128 rows
    groups            0 (128)  1 (2)  2 (5)  │                 3 (128)
    scales         ─────── 3 rows ─────────▶ rank 0          1 row ─▶ rank 1

    bytes = rows * D (rounded up to 16) + groups * 4 D

The scales add 3% for full groups, and 4 times the size of the row for groups of one row. Use this format for few and
large experts.

The rows of a group, and so the bits, depend on how tokens are distributed over ranks. NaN and infinity become NaN and
do not change the scales of their group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_comm.dispatch.wire.wire_dtype import WireDtype, bytes_per_row
from moe_comm.kernels.fp8 import E4M3, saturating_cast, scales_for
from moe_comm.runtime.memory import as_dtype

GROUP = 128
"""Maximum number of rows that share scales."""


@dataclass(frozen=True)
class RowGroups:
    """group_R: group of each row, in order. per_rank: number of groups sent to, or received from, each rank."""

    group_R: Tensor
    per_rank: tuple[int, ...]

    @classmethod
    def of(cls, blocks: npt.NDArray[np.int64], offsets: Sequence[int], device: torch.device) -> RowGroups:
        """Divide blocks of consecutive rows into groups.

        Args:
            blocks: rows in each block.
            offsets: first block of each rank, and the number of blocks at the end.
        """
        rows_B = torch.from_numpy(blocks.copy())
        groups_B = (rows_B + GROUP - 1) // GROUP
        per_rank = tuple(int(groups_B[lo:hi].sum()) for lo, hi in pairwise(offsets))
        num_rows = int(rows_B.sum())
        # First row and first group of each block.
        start_B, first_B = rows_B.cumsum(0) - rows_B, groups_B.cumsum(0) - groups_B
        facts_3B = torch.stack((rows_B, start_B, first_B)).to(device, non_blocking=True)
        start_R, first_R = torch.repeat_interleave(facts_3B[1:], facts_3B[0], dim=1, output_size=num_rows)
        return cls(first_R + (torch.arange(num_rows, device=device) - start_R) // GROUP, per_rank)


def encode_groups(rows_RD: Tensor, groups: RowGroups, wire_dtype: WireDtype) -> tuple[Tensor, Tensor]:
    """Return rows without scales, as 8-byte words [R, ceil(D / 16) * 2], and [G, D] fp32 scales."""
    num_rows, hidden = rows_RD.shape
    wide_RD = rows_RD.to(torch.float32)
    finite_RD = wide_RD.isfinite()
    amax_GD = wide_RD.new_zeros(sum(groups.per_rank), hidden)
    group_RD = groups.group_R.unsqueeze(1).expand(num_rows, hidden)
    amax_GD.scatter_reduce_(0, group_RD, wide_RD.abs().masked_fill(~finite_RD, 0.0), "amax")
    scale_GD = scales_for(amax_GD, wire_dtype.power_of_two)
    packed_RB = torch.zeros(
        num_rows, bytes_per_row(hidden, wire_dtype, rows_RD.dtype), dtype=torch.uint8, device=rows_RD.device
    )
    scaled_RD = (wide_RD / scale_GD[groups.group_R]).masked_fill_(~finite_RD, torch.nan)
    packed_RB[:, :hidden].view(E4M3).copy_(scaled_RD)
    return as_dtype(torch.int64, packed_RB), scale_GD


def decode_groups(packed_RX: Tensor, scale_GD: Tensor, groups: RowGroups, dtype: torch.dtype) -> Tensor:
    """The inverse of ``encode_groups`` up to rounding: [R, D] rows of ``dtype``."""
    values_RD = as_dtype(torch.uint8, packed_RX)[:, : scale_GD.shape[1]].view(E4M3).to(torch.float32)
    return saturating_cast(values_RD.mul_(scale_GD[groups.group_R]), dtype)


def rounded_in_groups(rows_RD: Tensor, wire_dtype: WireDtype) -> Tensor:
    """Round consecutive rows in groups, for backends that move rows in place."""
    if not rows_RD.numel():
        return rows_RD
    groups = RowGroups.of(np.array([rows_RD.shape[0]]), (0, 1), rows_RD.device)
    packed_RX, scale_GD = encode_groups(rows_RD, groups, wire_dtype)
    return decode_groups(packed_RX, scale_GD, groups, rows_RD.dtype)
