"""The thread that runs collectives during forward and backward passes."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from moe_comm.errors import MoeCommError
from moe_comm.train.parallel.bucket_schedule import TransferThread

X = torch.arange(3.0)
DEADLINE_S = 60.0


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_collectives_run_in_order_and_outside_autograd() -> None:
    order: list[int] = []

    def note(index: int, x: Tensor) -> Tensor:
        order.append(index)
        return x * index

    thread = TransferThread(X.device)
    weights = X.clone().requires_grad_()
    transfers = [thread.submit(lambda x, i=i: note(i, x), weights) for i in range(5)]
    for index, transfer in enumerate(transfers):
        result = transfer.wait()
        assert torch.equal(result, X * index) and not result.requires_grad
    assert order == list(range(5)) and thread.close()


def test_the_error_of_a_collective_is_raised_by_wait_and_the_next_one_runs() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ValueError("no such peer")

    thread = TransferThread(X.device)
    failed, doubled = thread.submit(fail, X), thread.submit(double, X)
    with pytest.raises(ValueError, match="no such peer"):
        failed.wait()
    assert torch.equal(doubled.wait(), 2 * X) and thread.close()


def test_close_drops_collectives_that_have_not_started() -> None:
    started, peer = threading.Event(), threading.Event()

    def wait_for_the_peer(x: Tensor) -> Tensor:
        started.set()
        assert peer.wait(DEADLINE_S)
        return x

    thread = TransferThread(X.device)
    running, dropped = thread.submit(wait_for_the_peer, X), thread.submit(double, X)
    assert started.wait(DEADLINE_S)
    assert not thread.close(), "the first collective still runs"
    with pytest.raises(MoeCommError, match="closed"):
        dropped.wait()
    with pytest.raises(MoeCommError, match="must not be used after close"):
        thread.submit(double, X)
    peer.set()
    assert torch.equal(running.wait(), X) and thread.close()
