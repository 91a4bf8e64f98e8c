"""Ranks on two hosts in network namespaces detect faults of ranks on the other host, and a cut link."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.bench.hosts.namespaces import INTERFACE, Hosts, unavailable_reason
from moe_comm.runtime.event_layout import Kind
from moe_comm.runtime.events import EVENTS, communication_span
from moe_comm.runtime.launch.agent import ENDED_BY_WATCH
from moe_comm.runtime.watch import Watcher, WatchOptions
from moe_comm.runtime.watch.report import DetectedFault
from tests.pool import RankFailure, RankPool

RANKS = 4
NEAR, FAR = (0, 1), (2, 3)
"""Ranks of the first host, which serves the store, and of the second host."""
FAULT_AT = 4
OPTIONS = WatchOptions(stuck_s=1.5, start_s=60.0, records=256)
DEAD_S = 1.0
"""Time in which the end of a process must be detected."""
BUSY_S = 30.0
"""Extra time for a machine that is busy with other tests."""
CLONE_FS = 0x200
SPACES = ("net", "uts", "mnt")


@dataclass(frozen=True)
class Plan:
    """hosts: pid in the namespaces of each host. how: fault of rank ``culprit``, or of the link of its host."""

    hosts: tuple[int, ...]
    store: tuple[str, int]
    folder: str
    how: str
    culprit: int


@pytest.fixture(scope="module")
def pair() -> Iterator[Hosts]:
    if problem := unavailable_reason():
        pytest.skip(problem)
    with Hosts(2, 1.0) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(RANKS) as pool:
        yield pool


def plan(hosts: Hosts, folder: Path, how: str, culprit: int) -> Plan:
    pids = tuple(host.pid for host in hosts.hosts)
    return Plan(pids, (hosts.hosts[0].address, hosts.next_port()), str(folder), how, culprit)


def live(rank: int, world: int, plan: Plan) -> str:
    """Run steps of collectives with a fault in one of them. Returns the error of this rank."""
    move_to(plan.hosts[rank // 2])
    join(rank, world, plan.store)
    reported = Path(plan.folder, f"{rank}.jsonl")

    def note(fault: DetectedFault) -> None:
        with reported.open("a") as file:
            file.write(json.dumps(asdict(fault) | {"at_ns": time.monotonic_ns()}) + "\n")

    group = EVENTS.group(range(world))
    sums_W = torch.ones(world)
    try:
        with Watcher.create(OPTIONS, Path(plan.folder, "faults"), [note]) as watch:
            assert watch.table.hosts == (NEAR, FAR)
            for step in range(1, 1_000_000):
                with watch.step(step):
                    if step == FAULT_AT and rank == plan.culprit:
                        if plan.how == "cut":
                            wait_for_heartbeats(watch)
                        Path(plan.folder, "happened").write_text(str(time.monotonic_ns()))
                        misbehave(plan.how)
                    with communication_span(Kind.COLLECTIVE, "exchange", group=group):
                        dist.all_to_all_single(torch.empty(world), sums_W)
    except RuntimeError as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        caught = f"{type(error).__name__}: {error}\n{notes}"
        Path(plan.folder, f"{rank}.caught").write_text(caught)  # other ranks may end this one before it returns
        return caught
    raise AssertionError("nothing happened")


def wait_for_heartbeats(watch: Watcher) -> None:
    """Wait for two heartbeats of the first host. It has then read the status of this one."""
    assert watch._hosts is not None
    heartbeats: set[int] = set()
    while len(heartbeats - {0}) < 2:
        threading.Event().wait(0.01)
        heartbeats.add(watch._hosts._others[0].heartbeat)


def misbehave(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait(200)  # watchers resume this rank for a moment, to write its stacks
    else:
        subprocess.run(("ip", "link", "set", INTERFACE, "down"), check=True)


def move_to(host: int) -> None:
    """Move this thread, and the threads that it starts later, into the namespaces of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    return_codes = [libc.unshare(CLONE_FS)]  # setns of a mount namespace needs a thread with its own root
    folder = os.getcwd()
    for space in SPACES:
        with Path(f"/proc/{host}/ns/{space}").open() as file:
            return_codes.append(libc.setns(file.fileno(), 0))
    assert return_codes == [0] * len(return_codes), os.strerror(ctypes.get_errno())
    os.chdir(folder)


def join(rank: int, world: int, address: tuple[str, int]) -> None:
    """Replace the process group of the pool by one over the link."""
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    wait = timedelta(seconds=200)  # longer than any test, so that no collective times out
    store = dist.TCPStore(*address, world, is_master=rank == 0, timeout=wait, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)


def faults_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the faults that a rank has received, with their times."""
    path = folder / f"{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def seconds_until(folder: Path, reported: dict[str, Any]) -> float:
    """Return the seconds from the fault until a rank has received it. All hosts share the clock of one machine."""
    return float((reported["at_ns"] - int((folder / "happened").read_text())) / 1e9)


def report_of(reported: dict[str, Any]) -> str:
    return Path(reported["path"]).read_text()


@pytest.mark.parametrize("culprit", FAR, ids=["leader of its host", "not the leader"])
def test_a_killed_rank_is_reported_on_the_other_host(
    pair: Hosts, ranks: RankPool, tmp_path: Path, culprit: int
) -> None:
    caught = ranks.run(live, plan(pair, tmp_path, "kill", culprit), timeout=150, expect_dead={culprit})
    check_culprit(tmp_path, caught, "died", culprit, DEAD_S)


def test_a_stopped_rank_is_reported_as_stuck_on_the_other_host(pair: Hosts, ranks: RankPool, tmp_path: Path) -> None:
    culprit = FAR[0]
    caught = ranks.run(live, plan(pair, tmp_path, "stop", culprit), timeout=150, expect_dead={culprit})
    check_culprit(tmp_path, caught, "stuck", culprit, OPTIONS.stuck_s)


def test_a_stopped_rank_that_serves_the_store_isolates_no_host(pair: Hosts, ranks: RankPool, tmp_path: Path) -> None:
    caught = ranks.run(live, plan(pair, tmp_path, "stop", 0), timeout=150, expect_dead={0})
    (reported,) = faults_of(tmp_path, 1)
    assert (reported["kind"], reported["ranks"]) == ("stuck", [0])
    for rank in FAR:
        # The store stops and then ends, so this host may receive no fault; but it must not receive another one.
        assert all((one["kind"], one["ranks"]) == ("stuck", [0]) for one in faults_of(tmp_path, rank))
        assert "gloo" in caught[rank], "the connection ends with the process"


def check_culprit(folder: Path, caught: list[str], kind: str, culprit: int, within_s: float) -> None:
    for rank in range(RANKS):
        faults = faults_of(folder, rank)
        if rank == culprit:
            assert faults == []
            continue
        assert [(one["kind"], one["ranks"], one["step"]) for one in faults] == [(kind, [culprit], FAULT_AT)]
        assert seconds_until(folder, faults[0]) < within_s + BUSY_S
        assert f"rank {culprit}  is the culprit" in report_of(faults[0])
        assert f"last events of rank {rank}" in report_of(faults[0])
        assert "Noticed: " in caught[rank] and faults[0]["path"] in caught[rank]


def test_a_cut_link_ends_all_ranks_and_none_is_reported_dead(pair: Hosts, ranks: RankPool, tmp_path: Path) -> None:
    try:
        with pytest.raises(RankFailure) as failure:
            ranks.run(live, plan(pair, tmp_path, "cut", FAR[0]), timeout=150, grace=60)
    finally:
        subprocess.run(pair.command(1, ("ip", "link", "set", INTERFACE, "up")), check=True)
    # The first rank of a host ends itself. The other one does so too, or gets an error from the lost connection.
    assert set(failure.value.errors.values()) == {("ProcessDied", f"exit code {ENDED_BY_WATCH}")}
    assert all(failure.value.errors.keys() & set(host) for host in (NEAR, FAR))
    for rank in set(range(RANKS)) - failure.value.errors.keys():
        assert "Noticed: " in Path(tmp_path, f"{rank}.caught").read_text()
    name = pair.hosts[1].name
    for rank in range(RANKS):
        (reported,) = faults_of(tmp_path, rank)
        assert (reported["kind"], reported["ranks"], reported["action"]) == ("unreachable", list(FAR), "stop")
        assert reported["summary"].count(f", {name})") == len(FAR)
        within_s = OPTIONS.stuck_s + 1.5 if rank in NEAR else 2 * OPTIONS.stuck_s + 2.5
        assert seconds_until(tmp_path, reported) < within_s + BUSY_S
        report = report_of(reported)
        assert ("cannot be reached: no heartbeat" if rank in NEAR else "is cut off from the others") in report
        assert "culprit" not in report and "died" not in report and "stuck" not in report
        assert f"last events of rank {rank}" in report
