"""Ring order: no two ranks use the same peer in one step; near peers come first or last."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from moe_comm.errors import ConfigError
from moe_comm.overlap.ring import Ring

SEEDED = settings(deadline=None, derandomize=True)
HOSTS, SIZE = st.integers(1, 5), st.integers(1, 7)


@SEEDED
@given(HOSTS, SIZE)
def test_at_every_step_the_peers_of_all_ranks_are_a_permutation(hosts: int, size: int) -> None:
    rings = [Ring(rank, hosts * size, size) for rank in range(hosts * size)]
    for orders in ([r.arrivals for r in rings], [r.sends for r in rings], [r.scatters for r in rings]):
        for step in zip(*orders, strict=True):
            assert sorted(step) == list(range(hosts * size))
        for order in orders:
            assert sorted(order) == list(range(hosts * size))


@SEEDED
@given(HOSTS, SIZE)
def test_sends_match_the_arrivals_of_the_peer_in_each_step(hosts: int, size: int) -> None:
    rings = [Ring(rank, hosts * size, size) for rank in range(hosts * size)]
    for ring in rings:
        for step, destination in enumerate(ring.sends):
            assert rings[destination].arrivals[step] == ring.rank


@SEEDED
@given(HOSTS, SIZE)
def test_ranks_of_the_own_host_are_first_in_arrivals_and_last_in_scatters(hosts: int, size: int) -> None:
    for rank in range(hosts * size):
        ring = Ring(rank, hosts * size, size)
        own_host = set(range(rank // size * size, (rank // size + 1) * size))
        assert ring.arrivals[0] == ring.sends[0] == ring.scatters[-1] == rank
        assert set(ring.arrivals[:size]) == set(ring.sends[:size]) == set(ring.scatters[-size:]) == own_host
        for order in (ring.arrivals, ring.scatters):  # the ranks of a host are consecutive
            assert all(
                len({peer // size for peer in order[first : first + size]}) == 1 for first in range(0, len(order), size)
            )
        assert [ring.arrivals[step] for step in ring.distance_W] == list(range(hosts * size))
        assert [ring.scatters[turn] for turn in ring.turn_W] == list(range(hosts * size))


def test_orders_match_the_documented_example() -> None:
    ring = Ring(6, 8, 4)
    assert ring.arrivals == (6, 7, 4, 5, 2, 3, 0, 1)
    assert ring.sends == (6, 5, 4, 7, 2, 1, 0, 3)
    assert ring.scatters == (2, 3, 0, 1, 7, 4, 5, 6)
    assert [Ring(rank, 8, 4).arrivals[5] for rank in range(8)] == [5, 6, 7, 4, 1, 2, 3, 0]


def test_on_one_host_a_scatter_starts_at_the_next_rank() -> None:
    assert Ring(1, 3).scatters == (2, 0, 1)
    assert Ring(1, 3).arrivals == (1, 2, 0)
    assert Ring(0, 1).arrivals == Ring(0, 1).scatters == (0,)


def test_hosts_of_unequal_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 ranks do not divide evenly over hosts of 4"):
        Ring(0, 6, 4)
    with pytest.raises(ConfigError, match="equally many ranks on each host"):
        Ring.of_hosts(0, ["a", "a", "b"])


def test_hosts_are_identified_by_name_and_need_consecutive_ranks() -> None:
    assert Ring.of_hosts(1, ["a", "a", "b", "b"]) == Ring(1, 4, 2)
    assert Ring.of_hosts(2, ["x"] * 3) == Ring(2, 3, 3)
    with pytest.raises(ConfigError, match="next to each other"):
        Ring.of_hosts(0, ["a", "b", "a", "b"])


@pytest.mark.parametrize(
    ("rank", "world", "size"), [(0, 0, None), (2, 2, None), (-1, 2, None), (0, 4, 0), (True, 2, 2), (0, 2.0, None)]
)
def test_invalid_ranks_and_sizes_are_refused(rank: int, world: int, size: int | None) -> None:
    with pytest.raises(ConfigError):
        Ring(rank, world, size)
    with pytest.raises(ConfigError):
        Ring.of_hosts(0, [])
