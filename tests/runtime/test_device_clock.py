"""Device times of spans are measured without waiting for the device. The tests simulate a device and its clock."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Self

import pytest

from moe_comm.runtime import device_clock
from moe_comm.runtime.device_clock import QueuedTimes
from moe_comm.runtime.event_layout import Kind, region_bytes
from moe_comm.runtime.event_reader import read_spans
from moe_comm.runtime.events import EventRecorder


class Device:
    """One stream that executes in order. Time only passes on request."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**12
        self.free_at = 0
        self.num_events = 0
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)

    def work(self, ns: int) -> None:
        self.free_at = max(self.free_at, self.now_ns) + ns

    def make(self) -> Event:
        self.num_events += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1

    def record(self) -> None:
        self.at = max(self.device.free_at, self.device.now_ns)

    def query(self) -> bool:
        return 0 <= self.at <= self.device.now_ns

    def elapsed_time(self, end: Self) -> float:
        assert self.query() and end.query(), "elapsed_time of an event that has not completed"
        return (end.at - self.at) * 1e-6

    def synchronize(self) -> None:
        raise AssertionError("the host waited for the device")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def recorder(device: Device, **options: object) -> EventRecorder:
    events = EventRecorder(256)
    events.attach(memoryview(bytearray(region_bytes(256))), 0, 256)
    events.device = QueuedTimes(device.make, **options)  # type: ignore[arg-type]
    return events


def times(events: EventRecorder) -> dict[str, tuple[int, int]]:
    return {span.name: span.device_ns for span in read_spans(events.region)}


def test_a_span_gets_the_device_times_of_the_work_that_it_queued(device: Device) -> None:
    events = recorder(device)
    began = device.now_ns
    with events.span(Kind.COMPUTE, "first"):
        device.work(3_000_000)
        device.now_ns += 10_000
    with events.span(Kind.DISPATCH, "second"):
        device.work(500_000)
        device.now_ns += 10_000
    events.begin_step(2)
    assert times(events) == {"first": (0, 0), "second": (0, 0)}, "the device has not completed the work"
    on_host = read_spans(events.region)
    device.now_ns += 3_200_000
    events.begin_step(3)
    assert times(events) == {"first": (began, began + 3_000_000), "second": (0, 0)}
    device.now_ns += 10**6
    events.begin_step(4)
    assert times(events)["second"] == (began + 3_000_000, began + 3_500_000)
    assert [replace(span, device_ns=(0, 0)) for span in read_spans(events.region)] == on_host, (
        "the host times do not change"
    )


def test_spans_without_device_work_use_no_events(device: Device) -> None:
    events = recorder(device)
    for kind in (Kind.DATA, Kind.CHECKPOINT, Kind.PAUSE, Kind.MARK):
        with events.span(kind, "on the host"):
            pass
    assert device.num_events == 0


def test_events_are_reused(device: Device) -> None:
    events = recorder(device)
    for step in range(200):
        events.begin_step(step)
        with events.span(Kind.COMPUTE, "work"):
            device.work(1000)
            device.now_ns += 5000
    assert device.num_events <= 6


def test_drift_of_the_device_clock_is_corrected(device: Device) -> None:
    """The device clock is 1% slow, so events seem to complete before they are queued. Their times are corrected."""

    class Slow(Event):
        def elapsed_time(self, end: Self) -> float:
            return 0.99 * super().elapsed_time(end)

    events = recorder(device)
    events.device = QueuedTimes(lambda: Slow(device))
    for step in range(50):
        device.now_ns += 10**8
        events.begin_step(step)
        began = device.now_ns
        with events.span(Kind.COMPUTE, f"work {step}"):
            device.work(1000)
        device.now_ns += 10**6
        events.begin_step(step)
        assert times(events)[f"work {step}"][0] == pytest.approx(began, abs=100_000)


def test_the_reference_event_is_renewed_before_elapsed_times_lose_precision(device: Device) -> None:
    elapsed_ms: list[float] = []

    class RecordingEvent(Event):
        def elapsed_time(self, end: Self) -> float:
            elapsed_ms.append(super().elapsed_time(end))
            return elapsed_ms[-1]

    events = recorder(device)
    events.device = QueuedTimes(lambda: RecordingEvent(device))
    for step in range(100):
        with events.span(Kind.COMPUTE, "work"):
            device.work(1000)
        device.now_ns += 300_000_000
        events.begin_step(step)
    assert max(elapsed_ms) < device_clock.RENEW_MS + 301


def test_nothing_is_recorded_while_a_graph_is_captured(device: Device) -> None:
    capturing = [True]
    events = recorder(device, capturing=lambda: capturing[0])
    with events.span(Kind.COMPUTE, "captured"):
        pass
    with events.span(Kind.COMPUTE, "half"):
        capturing[0] = False
    assert device.num_events == 0
    with events.span(Kind.COMPUTE, "not"):
        pass
    events.begin_step(1)
    assert [bool(end) for _, end in times(events).values()] == [False, False, True]


def test_a_device_that_never_completes_uses_a_bounded_number_of_events(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_clock, "MOST_PENDING", 10)
    events = recorder(device)
    device.work(10**15)
    for _ in range(100):
        with events.span(Kind.COMPUTE, "work"):
            pass
    assert device.num_events <= 22
