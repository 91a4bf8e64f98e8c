"""Rows that are sent between ranks by a list that all ranks know."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import channel_of, configure_collectives
from moe_comm.comm.sparse_rows import RowTransfer, transfer_rows
from moe_comm.errors import PeerError
from tests.pool import on_ranks

ROWS = (3, 0, 5, 4)
"""Rows of the tensors of each rank."""


def tensors_of(rank: int, dtype: torch.dtype) -> list[Tensor]:
    first = torch.arange(ROWS[rank] * 6).view(ROWS[rank], 2, 3) + 1000 * rank
    return [first.to(dtype), (first[:, 0] + 500).to(dtype)]


def random_transfers(world: int, seed: int) -> list[RowTransfer]:
    rng = random.Random(seed)
    ranks = [rank for rank in range(world) if ROWS[rank]]
    result = []
    for place in range(3 * seed):
        source = rng.choice(ranks)
        destination = rng.choice([rank for rank in range(world) if rank != source])
        result.append(RowTransfer(source, rng.randrange(ROWS[source]), destination, place))
    return result


@on_ranks(2, 4, timeout=60)
@pytest.mark.parametrize(("shared", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float64)])
def test_each_rank_receives_its_rows_in_the_order_of_the_list(
    rank: int, world: int, shared: bool, dtype: torch.dtype
) -> None:
    configure_collectives(CollectiveOptions(shared_memory=shared))
    try:
        for seed in range(4):
            transfers, received = random_transfers(world, seed), []

            def receive(one: RowTransfer, rows: Sequence[Tensor], received: list = received) -> None:  # type: ignore[type-arg]
                received.append((one, [row.clone() for row in rows]))

            transfer_rows(channel_of(dist.group.WORLD), transfers, tensors_of(rank, dtype), receive, "a test")
            assert [one for one, _ in received] == [one for one in transfers if one.destination == rank]
            for one, rows in received:
                for got, source in zip(rows, tensors_of(one.source, dtype), strict=True):
                    assert torch.equal(got, source[one.source_row])
    finally:
        configure_collectives(CollectiveOptions())


@on_ranks(2, timeout=60)
def test_an_error_of_one_rank_raises_on_the_others(rank: int) -> None:
    pytest.importorskip("moe_comm._C", reason="the native core is not built")

    def receive(one: RowTransfer, rows: Sequence[Tensor]) -> None:
        raise ValueError("no place for the row")

    transfers = [RowTransfer(0, 1, 1, 0), RowTransfer(0, 2, 1, 1)]
    with pytest.raises(ValueError if rank else PeerError, match="no place" if rank else "rank 1"):
        transfer_rows(channel_of(dist.group.WORLD), transfers, [torch.ones(3, 4)], receive, "a transfer")
