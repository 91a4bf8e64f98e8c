"""Memory that outlives ranks: other ranks find it and read complete slots only; it is freed when the launcher exits."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from moe_comm.errors import CheckpointError, MoeCommError
from moe_comm.runtime import memory_server
from moe_comm.runtime.memory_server import start_ticks
from moe_comm.runtime.persistent_memory import (
    HEADER_BYTES,
    SLOTS,
    LauncherProcess,
    PersistentMemory,
    SlotHeader,
    Slots,
    checksum,
    read,
)

DEADLINE_S = 120.0
HEADER = SlotHeader(run="r", epoch="e", step=7, owner=1, layout="l", content=5, state=2, crc=0)


@pytest.fixture
def owner() -> Iterator[tuple[LauncherProcess, subprocess.Popen[bytes]]]:
    """Yield a process that acts as the launcher."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield LauncherProcess(process.pid, start_ticks(process.pid)), process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def connected(owner: LauncherProcess, **options: object) -> Iterator[PersistentMemory]:
    host_memory = PersistentMemory(owner, **options)  # type: ignore[arg-type]
    try:
        yield host_memory
    finally:
        host_memory.close()


def pid_of(host_memory: PersistentMemory) -> int:
    """Return the pid of the memory server."""
    raw = host_memory._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


def ends(pid: int) -> bool:
    """Return whether a process ends within the deadline."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], DEADLINE_S)[0])
    finally:
        os.close(handle)


def fill(slots: Slots, slot: int, content: bytes, step: int) -> SlotHeader:
    header = replace(HEADER, step=step, content=len(content), state=0, crc=checksum(memoryview(content)))
    slots.clear(slot)
    slots.content(slot)[: len(content)] = content
    slots.commit(slot, header)
    return header


def test_memory_outlives_the_connection_that_wrote_it(
    owner: tuple[LauncherProcess, subprocess.Popen[bytes]],
) -> None:
    with connected(owner[0]) as first:
        token = first.token
        fill(first.allocate("a", 100), 1, b"content", 3)
    with connected(owner[0]) as second:
        assert second.token == token and second.names() == {"a": Slots.size_for(100)}
        memory = second.find("a")
        assert memory is not None and memory.header(0) is None
        header, data = read(memory, 1)
        assert (header.step, bytes(data)) == (3, b"content")
        assert second.find("b") is None
        second.end()


def test_memory_is_reallocated_only_for_larger_sizes_and_freed_if_not_retained(
    owner: tuple[LauncherProcess, subprocess.Popen[bytes]],
) -> None:
    with connected(owner[0]) as host_memory:
        fill(host_memory.allocate("a", 100), 0, b"1", 3)
        assert host_memory.allocate("a", 90).header(0) is not None, "the same number of pages"
        assert host_memory.allocate("a", 1 << 20).header(0) is None, "a larger size needs new memory"
        fill(host_memory.allocate("a", 1 << 20), 0, b"2", 3)
        assert host_memory.allocate("a", 100).header(0) is not None, "it may hold the only complete replica"
        host_memory.allocate("b", 1)
        host_memory.retain(["b", "c"])
        assert list(host_memory.names()) == ["b"]
        host_memory.end()


def test_emulated_hosts_have_separate_servers(owner: tuple[LauncherProcess, subprocess.Popen[bytes]]) -> None:
    with connected(owner[0], host="a") as a, connected(owner[0], host="b") as b:
        a.allocate("x", 1)
        assert a.token != b.token and b.names() == {}
        a.end()
        b.end()


def test_the_server_ends_with_the_run(
    owner: tuple[LauncherProcess, subprocess.Popen[bytes]],
) -> None:
    with connected(owner[0]) as host_memory:
        host_memory.allocate("a", 1 << 20)
        pid = pid_of(host_memory)
        open_files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        assert [path for path in open_files if path.startswith("/memfd:")], "memory without a name"
        assert not [path for path in open_files if path.startswith("/dev/shm/")]
        assert os.getsid(pid) != os.getsid(0), "it has its own session"
        assert b"RANK" not in Path(f"/proc/{pid}/environ").read_bytes()
        host_memory.end()
    assert ends(pid)


def test_the_server_ends_when_the_launcher_is_killed(owner: tuple[LauncherProcess, subprocess.Popen[bytes]]) -> None:
    with connected(owner[0]) as host_memory:
        pid = pid_of(host_memory)
        owner[1].kill()
        assert ends(pid)
        with pytest.raises(MoeCommError, match="does not answer"):
            host_memory.names()


def test_the_server_ends_when_the_launchers_folder_is_gone(
    owner: tuple[LauncherProcess, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    with connected(replace(owner[0], folder=str(folder))) as host_memory:
        pid = pid_of(host_memory)
        folder.rmdir()
        assert ends(pid)


def test_the_server_ends_when_no_rank_connects(owner: tuple[LauncherProcess, subprocess.Popen[bytes]]) -> None:
    with connected(owner[0], idle_s=3.0) as host_memory:  # this process must have connected by then
        pid = pid_of(host_memory)
    assert ends(pid)


def test_a_second_server_of_the_same_name_exits(owner: tuple[LauncherProcess, subprocess.Popen[bytes]]) -> None:
    with connected(owner[0]) as host_memory:
        arguments = [owner[0].name(""), str(owner[0].pid), str(owner[0].ticks), "", "60"]
        command = [sys.executable, "-I", "-S", memory_server.__file__, *arguments]
        assert subprocess.run(command, timeout=DEADLINE_S, check=False).returncode == 1
        assert host_memory.names() == {}
        host_memory.end()


def test_a_server_for_a_reused_pid_does_not_start(
    owner: tuple[LauncherProcess, subprocess.Popen[bytes]],
) -> None:
    arguments = ["moe_comm-test-other", str(owner[0].pid), str(owner[0].ticks + 1), "", "60"]
    command = [sys.executable, "-I", "-S", memory_server.__file__, *arguments]
    assert subprocess.run(command, timeout=DEADLINE_S, check=False).returncode == 1


def without(name: str, owner: LauncherProcess) -> subprocess.Popen[bytes]:
    """Start a memory server in a Python that lacks the function ``name`` of ``os``."""
    text = f"import os, runpy; del os.{name}; runpy.run_path({memory_server.__file__!r}, run_name='__main__')"
    arguments = [owner.name(""), str(owner.pid), str(owner.ticks), "", "60"]
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", text, *arguments])
    while f"@{owner.name('')}" not in Path("/proc/net/unix").read_text() and process.poll() is None:
        time.sleep(0.005)
    return process


def test_without_pidfd_the_server_still_ends_with_the_launcher(
    owner: tuple[LauncherProcess, subprocess.Popen[bytes]],
) -> None:
    process = without("pidfd_open", owner[0])
    with connected(owner[0], start=False) as host_memory:
        assert pid_of(host_memory) == process.pid
        assert host_memory.allocate("a", 10).stride > 0
        owner[1].kill()
        owner[1].communicate()
        assert process.wait(DEADLINE_S) == 0


def test_without_memfd_the_client_gets_an_error(
    owner: tuple[LauncherProcess, subprocess.Popen[bytes]],
) -> None:
    process = without("memfd_create", owner[0])
    with connected(owner[0], start=False) as host_memory:
        with pytest.raises(MoeCommError, match="memfd_create"):
            host_memory.allocate("a", 10)
        host_memory.end()
    assert process.wait(DEADLINE_S) == 0


def test_the_server_survives_invalid_requests(owner: tuple[LauncherProcess, subprocess.Popen[bytes]]) -> None:
    with connected(owner[0]) as host_memory:
        for request in (
            b"\xff",
            b"[]",
            b"{}",
            b"{" * 5000,
            b'{"do": "get"}',
            b'{"do": "get", "name": "a", "size": -1}',
        ):
            host_memory._socket.sendall(request)
            assert "error" in json.loads(host_memory._socket.recv(memory_server.MESSAGE_BYTES)), request
        with pytest.raises(MoeCommError, match="ValueError"):
            host_memory._ask(do="get", name="a", size="much")
        assert host_memory.names() == {}
        host_memory.end()


def test_the_server_imports_only_the_standard_library() -> None:
    code = f"import runpy, sys; runpy.run_path({memory_server.__file__!r}); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "numpy", "moe_comm"} & set(out.split())


@pytest.fixture
def slots() -> Slots:
    handle = os.memfd_create("test")
    os.ftruncate(handle, Slots.size_for(64))
    return Slots(handle)


def test_an_incomplete_slot_does_not_affect_the_other_slot(slots: Slots) -> None:
    fill(slots, 0, b"old", 1)
    fill(slots, 1, b"new", 2)
    slots.clear(0)
    slots.content(0)[:3] = b"hal"  # the writing process is killed here
    assert slots.header(0) is None
    assert bytes(read(slots, 1)[1]) == b"new"
    with pytest.raises(CheckpointError, match="not complete"):
        read(slots, 0)


def test_a_flipped_bit_is_detected(slots: Slots) -> None:
    fill(slots, 0, b"content", 1)
    slots.content(0)[3] ^= 1
    with pytest.raises(CheckpointError, match="state after step 1 does not match"):
        read(slots, 0)
    fill(slots, 1, b"content", 1)
    slots.raw(1)[30] ^= 1
    assert slots.header(1) is None


def test_a_header_with_more_bytes_than_the_slot_is_rejected(slots: Slots) -> None:
    slots.commit(0, replace(HEADER, content=slots.stride))
    assert slots.header(0) is None and SLOTS == 2


@given(st.binary(max_size=200))
def test_headers_are_read_as_written_or_rejected(noise: bytes) -> None:
    raw = HEADER.to_bytes()
    assert SlotHeader.read(raw) == HEADER and len(raw) == HEADER_BYTES
    changed = noise + raw[len(noise) :]
    assert SlotHeader.read(changed) in (None, HEADER) and SlotHeader.read(noise) is None


@pytest.mark.parametrize("change", [{"step": -1}, {"step": True}, {"run": 3}, {"crc": 1.5}, {"more": 1}])
def test_a_header_with_invalid_fields_is_rejected(change: dict[str, object]) -> None:
    invalid = object.__new__(SlotHeader)
    invalid.__dict__.update(vars(HEADER) | change)
    assert SlotHeader.read(invalid.to_bytes()) is None
