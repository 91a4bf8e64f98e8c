"""The store of chunks: contents, budget, waiting and errors; files without names; layouts."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe_comm.errors import StoreFull, StoreIOError
from moe_comm.runtime.offload import store as store_module
from moe_comm.runtime.offload.files import BLOCK, Backing, HostMemory, LocalFile, aligned_bytes
from moe_comm.runtime.offload.store import Budget, Store
from moe_comm.runtime.safe_files import open_unnamed
from moe_comm.train.offload.layout import Stored, cut, whole

CPU = torch.device("cpu")
SIZES = (BLOCK, 3 * BLOCK, 2 * BLOCK, BLOCK, 3 * BLOCK, 0, BLOCK)


def make(backing: Backing, slots: int = 3, threads: int = 2, deadline_s: float = 30.0) -> tuple[Store, Budget]:
    budget = Budget(slots * max(SIZES))
    return Store(backing, SIZES, slots, budget, CPU, threads, deadline_s), budget


@pytest.fixture(params=["file", "host"])
def backing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backing]:
    made: Backing = HostMemory(sum(SIZES)) if request.param == "host" else LocalFile(tmp_path, sum(SIZES), True)
    yield made
    made.close()


@pytest.mark.parametrize(("slots", "kept"), [(3, 3), (3, 0), (5, 2)])
def test_chunks_have_the_last_values_in_any_order(backing: Backing, slots: int, kept: int) -> None:
    store, budget = make(backing, slots)
    generator, values = torch.Generator().manual_seed(0), [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    for sweep in range(6):
        keys = list(range(len(SIZES)))
        order = keys[::-1] if sweep % 2 else keys
        store.announce(order)
        for number, key in enumerate(order):
            memory = store.take(key)
            assert torch.equal(memory, values[key]), (sweep, key)
            values[key] = torch.randint(256, memory.shape, dtype=torch.uint8, generator=generator)
            memory.copy_(values[key])
            store.release(key, dirty=True, keep=len(order) - number <= kept)
        for key in torch.randperm(len(SIZES), generator=generator).tolist()[:3]:
            with store.borrowed(key, write=True) as memory:
                assert torch.equal(memory, values[key])
                values[key] = memory.add_(1).clone()
        assert budget.peak <= budget.total
    store.close()
    store.close()


class Throttled(Backing):
    """Chunks in memory that take ``seconds`` each, one at a time, as on a disk."""

    def __init__(self, seconds: float) -> None:
        self._memory, self._seconds, self._disk = HostMemory(sum(SIZES)), seconds, threading.Lock()

    def read(self, offset: int, target: Tensor) -> None:
        with self._disk:
            time.sleep(self._seconds)
        self._memory.read(offset, target)

    def write(self, offset: int, source: Tensor) -> None:
        with self._disk:
            time.sleep(self._seconds)
        self._memory.write(offset, source)

    def extend(self, nbytes: int) -> None:
        self._memory.extend(nbytes)

    def close(self) -> None:
        self._memory.close()


def test_transfers_overlap_with_computation() -> None:
    seconds = 0.02
    store, _ = make(Throttled(seconds))
    for _ in range(2):  # the first sweep reads nothing
        store.take_traffic()
        began = time.perf_counter()
        store.announce(range(len(SIZES)))
        for key in range(len(SIZES)):
            store.take(key)
            time.sleep(2 * seconds)  # as long as a read and a write
            store.release(key, dirty=True, keep=False)
        elapsed = time.perf_counter() - began
    traffic = store.take_traffic()
    store.close()
    computed = 2 * seconds * len(SIZES)
    assert traffic.read == sum(SIZES)
    assert elapsed < 0.8 * (computed + traffic.busy_s), "neither reads nor writes overlap"
    assert traffic.waited_s < 0.5 * traffic.busy_s


def test_a_transfer_that_hangs_ends_at_the_deadline() -> None:
    class Hanging(Throttled):
        def write(self, offset: int, source: Tensor) -> None:
            hang.wait()

    hang = threading.Event()
    store, _ = make(Hanging(0.0), deadline_s=0.2)

    def sweep() -> None:
        for key in range(len(SIZES)):
            store.announce([key])
            store.take(key)
            store.release(key, dirty=True, keep=False)

    with pytest.raises(StoreIOError, match=r"deadline_s = 0\.2"):
        sweep()
    hang.set()
    store.close()


def test_the_number_of_a_discarded_chunk_is_used_again_when_its_transfer_has_ended() -> None:
    class Held(Throttled):
        def write(self, offset: int, source: Tensor) -> None:
            held.wait()

    held = threading.Event()
    store = Store(Held(0.0), [BLOCK] * 4, 4, Budget(4 * BLOCK), CPU, 1, 30.0, lambda key: -key)
    for key in range(4):
        store.put(key, BLOCK)
        store.release(key, dirty=True, keep=True)
    assert not store.ready(0)  # it is being written
    store.announce([0])
    store.discard(range(4))
    put = threading.Thread(target=store.put, args=(0, BLOCK), daemon=True)
    put.start()
    threading.Timer(0.05, held.set).start()  # most likely while ``put`` waits
    put.join(10)
    assert not put.is_alive()
    store.close()


def test_memory_that_cannot_be_allocated_is_an_error_of_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait in the collectives of an update, so nothing else may raise."""
    with pytest.raises(StoreFull, match="cannot be allocated"):
        aligned_bytes(1 << 60, CPU)
    allocated: list[int] = []

    def allocate(nbytes: int, device: torch.device) -> Tensor:
        allocated.append(nbytes)
        return aligned_bytes(nbytes if len(allocated) < 2 else 1 << 60, device)

    backing = HostMemory(sum(SIZES))
    monkeypatch.setattr(store_module, "aligned_bytes", allocate)
    store, _ = make(backing)
    store.announce([0, 1])
    with pytest.raises(StoreFull, match="cannot be allocated"):
        store.take(0)
    store.close()


def test_a_budget_is_never_exceeded() -> None:
    budget = Budget(100)
    budget.acquire(60)
    with pytest.raises(StoreFull, match="41 bytes exceed the budget: 60 of 100"):
        budget.acquire(41)
    assert (budget.held, budget.peak) == (60, 60)


def test_a_file_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def without_unnamed_files(path: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "not supported")
        return opened(path, flags, *args, **kwargs)

    for supported in (True, False):
        if not supported:
            monkeypatch.setattr(os, "open", without_unnamed_files)
        handle, _ = open_unnamed(tmp_path)
        assert os.pwritev(handle, [bytes(BLOCK)], 0) == BLOCK if not supported else True
        assert os.fstat(handle).st_nlink == 0 and not list(tmp_path.iterdir())
        os.close(handle)


def test_two_files_in_a_folder_are_separate(tmp_path: Path) -> None:
    """As of two jobs, or of the state and the activations of one."""
    first, second = (LocalFile(tmp_path, 4 * BLOCK, True) for _ in range(2))
    sources = [torch.full((BLOCK,), value, dtype=torch.uint8) for value in (1, 2)]
    memory = aligned_bytes(BLOCK, CPU)
    for file, source in zip((first, second), sources, strict=True):
        file.write(2 * BLOCK, memory.copy_(source))
    first.close()
    second.read(2 * BLOCK, memory)
    assert torch.equal(memory, sources[1])
    second.close()


def test_layouts_cover_each_element_once() -> None:
    items = [Stored(n, size, 4, ("master", "a", "b")) for n, size in enumerate((5000, 1, 0, 64, 9000, 63))]
    items.append(Stored(6, 5000, 4, ()))
    assert cut(items[-1:], BLOCK)[0].nbytes == 0
    chunks = cut(items, 2 * BLOCK)
    assert max(chunk.nbytes for chunk in chunks) == 2 * BLOCK
    for stored in (chunks, whole([items[:2], items[2:3], items[3:]])):
        ranges: dict[int, list[tuple[int, int]]] = {}
        for chunk in stored:
            assert chunk.nbytes % BLOCK == 0
            used: list[tuple[int, int]] = []
            for part in chunk.parts:
                assert part.start % 64 == 0
                ranges.setdefault(part.item, []).append((part.start, part.stop))
                used += [(offset, offset + 4 * (part.stop - part.start)) for offset in part.offsets.values()]
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(used))
            assert not used or used[-1][1] <= chunk.nbytes
        for number, item in enumerate(items):
            covered = [at for start, stop in ranges.get(number, []) for at in range(start, stop)]
            assert covered == list(range(item.elements))
    assert [chunk.group for chunk in whole([[], items[:1]])] == [0, 1]
