"""What the ranks of one host show each other: a shared board with every rank's events, and a hold on its process.

    one mapping a host, made by its first rank, without a name: what was killed leaves nothing behind
    ┌────────┬────────┬───────────────┬──────────────────────────┬──────────────────────────┐
    │ header │ notice │ one page each │ events of its first rank │ events of its second ... │
    └────────┴────────┴───────────────┴──────────────────────────┴──────────────────────────┘
      notice: what the ranks are told once something went wrong. page: how a rank's watcher judges itself.

Each rank also has a place for its Python stacks (faulthandler writes them there at a signal, whoever holds the
interpreter's lock), which its neighbours keep open, and a file descriptor for each neighbour's process, by which its
end is noticed at once and which never means another process that was given the same number.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import mmap
import os
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
from moe_comm.runtime.event_layout import LONG, RECORDS, region_bytes
from moe_comm.runtime.events import start_ticks
from moe_comm.runtime.host import host_key

PAGE = 4096
NOTICE_BYTES = 1 << 20
STACK_BYTES = 64 << 10
TEXT_BYTES = 1024
LOCK_S = 0.5
STEADY_LOOKS = 5
"""Stacks are whole when so many looks, 3 ms apart, have found no more of them: a thread follows the other."""
FIRST_SIGNAL = signal.SIGRTMIN + 6
"""A signal that nothing else uses, as SIGUSR1 is used by batch systems."""

Texts = Callable[[str], list[str]]
"""Gives every rank's text, by rank. Collective."""

_CANNOT = (AttributeError, OSError, ValueError, RuntimeError)
"""What calls raise that this kernel or Python lacks (``memfd_create``, ``eventfd`` and ``pidfd_open``), or refuses."""
_IGNORED: set[int] = set()
"""Signals that boards of this process have taken before."""
_SEQUENCE_AT, _SIZE_AT = 8, 16
_PHASE_AT, _PATIENCE_AT, _ACK_AT, _ACK_NS_AT, _LEFT_NS_AT, _WORDS_AT = 0, 8, 16, 24, 32, 64


class Phase(IntEnum):
    """Where a rank is in its life as its neighbours need to know it."""

    STARTING = 0  # until its first step has ended
    STEP = 1
    BETWEEN = 2  # steps: it may evaluate or save, which may take long
    LEFT = 3  # done: its end is none of the others' business
    FAILED = 4  # left with an error of its own
    CAUGHT = 5  # left with an error that another rank gave it


@dataclass(frozen=True)
class Member:
    """A rank's process. stacks: path of the place for its Python stacks. signal: brings them there."""

    rank: int
    host: str
    label: str
    pid: int
    ticks: int
    stacks: str
    signal: int


@dataclass(frozen=True)
class Page:
    """What a rank says of itself. patience_s: how long it may show no progress while others wait for it. acknowledged:
    the last notice that it has seen, at ack_ns. words: the error with which it left, at left_ns."""

    phase: Phase
    patience_s: float
    acknowledged: int
    ack_ns: int
    left_ns: int
    words: str


def group_texts(text: str) -> list[str]:
    """``Texts`` of the default process group, whatever its backend; at most ``TEXT_BYTES`` each."""
    raw = text.encode()
    if len(raw) > TEXT_BYTES:
        raise ValueError(f"{text!r} is longer than {TEXT_BYTES} bytes")
    device = "cpu" if "cpu" in str(dist.get_backend_config()) else "cuda"
    own = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    if raw:
        own[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    everyone = [torch.empty(TEXT_BYTES, dtype=torch.uint8, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own.to(device))
    return [bytes(one.tolist()).rstrip(b"\0").decode() for one in everyone]


class Board:
    """This rank's host. members: of all hosts, by rank. here: ranks of this host. hosts: ranks of each host."""

    def __init__(self, rank: int, members: Sequence[Member], memory: mmap.mmap, records: int) -> None:
        self.rank = rank
        self.members = tuple(members)
        self.records = records
        groups: dict[str, list[int]] = {}
        for member in members:
            groups.setdefault(member.host, []).append(member.rank)
        self.hosts = tuple(tuple(ranks) for ranks in groups.values())
        self.here = tuple(groups[members[rank].host])
        self._memory = memory
        self._view = memoryview(memory)
        self._pidfds: dict[int, int] = {}
        self._stacks: dict[int, int] = {}
        self._ended: set[int] = set()
        self._poll = select.poll()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake_fd, select.POLLIN)

    @classmethod
    def meet(cls, rank: int, texts: Texts = group_texts, *, records: int = RECORDS, host: str | None = None) -> Board:
        """Collective over all ranks. host: which ranks share a board; None: those that see each other's processes.

        Raises:
            HeapError: on every rank, where some rank cannot share memory with its neighbours.
        """
        answer, stacks, number = "", -1, 0
        try:
            stacks = _memory("moe_comm-stacks")
            number = _free_signal()
        except _CANNOT as error:  # told below: until then the others wait for this rank
            answer = f"rank {rank} cannot be watched here: {error}"
        own = Member(
            rank=rank,
            host=host if host is not None else host_key(),
            label=socket.gethostname()[:64],
            pid=os.getpid(),
            ticks=start_ticks(),
            stacks=f"/proc/{os.getpid()}/fd/{stacks}",
            signal=number,
        )
        members = [Member(**json.loads(text)) for text in texts(json.dumps(asdict(own)))]
        here = [member.rank for member in members if member.host == own.host]
        size = _size(len(here), records)
        memory: mmap.mmap | None = None
        board: Board | None = None
        path = ""
        shared = -1
        try:
            if rank == here[0] and not answer:
                shared = _memory("moe_comm-board")
                os.ftruncate(shared, size)
                memory = mmap.mmap(shared, size)
                path = f"/proc/{own.pid}/fd/{shared}"
        except _CANNOT as error:
            answer = f"rank {rank} cannot make a board of {size} bytes: {error}"
        paths = texts(path)
        try:
            if memory is None and paths[here[0]] and not answer:
                memory = _map(paths[here[0]], size)
            if memory is not None:
                board = cls(rank, members, memory, records)
                board._hold(stacks)
                _write_stacks(number, stacks)
        except _CANNOT as error:
            answer = f"rank {rank} cannot open what its neighbours share: {error}"
        problems = [text for text in texts(answer.encode()[:TEXT_BYTES].decode(errors="ignore")) if text]
        if shared >= 0:
            os.close(shared)  # all have mapped it
        if board is None or problems:
            kept = board is not None and rank in board._stacks
            if board is not None:
                board.close()
            if stacks >= 0 and not kept:
                os.close(stacks)
            raise HeapError((problems or ["the first rank of this host made no board"])[0])
        return board

    # --- memory ---

    def region(self, rank: int) -> memoryview:
        """Of ``rank``'s events, for ``EVENTS.attach`` and for readers."""
        at = _size(0, self.records) + len(self.here) * PAGE + self.here.index(rank) * _region_size(self.records)
        return self._view[at : at + region_bytes(self.records)]

    def page(self, rank: int) -> Page:
        """What ``rank`` says of itself."""
        at = self._page_at(rank)
        phase, patience, ack, ack_ns, left_ns = (
            LONG.unpack_from(self._view, at + field)[0]
            for field in (_PHASE_AT, _PATIENCE_AT, _ACK_AT, _ACK_NS_AT, _LEFT_NS_AT)
        )
        words = ""
        if phase in (Phase.FAILED, Phase.CAUGHT):
            (size,) = struct.unpack_from("<H", self._view, at + _WORDS_AT)
            words = bytes(self._view[at + _WORDS_AT + 2 :][: min(size, PAGE // 2)]).decode(errors="replace")
        return Page(Phase(phase), patience / 1e9, ack, ack_ns, left_ns, words)

    def say(self, phase: Phase, patience_s: float) -> None:
        """Of this rank."""
        at = self._page_at(self.rank)
        LONG.pack_into(self._view, at + _PATIENCE_AT, int(patience_s * 1e9))
        LONG.pack_into(self._view, at + _PHASE_AT, phase)

    def leave(self, phase: Phase, words: str = "") -> None:
        """This rank is no more part of it."""
        at = self._page_at(self.rank)
        data = words.encode()[: PAGE // 2]
        struct.pack_into(f"<H{len(data)}s", self._view, at + _WORDS_AT, len(data), data)
        LONG.pack_into(self._view, at + _LEFT_NS_AT, time.monotonic_ns())
        LONG.pack_into(self._view, at + _PHASE_AT, phase)

    def post(self, text: str, after: int) -> int:
        """Tell all ranks of this host, unless one has told them more than notice ``after`` by now.

        Returns the notice's number; 0: it was not told.
        """
        data = text.encode()[: NOTICE_BYTES - 1]
        with self._alone():
            if self.sequence != after:
                return 0
            self._view[PAGE : PAGE + len(data)] = data
            LONG.pack_into(self._view, _SIZE_AT, len(data))
            LONG.pack_into(self._view, _SEQUENCE_AT, after + 1)
        return after + 1

    @property
    def sequence(self) -> int:
        """Number of the newest notice; 0: none yet."""
        return int(LONG.unpack_from(self._view, _SEQUENCE_AT)[0])

    def notice(self) -> str:
        """The newest one."""
        (size,) = LONG.unpack_from(self._view, _SIZE_AT)
        return bytes(self._view[PAGE : PAGE + size]).decode(errors="replace")

    def acknowledge(self, number: int) -> None:
        """This rank has seen notice ``number``."""
        at = self._page_at(self.rank)
        LONG.pack_into(self._view, at + _ACK_NS_AT, time.monotonic_ns())
        LONG.pack_into(self._view, at + _ACK_AT, number)

    # --- processes ---

    def wait(self, seconds: float) -> None:
        """Sleep, until another rank of this host ends or ``wake`` is called."""
        for fd, _ in self._poll.poll(seconds * 1000):
            if fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(fd)
            for rank, process in self._pidfds.items():
                if process == fd:
                    self._ended.add(rank)
                    self._poll.unregister(fd)

    def wake(self) -> None:
        """Let ``wait`` return."""
        os.eventfd_write(self._wake_fd, 1)

    def ended(self, rank: int) -> bool:
        """Whether the process of a rank of this host has ended, as of the last ``wait``."""
        return rank in self._ended

    def stopped(self, rank: int) -> bool:
        """Whether it is stopped by a signal; not one that a debugger holds."""
        return self.letter(rank) == "T"

    def letter(self, rank: int) -> str:
        """State of its process as in /proc; "" if it has none."""
        try:
            return Path(f"/proc/{self.members[rank].pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return ""

    def stacks(self, rank: int, patience_s: float, *, resume: bool = False) -> str:
        """Python stacks of a rank of this host as they are now, or why there are none.

        resume: a stopped process is made to go on for a moment, or it could not write them.
        """
        if self.page(rank).phase >= Phase.LEFT:
            return "(none: it has left)"
        fd = self._stacks[rank]
        before = os.fstat(fd).st_size
        if not self._send(rank, self.members[rank].signal):
            return "(it has ended)"
        stopped = self.stopped(rank)
        if stopped:
            if not resume:
                return "(none: the process is stopped)"
            self._send(rank, signal.SIGCONT)
        end = time.monotonic() + patience_s
        size, steady = os.fstat(fd).st_size, 0
        while time.monotonic() < end and steady < STEADY_LOOKS:
            time.sleep(0.003)  # a stopped one runs meanwhile
            seen, size = size, os.fstat(fd).st_size
            steady = steady + 1 if size == seen > before else 0
        if stopped:
            self._send(rank, signal.SIGSTOP)
        return os.pread(fd, STACK_BYTES, before).decode(errors="replace").strip() or "(none came)"

    def kill(self, rank: int) -> bool:
        """End a rank of this host, and no other process; False if it had ended."""
        return self._send(rank, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the neighbours; the memory stays while events are recorded into it."""
        with contextlib.suppress(ValueError):
            faulthandler.unregister(self.members[self.rank].signal)
        for fd in (*self._pidfds.values(), *self._stacks.values(), self._wake_fd):
            os.close(fd)
        self._pidfds, self._stacks = {}, {}

    def _hold(self, stacks: int) -> None:
        """Open the neighbours' processes and places for stacks."""
        self._pidfds[self.rank] = os.pidfd_open(os.getpid())
        signal.pidfd_send_signal(self._pidfds[self.rank], 0)  # whether that can be had at all
        self._stacks[self.rank] = stacks
        for rank in self.here:
            if rank == self.rank:
                continue
            member = self.members[rank]
            self._pidfds[rank] = os.pidfd_open(member.pid)
            if start_ticks(member.pid) != member.ticks:
                raise OSError(f"rank {rank} (pid {member.pid}) has ended")
            self._poll.register(self._pidfds[rank], select.POLLIN)
            self._stacks[rank] = os.open(member.stacks, os.O_RDONLY | os.O_CLOEXEC)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Among the ranks of this host, by a lock that goes with its holder; one that is stopped with it is passed."""
        lock = self._stacks[self.here[0]]
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

    def _send(self, rank: int, number: int) -> bool:
        try:
            signal.pidfd_send_signal(self._pidfds[rank], number)
        except ProcessLookupError:
            return False
        return True

    def _page_at(self, rank: int) -> int:
        return _size(0, self.records) + self.here.index(rank) * PAGE


def _memory(name: str) -> int:
    """An empty file without a name that this user alone can open."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return fd


def _write_stacks(number: int, stacks: int) -> None:
    """From now on this process answers a signal with its stacks; once it does no more, it ignores it: a neighbour may
    have sent it just before."""
    with contextlib.suppress(ValueError):  # only the main thread may say so
        signal.signal(number, signal.SIG_IGN)
        _IGNORED.add(number)
    faulthandler.register(number, stacks, all_threads=True, chain=False)


def _free_signal() -> int:
    for number in range(FIRST_SIGNAL, signal.SIGRTMAX):
        if signal.getsignal(number) is signal.SIG_DFL or number in _IGNORED:
            return int(number)
    raise OSError("every real-time signal of this process has a handler; watching needs one for itself")


def _map(path: str, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_size != size:
            raise OSError(f"{path} has {found.st_size} bytes and belongs to user {found.st_uid}")
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _region_size(records: int) -> int:
    return -(-region_bytes(records) // PAGE) * PAGE


def _size(ranks: int, records: int) -> int:
    """Bytes of a board; of 0 ranks: where their pages begin."""
    return PAGE + NOTICE_BYTES + ranks * (PAGE + _region_size(records))
