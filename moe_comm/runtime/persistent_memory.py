"""Memory that outlives this process: two slots per name. One slot is complete while the other is written.

memory of one name, held by the host's ``memory_server``   header (4 KiB)
┌────────┬──────────────┬────────┬──────────────┐          magic, then length and CRC-32 of the JSON,
│ header │ content      │ header │ content      │          JSON: description of the content, its length and CRC-32
└────────┴──────────────┴────────┴──────────────┘
   slot 0, complete        slot 1, being written: its header is cleared first and written last

Errors: MoeCommError if there is no memory server and none can be started, OSError without enough memory, and
CheckpointError for content that is incomplete or damaged.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_comm.errors import CheckpointError, MoeCommError
from moe_comm.runtime import memory_server
from moe_comm.runtime.memory_server import peer_user, start_ticks
from moe_comm.runtime.untrusted import parse_object

HEADER_BYTES = 4096
MAGIC = b"mckept1\n"
SLOTS = 2
BLOCK = 32 << 20
"""Bytes per checksum call. The call releases the interpreter's lock."""
START_S = 20.0
"""Timeout for an answer of a memory server."""
IDLE_S = 1800.0
"""A memory server without connected ranks ends after this time."""


@dataclass(frozen=True)
class LauncherProcess:
    """The process that restarts ranks. Snapshots are valid while it lives."""

    pid: int
    ticks: int  # its start time; see ``start_ticks``
    folder: str = ""  # its temporary folder, which it removes when its ranks have ended; "" if it has none

    @classmethod
    def parent(cls, folder: str = "") -> LauncherProcess:
        """Return the parent of this process."""
        pid = os.getppid()
        try:
            return cls(pid, start_ticks(pid), folder)
        except OSError:
            raise MoeCommError("this process has no parent process that could restart ranks") from None

    def name(self, host: str) -> str:
        """Return the name of the memory server's socket. ``host`` distinguishes hosts that are emulated on one."""
        return f"moe_comm-keeper-{os.getuid()}-{self.pid}-{self.ticks}-{host}"


@dataclass(frozen=True)
class SlotHeader:
    """Description of the content of a slot."""

    run: str  # id of the run
    epoch: str  # id of the attempt that wrote it
    step: int
    owner: int  # rank whose state it is
    layout: str  # digest of the layout of the content
    content: int  # size of the tensors in bytes
    state: int  # size of the JSON after the tensors in bytes
    crc: int  # CRC-32 of both

    def to_bytes(self) -> bytes:
        """Return the header, padded to ``HEADER_BYTES``."""
        text = json.dumps(vars(self)).encode()
        return (MAGIC + struct.pack("<II", len(text), zlib.crc32(text)) + text).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def read(cls, raw: bytes) -> SlotHeader | None:
        """Parse a header. Returns None if there is none or it is damaged."""
        if len(raw) != HEADER_BYTES or not raw.startswith(MAGIC):
            return None
        length, crc = struct.unpack_from("<II", raw, len(MAGIC))
        text = raw[len(MAGIC) + 8 :][:length]
        if len(text) != length or zlib.crc32(text) != crc:
            return None
        try:
            header = cls(**parse_object(text))
        except (ValueError, TypeError):
            return None
        numbers = (header.step, header.owner, header.content, header.state, header.crc)
        texts = (header.run, header.epoch, header.layout)
        valid = all(type(value) is int and value >= 0 for value in numbers)
        return header if valid and all(isinstance(value, str) for value in texts) else None


class Slots:
    """The two slots of one name, mapped into this process. Closes ``handle``."""

    def __init__(self, handle: int, *, reserve: bool = False) -> None:
        """
        Args:
            handle: file descriptor of the memory.
            reserve: allocate the memory now instead of at the first write.
        """
        try:
            size = os.fstat(handle).st_size
            if reserve:
                os.posix_fallocate(handle, 0, size)
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        self.stride = size // SLOTS

    @staticmethod
    def size_for(capacity: int) -> int:
        """Return the size in bytes of two slots with ``capacity`` bytes each for content and state."""
        return SLOTS * (HEADER_BYTES + -(-capacity // mmap.PAGESIZE) * mmap.PAGESIZE)

    def header(self, slot: int) -> SlotHeader | None:
        """Return the header of ``slot``, or None if it is not complete."""
        header = SlotHeader.read(bytes(self.raw(slot)[:HEADER_BYTES]))
        return None if header is None or header.content + header.state > self.stride - HEADER_BYTES else header

    def clear(self, slot: int) -> None:
        """Mark ``slot`` as incomplete."""
        self.raw(slot)[:HEADER_BYTES] = bytes(HEADER_BYTES)

    def commit(self, slot: int, header: SlotHeader) -> None:
        """Mark ``slot`` as complete."""
        self.raw(slot)[:HEADER_BYTES] = header.to_bytes()

    def raw(self, slot: int) -> memoryview:
        """Return the header and the content of ``slot``, writable."""
        return memoryview(self._map)[slot * self.stride : (slot + 1) * self.stride]

    def buffer(self) -> memoryview:
        """Return both slots, writable."""
        return memoryview(self._map)

    def content(self, slot: int) -> memoryview:
        """Return the content of ``slot``, writable."""
        return self.raw(slot)[HEADER_BYTES:]


def checksum(data: memoryview, crc: int = 0) -> int:
    """Return the CRC-32. It is computed in blocks, so that other threads can run in between."""
    for at in range(0, len(data), BLOCK):
        crc = zlib.crc32(data[at : at + BLOCK], crc)
    return crc


class PersistentMemory:
    """A connection of this process to the memory server of its host (``moe_comm.runtime.memory_server``).

    Attributes:
        token: id of the memory server; equal for all processes that are connected to it.
    """

    def __init__(
        self, launcher: LauncherProcess, *, host: str = "", start: bool = True, idle_s: float = IDLE_S
    ) -> None:
        """
        Args:
            launcher: the memory server ends with this process.
            host: name of the host, if several hosts are emulated on one.
            start: start the memory server if there is none. False: first wait 2 s for another rank to start it.
            idle_s: time after which the memory server ends if no rank is connected.
        """
        self._child: subprocess.Popen[bytes] | None = None
        self._socket = self._connect(launcher, host, start, idle_s)
        self.token = str(self._ask(do="hello")["token"])

    def _connect(self, launcher: LauncherProcess, host: str, start: bool, idle_s: float) -> socket.socket:
        name = launcher.name(host)
        began = time.monotonic()
        while time.monotonic() - began < START_S:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.settimeout(START_S)
            try:
                connection.connect(f"\0{name}")
                if peer_user(connection) != os.getuid():
                    connection.close()
                    raise MoeCommError(f"the socket {name} belongs to another user")
                return connection
            except OSError:
                connection.close()
            if self._child is None and (start or time.monotonic() - began > 2):
                self._child = _start(launcher, name, idle_s)
            time.sleep(0.005)
        raise MoeCommError(f"no memory server answered within {START_S:g} s")

    def names(self) -> dict[str, int]:
        """Return all names and their sizes in bytes."""
        return {str(name): int(size) for name, size in self._ask(do="list")["sizes"].items()}

    def find(self, name: str) -> Slots | None:
        """Return the slots of ``name``, or None if there are none or they are too small for the headers."""
        if self.names().get(name, 0) < SLOTS * HEADER_BYTES:
            return None
        return Slots(self._handle(name, 0))

    def headers(self) -> list[tuple[str, int, SlotHeader]]:
        """Return name, slot and header of all complete slots."""
        results = []
        for name in self.names():
            slots = self.find(name)
            for slot in range(SLOTS) if slots is not None else ():
                if slots is not None and (header := slots.header(slot)) is not None:
                    results.append((name, slot, header))
        return results

    def allocate(self, name: str, capacity: int) -> Slots:
        """Return slots with at least ``capacity`` bytes each. Existing content is retained if it is large enough."""
        return Slots(self._handle(name, Slots.size_for(capacity)), reserve=True)

    def retain(self, names: list[str]) -> None:
        """Free the memory of all other names."""
        self._ask(do="retain", names=names)

    def end(self) -> None:
        """End the memory server at the end of a run. The memory is freed when no process has it mapped."""
        with contextlib.suppress(MoeCommError):  # it has ended
            self._ask(do="end")
        self.close()
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(5)

    def close(self) -> None:
        """Close the connection. The memory is retained."""
        self._socket.close()

    def _handle(self, name: str, size: int) -> int:
        _, handles = self._exchange(do="get", name=name, size=size)
        if len(handles) != 1:
            raise MoeCommError(f"the memory server returned no descriptor for {name!r}")
        return handles[0]

    def _ask(self, **request: Any) -> dict[str, Any]:
        return self._exchange(**request)[0]

    def _exchange(self, **request: Any) -> tuple[dict[str, Any], list[int]]:
        try:
            self._socket.sendall(json.dumps(request).encode())
            text, handles, _, _ = socket.recv_fds(self._socket, memory_server.MESSAGE_BYTES, 1)
            answer = parse_object(text)
        except (OSError, ValueError) as error:
            raise MoeCommError(f"the memory server does not answer: {error}") from None
        if "error" in answer:
            raise MoeCommError(f"the memory server: {answer['error']}")
        return answer, handles


def read(slots: Slots, slot: int) -> tuple[SlotHeader, memoryview]:
    """Return the header of a complete slot, and its content followed by the state, after verifying the checksum."""
    header = slots.header(slot)
    if header is None:
        raise CheckpointError("it is not complete")
    data = slots.content(slot)[: header.content + header.state]
    if checksum(data) != header.crc:
        raise CheckpointError(f"the checksum of rank {header.owner}'s state after step {header.step} does not match")
    return header, data


def _start(launcher: LauncherProcess, name: str, idle_s: float) -> subprocess.Popen[bytes]:
    """Start a memory server in a new session, so that signals to the ranks do not end it.

    It runs as an isolated script with a minimal environment: it must not load this process's modules, and it must not
    look like a rank.
    """
    arguments = [name, str(launcher.pid), str(launcher.ticks), launcher.folder, str(idle_s)]
    environment = {key: os.environ[key] for key in ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME") if key in os.environ}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(memory_server.__file__).resolve()), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
        cwd="/",
    )
