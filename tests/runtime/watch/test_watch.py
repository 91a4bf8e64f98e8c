"""Watchers detect the culprit and report it, and the other ranks leave their waits."""

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
from moe_comm.runtime.event_reader import read_header
from moe_comm.runtime.events import EVENTS, communication_span
from moe_comm.runtime.launch.agent import ENDED_BY_WATCH
from moe_comm.runtime.watch.fault_handler import FaultHandler
from moe_comm.runtime.watch.graph import RankStatus
from moe_comm.runtime.watch.report import DetectedFault, fault_json
from moe_comm.runtime.watch.status_table import FAULT_BYTES, Phase, StatusTable
from moe_comm.runtime.watch.watcher import Watcher, WatchOptions, _is_from_peers
from tests.pool import RankPool, on_ranks
from tests.runtime.watch.test_watch_graph import at_work, waiting


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_timeouts_are_rejected(value: float) -> None:
    with pytest.raises(ConfigError, match="stuck_s must be a positive, finite number"):
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
        threading.Event().wait(200)  # watchers resume this rank for a moment, to write its stacks
    elif how == "gil":
        ctypes.PyDLL(None).sleep(200)
    elif how == "loop":
        while True:
            pass
    elif how == "sleep":
        threading.Event().wait(200)
    elif how == "error":
        raise ValueError("on purpose")


def live(rank: int, world: int, arg: tuple[str, str, str, bool]) -> dict[str, Any]:
    """Run steps until rank ``CULPRIT`` misbehaves in one. Returns what this rank has detected."""
    how, folder, place, split = arg
    faults: list[DetectedFault] = []
    move = mover(place, world)
    host = f"host {rank * 2 // world}" if split else None
    # The end of a process is noticed at once. A rank of a busy machine must not be reported as stuck before.
    options = replace(OPTIONS, stuck_s=30.0) if how == "kill" else OPTIONS
    watch = Watcher.create(options, folder, [faults.append], host=host)
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
    return {"caught": caught, "faults": faults, "threads": threads}


def mover(place: str, world: int) -> Any:
    if place == "gloo":

        def exchange() -> None:
            """Every rank receives from every other one, and so from the rank that ends."""
            with communication_span(Kind.COLLECTIVE, "exchange", group=EVENTS.group(range(world))):
                dist.all_to_all_single(torch.empty(world), torch.ones(world))

        return exchange
    from moe_comm.dispatch import DispatchOptions, make_dispatcher

    dispatcher = make_dispatcher(
        world, dist.group.WORLD, backend="shared_memory", options=DispatchOptions(timeout_s=200)
    )
    ids_TK = torch.arange(world).view(world, 1)

    def send() -> None:
        dispatcher.dispatch(torch.ones(world, 8), ids_TK)

    return send


def check(results: list[Any], kind: str) -> None:
    """Check that all other ranks know the culprit and left their waits, and that one of them is the reporter."""
    others = [one for rank, one in enumerate(results) if rank != CULPRIT]
    faults = [one["faults"][0] for one in others]
    assert [len(one["faults"]) for one in others] == [1] * len(others)
    assert {(fault.kind, fault.ranks, fault.step, fault.action) for fault in faults} == {
        (kind, (CULPRIT,), FAULT_AT, "stop")
    }
    assert all(one["caught"] for one in others), "the culprit never completes the operation"
    assert all(not one["threads"] for one in others)
    reporters = [fault for fault in faults if fault.is_reporter]
    assert len(reporters) == 1
    assert 0 <= reporters[0].noticed_s < 30.0  # machines that run tests are slow
    reports = [Path(fault.path).read_text() for fault in faults]
    assert len({fault.path for fault in faults}) == len(faults)
    assert all(f"rank {CULPRIT}  is the culprit" in text for text in reports)
    assert all("last events of rank 0" in text for text in reports)
    if kind == "stuck":
        assert "misbehave" in reports[0]


@pytest.mark.parametrize(("how", "kind"), [("kill", "died"), ("stop", "stuck"), ("gil", "stuck"), ("loop", "stuck")])
def test_ranks_in_a_gloo_collective_detect_a_fault(pool2: RankPool, tmp_path: Path, how: str, kind: str) -> None:
    results = pool2.run(live, (how, str(tmp_path), "gloo", False), timeout=150, expect_dead={CULPRIT})
    check(results, kind)


@pytest.mark.parametrize(("how", "kind"), [("kill", "died"), ("sleep", "stuck")])
def test_ranks_in_a_dispatch_over_shared_memory_detect_a_fault(
    pool4: RankPool, tmp_path: Path, how: str, kind: str
) -> None:
    pids = pool4.pids
    results = pool4.run(live, (how, str(tmp_path), "shared_memory", False), timeout=150, expect_dead={CULPRIT})
    check(results, kind)
    assert all("report: " in one["caught"] for rank, one in enumerate(results) if rank != CULPRIT)
    assert not [name for name in os.listdir("/dev/shm") if any(f".{pid}." in name for pid in pids)]


@pytest.mark.parametrize(("how", "kind"), [("kill", "died"), ("sleep", "stuck")])
def test_a_fault_is_reported_on_all_hosts(pool4: RankPool, tmp_path: Path, how: str, kind: str) -> None:
    results = pool4.run(live, (how, str(tmp_path), "gloo", True), timeout=150, expect_dead={CULPRIT})
    check(results, kind)


@on_ranks(2, timeout=150)
def test_the_error_of_one_rank_is_reported_as_the_cause_of_the_errors_of_others(
    rank: int, world: int, tmp_path: Path
) -> None:
    kind, text = (
        (ValueError, "^on purpose$") if rank == CULPRIT else (PeerError, "rank 1.*left with ValueError: on purpose")
    )
    with pytest.raises(kind, match=text), Watcher.create(OPTIONS, tmp_path) as watch:
        fail_or_wait(watch, rank, world)


def fail_or_wait(watch: Watcher, rank: int, world: int) -> NoReturn:
    with watch.step(1):
        if rank == CULPRIT:
            raise ValueError("on purpose")
        with communication_span(Kind.COLLECTIVE, "sum", group=EVENTS.group(range(world))):
            assert watch._faults.reported.wait(120)  # the connection would be lost afterwards
    raise PeerError("connection lost")


@on_ranks(2, timeout=150)
def test_a_healthy_run_with_pauses_has_no_faults_and_no_reports(rank: int, world: int, tmp_path: Path) -> None:
    """Pause for longer than ``stuck_s`` on rank 1 in each step, and on rank 0 between steps."""
    faults: list[DetectedFault] = []
    options = WatchOptions(stuck_s=0.5, start_s=60.0, records=256)
    with Watcher.create(options, tmp_path / "faults", [faults.append]) as watch:
        for step in range(1, 4):
            with watch.step(step):
                if rank == 1:
                    threading.Event().wait(0.6)
                mover("gloo", world)()
            if rank == 0:
                threading.Event().wait(0.6)
            mover("gloo", world)()
        assert rank == 0 or watch.timeout_s > 4 * 0.5
        state = read_header(EVENTS.region)
        assert state is not None and state.rank == rank
    assert not faults and not list(tmp_path.iterdir())


@on_ranks(2, timeout=150)
def test_without_end_a_stuck_rank_is_reported_and_continues(rank: int, world: int, tmp_path: Path) -> None:
    options = replace(OPTIONS, stuck_s=0.5, end=False)
    faults: list[DetectedFault] = []
    with Watcher.create(options, tmp_path, [faults.append]) as watch:
        for step in range(1, 4):
            with watch.step(step):
                if step == 3 and rank == CULPRIT:
                    assert watch._faults.reported.wait(120)
                mover("gloo", world)()
    assert [(fault.kind, fault.action) for fault in faults] == [("stuck", "none")]


# --- reaction of a rank to a fault ---


@pytest.fixture
def alone() -> Iterator[StatusTable]:
    table = StatusTable.create(0, lambda text: [text], records=256)
    yield table
    table.close()


def noticed(kind: str, ranks: tuple[int, ...], victims: list[int], report: str = "it") -> str:
    fault = DetectedFault(kind, ranks, "rank 0 is it", 3, "stop", 0, report)
    return fault_json(asdict(fault) | {"reporter": 0, "victims": victims})


@pytest.mark.parametrize("report", ["é\n" * 2_000_000, "x" * FAULT_BYTES])
def test_a_fault_that_is_too_long_loses_the_end_of_its_report(alone: StatusTable, report: str) -> None:
    alone.post_fault(noticed("died", (0,), [], report), 0)
    reported = json.loads(alone.fault_text())
    assert (reported["summary"], reported["reporter"]) == ("rank 0 is it", 0)
    assert report.startswith(reported["report"])
    assert len(reported["report"]) > 100_000


def test_a_culprit_is_killed_although_the_report_cannot_be_written(
    alone: StatusTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(alone, "kill", ended.append)
    disk = threading.Event()

    def write(fault: DetectedFault) -> None:
        disk.wait(120)

    handler = FaultHandler(alone, OPTIONS, tmp_path, [write], lambda: True)
    alone.post_fault(noticed("stuck", (0,), [0]), 0)
    handler.handle(handler.pending)
    assert (ended, handler.reported.is_set()) == ([0], False)
    disk.set()
    assert handler.reported.wait(120)


def test_ranks_that_wait_for_a_failed_rank_let_it_write_its_checkpoint_first(
    alone: StatusTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    handler = FaultHandler(alone, OPTIONS, tmp_path, (), lambda: True)
    alone.publish(Phase.STEP, 1.0)
    alone.post_fault(noticed("error", (0,), []), 0)
    handler.handle(handler.pending)
    second = 1_000_000_000
    now = handler._stopping_ns
    handler.exit_if_waiting(now + 30 * second)
    alone._ended.add(0)
    handler.exit_if_waiting(now + 31 * second)
    assert codes == [], "its end may end the wait of this rank"
    handler.exit_if_waiting(now + 36 * second)
    assert codes == [ENDED_BY_WATCH]


def test_a_failed_rank_that_does_not_end_is_waited_for_no_longer_than_start_s(
    alone: StatusTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    handler = FaultHandler(alone, OPTIONS, tmp_path, (), lambda: True)
    alone.publish(Phase.STEP, 1.0)
    alone.post_fault(noticed("error", (0,), []), 0)
    handler.handle(handler.pending)
    handler.exit_if_waiting(handler._stopping_ns + int((OPTIONS.start_s + 6) * 1e9))
    assert codes == [ENDED_BY_WATCH]


class Elsewhere:
    """Heartbeats of another host, with a stuck rank or not."""

    def __init__(self) -> None:
        self.stuck = True
        self.store_silent_s, self.isolation_timeout_s = 0.0, 5.0
        self.reported: list[str] = []

    def statuses(self) -> list[RankStatus]:
        stalled_s = 60.0 if self.stuck else 0.0
        return [at_work(1, stalled_s), waiting(0, (0, 1), 7)] if self.stuck else []

    def publish_fault(self, text: str) -> None:
        self.reported.append(text)


def test_a_fault_of_another_host_is_posted_once_and_after_a_delay(alone: StatusTable, tmp_path: Path) -> None:
    watch = Watcher(alone, replace(OPTIONS, end=False), tmp_path)
    elsewhere = Elsewhere()
    watch._hosts = elsewhere  # type: ignore[assignment]
    second = 1_000_000_000
    watch._check(100 * second)
    elsewhere.stuck = False
    watch._check(101 * second)
    elsewhere.stuck = True
    watch._check(110 * second)
    assert elsewhere.reported == [], "its own host must post first"
    for later in range(112, 120):
        watch._check(later * second)
    assert len(elsewhere.reported) == 1


class Silent(Elsewhere):
    """A host without heartbeats."""

    def statuses(self) -> list[RankStatus]:
        return [replace(at_work(1, 60.0), state="unreachable"), waiting(0, (0, 1), 7)]


@pytest.mark.parametrize(("end", "action"), [(True, "stop"), (False, "none")])
def test_ranks_end_for_a_host_without_heartbeats_if_end_is_set(
    alone: StatusTable, tmp_path: Path, end: bool, action: str
) -> None:
    watch = Watcher(alone, replace(OPTIONS, end=end), tmp_path)
    silent = Silent()
    watch._hosts = silent  # type: ignore[assignment]
    for second in range(100, 104):
        watch._check(second * 1_000_000_000)
    (reported,) = map(json.loads, silent.reported)
    assert (reported["kind"], reported["ranks"], reported["action"], reported["victims"]) == (
        "unreachable",
        [1],
        action,
        [],
    )


@on_ranks(2, timeout=150)
def test_watched_ranks_record_spans(tmp_path: Path) -> None:
    EVENTS.enabled = False
    with Watcher.create(OPTIONS, tmp_path):
        assert EVENTS.enabled


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Connection closed by peer [127.0.0.1]"), True),
        (PeerError("rank 1 is gone"), True),
        (ConnectionError("connection to the logger lost"), False),
        (ValueError("no connection"), False),
        (RuntimeError("shapes differ"), False),
    ],
)
def test_only_connection_errors_of_torch_are_caused_by_other_ranks(error: Exception, expected: bool) -> None:
    assert _is_from_peers(error) == expected
