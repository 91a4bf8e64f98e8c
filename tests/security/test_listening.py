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
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    process = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env | {"OMP_NUM_THREADS": "1"} | environment,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the reports of two ranks of a launch. Another socket listens on the port that torch would use."""
    folder = tmp_path_factory.mktemp("local")
    with socket.socket() as other_server:
        other_server.bind(("127.0.0.1", 0))
        other_server.listen()
        port = str(other_server.getsockname()[1])
        return run(["tests.security.ranks", "local", str(folder)], MASTER_ADDR="127.0.0.1", MASTER_PORT=port)["seen"]


def test_a_local_launch_listens_on_loopback_only_and_needs_no_port_of_its_own(local: Any) -> None:
    assert len(local) == 2 and all(report["ranks"] for report in local), (
        "no listener found, although gloo opens one on each rank"
    )
    for report in local:
        assert report["processes"] >= 3, "expected at least the launcher and two ranks"
        assert set(report["ranks"]) <= set(report["tree"]) <= LOOPBACK


def test_other_users_cannot_read_the_files_of_a_launch(local: Any) -> None:
    assert len(local[0]["modes"]) > 1, "the folder has no store file of the ranks"
    assert local[0]["modes"]["."] == 0o700, "other users can enter the folder"


def test_ranks_of_torchrun_on_one_host_listen_on_loopback_only(tmp_path: Path) -> None:
    """The store of torchrun's own agent is not covered; see docs/reliability.md."""
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"]
    reports = run([*command, "-m", "tests.security.ranks", "torchrun", str(tmp_path)])["seen"]
    assert len(reports) == 2
    for report in reports:
        assert report["ranks"] and set(report["ranks"]) <= LOOPBACK


def test_listening_finds_a_socket_on_all_interfaces() -> None:
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        assert not listening([os.getpid()]) <= LOOPBACK


def test_other_users_cannot_read_shared_memory_with_any_umask() -> None:
    native = pytest.importorskip("moe_comm._C", reason="the native core is not built")
    name = f"moe_comm.{os.getpid()}.security"
    before = os.umask(0)
    try:
        heap = native.Heap(f"/{name}", 64, 0, 1 << 22)
    finally:
        os.umask(before)
    assert modes(Path("/dev/shm") / name) == {".": 0o600}
    heap.unlink()
