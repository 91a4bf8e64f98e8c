"""The state of a peer's process, and the translation of backend errors that peers cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch.distributed as dist

from moe_comm.comm.channel import Channel
from moe_comm.comm.communicator import new_communicator
from moe_comm.comm.peers import Process, _stat
from moe_comm.errors import PeerDied, PeerTimeout


def test_this_process_is_alive_and_other_hosts_are_unknown() -> None:
    own = Process.own()
    assert own.status(own.host) == "alive"
    assert replace(own, host=own.host + 1).status(own.host) == "on another host"


def test_a_process_with_a_different_start_time_counts_as_ended() -> None:
    own = Process.own()
    assert replace(own, started=own.started - 1).status(own.host) == "ended"


def test_stopped_ended_and_unreaped_processes_are_distinguished() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = _stat(child.pid)
    assert stat is not None
    process = Process(Process.own().host, child.pid, stat[1])
    assert process.status(process.host) == "alive"
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert process.status(process.host) == "stopped"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.status(process.host) == "ended", "a zombie must count as ended"
    child.communicate()
    assert process.status(process.host) == "ended"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Timed out waiting 4000ms for recv operation to complete", PeerTimeout),
        ("Operation timed out!", PeerTimeout),
        ("Read error [127.0.0.1]:37014: Connection reset by peer", PeerDied),
        ("Connection closed by peer [127.0.0.1]:37014", PeerDied),
        ("Application timeout caused pair closure", PeerTimeout),
        ("NCCL error: remote process exited or there was a network error", PeerDied),
        ("Split sizes doesn't match total dim 0 size", None),
        ("Invalid scalar type", None),
    ],
)
def test_only_backend_errors_about_peers_are_translated(text: str, kind: type | None) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        channel = Channel(new_communicator(dist.group.WORLD), 1.0)
        error = channel.peer_error(text, 1.0, "dispatch (call 1)")
    finally:
        dist.destroy_process_group()
    assert error is None if kind is None else type(error) is kind
