"""Chunks of rows between hosts: their number, and that the result is complete."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from moe_comm.comm.channel import PendingTensor
from moe_comm.dispatch.hierarchical.rail import ChunkOptions, PendingBlocks, gather_ranges
from moe_comm.errors import ConfigError


@pytest.mark.parametrize(
    ("num_bytes", "count"), [(0, 1), (99, 1), (100, 1), (199, 1), (200, 2), (399, 3), (400, 4), (10**9, 4)]
)
def test_a_chunk_has_its_minimum_bytes_and_the_number_is_limited(num_bytes: int, count: int) -> None:
    assert ChunkOptions(min_bytes=100, max_chunks=4).count(num_bytes) == count


@pytest.mark.parametrize("wrong", [{"min_bytes": 0}, {"max_chunks": 0}])
def test_invalid_chunk_options_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ChunkOptions(**wrong)


def arriving(rows_ND: Tensor, cuts: list[int], own: range) -> PendingBlocks:
    """Blocks divided at ``cuts``, two row ranges per message, last ones first."""
    edges = sorted({0, len(rows_ND), own.start, own.stop, *cuts})
    spans = [range(a, b) for a, b in pairwise(edges) if not own.start <= a < own.stop][::-1]
    chunks = [spans[i : i + 2] for i in range(0, len(spans), 2)]
    return PendingBlocks(
        len(rows_ND), own, tuple((piece, PendingTensor.completed(gather_ranges(rows_ND, piece))) for piece in chunks)
    )


@given(st.data())
def test_rows_are_in_their_order_or_at_an_index(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 12))
    rows_ND = torch.arange(rows * 3.0).view(rows, 3)
    place = st.integers(0, rows)
    start, stop = sorted((data.draw(place), data.draw(place)))
    cuts = data.draw(st.lists(place))
    found = arriving(rows_ND, cuts, range(start, stop)).take(lambda part: part * 2, 3 * rows_ND[start:stop])
    assert torch.equal(found, torch.cat((2 * rows_ND[:start], 3 * rows_ND[start:stop], 2 * rows_ND[stop:])))
    picked = data.draw(st.lists(st.integers(0, max(rows - 1, 0)), max_size=30)) if rows else []
    index_N = torch.tensor(sorted(picked), dtype=torch.int64)
    found = arriving(rows_ND, cuts, range(0)).pick(lambda part: part * 2, rows_ND[:0], index_N)
    assert torch.equal(found, rows_ND[index_N] * 2)
