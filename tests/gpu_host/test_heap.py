"""The heap over a block: places come back with the last tensor over them, and never while a stream may use them."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from moe_comm.errors import HeapError
from moe_comm.gpu.blocks import ALIGN, alone
from moe_comm.gpu.heap import Heap, heap_bytes


def heap(size: int = 16 * ALIGN, first: int = 0) -> Heap:
    return Heap(alone(size, torch.device("cpu")).own, first)


def test_a_place_comes_back_with_the_last_tensor_over_it() -> None:
    places = heap()
    rows_RD = places.rows(3, 5, torch.bfloat16)
    view, detached = rows_RD[1:], rows_RD.detach()
    del rows_RD, view
    assert places.used == ALIGN
    del detached
    assert places.used == 0


def test_a_place_lives_as_long_as_autograd_keeps_it() -> None:
    places = heap()
    weight = torch.ones(5, requires_grad=True)
    y = (places.rows(3, 5, torch.float32).fill_(2) * weight).sum()
    assert places.used == ALIGN
    y.backward()
    del y
    assert places.used == 0 and weight.grad is not None and weight.grad.tolist() == [6.0] * 5


def test_places_do_not_overlap_and_all_of_the_heap_can_be_had() -> None:
    """Random sizes, freed in random order, against what was written there."""
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


def test_a_full_heap_says_how_much_there_is() -> None:
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
    """As far as the heap knows one: whom it has waited for."""

    def __init__(self) -> None:
        self.after: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.after.append(other)


def test_a_stream_that_takes_what_another_has_left_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the other has given it back itself, so that nobody knows any more whose it was."""
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


def test_what_another_stream_uses_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams and events as far as the heap knows them."""
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
    assert places.room() == 4 * ALIGN, "freed and wanted on one stream: at once"
    used = places.allocate(2 * ALIGN)
    places.record(used, copies)  # type: ignore[arg-type]
    del used
    assert places.room() == 2 * ALIGN, "the other stream has not passed"
    assert places.allocate(3 * ALIGN).numel() == 3 * ALIGN and over, "waited for it when nothing else was left"
    over.clear()
    now[0] = copies
    assert places.room() < 4 * ALIGN, "what died on one stream is not another's at once"


def test_the_reckoning_of_a_heap_holds() -> None:
    places = Heap(alone(heap_bytes(10, 33, torch.bfloat16, 3), torch.device("cpu")).own, 0)
    assert len([places.rows(10, 33, torch.bfloat16) for _ in range(3)]) == 3
