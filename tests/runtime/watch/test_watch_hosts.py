"""Heartbeats between hosts over a store."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_comm.runtime.watch.graph import RankStatus
from moe_comm.runtime.watch.host_heartbeats import HostHeartbeats
from moe_comm.runtime.watch.report import statuses_to_json


class Hosts:
    """Two hosts with one rank each. This object is a fake store, and ``now`` is the fake clock in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.entries: dict[str, str] = {"0": "", "1": ""}
        self.statuses = [RankStatus(0)]
        members = [RankStatus(0), RankStatus(1)]
        monkeypatch.setattr("moe_comm.runtime.watch.host_heartbeats.time.monotonic", lambda: self.now)
        self.heartbeats = HostHeartbeats(self, 0, [[0], [1]], lambda: self.statuses, lambda: True, 5.0, members)  # type: ignore[arg-type]

    def set(self, key: str, value: str) -> None:
        self.entries[key] = value

    def multi_get(self, keys: list[str]) -> list[str]:
        return [self.entries[key] for key in keys]

    def exchange(self, seconds: float, heartbeat: int | None = None, state: Any = "alive") -> list[Any]:
        """Advance the clock by ``seconds`` and exchange heartbeats. Return the states of the other host's ranks.

        The other host publishes ``heartbeat`` before the exchange, unless it is None.
        """
        self.now += seconds
        if heartbeat is not None:
            statuses = statuses_to_json([RankStatus(1, state=state)])
            self.entries["1"] = json.dumps({"heartbeat": heartbeat, "statuses": statuses, "fault": ""})
        self.heartbeats._exchange([1])
        return [status.state for status in self.heartbeats.statuses()]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch)


def test_a_host_without_heartbeats_is_unreachable(hosts: Hosts) -> None:
    assert hosts.exchange(0.25, 1) == ["alive"]
    states = [hosts.exchange(0.25) for _ in range(24)]
    assert states[:18] == [["alive"]] * 18
    assert states[-1] == ["unreachable"]
    assert hosts.heartbeats.needs_check()


def test_a_slow_store_makes_no_host_unreachable(hosts: Hosts) -> None:
    assert hosts.exchange(0.25, 1) == ["alive"]
    hosts.now += 60.0
    assert [(status.state, status.stalled_s) for status in hosts.heartbeats.statuses()] == [("alive", 0.0)]
    assert not hosts.heartbeats.needs_check()
    assert hosts.exchange(0.0) == ["alive"], "the other host could not publish either"
    assert not hosts.heartbeats.needs_check()
    assert hosts.exchange(0.25, 2) == ["alive"]


def test_an_older_entry_that_arrives_later_is_ignored(hosts: Hosts) -> None:
    assert hosts.exchange(0.25, 7, "left") == ["left"]
    assert hosts.exchange(0.25, 6, "alive") == ["left"]


def test_only_the_last_rank_to_leave_publishes_for_its_host(hosts: Hosts) -> None:
    hosts.heartbeats._done.set()
    hosts.statuses = [RankStatus(0, state="left"), RankStatus(2)]
    hosts.heartbeats._run()
    assert hosts.entries["0"] == ""
    hosts.statuses = [RankStatus(0, state="left"), RankStatus(2, state="failed")]
    hosts.heartbeats._run()
    entry = json.loads(hosts.entries["0"])
    assert [status["state"] for status in json.loads(entry["statuses"])] == ["left", "failed"]


def test_a_host_that_never_publishes_becomes_unreachable_and_is_not_judged_before(hosts: Hosts) -> None:
    assert hosts.exchange(0.25) == []
    states = [hosts.exchange(0.25) for _ in range(24)]
    assert states[:18] == [[]] * 18
    assert states[-1] == ["unreachable"]


def test_the_end_of_a_rank_remains_known_when_its_host_is_unreachable(hosts: Hosts) -> None:
    assert hosts.exchange(0.25, 1, "ended") == ["ended"]
    assert [hosts.exchange(0.25) for _ in range(24)] == [["ended"]] * 24


def test_a_late_heartbeat_does_not_make_the_ranks_of_the_host_stalled(hosts: Hosts) -> None:
    hosts.exchange(0.25, 1)
    for _ in range(16):
        hosts.exchange(0.25)
    (status,) = hosts.heartbeats.statuses()
    assert (status.state, status.stalled_s, status.heartbeat_age_s) == ("alive", 0.5, 0.5)


def test_a_store_is_silent_while_it_does_not_answer_and_after_it_has_failed(hosts: Hosts) -> None:
    """Run the heartbeat thread's function for three periods. The first two requests to the store fail."""
    silent_s: list[float] = []
    wait_results = iter([False, False, False, True])

    class Done:
        def wait(self, seconds: float) -> bool:
            silent_s.append(hosts.heartbeats.store_silent_s)
            hosts.now += 6.0
            return next(wait_results)

    def multi_get(keys: list[str]) -> list[str]:
        hosts.now += 1.0
        if len(silent_s) < 3:
            raise RuntimeError("no answer")
        return [hosts.entries[key] for key in keys]

    hosts.heartbeats._done = Done()  # type: ignore[assignment]
    hosts.multi_get = multi_get  # type: ignore[method-assign]
    hosts.heartbeats._run()
    assert silent_s == [0.0, 1.0, 8.0, 0.0]
    assert hosts.heartbeats.store_silent_s == 0.0
    hosts.heartbeats._asked_s = hosts.now - hosts.heartbeats.isolation_timeout_s
    assert hosts.heartbeats.needs_check()
