"""A meter counts the time inside its ``with`` blocks once, except for the time in which it is paused."""

from __future__ import annotations

import contextlib
import threading

import pytest

from moe_comm.runtime import events
from moe_comm.runtime.events import Meter


class Clock:
    """A clock that only advances on request."""

    def __init__(self) -> None:
        self.now = 5.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(events, "time", clock)
    return clock


def test_nested_blocks_count_once_and_take_resets_the_total(clock: Clock) -> None:
    meter = Meter()
    clock.now += 1
    with meter:
        clock.now += 2
        with meter:
            clock.now += 4
        clock.now += 8
    clock.now += 16
    assert meter.take() == 2 + 4 + 8
    assert meter.take() == 0


def test_paused_time_does_not_count_except_for_blocks_entered_in_the_pause(clock: Clock) -> None:
    meter = Meter()
    with meter, meter:
        clock.now += 1
        with meter.paused():
            clock.now += 2
            with meter:
                clock.now += 4
                with meter.paused():
                    clock.now += 8
                clock.now += 16
            clock.now += 32
        clock.now += 64
    clock.now += 128
    assert meter.take() == 1 + 4 + 16 + 64


def test_a_pause_outside_a_block_has_no_effect_and_an_exception_ends_a_pause(clock: Clock) -> None:
    meter = Meter()
    with meter.paused():
        clock.now += 1
        with meter:
            clock.now += 2
    with meter:
        with contextlib.suppress(ZeroDivisionError), meter.paused():
            clock.now += 4
            raise ZeroDivisionError
        clock.now += 8
    assert meter.take() == 2 + 8


def test_a_pause_does_not_affect_other_threads(clock: Clock) -> None:
    meter = Meter()

    def work() -> None:
        with meter:
            clock.now += 1

    with meter.paused():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert meter.take() == 1
