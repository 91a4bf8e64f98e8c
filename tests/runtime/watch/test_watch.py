"""Ranks notice who is to blame, report it, and come out of their waits."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from moe_comm.errors import ConfigError, PeerError
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.event_reader import read_state
from moe_comm.runtime.events import EVENTS, moving
from moe_comm.runtime.launch.agent import ENDED_BY_WATCH
from moe_comm.runtime.watch.graph import View
from moe_comm.runtime.watch.notice import Notices
from moe_comm.runtime.watch.report import Fault, notice_text
from moe_comm.runtime.watch.status_table import NOTICE_BYTES, Board, Phase
from moe_comm.runtime.watch.watcher import Watcher, WatchOptions, _is_from_peers
from tests.pool import RankPool
from tests.runtime.watch.test_watch_graph import at_work, waiting


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_patience_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="stuck_s must be a positive number"):
        WatchOptions(stuck_s=value)


# --- with ranks ---

CULPRIT = 1
FAULT_AT = 4
OPTIONS = WatchOptions(stuck_s=1.5, start_s=60.0, records=256)


def misbehave(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait(100)  # it is made to go on for a moment, to write its stacks
    elif how == "gil":
        ctypes.PyDLL(None).sleep(100)
    elif how == "loop":
        while True:
            pass
    elif how == "sleep":
        threading.Event().wait(100)
    elif how == "error":
        raise ValueError("on purpose")


def live(rank: int, world: int, arg: tuple[str, str, str, bool]) -> dict[str, Any]:
    """Some steps, in one of which rank ``CULPRIT`` misbehaves; what this rank came to know."""
    how, folder, place, split = arg
    found: list[Fault] = []
    move = mover(place, world)
    host = f"host {rank * 2 // world}" if split else None
    watch = Watcher.meet(OPTIONS, folder, [found.append], host=host)
    caught = ""
    try:
        with watch:
            for step in range(1, 1_000_000):
                with watch.step(step):
                    if step == FAULT_AT and rank == CULPRIT:
                        misbehave(how)
                    move()
    except (RuntimeError, ValueError) as error:
        caught = f"{type(error).__name__}: {error}"
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("moe_comm-watch")]
    return {"caught": caught, "faults": found, "threads": threads}


def mover(place: str, world: int) -> Any:
    if place == "gloo":

        def exchange() -> None:
            """Every rank hears from every other, and so from the one that ends."""
            with moving(Kind.COLLECTIVE, "exchange", group=EVENTS.group(range(world))):
                dist.all_to_all_single(torch.empty(world), torch.ones(world))

        return exchange
    from moe_comm.dispatch import DispatchOptions, make_dispatcher

    dispatcher = make_dispatcher(world, dist.group.WORLD, "shared_memory", options=DispatchOptions(timeout_s=60))
    ids_TK = torch.arange(world).view(world, 1)

    def send() -> None:
        dispatcher.dispatch(torch.ones(world, 8), ids_TK)

    return send


def check(results: list[Any], kind: str) -> None:
    """All but the culprit know it, came out of their waits, and one of them speaks for all."""
    others = [one for rank, one in enumerate(results) if rank != CULPRIT]
    faults = [one["faults"][0] for one in others]
    assert [len(one["faults"]) for one in others] == [1] * len(others)
    assert {(fault.kind, fault.ranks, fault.step, fault.action) for fault in faults} == {
        (kind, (CULPRIT,), FAULT_AT, "stop")
    }
    assert all(one["caught"] for one in others), "what they waited for will not come"
    assert all(not one["threads"] for one in others)
    speaking = [fault for fault in faults if fault.speaks]
    assert len(speaking) == 1
    assert 0 <= speaking[0].noticed_s < (10.0 if kind == "died" else 20.0)  # machines that run tests are slow
    reports = [Path(fault.path).read_text() for fault in faults]
    assert len({fault.path for fault in faults}) == len(faults)
    assert all(f"rank {CULPRIT}  is the culprit" in text for text in reports)
    assert all("last events of rank 0" in text for text in reports)
    if kind == "stuck":
        assert "misbehave" in reports[0]


@pytest.mark.parametrize(("how", "kind"), [("kill", "died"), ("stop", "stuck"), ("gil", "stuck"), ("loop", "stuck")])
def test_ranks_in_a_collective_of_gloo_notice(pool2: RankPool, tmp_path: Path, how: str, kind: str) -> None:
    results = pool2.run(live, (how, str(tmp_path), "gloo", False), timeout=60, expect_dead={CULPRIT})
    check(results, kind)


@pytest.mark.parametrize(("how", "kind"), [("kill", "died"), ("sleep", "stuck")])
def test_ranks_in_a_dispatch_over_shared_memory_notice(pool4: RankPool, tmp_path: Path, how: str, kind: str) -> None:
    pids = pool4.pids
    results = pool4.run(live, (how, str(tmp_path), "shared_memory", False), timeout=60, expect_dead={CULPRIT})
    check(results, kind)
    assert all("report: " in one["caught"] for rank, one in enumerate(results) if rank != CULPRIT)
    assert not [name for name in os.listdir("/dev/shm") if any(f".{pid}." in name for pid in pids)]


@pytest.mark.parametrize(("how", "kind"), [("kill", "died"), ("sleep", "stuck")])
def test_hosts_tell_each_other(pool4: RankPool, tmp_path: Path, how: str, kind: str) -> None:
    results = pool4.run(live, (how, str(tmp_path), "gloo", True), timeout=60, expect_dead={CULPRIT})
    check(results, kind)


def test_an_exception_of_one_rank_is_the_cause_of_what_the_others_catch(pool2: RankPool, tmp_path: Path) -> None:
    first, second = pool2.run(leave_with_error, str(tmp_path), timeout=60)
    assert second == "ValueError: on purpose"
    assert "rank 1" in first
    assert "left with ValueError: on purpose" in first


def leave_with_error(rank: int, world: int, folder: str) -> str:
    with pytest.raises((ValueError, PeerError)) as caught, Watcher.meet(OPTIONS, folder) as watch:
        fail_or_wait(watch, rank, world)
    return f"{caught.type.__name__}: {caught.value}"


def fail_or_wait(watch: Watcher, rank: int, world: int) -> NoReturn:
    with watch.step(1):
        if rank == CULPRIT:
            raise ValueError("on purpose")
        with moving(Kind.COLLECTIVE, "sum", group=EVENTS.group(range(world))):
            assert watch._notices.told.wait(30)  # as long as it takes for the connection to be lost
    raise PeerError("connection lost")


def test_a_healthy_run_with_pauses_is_left_alone_and_nothing_is_written(pool2: RankPool, tmp_path: Path) -> None:
    options = (str(tmp_path / "faults"), 0.25)
    assert pool2.run(pause, options, timeout=60) == [{"faults": 0, "longest": True, "rank": rank} for rank in range(2)]
    assert list(tmp_path.iterdir()) == []


def pause(rank: int, world: int, arg: tuple[str, float]) -> dict[str, Any]:
    """Pauses longer than ``stuck_s``, after a first step that had such a pause, and a long one between steps."""
    folder, stuck_s = arg
    found: list[Fault] = []
    options = WatchOptions(stuck_s=stuck_s, start_s=60.0, records=256)
    with Watcher.meet(options, folder, [found.append]) as watch:
        for step in range(1, 4):
            with watch.step(step):
                if rank == 1:
                    threading.Event().wait(0.6)
                mover("gloo", world)()
            if rank == 0:
                threading.Event().wait(0.6)
            mover("gloo", world)()
        longest = watch.patience_s > 4 * stuck_s
        state = read_state(EVENTS.region)
        assert state is not None
    return {"faults": len(found), "longest": longest or rank == 0, "rank": state.rank}


def test_reporting_without_ending_leaves_the_stuck_rank_to_go_on(pool2: RankPool, tmp_path: Path) -> None:
    told = pool2.run(report_only, str(tmp_path), timeout=60)
    assert told == [("stuck", "none", 1)] * 2


def report_only(rank: int, world: int, folder: str) -> tuple[str, str, int]:
    options = replace(OPTIONS, stuck_s=0.5, end=False)
    found: list[Fault] = []
    with Watcher.meet(options, folder, [found.append]) as watch:
        for step in range(1, 4):
            with watch.step(step):
                if step == 3 and rank == CULPRIT:
                    assert watch._notices.told.wait(30)
                mover("gloo", world)()
    return found[0].kind, found[0].action, len(found)


# --- what a rank does with a notice ---


@pytest.fixture
def alone() -> Iterator[Board]:
    board = Board.meet(0, lambda text: [text], records=256)
    yield board
    board.close()


def noticed(kind: str, ranks: tuple[int, ...], victims: list[int], report: str = "it") -> str:
    fault = Fault(kind, ranks, "rank 0 is it", 3, "stop", 0, report)
    return notice_text(asdict(fault) | {"speaker": 0, "victims": victims})


@pytest.mark.parametrize("report", ["é\n" * 2_000_000, "x" * NOTICE_BYTES])
def test_a_notice_that_is_too_long_loses_the_end_of_its_report(alone: Board, report: str) -> None:
    alone.post(noticed("died", (0,), [], report), 0)
    told = json.loads(alone.notice())
    assert (told["what"], told["speaker"]) == ("rank 0 is it", 0)
    assert report.startswith(told["report"])
    assert len(told["report"]) > 100_000


def test_a_culprit_is_ended_though_its_report_cannot_be_written(
    alone: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(alone, "kill", ended.append)
    disk = threading.Event()

    def write(fault: Fault) -> None:
        disk.wait(30)

    notices = Notices(alone, OPTIONS, tmp_path, [write], lambda: True)
    alone.post(noticed("stuck", (0,), [0]), 0)
    notices.take(notices.new)
    assert (ended, notices.told.is_set()) == ([0], False)
    disk.set()
    assert notices.told.wait(30)


def test_who_waits_for_a_rank_that_failed_lets_it_write_its_checkpoint_first(
    alone: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    notices = Notices(alone, OPTIONS, tmp_path, (), lambda: True)
    alone.say(Phase.STEP, 1.0)
    alone.post(noticed("error", (0,), []), 0)
    notices.take(notices.new)
    second = 1_000_000_000
    now = notices._over_ns
    notices.come_out(now + 30 * second)
    alone._ended.add(0)
    notices.come_out(now + 31 * second)
    assert codes == [], "its end may let this rank go"
    notices.come_out(now + 36 * second)
    assert codes == [ENDED_BY_WATCH]


def test_what_a_rank_never_says_it_is_waited_for_no_longer_than_the_start(
    alone: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    notices = Notices(alone, OPTIONS, tmp_path, (), lambda: True)
    alone.say(Phase.STEP, 1.0)
    alone.post(noticed("error", (0,), []), 0)
    notices.take(notices.new)
    notices.come_out(notices._over_ns + int((OPTIONS.start_s + 6) * 1e9))
    assert codes == [ENDED_BY_WATCH]


class Elsewhere:
    """Other hosts, with a rank that is stuck or not."""

    def __init__(self) -> None:
        self.stuck = True
        self.mute_s, self.cut_s = 0.0, 5.0
        self.told: list[str] = []

    def others(self) -> list[View]:
        silent_s = 60.0 if self.stuck else 0.0
        return [at_work(1, silent_s), waiting(0, (0, 1), 7)] if self.stuck else []

    def tell(self, notice: str) -> None:
        self.told.append(notice)


def test_each_suspicion_of_another_host_gets_its_time_and_is_told_once(alone: Board, tmp_path: Path) -> None:
    watch = Watcher(alone, replace(OPTIONS, end=False), tmp_path)
    elsewhere = Elsewhere()
    watch._hosts = elsewhere  # type: ignore[assignment]
    second = 1_000_000_000
    watch._judge(100 * second)
    elsewhere.stuck = False
    watch._judge(101 * second)
    elsewhere.stuck = True
    watch._judge(110 * second)
    assert elsewhere.told == [], "its own host speaks first"
    for later in range(112, 120):
        watch._judge(later * second)
    assert len(elsewhere.told) == 1


class Silent(Elsewhere):
    """A host that is not heard."""

    def others(self) -> list[View]:
        return [replace(at_work(1, 60.0), fate="unreachable"), waiting(0, (0, 1), 7)]


@pytest.mark.parametrize(("end", "action"), [(True, "stop"), (False, "none")])
def test_ranks_end_for_a_host_that_is_not_heard_if_they_may(
    alone: Board, tmp_path: Path, end: bool, action: str
) -> None:
    watch = Watcher(alone, replace(OPTIONS, end=end), tmp_path)
    silent = Silent()
    watch._hosts = silent  # type: ignore[assignment]
    for second in range(100, 104):
        watch._judge(second * 1_000_000_000)
    (told,) = map(json.loads, silent.told)
    assert (told["kind"], told["ranks"], told["action"], told["victims"]) == ("unreachable", [1], action, [])


def test_ranks_that_are_watched_record_what_they_do(pool2: RankPool, tmp_path: Path) -> None:
    assert pool2.run(record_nothing, str(tmp_path), timeout=60) == [True] * 2


def record_nothing(rank: int, world: int, folder: str) -> bool:
    EVENTS.enabled = False
    with Watcher.meet(OPTIONS, folder):
        return EVENTS.enabled


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RuntimeError("Connection closed by peer [127.0.0.1]"), True),
        (PeerError("rank 1 is gone"), True),
        (ConnectionError("connection to the logger lost"), False),
        (ValueError("no connection"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_only_what_torch_raises_of_connections_comes_from_other_ranks(error: Exception, found: bool) -> None:
    assert _is_from_peers(error) == found
