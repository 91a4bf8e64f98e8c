"""Memory that outlives this process: two slots a name, one complete while the other is written.

memory of one name, kept by the host's ``memory_server``   header (4 KiB)
┌────────┬──────────────┬────────┬──────────────┐          mark, length and CRC-32 of what follows,
│ header │ content      │ header │ content      │          JSON: what the content is, its length and CRC-32
└────────┴──────────────┴────────┴──────────────┘
   slot 0, complete        slot 1, being written: its header is cleared first, and written last
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
MARK = b"mckept1\n"
SLOTS = 2
BLOCK = 32 << 20
"""Bytes of which a checksum is taken at once, without Python's lock."""
START_S = 20.0
"""Within which a memory server must answer."""
IDLE_S = 1800.0
"""A memory server without any rank ends after this."""


@dataclass(frozen=True)
class Owner:
    """The process that starts ranks again, for as long as it lives what is kept is of use.

    folder: its own, which it removes when its ranks have ended; "" where it has none.
    """

    pid: int
    ticks: int
    folder: str = ""

    @classmethod
    def parent(cls, folder: str = "") -> Owner:
        """This process's parent.

        Raises:
            MoeCommError: it cannot be seen from here.
        """
        pid = os.getppid()
        try:
            return cls(pid, start_ticks(pid), folder)
        except OSError:
            raise MoeCommError("this process has no parent that could start ranks again") from None

    def name(self, host: str) -> str:
        """Of the memory server's socket. host: tells hosts apart that are emulated on one."""
        return f"moe_comm-keeper-{os.getuid()}-{self.pid}-{self.ticks}-{host}"


@dataclass(frozen=True)
class Header:
    """What a slot holds. epoch: names the attempt that wrote it. layout: digest of how the content is cut.

    content, state: bytes of tensors, and of the JSON behind them. crc: CRC-32 of both.
    """

    run: str
    epoch: str
    step: int
    owner: int
    layout: str
    content: int
    state: int
    crc: int

    def to_bytes(self) -> bytes:
        """Padded to ``HEADER_BYTES``."""
        text = json.dumps(vars(self)).encode()
        return (MARK + struct.pack("<II", len(text), zlib.crc32(text)) + text).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def read(cls, raw: bytes) -> Header | None:
        """None where there is none, or it is damaged."""
        if len(raw) != HEADER_BYTES or not raw.startswith(MARK):
            return None
        length, crc = struct.unpack_from("<II", raw, len(MARK))
        text = raw[len(MARK) + 8 :][:length]
        if len(text) != length or zlib.crc32(text) != crc:
            return None
        try:
            found = cls(**parse_object(text))
        except (ValueError, TypeError):
            return None
        numbers = (found.step, found.owner, found.content, found.state, found.crc)
        texts = (found.run, found.epoch, found.layout)
        whole = all(type(value) is int and value >= 0 for value in numbers)
        return found if whole and all(isinstance(value, str) for value in texts) else None


class Slots:
    """The two slots of one name, mapped. ``handle`` is closed."""

    def __init__(self, handle: int, *, reserve: bool = False) -> None:
        """reserve: have the system find the memory now, and not when it is written to.

        Raises:
            OSError: there is not enough.
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
    def size_for(room: int) -> int:
        """Bytes of the memory of a name whose slots have ``room`` for content and state."""
        return SLOTS * (HEADER_BYTES + -(-room // mmap.PAGESIZE) * mmap.PAGESIZE)

    def header(self, slot: int) -> Header | None:
        """What is complete in ``slot``; None: nothing."""
        found = Header.read(bytes(self.raw(slot)[:HEADER_BYTES]))
        return None if found is None or found.content + found.state > self.stride - HEADER_BYTES else found

    def clear(self, slot: int) -> None:
        """Whatever is in ``slot`` is no longer complete."""
        self.raw(slot)[:HEADER_BYTES] = bytes(HEADER_BYTES)

    def commit(self, slot: int, header: Header) -> None:
        """The content of ``slot`` is complete."""
        self.raw(slot)[:HEADER_BYTES] = header.to_bytes()

    def raw(self, slot: int) -> memoryview:
        """Header and content, writable."""
        return memoryview(self._map)[slot * self.stride : (slot + 1) * self.stride]

    def whole(self) -> memoryview:
        """Both slots, writable."""
        return memoryview(self._map)

    def content(self, slot: int) -> memoryview:
        """What comes after the header, writable."""
        return self.raw(slot)[HEADER_BYTES:]


def checksum(data: memoryview, crc: int = 0) -> int:
    """CRC-32, a block at a time: other threads run meanwhile."""
    for at in range(0, len(data), BLOCK):
        crc = zlib.crc32(data[at : at + BLOCK], crc)
    return crc


class PersistentMemory:
    """This process's connection to the memory server of its host.

    Attributes:
        token: the same for all processes that share the memory server, and for no other.
    """

    def __init__(self, owner: Owner, *, host: str = "", start: bool = True, idle_s: float = IDLE_S) -> None:
        """
        Args:
            host: a name where several hosts are emulated on one.
            start: start the memory server at once if there is none; else wait for another rank to do it, for a while.

        Raises:
            MoeCommError: there is none and none can be started.
        """
        self._child: subprocess.Popen[bytes] | None = None
        self._socket = self._connect(owner, host, start, idle_s)
        self.token = str(self._ask(do="hello")["token"])

    def _connect(self, owner: Owner, host: str, start: bool, idle_s: float) -> socket.socket:
        name = owner.name(host)
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
                self._child = _start(owner, name, idle_s)
            time.sleep(0.005)
        raise MoeCommError(f"no memory server answered within {START_S:g} s")

    def names(self) -> dict[str, int]:
        """What is kept, and its size in bytes."""
        return {str(name): int(size) for name, size in self._ask(do="list")["sizes"].items()}

    def find(self, name: str) -> Slots | None:
        """What is kept as ``name``; None: nothing, or nothing with room for two headers."""
        if self.names().get(name, 0) < SLOTS * HEADER_BYTES:
            return None
        return Slots(self._handle(name, 0))

    def make(self, name: str, room: int) -> Slots:
        """Slots with at least ``room`` bytes each for content. What is kept there stays, unless it has less room.

        Raises:
            OSError: there is not enough memory.
        """
        return Slots(self._handle(name, Slots.size_for(room)), reserve=True)

    def retain(self, names: list[str]) -> None:
        """Let go of all others."""
        self._ask(do="retain", names=names)

    def end(self) -> None:
        """The run is over: the memory server ends, and all memory with it once nobody has it mapped."""
        with contextlib.suppress(MoeCommError):  # it has ended
            self._ask(do="end")
        self.close()
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(5)

    def close(self) -> None:
        """Give up the connection; the memory stays."""
        self._socket.close()

    def _handle(self, name: str, size: int) -> int:
        _, handles = self._exchange(do="get", name=name, size=size)
        if len(handles) != 1:
            raise MoeCommError(f"the memory server gave no handle of {name!r}")
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


def read(slots: Slots, slot: int) -> tuple[Header, memoryview]:
    """A complete slot, header and content with the state behind, checked.

    Raises:
        CheckpointError: it is not complete, or damaged.
    """
    header = slots.header(slot)
    if header is None:
        raise CheckpointError("it is not complete")
    data = slots.content(slot)[: header.content + header.state]
    if checksum(data) != header.crc:
        raise CheckpointError(f"the checksum of what rank {header.owner} kept after step {header.step} differs")
    return header, data


def _start(owner: Owner, name: str, idle_s: float) -> subprocess.Popen[bytes]:
    """Start a memory server, in a session of its own: what ends the ranks does not end it.

    By its file and isolated, so that neither this process's modules nor its environment matter; without the variables
    by which a rank is known.
    """
    arguments = [name, str(owner.pid), str(owner.ticks), owner.folder, str(idle_s)]
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
