"""Hosts that look at each other through a store."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_comm.runtime.watch.graph import View
from moe_comm.runtime.watch.hosts import HostBeats
from moe_comm.runtime.watch.report import views_to_json


class Hosts:
    """Two hosts with a rank each on a store that this test serves; time is what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.kept: dict[str, str] = {"0": "", "1": ""}
        self.views = [View(0)]
        members = [View(0), View(1)]
        monkeypatch.setattr("moe_comm.runtime.watch.hosts.time.monotonic", lambda: self.now)
        self.beats = HostBeats(self, 0, [[0], [1]], lambda: self.views, lambda: True, 5.0, members)  # type: ignore[arg-type]

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value

    def multi_get(self, keys: list[str]) -> list[str]:
        return [self.kept[key] for key in keys]

    def exchange(self, seconds: float, beat: int | None = None, fate: Any = "alive") -> list[Any]:
        """After so many seconds; the other host has said something with ``beat``. Fates of its ranks."""
        self.now += seconds
        if beat is not None:
            told = {"beat": beat, "views": views_to_json([View(1, fate=fate)]), "notice": ""}
            self.kept["1"] = json.dumps(told)
        self.beats._exchange([1])
        return [view.fate for view in self.beats.others()]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Hosts:
    return Hosts(monkeypatch)


def test_a_host_is_gone_when_it_says_nothing_for_long(hosts: Hosts) -> None:
    assert hosts.exchange(0.25, 1) == ["alive"]
    found = [hosts.exchange(0.25) for _ in range(24)]
    assert found[:18] == [["alive"]] * 18
    assert found[-1] == ["unreachable"]
    assert hosts.beats.is_odd()


def test_a_store_that_answers_late_makes_no_host_gone(hosts: Hosts) -> None:
    assert hosts.exchange(0.25, 1) == ["alive"]
    hosts.now += 60.0
    assert [(view.fate, view.silent_s) for view in hosts.beats.others()] == [("alive", 0.0)]
    assert not hosts.beats.is_odd()
    assert hosts.exchange(0.0) == ["alive"], "the other host could not speak either"
    assert not hosts.beats.is_odd()
    assert hosts.exchange(0.25, 2) == ["alive"]


def test_what_was_said_before_and_comes_later_is_not_heard(hosts: Hosts) -> None:
    assert hosts.exchange(0.25, 7, "left") == ["left"]
    assert hosts.exchange(0.25, 6, "alive") == ["left"]


def test_only_who_leaves_last_says_so_for_its_host(hosts: Hosts) -> None:
    hosts.beats._done.set()
    hosts.views = [View(0, fate="left"), View(2)]
    hosts.beats._run()
    assert hosts.kept["0"] == ""
    hosts.views = [View(0, fate="left"), View(2, fate="failed")]
    hosts.beats._run()
    assert [view["fate"] for view in json.loads(json.loads(hosts.kept["0"])["views"])] == ["left", "failed"]


def test_a_host_that_never_says_anything_is_unreachable_after_a_while_and_not_judged_before(hosts: Hosts) -> None:
    assert hosts.exchange(0.25) == []
    found = [hosts.exchange(0.25) for _ in range(24)]
    assert found[:18] == [[]] * 18
    assert found[-1] == ["unreachable"]


def test_what_a_silent_host_has_said_of_the_end_of_its_rank_stays_true(hosts: Hosts) -> None:
    assert hosts.exchange(0.25, 1, "ended") == ["ended"]
    assert [hosts.exchange(0.25) for _ in range(24)] == [["ended"]] * 24


def test_the_silence_of_a_host_does_not_make_its_ranks_silent(hosts: Hosts) -> None:
    hosts.exchange(0.25, 1)
    for _ in range(16):
        hosts.exchange(0.25)
    assert [(view.fate, view.silent_s, view.unbeaten_s) for view in hosts.beats.others()] == [("alive", 0.5, 0.5)]


def test_a_store_is_mute_while_it_does_not_answer_and_after_it_has_failed(hosts: Hosts) -> None:
    """What the thread does, as far as its third turn."""
    seen: list[float] = []
    turns = iter([False, False, False, True])

    class Done:
        def wait(self, seconds: float) -> bool:
            seen.append(hosts.beats.mute_s)
            hosts.now += 6.0
            return next(turns)

    def fail(keys: list[str]) -> list[str]:
        hosts.now += 1.0
        if len(seen) < 3:
            raise RuntimeError("no answer")
        return [hosts.kept[key] for key in keys]

    hosts.beats._done = Done()  # type: ignore[assignment]
    hosts.multi_get = fail  # type: ignore[method-assign]
    hosts.beats._run()
    assert seen == [0.0, 1.0, 8.0, 0.0]
    assert hosts.beats.mute_s == 0.0
    hosts.beats._asked_s = hosts.now - hosts.beats.cut_s
    assert hosts.beats.is_odd()
