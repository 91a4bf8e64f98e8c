"""Who keeps whose copy: always another host, no rank more than it must, as few shared groups as can be."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm.errors import ConfigError
from moe_comm.topology import ParallelConfig
from moe_comm.topology.buddies import buddies, shared_groups


@st.composite
def mappings(draw: st.DrawFn) -> ParallelConfig:
    degrees = [draw(st.sampled_from([1, 2, 3])) for _ in range(4)]
    stage = degrees[0] * degrees[1] * degrees[2]
    etp = draw(st.sampled_from([d for d in range(1, stage + 1) if stage % d == 0]))
    ep = draw(st.sampled_from([d for d in range(1, stage // etp + 1) if (stage // etp) % d == 0]))
    return ParallelConfig(tp=degrees[0], cp=degrees[1], dp=degrees[2], pp=degrees[3], ep=ep, etp=etp)


@given(mappings(), st.data())
@settings(max_examples=100, deadline=None)
def test_every_copy_is_on_another_host_and_spread_evenly(config: ParallelConfig, data: st.DataObject) -> None:
    hosts = data.draw(st.lists(st.integers(0, 3), min_size=config.world, max_size=config.world))
    found = buddies(config, hosts)
    if len(set(hosts)) == 1:
        assert found is None
        return
    assert found is not None and len(found) == config.world
    assert all(hosts[rank] != hosts[keeper] for rank, keeper in enumerate(found))
    largest = max(Counter(hosts).values())
    most = max(1, -(-largest // (config.world - largest)))
    assert max(Counter(found).values()) <= most
    if 2 * largest <= config.world:
        assert sorted(found) == list(range(config.world)), "a permutation"
    assert found == buddies(config, [f"host {host}" for host in hosts]), "names do not matter"


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
        return max(shared_groups(config, rank, keeper) for rank, keeper in enumerate(choice))

    found = buddies(config, hosts)
    assert found is not None
    ranks = range(config.world)
    all_choices = (c for c in permutations(ranks) if all(hosts[r] != hosts[c[r]] for r in ranks))
    assert worst(found) == min(map(worst, all_choices))


def test_on_a_regular_cluster_no_rank_shares_a_group_with_its_keeper() -> None:
    config = ParallelConfig.of(64, tp=8, pp=2, ep=8)
    found = buddies(config, [rank // 8 for rank in range(64)])
    assert found is not None and sorted(found) == list(range(64))
    for rank, keeper in enumerate(found):
        for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp"):
            assert keeper not in config.group_of(rank, axis)


def test_hosts_that_are_not_those_of_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="host of each of the 4 ranks; got 3"):
        buddies(ParallelConfig(dp=4), "abc")
