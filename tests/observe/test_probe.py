"""Probes between the hosts of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_comm.observe.probe import Probe, first_ranks
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import EVENTS
from tests.pool import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def probe(rank: int, world: int, hosts: list[str]) -> list[dict[int, float]]:
    probes = Probe(hosts)
    return [probes(), probes()]


def test_the_first_rank_of_each_host_probes() -> None:
    assert first_ranks(["b", "b", "a", "b", "c"]) == [0, 2, 4]
    assert first_ranks(["a"]) == [0]


def test_each_host_receives_a_probe_from_each_other_host(pool: RankPool) -> None:
    by_rank = pool.run(probe, ["a", "b", "b", "c"], timeout=60)
    for call in range(2):
        assert {rank: set(seconds[call]) for rank, seconds in enumerate(by_rank)} == {
            0: {1, 3},
            1: {0, 3},
            2: set(),
            3: {0, 1},
        }
        assert all(value > 0 for seconds in by_rank for value in seconds[call].values())


def recorded_calls(rank: int, world: int, hosts: list[str]) -> list[tuple[str, tuple[int, ...], int]]:
    before = {(span.rank, span.index) for span in read_spans(EVENTS.region)}
    EVENTS.reset_call_counts()
    probes = Probe(hosts)
    probes()
    probes.close()
    probes.close()
    new_spans = [span for span in read_spans(EVENTS.region) if (span.rank, span.index) not in before]
    return [(span.name, span.group, span.call) for span in new_spans if span.kind is Kind.COLLECTIVE and not span.open]


def test_each_probe_round_is_recorded_as_a_call(pool: RankPool) -> None:
    rounds = [("probe between hosts", (0, 1, 3), call) for call in (1, 2)]
    assert pool.run(recorded_calls, ["a", "b", "b", "c"], timeout=60) == [rounds, rounds, [], rounds]


def test_a_single_host_is_not_probed(pool: RankPool) -> None:
    assert pool.run(probe, ["a"] * 4, timeout=60) == [[{}, {}]] * 4
