"""Ranks of one host that share memory: one growing heap a rank, mapped by all, and waiting with deadlines.

rank 0  [control | blocks ...]  ◀──────┐ every rank maps every heap
rank 1  [control | blocks ...]  ◀──────┤ the name is removed as soon as all have: a SIGKILL leaks nothing
rank 2  [control | blocks ...]  ◀──────┘
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import ConfigError, HeapError, MissingDependency

if TYPE_CHECKING:
    from moe_comm import _C

SEGMENT_PREFIX = "moe_comm"
TEXT_BYTES = 1024
"""Of what ranks tell each other at set-up: a name, and a bit for each core."""
SPIN_US = 50.0
"""How long a rank with a core of its own spins before it sleeps: waking up costs about as much."""
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def native() -> ModuleType:
    """The native core.

    Raises:
        MissingDependency: it was not built.
    """
    try:
        from moe_comm import _C
    except ImportError as error:
        raise MissingDependency(
            f"the native core moe_comm._C is not built ({error}); run `pip install -e .`"
        ) from error
    return _C


@lru_cache(maxsize=1)
def native_is_built() -> bool:
    """Whether this process has the native core."""
    try:
        native()
    except MissingDependency:
        return False
    return True


@dataclass(frozen=True)
class SharedOptions:
    """timeout_s: seconds until ``PeerTimeout``. spin_us: microseconds to spin before sleeping; None spins only where
    every rank has a core. initial_bytes: room each heap starts with. reserve_bytes: address range each heap may grow
    into. first_progress: where the wrapping counters start (tests)."""

    timeout_s: float = 300.0
    spin_us: float | None = None
    initial_bytes: int = 4 << 20
    reserve_bytes: int = 1 << 38
    first_progress: int = 0


@lru_cache(maxsize=1)
def private_heap() -> _C.Heap:
    """This process's heap of private memory, for dispatch without peers. Pages stay mapped and warm: faulting in
    fresh ones costs more than the copies into them."""
    heap: _C.Heap = native().Heap("")
    return heap


def _core_mask() -> int:
    """The cores this process may use, a bit each."""
    return sum(1 << core for core in os.sched_getaffinity(0))


def _distinct_cores(masks: Iterable[str]) -> int:
    """Cores that ranks with these hexadecimal masks have together; each may be pinned to its own."""
    together = 0
    for mask in masks:
        together |= int(mask, 16)
    return together.bit_count()


def block(heap: _C.Heap, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised [rows, width] tensor in ``heap``; its memory goes back when the tensor dies, on any thread."""
    if rows == 0 or width == 0:
        return torch.empty(rows, width, dtype=dtype)
    return torch.from_dlpack(heap.tensor(rows, width, DTYPE_CODES[dtype]))


WARM_BYTES = 128 << 10
"""malloc keeps smaller tensors' pages mapped by itself (its mmap threshold)."""


def warm(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised [rows, width] CPU tensor; a large one from the private heap, whose pages are already mapped."""
    size = rows * width * dtype.itemsize
    if size < WARM_BYTES:
        return torch.empty(rows, width, dtype=dtype)
    if dtype in DTYPE_CODES:
        return block(private_heap(), rows, width, dtype)
    words = block(private_heap(), 1, -(-size // 4), torch.float32).view(-1).view(torch.uint8)
    return words[:size].view(dtype).view(rows, width)


def host_key() -> str:
    """Equal for two processes exactly when they see the same /dev/shm on the same kernel and name pids alike."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(os.stat("/dev/shm").st_dev))
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError as error:
        parts.append(f"unknown: {error.errno}")
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def host_word() -> int:
    """``host_key`` as a number that fits an int64."""
    return int(host_key(), 16) >> 2


class SharedGroup:
    """The heaps of all ranks of a process group on one host. Made once per group and shared by its dispatchers."""

    _made: ClassVar[weakref.WeakKeyDictionary[ProcessGroup, SharedGroup]] = weakref.WeakKeyDictionary()

    def __init__(self, group: ProcessGroup, options: SharedOptions) -> None:
        core = native()
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        core.sweep_stale(SEGMENT_PREFIX)
        try:
            self._meet(core, group, options)
        finally:
            # Whatever went wrong: an error that somebody keeps would keep this object, and so the name, alive.
            if hasattr(self, "heap"):
                self.heap.unlink()

    def _meet(self, core: ModuleType, group: ProcessGroup, options: SharedOptions) -> None:
        """Make this rank's heap and attach the others'."""
        name = f"/{SEGMENT_PREFIX}.{os.getpid()}.{secrets.token_hex(8)}"
        # A rank that fails must not leave the others waiting in a collective: it says so in the next one.
        problem: Exception | None = None
        try:
            self.heap = core.Heap(name, core.Communicator.control_bytes(), options.initial_bytes, options.reserve_bytes)
        except HeapError as error:
            problem = error
        said = _gather_text(f"{host_key()} {name if problem is None else ''} {_core_mask():x}", group)
        keys, names, masks = zip(*(text.split(" ") for text in said), strict=True)
        try:
            if len(set(keys)) > 1:
                raise ConfigError(
                    "shared_memory needs all ranks of the group on one host with one /dev/shm; "
                    "use all_to_all between hosts"
                )
            if problem is None and not all(names):
                raise HeapError(f"rank {names.index('')} could not create its shared memory")
            if problem is None:
                spin = SPIN_US if _distinct_cores(masks) >= self.world else 0.0
                spin = spin if options.spin_us is None else options.spin_us
                self.communicator = core.Communicator(
                    self.heap, self.rank, self.world, options.timeout_s, spin, options.first_progress
                )
                # Control regions must stand before peers look at them.
        except (HeapError, ConfigError) as error:
            problem = problem or error
        _agree(problem, group)
        try:
            self.communicator.attach(list(names))
        except HeapError as error:
            problem = error
        failed = _gather_text("" if problem is None else "failed", group)
        if problem is not None:
            raise problem
        if any(failed):
            raise HeapError(f"rank {failed.index('failed')} could not attach the shared memory of its peers")

    @classmethod
    def of(cls, group: ProcessGroup, options: SharedOptions | None = None) -> SharedGroup:
        """The shared group of ``group``, made on first use. Collective then.

        Raises:
            ConfigError: the ranks are not on one host.
            HeapError: shared memory is full or not accessible.
        """
        made = cls._made.get(group)
        if made is None:
            made = cls(group, options or SharedOptions())
            cls._made[group] = made
        elif options is not None:
            made.communicator.set_timeout(options.timeout_s)
        return made


def _gather_text(text: str, group: ProcessGroup) -> list[str]:
    """``text`` of every rank, by a collective of fixed size (no pickle)."""
    raw = text.encode()
    if len(raw) > TEXT_BYTES:
        raise ValueError(f"{text!r} is longer than {TEXT_BYTES} bytes")
    own = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
    own[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else own[:0]
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return [bytes(t.tolist()).rstrip(b"\0").decode() for t in everyone]


def _agree(problem: Exception | None, group: ProcessGroup) -> None:
    """Raise on every rank if any has a problem."""
    failed = _gather_text("" if problem is None else "failed", group)
    if problem is not None:
        raise problem
    if any(failed):
        raise HeapError(f"rank {failed.index('failed')} could not set up its shared memory")
