"""Runs that resume from snapshots in memory have the bits of runs without faults, whichever replica is lost."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.observe.records import Attempt, read_lines
from moe_comm.runtime.launch import init_ranks, launch
from moe_comm.runtime.persistent_memory import LauncherProcess, PersistentMemory, Slots
from moe_comm.train import RunResult, run
from moe_comm.train.loop import job
from moe_comm.train.resilience.peer_memory import PeerSnapshots
from moe_comm.train.resilience.persistent_state import open_host_memory
from tests.pool import RankPool
from tests.train.loop.test_resume import AUTO, Crash, crash_after, folder_of, losses_of, state_of

EVERY = "checkpoint.peer_every=1"


@dataclass(frozen=True)
class Setting:
    """A run on a pool. owner: launcher of the servers; None: no snapshots. hosts: one letter for the host of each rank.
    crash: number of steps after which the run crashes."""

    settings: tuple[str, ...]
    owner: LauncherProcess | None = None
    hosts: str = "aaaa"
    crash: int | None = None

    def then(self, *settings: str, crash: int | None = None) -> Setting:
        """Return the setting of the restarted ranks."""
        return replace(self, settings=(*self.settings, AUTO, *settings), crash=crash)


def _work(rank: int, world: int, setting: Setting) -> RunResult | None:
    owner = setting.owner
    with pytest.MonkeyPatch.context() as patch, crash_after(setting.crash):
        if owner is not None:
            patch.setattr(job, "open_host_memory", lambda ranks, say: PersistentMemory(owner, host=setting.hosts[rank]))
        try:
            return run(None, list(setting.settings))
        except Crash:
            return None


def server_of(host_memory: PersistentMemory) -> int:
    """Return the pid of a memory server."""
    raw = host_memory._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


def ended(pid: int) -> bool:
    """Return whether a process ends within two minutes."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle) as file:
        return bool(select.select([file], [], [], 120)[0])


def kill_host(owner: LauncherProcess, host: str) -> None:
    """Kill a host's memory server, which simulates the loss of the host."""
    host_memory = PersistentMemory(owner, host=host, start=False)
    pid = server_of(host_memory)
    host_memory.close()
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)


def newest(slots: Slots) -> int:
    headers = [slots.header(slot) for slot in range(2)]
    return max(range(2), key=lambda slot: -1 if (header := headers[slot]) is None else header.step)


def damage(owner: LauncherProcess, host: str, rank: int, slots_of: str = "newest") -> None:
    """Change a byte of a rank's snapshot on a host, to a different value each time."""
    host_memory = PersistentMemory(owner, host=host, start=False)
    slots = host_memory.find(f"rank-{rank:05d}")
    assert slots is not None
    for slot in range(2) if slots_of == "all" else [newest(slots)]:
        slots.content(slot)[100] = (slots.content(slot)[100] + 1) % 256
    host_memory.close()


def attempts_of(folder: Path) -> list[tuple[int, str]]:
    return [(attempt.first_step, attempt.source) for attempt in read_lines(folder / "attempts.jsonl", Attempt)]


def assert_same_run(folder: Path, other: Path) -> None:
    assert losses_of(folder) == losses_of(other)
    state, expected_state = state_of(folder), state_of(other)
    assert state.keys() == expected_state.keys()
    assert all(torch.equal(state[name], expected_state[name]) for name in state)


def settings_in(settings: list[str], tmp_path: Path, name: str) -> tuple[str, ...]:
    return (*settings, f"run.folder={tmp_path / name}")


SPREAD = ("parallel.ep=2", "parallel.sharding=fsdp", "model.dtype=bfloat16", "model.family=deepseek_v3")
MAPPINGS = {
    "ep, fsdp, bf16, correction bias": (*SPREAD, "model.bias_rate=0.05"),
    "zbv, tied": ("parallel.pp=2", "parallel.schedule=zbv", "model.layers=4", "model.tie=true"),
}


@pytest.mark.parametrize(
    ("mapping", "lost"),
    [("ep, fsdp, bf16, correction bias", "a host"), pytest.param("zbv, tied", "processes", marks=pytest.mark.slow)],
)
def test_a_run_without_checkpoints_resumes_to_the_same_bits(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path, owner: LauncherProcess, mapping: str, lost: str
) -> None:
    settings = [*shared_settings, *MAPPINGS[mapping], "run.steps=5", "run.eval_every=2"]
    uninterrupted = settings_in(settings, tmp_path, "through")
    pool2.run(_work, Setting(uninterrupted), timeout=90)
    crashed = Setting((*settings_in(settings, tmp_path, "broken"), EVERY), owner, "ab", crash=3)
    pool2.run(_work, crashed, timeout=90)
    if lost == "a host":
        kill_host(owner, "b")
    result = pool2.run(_work, crashed.then(), timeout=90)[0]
    folder = folder_of(list(crashed.settings))
    assert (result.status, result.steps, result.folder) == ("finished", 5, folder)
    assert attempts_of(folder) == [(1, "fresh"), (4, "peer memory")]
    assert_same_run(folder, folder_of(list(uninterrupted)))
    written_result = json.loads((folder / "result.json").read_text())
    assert written_result["peer_memory"]["copies"] == 1 and written_result["peer_memory"]["bytes"] > 0
    assert written_result["effective_time"]["attempts"] == 2 and written_result["effective_time"]["lost_steps"] == 1


def test_a_damaged_snapshot_is_replaced_by_a_replica_an_earlier_step_or_the_disk(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path, owner: LauncherProcess
) -> None:
    settings = [*shared_settings, "parallel.ep=2", "run.steps=7", "checkpoint.every=2"]
    uninterrupted = settings_in(settings, tmp_path, "through")
    pool2.run(_work, Setting(uninterrupted), timeout=90)
    crashed = Setting((*settings_in(settings, tmp_path, "broken"), EVERY), owner, "ab", crash=5)
    pool2.run(_work, crashed, timeout=90)
    damage(owner, "b", 1)
    # Resumes after step 5 from the replica on the other host.
    pool2.run(_work, crashed.then(crash=5), timeout=90)
    damage(owner, "a", 1)
    damage(owner, "b", 1)
    # Resumes after step 4 from memory, which is as new as the checkpoint on the disk.
    pool2.run(_work, crashed.then(crash=4), timeout=90)
    for host in "ab":
        damage(owner, host, 0, "all")
    # Resumes after step 4 from the disk.
    pool2.run(_work, crashed.then(crash=6), timeout=90)
    # Step 6 is also on the disk. There is no snapshot of the other mapping, and afterwards none of the first one.
    pool2.run(_work, crashed.then("parallel.ep=1", crash=6), timeout=90)
    pool2.run(_work, crashed.then(), timeout=90)
    folder = folder_of(list(crashed.settings))
    memory, disk = "peer memory", "checkpoint"
    assert attempts_of(folder) == [(1, "fresh"), (6, memory), (5, memory), (5, disk), (7, disk), (7, disk)]
    assert_same_run(folder, folder_of(list(uninterrupted)))


def test_a_snapshot_older_than_the_checkpoint_is_not_used(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path, owner: LauncherProcess
) -> None:
    settings = settings_in(
        [*shared_settings, "run.steps=5", "checkpoint.every=4", "checkpoint.peer_every=3"], tmp_path, "runs"
    )
    setting = Setting(settings, owner, "aa", crash=4)
    pool2.run(_work, setting, timeout=90)
    pool2.run(_work, setting.then(), timeout=90)
    assert attempts_of(folder_of(list(settings))) == [(1, "fresh"), (5, "checkpoint")]


def test_a_snapshot_of_another_run_is_not_used(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path, owner: LauncherProcess
) -> None:
    first, second = (
        Setting((*settings_in([*shared_settings, "run.steps=3"], tmp_path, name), EVERY), owner, "aa", crash=2)
        for name in ("first", "second")
    )
    pool2.run(_work, first, timeout=90)
    result = pool2.run(_work, second.then(), timeout=90)[0]
    assert attempts_of(result.folder) == [(1, "fresh")] and result.folder == folder_of(list(second.settings))


def test_without_a_launcher_no_snapshots_are_saved(settings: list[str], capsys: Any) -> None:
    result = run(None, [*settings, EVERY, "run.steps=2"])
    assert result.status == "finished"
    assert "no snapshots are saved in memory: rank 0: no launcher would restart these ranks" in capsys.readouterr().out
    assert "peer_memory" not in json.loads((result.folder / "result.json").read_text())


# --- runs in separate processes ---


def _killed_once(settings: list[str], victim: int, servers: Path) -> RunResult:
    """Run training, in which one rank kills itself in the first attempt.

    Write the pids of the servers to a file, and those of the ranks to a file next to it.
    """
    with servers.with_name("ranks").open("a") as file:
        file.write(f"{os.getpid()}\n")
    with init_ranks(None, 60) as ranks, pytest.MonkeyPatch.context() as patch:

        def recording(*args: Any) -> Any:
            host_memory = open_host_memory(*args)
            assert host_memory is not None
            with servers.open("a") as file:
                file.write(f"{server_of(host_memory)}\n")
            return host_memory

        def kill_in_step_4(self: PeerSnapshots, step: int, loss: float) -> float:
            if ranks.rank == victim and ranks.restarts == 0 and step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss

        patch.setattr(job, "open_host_memory", recording)
        patch.setattr(PeerSnapshots, "after_backward", kill_in_step_4)
        return run(None, [*settings, *([AUTO] if ranks.restarts else [])])


def test_a_killed_rank_is_restarted_and_resumes_from_memory(
    pool2: RankPool, shared_settings: list[str], tmp_path: Path
) -> None:
    settings = [*shared_settings, "parallel.ep=2", "run.steps=5"]
    uninterrupted = settings_in(settings, tmp_path, "through")
    pool2.run(_work, Setting(uninterrupted), timeout=90)
    killed = [*settings_in(settings, tmp_path, "broken"), EVERY]
    servers = tmp_path / "servers"
    results = launch(_killed_once, (killed, 1, servers), ranks=2, restarts=1, preload=["torch"])
    folder = folder_of(killed)
    assert [result.steps for result in results] == [5, 5]
    (first, first_source), (resumed_step, source) = attempts_of(folder)
    # The snapshot that was in progress when the rank was killed may be complete, or the previous one is.
    assert (first, first_source, source) == (1, "fresh", "peer memory") and resumed_step in (3, 4)
    assert_same_run(folder, folder_of(list(uninterrupted)))
    (pid,) = set(servers.read_text().split())
    assert ended(int(pid)), "both attempts must use one server, which ends with the run"
    ranks = (tmp_path / "ranks").read_text().split()
    assert len(ranks) >= 4, "two ranks in two attempts"
    # Other tests on this machine have segments, too.
    assert not [path for rank in ranks for path in Path("/dev/shm").glob(f"moe_comm.{rank}.*")]
    effective = json.loads((folder / "result.json").read_text())["effective_time"]
    assert effective["attempts"] == 2 and 0 < effective["ratio"] < 1 and effective["restart_s"] > 0
