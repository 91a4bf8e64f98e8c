"""Chunks in a budget of memory, and threads that read and write them.

    absent ── announce ──▶ reading ──▶ ready ── take ──▶ leased ── release ──▶ ready      kept for the next sweep
                              ▲          │                                 └─▶ writing ──▶ absent
                              │          └── evict, when nothing else can free memory ──▶ writing or absent
                              └── as soon as memory is free, in the announced order; with ``next_use``, also in place
                                  of a chunk that is used later

Chunks of new data begin with ``put`` instead, which leases memory without reading, and end with ``discard``:

    put ──▶ leased ── release ──▶ ready ── most of the memory is used ──▶ writing ──▶ absent

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
from itertools import accumulate

import torch
from torch import Tensor

from moe_comm.errors import MoeCommError, StoreFull, StoreIOError
from moe_comm.runtime.offload.files import BLOCK, Backing, aligned_bytes

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
    discarded: bool = False


@dataclass
class Traffic:
    """Statistics of a store since the last ``take_traffic``.

    Attributes:
        read, written: bytes.
        waited_s: seconds that ``take`` and ``put`` waited.
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
    """Chunks by number. ``take``, ``put`` and ``announce`` are called by one thread at a time.

    Args:
        sizes: bytes of each chunk.
        slots: maximum number of chunks in memory.
        device: of the memory.
        threads: chunks that are read or written at the same time.
        deadline_s: seconds that ``take`` waits for one chunk.
        next_use: returns when a chunk is used next, in any unit. None: in the announced order.
    """

    def __init__(
        self,
        backing: Backing,
        sizes: Sequence[int],
        slots: int,
        budget: Budget,
        device: torch.device,
        threads: int,
        deadline_s: float,
        next_use: Callable[[int], float] | None = None,
    ) -> None:
        self._backing, self._sizes, self._device, self._deadline_s = backing, list(sizes), device, deadline_s
        self.slots, self._budget, self._next_use = slots, budget, next_use
        self._slot_bytes = max(sizes, default=0)
        self._offsets = [0, *accumulate(sizes)]
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
        self._early: set[int] = set()  # read, and not taken yet
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
            self._use_stream()
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
                if resident is None and (not self._wanted or self._wanted[0] != key):
                    with contextlib.suppress(ValueError):  # evicted, or taken in another order than announced
                        self._wanted.remove(key)
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
            self._early.discard(key)
            self._traffic.waited_s += time.perf_counter() - began
            return resident.slot[: self._sizes[key]]

    def put(self, key: int, nbytes: int) -> Tensor:
        """Return memory of ``nbytes`` bytes for a new chunk, and lease it until ``release``.

        Chunks that are used later are written while there is still memory, so that the next call need not wait.

        Raises:
            StoreIOError: an earlier write failed, or did not end within the deadline.
        """
        began = time.perf_counter()
        with self._changed:
            self._use_stream()
            slot: Tensor | None = None
            while slot is None:
                if self._error is not None:
                    raise self._error
                if key not in self._resident:  # else a discarded chunk whose transfer has not ended
                    if not self._free and (slot := self._allocate()) is None:
                        self._write_early(1)
                    if slot is None and self._free:
                        slot = self._free.pop()
                if slot is None and not self._changed.wait(self._deadline_s - (time.perf_counter() - began)):
                    self._error = StoreIOError(f"offloaded state was not written within {self._deadline_s:g} s")
            self._sizes[key] = -(-nbytes // BLOCK) * BLOCK  # as direct I/O requires
            self._resident[key] = _Resident(slot, Status.LEASED)
            self._write_early(len(self._threads))
            self._traffic.waited_s += time.perf_counter() - began
            return slot[:nbytes]

    def discard(self, keys: Sequence[int]) -> None:
        """Forget chunks that are not leased. ``put`` can use their numbers again."""
        with self._changed:
            for key in keys:
                self._written.discard(key)
                self._early.discard(key)
                resident = self._resident.get(key)
                if resident is None:
                    continue
                if resident.status is Status.READY:
                    del self._resident[key]
                    self._free.append(resident.slot)
                else:
                    resident.discarded = True
            gone = set(keys)
            self._wanted = deque(key for key in self._wanted if key not in gone)

    def extend(self, chunks: int) -> range:
        """Add chunks of the size of a slot, and return their numbers. Raises ``StoreFull``."""
        self._backing.extend(chunks * self._slot_bytes)
        with self._changed:
            first = len(self._sizes)
            for _ in range(chunks):
                self._sizes.append(self._slot_bytes)
                self._offsets.append(self._offsets[-1] + self._slot_bytes)
        return range(first, first + chunks)

    def release(self, key: int, *, dirty: bool, keep: bool) -> None:
        """End the lease of a chunk. ``dirty``: it has changed. ``keep``: leave it in memory."""
        with self._changed:
            resident = self._resident[key]
            resident.dirty |= dirty and self._sizes[key] > 0
            resident.status = Status.READY
            if not keep:
                self._drop(key)
            self._advance()

    def ready(self, key: int) -> bool:
        """Return whether a chunk is in memory."""
        with self._changed:
            resident = self._resident.get(key)
            return resident is not None and resident.status is not Status.WRITING

    @contextlib.contextmanager
    def borrowed(self, key: int, *, write: bool) -> Iterator[Tensor]:
        """Lease a chunk outside of the announced order. After an exception in the block it can be taken again."""
        self.announce([key])
        memory = self.take(key)
        try:
            yield memory
        finally:
            self.release(key, dirty=write, keep=True)

    def flush(self) -> None:
        """Write the chunks that have changed, and wait until no chunk is read or written.

        Raises:
            StoreIOError, CorruptFile: a transfer failed, or did not end within the deadline.
        """
        with self._changed:
            for key, resident in list(self._resident.items()):
                if resident.dirty and resident.status is Status.READY:
                    self._drop(key)
            while self._busy and self._error is None:
                if not self._changed.wait(self._deadline_s):
                    self._error = StoreIOError(f"offloaded state was not written within {self._deadline_s:g} s")
        self.check()

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
        # One of the threads may be the last to refer to the owner of this store, which then calls this there.
        others = [thread for thread in threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(CLOSE_S)
        if not any(thread.is_alive() for thread in others):  # a thread that hangs still uses the file
            self._backing.close()
        self._resident.clear()
        self._free.clear()

    def _use_stream(self) -> None:
        if self._device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._device)

    def _allocate(self) -> Tensor | None:
        """Return a new slot; None if all are allocated."""
        if self._allocated >= self.slots:
            return None
        self._budget.acquire(self._slot_bytes)
        self._allocated += 1
        return aligned_bytes(self._slot_bytes, self._device)

    def _write_early(self, slots: int) -> None:
        """Evict chunks that are used last until ``slots`` slots are free, or will be when they are written."""
        writing = sum(one.status is Status.WRITING for one in self._resident.values())
        while len(self._free) + self.slots - self._allocated + writing < slots:
            last = self._last()
            if last is None:
                return
            writing += self._resident[last].dirty
            self._drop(last)

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
                if self._busy >= len(self._threads):  # what is announced later may be needed before this
                    return
                slot = self._slot(key)
                if slot is None:
                    return
                self._resident[key] = resident = _Resident(slot, Status.READING)
                if key in self._written:
                    self._early.add(key)
                    self._submit(key, resident)
                else:
                    slot.zero_()
                    resident.status = Status.READY
            self._wanted.popleft()

    def _slot(self, key: int) -> Tensor | None:
        """Return memory for a chunk; None if there is none, or only that of chunks that are used before it.

        With ``next_use``, a few chunks at a time replace others before they are taken: those would be of more use until
        then.
        """
        if not self._free and (slot := self._allocate()) is not None:
            return slot
        if not self._free and self._next_use is not None and len(self._early) < len(self._threads) + self.slots // 8:
            last = self._last()
            if last is not None and self._next_use(last) > self._next_use(key):
                self._drop(last)
        return self._free.pop() if self._free else None

    def _last(self) -> int | None:
        """Return the chunk in memory that is used last."""
        ready = [key for key, resident in self._resident.items() if resident.status is Status.READY]
        after = len(self._position)
        return max(ready, key=self._next_use or (lambda key: self._position.get(key, after)), default=None)

    def _evict(self) -> None:
        """Drop the chunk in memory that is used last."""
        last = self._last()
        if last is None:
            raise MoeCommError("internal error: all memory of the offloaded state is leased")
        self._drop(last)
        self._advance()

    def _drop(self, key: int) -> None:
        self._early.discard(key)
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
                    move(self._offsets[key], resident.slot[: self._sizes[key]])
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
            elif resident.discarded:
                del self._resident[key]
                self._free.append(resident.slot)
            elif resident.status is Status.WRITING:
                self._traffic.written += self._sizes[key]
                self._written.add(key)
                del self._resident[key]
                self._free.append(resident.slot)
            else:
                self._traffic.read += self._sizes[key]
                resident.status = Status.READY
            self._advance()
            self._changed.notify_all()
