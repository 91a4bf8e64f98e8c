"""The stream of ``peer_to_peer`` operations, with simulated streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_comm.dispatch.peer_to_peer.streams import OperationStream

CUDA = torch.device("cuda", 0)


class Stream:
    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.priority, self.waited = priority, list[Stream]()

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """Return a list with the current stream."""
    stream = [Stream()]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda new: stream.__setitem__(0, new))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    return stream


def _run(operations: OperationStream, current: list[Stream]) -> Stream:
    """Run an operation. Return its stream."""
    operations.enter(())
    used = current[0]
    operations.leave(failed=False)
    return used


def test_an_operation_runs_on_the_callers_stream_unless_it_has_its_own(current: list[Stream]) -> None:
    heap: Any = None  # not used without tensors
    caller = current[0]
    assert _run(OperationStream(CUDA, heap, own=False), current) is caller
    own = _run(OperationStream(CUDA, heap, own=True), current)
    assert own is not caller and own.waited == [caller] and caller.waited == [own] and current == [caller]


def test_the_caller_does_not_wait_for_an_operation_on_the_side_stream(current: list[Stream]) -> None:
    heap: Any = None
    caller, operations = current[0], OperationStream(CUDA, heap, own=False)
    operations.use_side_stream(True)
    side = _run(operations, current)
    assert side is not caller and side.waited == [caller] and not caller.waited and current == [caller]
    assert side.priority < caller.priority, "a lower number is a higher priority"
    operations.use_side_stream(False)
    assert _run(operations, current) is caller and not caller.waited
    operations.use_side_stream(True)
    assert _run(operations, current) is side
    operations.wait()
    assert caller.waited == [side]


def test_the_callers_stream_can_be_used_within_an_operation(current: list[Stream]) -> None:
    heap: Any = None
    caller, operations = current[0], OperationStream(CUDA, heap, own=False)
    operations.use_side_stream(True)
    assert operations.is_separate
    operations.enter(())
    with operations.on_callers():
        assert current == [caller]
    assert current != [caller]
    operations.leave(failed=False)
    assert current == [caller] and not caller.waited
