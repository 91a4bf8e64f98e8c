"""Chunks of rows between hosts: their number, and the rows assembled from them."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from moe_comm.comm.channel import PendingTensor
from moe_comm.dispatch.hierarchical.rail import PendingBlocks, gather_ranges


def pending_blocks(rows_ND: Tensor, cuts: list[int], own: range) -> PendingBlocks:
    """Return blocks divided at ``cuts`` into row ranges, two per message, the last ranges first."""
    edges = sorted({0, len(rows_ND), own.start, own.stop, *cuts})
    spans = [range(a, b) for a, b in pairwise(edges) if not own.start <= a < own.stop][::-1]
    messages = [spans[i : i + 2] for i in range(0, len(spans), 2)]
    return PendingBlocks(
        len(rows_ND),
        own,
        tuple((span_group, PendingTensor.completed(gather_ranges(rows_ND, span_group))) for span_group in messages),
    )


@given(st.data())
def test_take_keeps_the_row_order_and_pick_follows_the_index(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 12))
    rows_ND = torch.arange(rows * 3.0).view(rows, 3)
    position = st.integers(0, rows)
    start, stop = sorted((data.draw(position), data.draw(position)))
    cuts = data.draw(st.lists(position))
    result = pending_blocks(rows_ND, cuts, range(start, stop)).take(lambda part: part * 2, 3 * rows_ND[start:stop])
    assert torch.equal(result, torch.cat((2 * rows_ND[:start], 3 * rows_ND[start:stop], 2 * rows_ND[stop:])))
    indices = data.draw(st.lists(st.integers(0, max(rows - 1, 0)), max_size=30)) if rows else []
    index_N = torch.tensor(sorted(indices), dtype=torch.int64)
    result = pending_blocks(rows_ND, cuts, range(0)).pick(lambda part: part * 2, rows_ND[:0], index_N)
    assert torch.equal(result, rows_ND[index_N] * 2)
