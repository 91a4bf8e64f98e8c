"""The status table: memory shared by the ranks of one host, with the events and the process handle of each rank.

    one anonymous mapping per host, made by its first rank; the kernel frees it when the last process ends
    ┌────────┬───────┬─────────────────┬──────────────────────────┬──────────────────────────┐
    │ header │ fault │ entry per rank  │ events of the first rank │ events of the second ... │
    └────────┴───────┴─────────────────┴──────────────────────────┴──────────────────────────┘
      fault: the newest detected fault, as JSON. entry: phase and progress timeout of a rank.

Each rank also has an anonymous file for its Python stacks, which the other ranks of the host keep open. faulthandler
writes the stacks there when the rank receives a signal, even if a thread holds the interpreter's lock. Each rank holds
pidfds of the other processes. They report the end of a process at once, and never refer to another one with its pid.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import mmap
import os
import re
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist

from moe_comm.errors import HeapError
from moe_comm.runtime.event_layout import LONG, RECORDS, fence, region_bytes
from moe_comm.runtime.events import start_ticks
from moe_comm.runtime.groups import host_key

PAGE = 4096
FAULT_BYTES = 1 << 20
STACK_BYTES = 64 << 10
TEXT_BYTES = 1024
LOCK_S = 0.5
"""Maximum time to wait for the lock of the table. A stopped process may hold it."""
STEADY_LOOKS = 5
"""The stacks are complete when their size was equal in this many checks, 3 ms apart. Threads are written one by one."""
FIRST_SIGNAL = signal.SIGRTMIN + 6
"""First real-time signal to try for requests of Python stacks. Batch systems use SIGUSR1."""

TextGather = Callable[[str], list[str]]
"""All-gathers one text per rank, in rank order. Collective."""

_UNSUPPORTED = (AttributeError, OSError, ValueError, RuntimeError)
"""Raised where the kernel or Python lacks or refuses ``memfd_create``, ``eventfd`` or ``pidfd_open``."""
_FAULT_NUMBER_AT, _SIZE_AT = 8, 16
_PHASE_AT, _TIMEOUT_AT, _ACKNOWLEDGED_AT, _ACKNOWLEDGED_NS_AT, _LEFT_NS_AT, _MESSAGE_AT = 0, 8, 16, 24, 32, 64


class Phase(IntEnum):
    """Phase of a rank, as its entry publishes it."""

    STARTING = 0  # until the end of the first step
    STEP = 1
    BETWEEN = 2  # between steps: evaluation or a checkpoint may take long
    LEFT = 3  # finished; the end of its process is expected
    FAILED = 4  # left because of its own error
    CAUGHT = 5  # left with an error that another rank caused


@dataclass(frozen=True)
class Member:
    """The process of a rank."""

    rank: int
    host: str  # key of its host; see ``host_key``
    label: str  # host name for messages
    pid: int
    ticks: int  # start time of the process; see ``start_ticks``
    stacks: str  # path of the file for its Python stacks
    signal: int  # signal that makes it write its stacks


@dataclass(frozen=True)
class StatusEntry:
    """The entry of a rank in the table."""

    phase: Phase
    timeout_s: float  # longest time without progress of a healthy rank
    acknowledged: int  # number of the last fault that the rank has received, at ``acknowledged_ns``
    acknowledged_ns: int
    left_ns: int
    message: str  # the error with which it left, at ``left_ns``


def gather_texts(text: str) -> list[str]:
    """All-gather a text of at most ``TEXT_BYTES`` over the default process group, with any backend. Collective."""
    raw = text.encode()
    if len(raw) > TEXT_BYTES:
        raise ValueError(f"{text!r} is longer than {TEXT_BYTES} bytes")
    device = "cpu" if "cpu" in str(dist.get_backend_config()) else "cuda"
    own = torch.zeros(TEXT_BYTES, dtype=torch.uint8, device="cpu")
    if raw:
        own[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    texts = [torch.empty(TEXT_BYTES, dtype=torch.uint8, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(texts, own.to(device))
    return [bytes(gathered.tolist()).rstrip(b"\0").decode() for gathered in texts]


class StatusTable:
    """The status table of this rank's host. ``create`` makes it.

    Attributes:
        members: the processes of all ranks of all hosts, by rank.
        local_ranks: the ranks of this host.
        hosts: the ranks of each host.
    """

    def __init__(self, rank: int, members: Sequence[Member], memory: mmap.mmap, records: int) -> None:
        self.rank = rank
        self.members = tuple(members)
        self.records = records
        groups: dict[str, list[int]] = {}
        for member in members:
            groups.setdefault(member.host, []).append(member.rank)
        self.hosts = tuple(tuple(ranks) for ranks in groups.values())
        self.local_ranks = tuple(groups[members[rank].host])
        self._memory = memory
        self._view = memoryview(memory)
        self._pidfds: dict[int, int] = {}
        self._stacks: dict[int, int] = {}
        self._ended: set[int] = set()
        self._poll = select.poll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake_fd, select.POLLIN)

    @classmethod
    def create(
        cls, rank: int, gather: TextGather = gather_texts, *, records: int = RECORDS, host: str | None = None
    ) -> StatusTable:
        """Create the tables of all hosts. Collective over all ranks.

        Args:
            records: number of spans in the event ring of each rank.
            host: ranks with an equal value share a table. None: ``host_key``.
        """
        problem, stacks, number = "", -1, 0
        try:
            stacks = _create_memfd("moe_comm-stacks")
            number = _free_signal()
        except _UNSUPPORTED as error:  # raised below, after the collective calls that the other ranks wait in
            problem = f"rank {rank} cannot be watched here: {error}"
        own = Member(
            rank=rank,
            host=host if host is not None else host_key(),
            label=socket.gethostname()[:64],
            pid=os.getpid(),
            ticks=start_ticks(),
            stacks=f"/proc/{os.getpid()}/fd/{stacks}",
            signal=number,
        )
        members = [Member(**json.loads(text)) for text in gather(json.dumps(asdict(own)))]
        local_ranks = [member.rank for member in members if member.host == own.host]
        size = _table_bytes(len(local_ranks), records)
        memory: mmap.mmap | None = None
        table: StatusTable | None = None
        path = ""
        shared = -1
        try:
            if rank == local_ranks[0] and not problem:
                shared = _create_memfd("moe_comm-status")
                os.ftruncate(shared, size)
                memory = mmap.mmap(shared, size)
                path = f"/proc/{own.pid}/fd/{shared}"
        except _UNSUPPORTED as error:
            problem = f"rank {rank} cannot make a status table of {size} bytes: {error}"
        paths = gather(path)
        try:
            if memory is None and paths[local_ranks[0]] and not problem:
                memory = _map(paths[local_ranks[0]], size)
            if memory is not None:
                table = cls(rank, members, memory, records)
                table._open_processes(stacks)
                _write_stacks(number, stacks)
        except _UNSUPPORTED as error:
            problem = f"rank {rank} cannot open the memory that the other ranks of its host share: {error}"
        problems = [text for text in gather(problem.encode()[:TEXT_BYTES].decode(errors="ignore")) if text]
        if shared >= 0:
            os.close(shared)  # all ranks have mapped it
        if table is None or problems:
            owned = table is not None and rank in table._stacks
            if table is not None:
                table.close()
            if stacks >= 0 and not owned:
                os.close(stacks)
            raise HeapError((problems or ["the first rank of this host made no status table"])[0])
        return table

    # --- memory ---

    def region(self, rank: int) -> memoryview:
        """Return the memory for the events of ``rank``, for ``EVENTS.attach`` and for readers."""
        entries_end = _table_bytes(0, self.records) + len(self.local_ranks) * PAGE
        at = entries_end + self.local_ranks.index(rank) * _region_size(self.records)
        return self._view[at : at + region_bytes(self.records)]

    def entry(self, rank: int) -> StatusEntry:
        """Return the entry of ``rank``."""
        at = self._entry_at(rank)
        phase, acknowledged = self._words(at, _PHASE_AT, _ACKNOWLEDGED_AT)
        fence()  # these two are written after the others
        timeout, acknowledged_ns, left_ns = self._words(at, _TIMEOUT_AT, _ACKNOWLEDGED_NS_AT, _LEFT_NS_AT)
        message = ""
        if phase in (Phase.FAILED, Phase.CAUGHT):
            (size,) = struct.unpack_from("<H", self._view, at + _MESSAGE_AT)
            message = bytes(self._view[at + _MESSAGE_AT + 2 :][: min(size, PAGE // 2)]).decode(errors="replace")
        return StatusEntry(Phase(phase), timeout / 1e9, acknowledged, acknowledged_ns, left_ns, message)

    def publish(self, phase: Phase, timeout_s: float) -> None:
        """Publish the phase and the progress timeout of this rank."""
        at = self._entry_at(self.rank)
        LONG.pack_into(self._view, at + _TIMEOUT_AT, int(timeout_s * 1e9))
        fence()
        LONG.pack_into(self._view, at + _PHASE_AT, phase)

    def leave(self, phase: Phase, message: str = "") -> None:
        """Publish that this rank leaves, in phase ``LEFT``, ``FAILED`` or ``CAUGHT``."""
        at = self._entry_at(self.rank)
        data = message.encode()[: PAGE // 2]
        struct.pack_into(f"<H{len(data)}s", self._view, at + _MESSAGE_AT, len(data), data)
        LONG.pack_into(self._view, at + _LEFT_NS_AT, time.monotonic_ns())
        fence()
        LONG.pack_into(self._view, at + _PHASE_AT, phase)

    def post_fault(self, text: str, after: int) -> int:
        """Post a fault to all ranks of this host, if no fault with a number above ``after`` has been posted.

        Returns its number; 0 if it was not posted.
        """
        data = text.encode()[: FAULT_BYTES - 1]
        with self._locked():
            if self.fault_number != after:
                return 0
            self._view[PAGE : PAGE + len(data)] = data
            LONG.pack_into(self._view, _SIZE_AT, len(data))
            fence()
            LONG.pack_into(self._view, _FAULT_NUMBER_AT, after + 1)
        return after + 1

    @property
    def fault_number(self) -> int:
        """Number of the newest fault; 0 if there is none."""
        return int(LONG.unpack_from(self._view, _FAULT_NUMBER_AT)[0])

    def fault_text(self) -> str:
        """Return the newest fault."""
        fence()  # the caller has read its number
        (size,) = LONG.unpack_from(self._view, _SIZE_AT)
        return bytes(self._view[PAGE : PAGE + size]).decode(errors="replace")

    def acknowledge(self, number: int) -> None:
        """Publish that this rank has received fault ``number``."""
        at = self._entry_at(self.rank)
        LONG.pack_into(self._view, at + _ACKNOWLEDGED_NS_AT, time.monotonic_ns())
        fence()
        LONG.pack_into(self._view, at + _ACKNOWLEDGED_AT, number)

    # --- processes ---

    def wait(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until a rank of this host ends or ``wake`` is called."""
        for fd, _ in self._poll.poll(seconds * 1000):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            for rank, process in self._pidfds.items():
                if process == fd:
                    self._ended.add(rank)
                    self._poll.unregister(fd)

    def wake(self) -> None:
        """Make ``wait`` return."""
        os.eventfd_write(self._wake_fd, 1)

    def ended(self, rank: int) -> bool:
        """Whether the process of a rank of this host has ended, as of the last ``wait``."""
        return rank in self._ended

    def stopped(self, rank: int) -> bool:
        """Whether its process is stopped by a signal, other than by a debugger."""
        return self.letter(rank) == "T"

    def letter(self, rank: int) -> str:
        """Return the state of its process as in /proc; "" if it has ended."""
        try:
            return Path(f"/proc/{self.members[rank].pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def stacks(self, rank: int, timeout_s: float, *, resume: bool = False) -> str:
        """Return the current Python stacks of a rank of this host, or a text that says why there are none.

        ``resume`` lets a stopped process run for a moment. It cannot write its stacks while it is stopped.

        A pending request is not repeated. The process could handle two requests in two threads at once, and their
        writes would overwrite each other in the file.
        """
        if self.entry(rank).phase >= Phase.LEFT:
            return "(none: it has left)"
        fd = self._stacks[rank]
        before = os.fstat(fd).st_size
        if not self._requested(rank) and not self._signal(rank, self.members[rank].signal):
            return "(it has ended)"
        stopped = self.stopped(rank)
        if stopped:
            if not resume:
                return "(none: the process is stopped)"
            self._signal(rank, signal.SIGCONT)
        end = time.monotonic() + timeout_s
        size, steady = os.fstat(fd).st_size, 0
        while time.monotonic() < end and steady < STEADY_LOOKS:
            time.sleep(0.003)  # a stopped process runs during this time
            previous, size = size, os.fstat(fd).st_size
            steady = steady + 1 if size == previous > before else 0
        if stopped:
            self._signal(rank, signal.SIGSTOP)
        return os.pread(fd, STACK_BYTES, before).decode(errors="replace").strip() or "(none came)"

    def kill(self, rank: int) -> bool:
        """Kill a rank of this host. Returns False if its process had ended."""
        return self._signal(rank, signal.SIGKILL)

    def close(self) -> None:
        """Release the process handles. The memory stays mapped while events are recorded into it."""
        with contextlib.suppress(ValueError):
            faulthandler.unregister(self.members[self.rank].signal)
        for fd in (*self._pidfds.values(), *self._stacks.values(), self._wake_fd):
            os.close(fd)
        self._pidfds, self._stacks = {}, {}

    def _open_processes(self, stacks: int) -> None:
        """Open the processes and the stack files of the ranks of this host."""
        self._pidfds[self.rank] = os.pidfd_open(os.getpid())
        signal.pidfd_send_signal(self._pidfds[self.rank], 0)  # raises if this kernel does not support it
        self._stacks[self.rank] = stacks
        for rank in self.local_ranks:
            if rank == self.rank:
                continue
            member = self.members[rank]
            self._pidfds[rank] = os.pidfd_open(member.pid)
            if start_ticks(member.pid) != member.ticks:
                raise OSError(f"rank {rank} (pid {member.pid}) has ended")
            self._poll.register(self._pidfds[rank], select.POLLIN)
            self._stacks[rank] = os.open(member.stacks, os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the table among the ranks of this host. The lock ends with its holder. A stopped holder is bypassed."""
        lock = self._stacks[self.local_ranks[0]]
        end = time.monotonic() + LOCK_S
        held = False
        while not held and time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                time.sleep(0.001)
        try:
            yield
        finally:
            if held:
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _requested(self, rank: int) -> bool:
        """Whether a request of stacks is pending in its process. A stopped process does not handle requests."""
        try:
            status = Path(f"/proc/{self.members[rank].pid}/status").read_text()
        except OSError:  # it has ended
            return False
        pending = re.search(r"^ShdPnd:\s*([0-9a-f]+)", status, re.MULTILINE)
        return pending is not None and bool(int(pending[1], 16) & 1 << self.members[rank].signal - 1)

    def _signal(self, rank: int, number: int) -> bool:
        try:
            signal.pidfd_send_signal(self._pidfds[rank], number)
        except ProcessLookupError:
            return False
        return True

    def _words(self, at: int, *fields: int) -> list[int]:
        return [LONG.unpack_from(self._view, at + field)[0] for field in fields]

    def _entry_at(self, rank: int) -> int:
        return _table_bytes(0, self.records) + self.local_ranks.index(rank) * PAGE


def _create_memfd(name: str) -> int:
    """Return the descriptor of an empty anonymous file that only this user can open."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return fd


def _write_stacks(number: int, stacks: int) -> None:
    """Make this process write its stacks when it receives a signal.

    After faulthandler is unregistered, the signal is ignored: another rank may have sent it just before.
    """
    with contextlib.suppress(ValueError):  # only the main thread can set handlers
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(number, stacks, all_threads=True, chain=False)


def _free_signal() -> int:
    for number in range(FIRST_SIGNAL, signal.SIGRTMAX):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
            return int(number)
    raise OSError("every real-time signal of this process has a handler; the watcher needs a free one")


def _map(path: str, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_size != size:
            raise OSError(f"{path} has {status.st_size} bytes and belongs to user {status.st_uid}")
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _region_size(records: int) -> int:
    return -(-region_bytes(records) // PAGE) * PAGE


def _table_bytes(ranks: int, records: int) -> int:
    """Bytes of a table. For 0 ranks, the offset of the entries."""
    return PAGE + FAULT_BYTES + ranks * (PAGE + _region_size(records))
