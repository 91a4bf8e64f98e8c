"""Kernels that wait for other ranks: they run in order over streams, and leave processors for collectives.

The GPU is simulated: processors are slots of a semaphore, and streams are recorded or threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from moe_comm.errors import ConfigError
from moe_comm.gpu import order as order_module
from moe_comm.gpu.order import StreamOrder, stream_order

pytest.importorskip("triton", reason="needs Triton")

from moe_comm.kernels.triton.launch import FREE_SMS, waiting_programs

CUDA = torch.device("cuda", 0)
PROCESSORS = 32


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.delenv(FREE_SMS, raising=False)


class Stream:
    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)


def test_a_stream_waits_for_the_one_that_was_used_before(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Stream(), Stream()
    current = [first]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    capturing = [False]
    monkeypatch.setattr(order_module, "capturing", lambda device: capturing[0])
    kept: dict[object, StreamOrder] = {}

    def keep(key: object, make: object) -> StreamOrder:
        return kept.setdefault(key, make())  # type: ignore[operator]

    peer_to_peer, triton = stream_order(keep, CUDA), stream_order(keep, CUDA)
    peer_to_peer.enter()
    triton.enter()
    assert not first.waited
    current[0] = second
    triton.enter()
    peer_to_peer.enter()
    assert second.waited == [first] and not first.waited
    current[0], capturing[0] = Stream(), True
    triton.enter()
    assert not current[0].waited, "a graph has its own order"
    current[0], capturing[0] = first, False
    triton.enter()
    assert first.waited == [second]


def test_an_operation_waits_for_all_streams_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    push, product, caller = Stream(), Stream(), Stream()
    current = [push]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(order_module, "capturing", lambda device: False)
    order = stream_order(None, CUDA)
    order.enter()
    for current[0] in (product, push, product):
        order.join()
    current[0] = caller
    order.enter()
    assert caller.waited == [push, product] and not push.waited and not product.waited
    current[0] = push
    order.enter()
    assert push.waited == [caller]


@pytest.mark.usefixtures("gpu")
def test_processors_stay_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waiting_programs(CUDA) == PROCESSORS - 2
    monkeypatch.setenv(FREE_SMS, "8")
    assert waiting_programs(CUDA) == PROCESSORS - 8
    for wrong in ("30", "-1", "many"):
        monkeypatch.setenv(FREE_SMS, wrong)
        with pytest.raises(ConfigError, match=rf"MOE_COMM_FREE_SMS must be .* from 0 to 29 on this GPU; got '{wrong}'"):
            waiting_programs(CUDA)


class Gpu:
    """A GPU whose kernels take a number of processors while they run. A cooperative kernel takes them all at once."""

    def __init__(self, limit_s: float) -> None:
        self.free, self.limit_s = PROCESSORS, limit_s
        self.changed = threading.Condition()
        self.used = threading.Event()

    def run(self, blocks: int, peer: threading.Barrier) -> None:
        """Run a cooperative kernel of ``blocks`` blocks that waits for the same kernel on the other GPU."""
        self.wait_until(lambda: self.free >= blocks, -blocks)
        try:
            peer.wait(self.limit_s)
        finally:
            self.wait_until(lambda: True, blocks)

    def run_blocks(self, peers: list[threading.Barrier]) -> None:
        """Run an ordinary kernel, whose blocks become resident in order as there is room."""
        for peer in peers:
            self.run(1, peer)

    def wait_until(self, condition: Callable[[], bool], freed: int = 0) -> None:
        with self.changed:
            if not self.changed.wait_for(condition, self.limit_s):
                raise TimeoutError("the kernel does not become resident")
            self.free += freed
            self.used.set()
            self.changed.notify_all()


def both_end(programs: int, limit_s: float) -> bool:
    """Return whether a fused kernel and a collective of 16 blocks end that start in opposite orders on two GPUs."""
    one, other = Gpu(limit_s), Gpu(limit_s)
    fused, collective = threading.Barrier(2), [threading.Barrier(2) for _ in range(16)]
    with ThreadPoolExecutor(4) as streams:
        started = [streams.submit(one.run, programs, fused), streams.submit(other.run_blocks, collective)]
        for gpu in (one, other):
            assert gpu.used.wait(60)  # not ``limit_s``: on a busy machine, a thread may start late
        started += [streams.submit(one.run_blocks, collective), streams.submit(other.run, programs, fused)]
        return all(future.exception() is None for future in started)


@pytest.mark.usefixtures("gpu")
def test_a_fused_kernel_and_a_collective_on_two_gpus_do_not_starve_each_other() -> None:
    assert both_end(waiting_programs(CUDA), limit_s=60)
    assert not both_end(PROCESSORS, limit_s=0.5), "the simulation shows the deadlock without free processors"
