"""Ranks of one host only listen on loopback, and only their user can read their files."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.security.ranks import LOOPBACK, listening, modes

ROOT = Path(__file__).parents[2]


def run(command: list[str], **environment: str) -> Any:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=kept | {"OMP_NUM_THREADS": "1"} | environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each of two ranks of a launch saw, started while the port that torch would take is another's."""
    folder = tmp_path_factory.mktemp("local")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        return run(["tests.security.ranks", "local", str(folder)], MASTER_ADDR="127.0.0.1", MASTER_PORT=port)["seen"]


def test_a_local_launch_listens_on_loopback_only_and_needs_no_port_of_its_own(local: Any) -> None:
    assert len(local) == 2 and all(one["ranks"] for one in local), "gloo listens, so there is something to see"
    for one in local:
        assert one["processes"] >= 3, "the launcher and two ranks at least"
        assert set(one["ranks"]) <= set(one["tree"]) <= LOOPBACK


def test_what_a_launch_puts_into_files_is_for_its_user_alone(local: Any) -> None:
    assert len(local[0]["modes"]) > 1, "the ranks met in a file there"
    assert local[0]["modes"]["."] == 0o700, "other users cannot enter the folder"


def test_ranks_of_torchrun_on_one_host_listen_on_loopback_only(tmp_path: Path) -> None:
    """Its own agent's store is torch's: see docs/reliability.md."""
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"]
    seen = run([*command, "-m", "tests.security.ranks", "torchrun", str(tmp_path)])["seen"]
    assert len(seen) == 2
    for one in seen:
        assert one["ranks"] and set(one["ranks"]) <= LOOPBACK


def test_the_look_at_sockets_sees_one_that_is_open_to_all() -> None:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        assert not listening([os.getpid()]) <= LOOPBACK


def test_shared_memory_is_for_its_user_alone_whatever_the_umask() -> None:
    native = pytest.importorskip("moe_comm._C", reason="the native core is not built")
    name = f"moe_comm.{os.getpid()}.security"
    before = os.umask(0)
    try:
        heap = native.Heap(f"/{name}", 64, 0, 1 << 22)
    finally:
        os.umask(before)
    assert modes(Path("/dev/shm") / name) == {".": 0o600}
    heap.unlink()
