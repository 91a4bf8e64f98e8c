"""Chunks in a budget of memory, and threads that read and write them.

    absent ── announce ──▶ reading ──▶ ready ── take ──▶ leased ── release ──▶ ready      kept for the next sweep
                              ▲          │                                 └─▶ writing ──▶ absent
                              │          └── evict, when nothing else can free memory ──▶ writing or absent
                              └── as soon as memory is free, in the announced order

Memory is divided into slots of the size of the largest chunk. A slot is allocated when it is first needed, after its
bytes are acquired from the budget. The first error of a thread is kept, and raised by the next ``take`` and ``check``.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from moe_comm.errors import MoeCommError, StoreFull, StoreIOError
from moe_comm.train.offload.files import Backing, aligned_bytes
from moe_comm.train.offload.layout import Chunk

CLOSE_S = 1.0
"""Seconds that ``close`` waits for a transfer that does not end."""


class Status(Enum):
    """State of a chunk in memory."""

    READING = "reading"
    READY = "ready"
    LEASED = "leased"
    WRITING = "writing"


@dataclass
class _Resident:
    slot: Tensor
    status: Status
    dirty: bool = False


@dataclass
class Traffic:
    """Statistics of a store since the last ``take_traffic``.

    Attributes:
        read, written: bytes.
        waited_s: seconds that ``take`` waited.
        busy_s: seconds in which at least one chunk was read or written.
    """

    read: int = 0
    written: int = 0
    waited_s: float = 0.0
    busy_s: float = 0.0


@dataclass
class Budget:
    """Bytes of memory that may be held. ``peak``: the most bytes held so far."""

    total: int
    held: int = 0
    peak: int = field(default=0, init=False)

    def acquire(self, nbytes: int) -> None:
        """Account for ``nbytes`` before they are allocated. Raises ``StoreFull`` if they exceed the budget."""
        if self.held + nbytes > self.total:
            raise StoreFull(f"{nbytes} bytes exceed the budget: {self.held} of {self.total} bytes are held")
        self.held += nbytes
        self.peak = max(self.peak, self.held)


class Store:
    """Chunks by number. ``take`` and ``announce`` are called by one thread at a time.

    Args:
        slots: maximum number of chunks in memory.
        device: of the memory.
        threads: chunks that are read or written at the same time.
        deadline_s: seconds that ``take`` waits for one chunk.
    """

    def __init__(
        self,
        backing: Backing,
        chunks: Sequence[Chunk],
        slots: int,
        budget: Budget,
        device: torch.device,
        threads: int,
        deadline_s: float,
    ) -> None:
        self._backing, self._chunks, self._device, self._deadline_s = backing, chunks, device, deadline_s
        self.slots, self._budget = slots, budget
        self._slot_bytes = max((chunk.nbytes for chunk in chunks), default=0)
        self._offsets, end = [], 0
        for chunk in chunks:
            self._offsets.append(end)
            end += chunk.nbytes
        self._free: list[Tensor] = []
        self._allocated = 0
        self._resident: dict[int, _Resident] = {}
        self._written: set[int] = set()  # other chunks are zeros
        self._wanted: deque[int] = deque()
        self._position: dict[int, int] = {}
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._traffic = Traffic()
        self._busy = 0
        self._busy_since = 0.0
        self._stream: torch.cuda.Stream | None = None  # of the thread that takes chunks
        self._jobs: queue.SimpleQueue[tuple[int, _Resident, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"moe_comm offload {number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def announce(self, order: Sequence[int]) -> None:
        """Declare the chunks that will be taken next, in order, and start to read them."""
        with self._changed:
            if self._device.type == "cuda":
                self._stream = torch.cuda.current_stream(self._device)
            self._position = {key: number for number, key in enumerate(order)}
            self._wanted = deque(order)
            self._advance()

    def take(self, key: int) -> Tensor:
        """Return the bytes of a chunk, which must be announced, and lease them until ``release``.

        Raises:
            StoreIOError, CorruptFile: it could not be read, or not within the deadline, or an earlier write failed.
        """
        began = time.perf_counter()
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                resident = self._resident.get(key)
                if resident is not None and resident.status is Status.READY:
                    break
                if resident is None and key not in self._wanted:  # evicted, or taken without announcement
                    self._wanted.appendleft(key)
                    self._advance()
                    continue
                if resident is None and not self._busy:
                    self._evict()
                    continue
                if not self._changed.wait(self._deadline_s - (time.perf_counter() - began)):
                    self._error = StoreIOError(
                        f"chunk {key} of the offloaded state was not read within offload.deadline_s = "
                        f"{self._deadline_s:g} s; a disk hangs or is too slow"
                    )
            resident.status = Status.LEASED
            self._traffic.waited_s += time.perf_counter() - began
            return resident.slot[: self._chunks[key].nbytes]

    def release(self, key: int, *, dirty: bool, keep: bool) -> None:
        """End the lease of a chunk. ``dirty``: it has changed. ``keep``: leave it in memory."""
        with self._changed:
            resident = self._resident[key]
            resident.dirty |= dirty and self._chunks[key].nbytes > 0
            resident.status = Status.READY
            if not keep:
                self._drop(key)
            self._advance()

    @contextlib.contextmanager
    def borrowed(self, key: int, *, write: bool) -> Iterator[Tensor]:
        """Lease a chunk outside of the announced order."""
        self.announce([key])
        yield self.take(key)
        self.release(key, dirty=write, keep=True)

    def check(self) -> None:
        """Raise the first error of a transfer."""
        with self._changed:
            if self._error is not None:
                raise self._error

    def take_traffic(self) -> Traffic:
        """Return the statistics since the last call."""
        with self._changed:
            now, traffic = time.perf_counter(), self._traffic
            if self._busy:
                traffic.busy_s += now - self._busy_since
                self._busy_since = now
            self._traffic = Traffic()
            return traffic

    def close(self) -> None:
        """End the threads and release memory and backing. A second call does nothing."""
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        for thread in threads:
            thread.join(CLOSE_S)
        if not any(thread.is_alive() for thread in threads):  # a thread that hangs still uses the file
            self._backing.close()
        self._resident.clear()
        self._free.clear()

    def _advance(self) -> None:
        """Start to read announced chunks while there is free memory; keep an error for the next ``take``.

        A thread of this store also calls it. Memory is then zeroed, and read into, in the order of the stream of the
        thread that takes chunks, which may still read what was there.
        """
        try:
            with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._read_wanted()
        except Exception as error:
            self._error = self._error or error

    def _read_wanted(self) -> None:
        while self._wanted:
            key = self._wanted[0]
            resident = self._resident.get(key)
            if resident is not None and resident.status is Status.WRITING:
                return  # read again when it is written
            if resident is None:
                slot = self._slot()
                if slot is None:
                    return
                self._resident[key] = resident = _Resident(slot, Status.READING)
                if key in self._written:
                    self._submit(key, resident)
                else:
                    slot.zero_()
                    resident.status = Status.READY
            self._wanted.popleft()

    def _slot(self) -> Tensor | None:
        if self._free:
            return self._free.pop()
        if self._allocated < self.slots:
            self._budget.acquire(self._slot_bytes)
            self._allocated += 1
            return aligned_bytes(self._slot_bytes, self._device)
        return None

    def _evict(self) -> None:
        """Drop the chunk in memory that is needed last."""
        ready = [key for key, resident in self._resident.items() if resident.status is Status.READY]
        if not ready:
            raise MoeCommError("internal error: all memory of the offloaded state is leased")
        after = len(self._position)
        self._drop(max(ready, key=lambda key: self._position.get(key, after)))
        self._advance()

    def _drop(self, key: int) -> None:
        resident = self._resident[key]
        if resident.dirty:
            resident.status = Status.WRITING
            self._submit(key, resident)
        else:
            del self._resident[key]
            self._free.append(resident.slot)

    def _submit(self, key: int, resident: _Resident) -> None:
        if not self._busy:
            self._busy_since = time.perf_counter()
        self._busy += 1
        ready = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None
        self._jobs.put((key, resident, ready))

    def _run(self) -> None:
        if self._device.index is not None and self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # else leaving the stream would start CUDA on the first GPU
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        while (job := self._jobs.get()) is not None:
            key, resident, ready = job
            error: BaseException | None = None
            try:
                with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                    if stream is not None and ready is not None:
                        stream.wait_event(ready)
                    move: Callable[[int, Tensor], None] = self._backing.read
                    if resident.status is Status.WRITING:
                        move = self._backing.write
                    move(self._offsets[key], resident.slot[: self._chunks[key].nbytes])
                    if stream is not None:
                        stream.synchronize()
            except BaseException as caught:
                error = caught
            self._end(key, resident, error)

    def _end(self, key: int, resident: _Resident, error: BaseException | None) -> None:
        """Record the end of a transfer."""
        with self._changed:
            self._busy -= 1
            if not self._busy:
                self._traffic.busy_s += time.perf_counter() - self._busy_since
            if error is not None:
                self._error = self._error or error
            elif resident.status is Status.WRITING:
                self._traffic.written += self._chunks[key].nbytes
                self._written.add(key)
                del self._resident[key]
                self._free.append(resident.slot)
                self._advance()
            else:
                self._traffic.read += self._chunks[key].nbytes
                resident.status = Status.READY
            self._changed.notify_all()
