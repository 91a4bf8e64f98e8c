"""The heap in a block: memory is freed with its last tensor, and not reused while a stream may use it."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from moe_comm.errors import HeapError
from moe_comm.gpu.blocks import ALIGN, single_block
from moe_comm.gpu.heap import Heap, heap_bytes


def heap(size: int = 16 * ALIGN, first: int = 0) -> Heap:
    return Heap(single_block(size, torch.device("cpu")).own, first)


def test_memory_is_freed_with_its_last_tensor() -> None:
    places = heap()
    rows_RD = places.rows(3, 5, torch.bfloat16)
    view, detached = rows_RD[1:], rows_RD.detach()
    del rows_RD, view
    assert places.used == ALIGN
    del detached
    assert places.used == 0


def test_memory_lives_while_autograd_keeps_it() -> None:
    places = heap()
    weight = torch.ones(5, requires_grad=True)
    y = (places.rows(3, 5, torch.float32).fill_(2) * weight).sum()
    assert places.used == ALIGN
    y.backward()
    del y
    assert places.used == 0 and weight.grad is not None and weight.grad.tolist() == [6.0] * 5


def test_allocations_do_not_overlap_and_can_use_the_whole_heap() -> None:
    """Allocate random sizes, free them in random order, and compare their contents."""
    places, draw = heap(64 * ALIGN), random.Random(3)
    live: list[tuple[torch.Tensor, int]] = []
    for step in range(400):
        if live and draw.random() < 0.5:
            tensor, value = live.pop(draw.randrange(len(live)))
            assert bool((tensor == value).all())
            del tensor
            continue
        try:
            tensor = places.allocate(draw.randrange(1, 6 * ALIGN))
        except HeapError:
            continue
        assert tensor.data_ptr() % ALIGN == 0 and places.owns(tensor)
        live.append((tensor.fill_(step % 251), step % 251))
        del tensor
    live.clear()
    assert places.used == 0 and places.room() == places.size
    assert places.allocate(places.size).numel() == places.size


def test_the_control_area_is_not_part_of_it() -> None:
    places = heap(8 * ALIGN, first=300)
    assert places.size == 6 * ALIGN
    assert places.offset(places.allocate(8)) == 2 * ALIGN


def test_the_error_of_a_full_heap_has_its_size() -> None:
    places = heap()
    kept = places.allocate(10 * ALIGN)
    with pytest.raises(HeapError, match=rf"{7 * ALIGN} bytes in the heap of {16 * ALIGN}: {10 * ALIGN} are in use"):
        places.allocate(7 * ALIGN)
    assert places.room() == 6 * ALIGN and kept.numel() == 10 * ALIGN


def test_tensors_may_die_on_other_threads() -> None:
    places = heap()
    box = [places.allocate(100)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert places.used == 0


class Stream:
    """A fake stream that records waits."""

    def __init__(self) -> None:
        self.after: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.after.append(other)


def test_a_stream_that_reuses_memory_of_another_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the other stream has freed it itself."""
    first, second = Stream(), Stream()
    now, capturing = [first], [False]
    monkeypatch.setattr("moe_comm.gpu.heap._stream", lambda device: now[0])
    monkeypatch.setattr("moe_comm.gpu.heap.capturing", lambda device: capturing[0])
    places = heap(4 * ALIGN)
    kept = places.allocate(4 * ALIGN)
    del kept
    assert places.room() == 4 * ALIGN and not first.after, "collected by the stream that used it"
    now[0], capturing[0] = second, True
    assert places.room() == 4 * ALIGN and not second.after, "a graph waits for no stream outside of it"
    capturing[0] = False
    kept = places.allocate(ALIGN)
    assert second.after == [first]
    del kept
    assert places.room() == 4 * ALIGN and second.after == [first], "once"
    now[0] = first
    assert places.room() == 4 * ALIGN and first.after == [second], "room makes it this stream's, too"


def test_memory_recorded_on_another_stream_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fake streams and events."""
    over: list[bool] = []

    class Event:
        def query(self) -> bool:
            return bool(over)

        def synchronize(self) -> None:
            over.append(True)

    main, copies = Stream(), Stream()
    now = [main]
    monkeypatch.setattr("moe_comm.gpu.heap._stream", lambda device: now[0])
    monkeypatch.setattr("moe_comm.gpu.heap._events", lambda streams: tuple(Event() for _ in streams))
    places = heap(4 * ALIGN)
    kept = places.allocate(2 * ALIGN)
    del kept
    assert places.room() == 4 * ALIGN, "freed and allocated on one stream: reused at once"
    used = places.allocate(2 * ALIGN)
    places.record(used, copies)  # type: ignore[arg-type]
    del used
    assert places.room() == 2 * ALIGN, "the other stream has not passed"
    assert places.allocate(3 * ALIGN).numel() == 3 * ALIGN and over, "waited for it when nothing else was left"
    over.clear()
    now[0] = copies
    assert places.room() < 4 * ALIGN, "memory freed on one stream is not reused by another at once"


def test_heap_bytes_is_sufficient() -> None:
    places = Heap(single_block(heap_bytes(10, 33, torch.bfloat16, 3), torch.device("cpu")).own, 0)
    assert len([places.rows(10, 33, torch.bfloat16) for _ in range(3)]) == 3
