"""Buddy ranks: on another host, evenly distributed, and with as few shared groups as possible."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings, strategies as st

from moe_comm.errors import ConfigError
from moe_comm.topology import ParallelConfig
from moe_comm.topology.buddies import buddies


@st.composite
def mappings(draw: st.DrawFn) -> ParallelConfig:
    degrees = [draw(st.sampled_from([1, 2, 3])) for _ in range(4)]
    stage = degrees[0] * degrees[1] * degrees[2]
    etp = draw(st.sampled_from([d for d in range(1, stage + 1) if stage % d == 0]))
    ep = draw(st.sampled_from([d for d in range(1, stage // etp + 1) if (stage // etp) % d == 0]))
    return ParallelConfig(tp=degrees[0], cp=degrees[1], dp=degrees[2], pp=degrees[3], ep=ep, etp=etp)


@given(mappings(), st.data())
@settings(max_examples=100, deadline=None)
def test_each_replica_is_on_another_host_and_replicas_are_even(config: ParallelConfig, data: st.DataObject) -> None:
    hosts = data.draw(st.lists(st.integers(0, 3), min_size=config.world, max_size=config.world))
    assignment = buddies(config, hosts)
    if len(set(hosts)) == 1:
        assert assignment is None
        return
    assert assignment is not None and len(assignment) == config.world
    assert all(hosts[rank] != hosts[buddy] for rank, buddy in enumerate(assignment))
    largest = max(Counter(hosts).values())
    max_replicas = max(1, -(-largest // (config.world - largest)))
    assert max(Counter(assignment).values()) <= max_replicas
    if 2 * largest <= config.world:
        assert sorted(assignment) == list(range(config.world)), "buddies must be a permutation"
    assert assignment == buddies(config, [f"host {host}" for host in hosts]), "host names must not matter"


@pytest.mark.parametrize(
    ("config", "hosts"),
    [
        (ParallelConfig(tp=2, dp=2, ep=2), "aabb"),
        (ParallelConfig(tp=2, dp=2, ep=4), "aabb"),
        (ParallelConfig(dp=4, ep=2), "abab"),
        (ParallelConfig(pp=2, dp=2, ep=2), "aabb"),
        (ParallelConfig(pp=2, dp=3, ep=3), "aabbcc"),
        (ParallelConfig(tp=2, cp=3, ep=2, etp=3), "aaabbb"),
    ],
)
def test_no_other_choice_shares_fewer_groups(config: ParallelConfig, hosts: str) -> None:
    def worst(choice: tuple[int, ...]) -> int:
        def shared(rank: int, buddy: int) -> int:
            return sum(buddy in config.group_of(rank, axis) for axis in config.sizes)

        return max(shared(rank, buddy) for rank, buddy in enumerate(choice))

    assignment = buddies(config, hosts)
    assert assignment is not None
    ranks = range(config.world)
    all_choices = (c for c in permutations(ranks) if all(hosts[r] != hosts[c[r]] for r in ranks))
    assert worst(assignment) == min(map(worst, all_choices))


def test_on_a_regular_cluster_no_rank_shares_a_group_with_its_buddy() -> None:
    config = ParallelConfig.of(64, tp=8, pp=2, ep=8)
    assignment = buddies(config, [rank // 8 for rank in range(64)])
    assert assignment is not None and sorted(assignment) == list(range(64))
    for rank, buddy in enumerate(assignment):
        for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
            assert buddy not in config.group_of(rank, axis)


def test_a_wrong_number_of_hosts_raises() -> None:
    with pytest.raises(ConfigError, match="host of each of the 4 ranks; got 3"):
        buddies(ParallelConfig(dp=4), "abc")
