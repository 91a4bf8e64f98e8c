"""Ring order: no two ranks use the same peer in one step; own rows come first, own results last."""

from __future__ import annotations

import pytest

from moe_comm.overlap.ring import Ring


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_at_every_step_the_peers_of_all_ranks_are_a_permutation(world: int) -> None:
    rings = [Ring(rank, world) for rank in range(world)]
    for orders in ([ring.arrivals for ring in rings], [ring.scatters for ring in rings]):
        for peers in (*orders, *zip(*orders, strict=True)):
            assert sorted(peers) == list(range(world))


def test_own_rows_come_first_and_own_results_last() -> None:
    assert Ring(1, 4).arrivals == (1, 2, 3, 0)
    assert Ring(1, 4).scatters == (2, 3, 0, 1)
    assert Ring(0, 1).arrivals == Ring(0, 1).scatters == (0,)
