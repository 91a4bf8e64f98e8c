"""Operations of one rank after faults. Device and CPU both count them.

The device is a launcher that records launches, or kernels that run on the CPU.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace

import pytest
import torch

from moe_comm.dispatch import DispatchOptions
from moe_comm.dispatch.peer_to_peer.dispatcher import PeerToPeerDispatcher
from moe_comm.dispatch.types import PeerToPeerOptions
from moe_comm.errors import ConfigError, KernelError, PeerError, RoutingError
from moe_comm.gpu import operations, protocol
from moe_comm.gpu.launch import Launcher, NativeLauncher
from moe_comm.topology import ExpertPlacement
from tests.support.launches import HookedLauncher, RecordedLaunch, RecordingLauncher

pytest.importorskip("moe_comm._C", reason="the native core is not built")
OPTIONS = DispatchOptions(
    timeout_s=5, peer_to_peer=PeerToPeerOptions(heap_bytes=1 << 16, emulate=True, capacity_rows=8)
)
X_TD, IDS_TK = torch.ones(2, 4), torch.tensor([[0], [1]])


def one_rank(launcher: Launcher, options: DispatchOptions = OPTIONS) -> PeerToPeerDispatcher:
    return PeerToPeerDispatcher(ExpertPlacement.balanced(2, 1), None, 0, options, "cpu", launcher)


def low_latency_step(dispatcher: PeerToPeerDispatcher) -> torch.Tensor:
    sent = dispatcher.low_latency_dispatch(X_TD, IDS_TK, 2)
    return dispatcher.low_latency_combine(sent.receive()[0], torch.ones(2, 1), sent)


def test_cpu_and_device_count_the_same_operations_after_a_refused_launch() -> None:
    refused: list[str] = []

    def refuse_once(kernel: str) -> None:
        if kernel in refused:
            refused.clear()
            raise KernelError(f"{kernel} is refused")

    dispatcher = one_rank(HookedLauncher(refuse_once))
    state = dispatcher.memory.operations
    for kernel in ("scan", "count", "ll_ready"):
        refused.append(kernel)
        with pytest.raises(KernelError, match=kernel):
            low_latency_step(dispatcher) if kernel == "ll_ready" else dispatcher.dispatch(X_TD, IDS_TK)
        assert state.turn == int(state._state[0]), kernel
    dispatched = dispatcher.dispatch(X_TD, IDS_TK)
    assert torch.equal(dispatcher.combine(dispatched.rows_RD, torch.ones(2, 1), dispatched.handle), X_TD)


class LateReport:
    """A device that reports the bad ids of a turn only after the host has launched ``meet`` of the next turn."""

    def __init__(self) -> None:
        self.meetings = 0

    def __call__(self, launch: RecordedLaunch) -> None:
        if launch.kernel not in ("meet", "scan"):
            return
        self.meetings += 1
        words = launch.words
        if self.meetings == 2:
            header = (ctypes.c_int64 * protocol.HEADER_WORDS).from_address(words["all_headers_at"])
            header[protocol.FAULT_WORD : protocol.FAULT_WORD + 4] = [protocol.BAD_IDS_WORD, 1, 99, 1]
            report = (ctypes.c_int64 * len(protocol.REPORT_WORDS)).from_address(words["report_at"])
            report[1], report[0] = protocol.BAD_IDS, 1


def test_a_fault_reported_a_turn_late_makes_the_group_unusable() -> None:
    """Other ranks may be in a different turn by then, so the ranks no longer agree on the next turn."""
    device = LateReport()
    dispatcher = one_rank(RecordingLauncher(device))
    dispatcher.memory.emulated = False
    dispatcher.dispatch_fixed(X_TD, IDS_TK)
    assert device.meetings == 1 and not dispatcher.memory.operations.failed
    for _ in range(2):
        with pytest.raises(PeerError, match=r"an earlier operation failed: .*99"):
            dispatcher.dispatch(X_TD, IDS_TK)
    assert device.meetings == 2, "no kernel may be launched after the fault is known"


def test_a_fault_reported_in_its_turn_leaves_the_group_usable() -> None:
    dispatcher = one_rank(NativeLauncher("cpu"))
    state = dispatcher.memory.operations
    for _ in range(3):
        with pytest.raises(RoutingError, match="99"):
            dispatcher.dispatch(X_TD, torch.tensor([[0], [99]]))
        assert state.turn == int(state._state[0]) > 0
        assert dispatcher.dispatch(X_TD, IDS_TK).handle.rows_per_expert == (1, 1)


def test_operations_that_wait_are_refused_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = one_rank(NativeLauncher("cpu"))
    state = dispatcher.memory.operations
    before = state.turn
    for module in ("primitives", "dispatcher"):
        monkeypatch.setattr(f"moe_comm.dispatch.peer_to_peer.{module}.capturing", lambda device: True)
    with pytest.raises(ConfigError, match="use dispatch_fixed"):
        dispatcher.dispatch(X_TD, IDS_TK)
    with pytest.raises(ConfigError, match="once before"):
        dispatcher.low_latency_dispatch(X_TD, IDS_TK, 2)
    reserved = state.heap.reserve()
    with pytest.raises(Exception, match="no room"):
        dispatcher.dispatch_fixed(X_TD, IDS_TK)
    del reserved
    assert state.turn == before == int(state._state[0])
    monkeypatch.undo()
    assert dispatcher.low_latency_dispatch(X_TD, IDS_TK, 2).receive()[0].shape == (2, 2, 4)


def test_buffers_are_freed_only_after_the_device_is_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(operations, "capturing", lambda device: capturing[0])
    buffers, device = [object()], torch.device("cuda", 1)
    references = sys.getrefcount(buffers)
    operations._free(device, buffers)
    assert not waited and len(buffers) == 1, "must not wait during a capture"
    assert sys.getrefcount(buffers) == references + 1, "buffers in use by a capture must be leaked instead of freed"
    capturing[0] = False
    operations._free(device, buffers)
    assert waited == [device] and not buffers


def test_too_many_experts_are_refused_during_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_comm.gpu.launch.shared_limit", lambda device: 4096)
    placement = ExpertPlacement.balanced(200, 1)
    options = replace(OPTIONS, timeout_s=1)
    with pytest.raises(ConfigError, match="200 experts needs"):
        PeerToPeerDispatcher(placement, None, 0, options, "cpu")
