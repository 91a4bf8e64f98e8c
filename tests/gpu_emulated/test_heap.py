"""The heap in a device memory block: memory is freed with its last tensor, and not reused while a stream may use it."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from moe_comm.errors import HeapError
from moe_comm.gpu.blocks import ALIGN, single_block
from moe_comm.gpu.heap import Heap, heap_bytes


def make_heap(size: int = 16 * ALIGN, first: int = 0) -> Heap:
    return Heap(single_block(size, torch.device("cpu")).own, first)


def room(memory: Heap) -> int:
    """Return the bytes of the largest possible allocation."""
    block = memory.reserve()
    if block is None:
        return 0
    size = block.size
    memory.keep(block)
    return size


def test_memory_is_freed_with_its_last_tensor() -> None:
    memory = make_heap()
    rows_RD = memory.rows(3, 5, torch.bfloat16)
    view, detached = rows_RD[1:], rows_RD.detach()
    del rows_RD, view
    assert memory.used == ALIGN
    del detached
    assert memory.used == 0


def test_memory_lives_while_autograd_keeps_it() -> None:
    memory = make_heap()
    weight = torch.ones(5, requires_grad=True)
    y = (memory.rows(3, 5, torch.float32).fill_(2) * weight).sum()
    assert memory.used == ALIGN
    y.backward()
    del y
    assert memory.used == 0 and weight.grad is not None and weight.grad.tolist() == [6.0] * 5


def test_allocations_do_not_overlap_and_can_use_the_whole_heap() -> None:
    """Allocate random sizes, free them in random order, and compare their contents."""
    memory, draw = make_heap(64 * ALIGN), random.Random(3)
    live: list[tuple[torch.Tensor, int]] = []
    for step in range(400):
        if live and draw.random() < 0.5:
            tensor, value = live.pop(draw.randrange(len(live)))
            assert bool((tensor == value).all())
            del tensor
            continue
        try:
            tensor = memory.allocate(draw.randrange(1, 6 * ALIGN))
        except HeapError:
            continue
        assert tensor.data_ptr() % ALIGN == 0 and memory.owns(tensor)
        live.append((tensor.fill_(step % 251), step % 251))
        del tensor
    live.clear()
    assert memory.used == 0 and room(memory) == memory.size
    assert memory.allocate(memory.size).numel() == memory.size


def test_a_reservation_keeps_some_ranges_and_frees_the_rest() -> None:
    memory = make_heap()
    earlier = memory.allocate(2 * ALIGN)
    block = memory.reserve()
    assert block is not None and block.size == 14 * ALIGN and memory.reserve() is None
    first, second = memory.keep(block, (0, ALIGN + 1), (6 * ALIGN, ALIGN))
    del block
    assert memory.used == 5 * ALIGN and room(memory) == 7 * ALIGN
    rows_RD, scale_RS = first.matrix(0, 3, 100, torch.uint8), second.matrix(0, 1, 4, torch.float32)
    del first, second
    assert memory.used == 5 * ALIGN, "the tensors keep the ranges"
    assert memory.offset(rows_RD) == 2 * ALIGN and memory.offset(scale_RS) == 8 * ALIGN
    del rows_RD
    assert memory.used == 3 * ALIGN and memory.offset(memory.allocate(6 * ALIGN)) == 2 * ALIGN
    del scale_RS, earlier
    assert memory.used == 0 and room(memory) == memory.size


def test_a_dropped_reservation_is_freed() -> None:
    memory = make_heap()
    memory.reserve()
    assert memory.used == 0


def test_the_heap_starts_after_the_control_area() -> None:
    memory = make_heap(8 * ALIGN, first=300)
    assert memory.size == 6 * ALIGN
    assert memory.offset(memory.allocate(8)) == 2 * ALIGN


def test_the_error_of_a_full_heap_has_its_size() -> None:
    memory = make_heap()
    tensor = memory.allocate(10 * ALIGN)
    with pytest.raises(HeapError, match=rf"{7 * ALIGN} bytes in the heap of {16 * ALIGN}: {10 * ALIGN} are in use"):
        memory.allocate(7 * ALIGN)
    assert room(memory) == 6 * ALIGN and tensor.numel() == 10 * ALIGN


def test_tensors_may_be_freed_on_other_threads() -> None:
    memory = make_heap()
    tensors = [memory.allocate(100)]
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert memory.used == 0


class Stream:
    """A fake stream that records waits."""

    def __init__(self) -> None:
        self.after: list[Stream] = []
        self.events: list[object] = []

    def wait_stream(self, other: Stream) -> None:
        self.after.append(other)

    def wait_event(self, event: object) -> None:
        self.events.append(event)


def test_a_stream_that_reuses_memory_of_another_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stream waits for the first one, also if the first one has freed the memory itself."""
    first, second = Stream(), Stream()
    current, capturing = [first], [False]
    monkeypatch.setattr("moe_comm.gpu.heap._stream", lambda device: current[0])
    monkeypatch.setattr("moe_comm.gpu.heap.capturing", lambda device: capturing[0])
    memory = make_heap(4 * ALIGN)
    tensor = memory.allocate(4 * ALIGN)
    del tensor
    assert room(memory) == 4 * ALIGN and not first.after, "the stream that used the memory must not wait"
    current[0], capturing[0] = second, True
    assert room(memory) == 4 * ALIGN and not second.after, "a captured graph must not wait for a stream outside of it"
    capturing[0] = False
    tensor = memory.allocate(ALIGN)
    assert second.after == [first]
    del tensor
    assert room(memory) == 4 * ALIGN and second.after == [first], "must wait only once"
    current[0] = first
    assert room(memory) == 4 * ALIGN and first.after == [second], "room must make this stream wait as well"


def test_memory_recorded_on_a_stream_is_reused_only_after_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fake streams and events."""
    completed: list[bool] = []

    class Event:
        def query(self) -> bool:
            return bool(completed)

        def synchronize(self) -> None:
            completed.append(True)

    main, copies = Stream(), Stream()
    current = [main]
    monkeypatch.setattr("moe_comm.gpu.heap._stream", lambda device: current[0])
    monkeypatch.setattr("moe_comm.gpu.heap._events", lambda streams: tuple(Event() for _ in streams))
    memory = make_heap(4 * ALIGN)
    tensor = memory.allocate(2 * ALIGN)
    del tensor
    assert room(memory) == 4 * ALIGN, "memory freed on one stream is reused by it at once"
    recorded = memory.allocate(2 * ALIGN)
    memory.record(recorded, copies)  # type: ignore[arg-type]
    del recorded
    assert memory.used == 2 * ALIGN, "the recorded stream may still use it"
    assert memory.allocate(3 * ALIGN).numel() == 3 * ALIGN and completed, "must wait for the event"
    completed.clear()
    current[0] = copies
    assert memory.used == 3 * ALIGN, "memory freed on one stream is not reused by another at once"
    assert not copies.events and room(memory) == 4 * ALIGN and copies.events, "a reservation makes its stream wait"


def test_heap_bytes_is_sufficient_for_the_requested_rows() -> None:
    memory = Heap(single_block(heap_bytes(10, 33, torch.bfloat16, 3), torch.device("cpu")).own, 0)
    assert len([memory.rows(10, 33, torch.bfloat16) for _ in range(3)]) == 3
