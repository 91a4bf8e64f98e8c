"""Gradients and new weights are transferred during backward and forward passes, with the bits of serial transfers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moe_comm.comm.communicator import communicators
from moe_comm.comm.group_setup import communicator_of
from moe_comm.errors import MoeCommError
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.optim import OptimizerOptions
from moe_comm.train.parallel import DataParallel, DataParallelOptions
from tests.train.toy import SHARDINGS, make, train

DEADLINE_S = 60.0
MAPPINGS = {
    2: [ParallelConfig(dp=2), ParallelConfig(dp=2, ep=2), ParallelConfig(tp=2, etp=2)],
    4: [ParallelConfig(tp=2, dp=2, ep=2, etp=2), ParallelConfig(dp=4, ep=2)],
}


def states(rank: int, world: int, arg: tuple[ParallelConfig, str, dict[str, Any]]) -> Any:
    """Train serially and with overlap; return parameters, owned shards and bytes sent of both."""
    config, sharding, settings = arg
    results = []
    for overlap in ("off", "on"):
        compress = settings.get("dtype") is torch.bfloat16
        options = DataParallelOptions(sharding=sharding, compress=compress, overlap_gradients=overlap)
        data_parallel, _, model = train(ParallelMesh(config), options, OptimizerOptions(), **settings)
        data_parallel.wait_weights()
        tensors = [owned.value for owned in data_parallel.owned()]
        if sharding != "fsdp":  # whose parameters have the storage of the owned shards
            tensors += model.parameters()
        results.append(([tensor.detach().clone() for tensor in tensors], data_parallel.traffic))
        data_parallel.close()
    return results


@pytest.mark.parametrize(
    ("world", "sharding", "settings"),
    [
        (2, "replicate", {"bucket_bytes": 100}),
        (4, "zero1", {"bucket_bytes": 100}),
        (2, "zero1", {"bucket_bytes": 10_000, "keep_gradients": True}),
        (4, "replicate", {"bucket_bytes": 300, "dtype": torch.bfloat16}),
        (2, "zero1", {"bucket_bytes": 300, "dtype": torch.bfloat16}),
        (4, "fsdp", {}),
    ],
)
def test_overlap_changes_no_bit_and_no_byte(world, sharding, settings, request):
    for config in MAPPINGS[world]:
        results = request.getfixturevalue(f"pool{world}").run(states, (config, sharding, settings), timeout=200)
        for (serial, serial_traffic), (overlapped, traffic) in results:
            assert traffic == serial_traffic
            for expected, tensor in zip(serial, overlapped, strict=True):
                assert torch.equal(expected, tensor)


class _Gate(torch.autograd.Function):
    """Identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


class Tower(nn.Module):
    """Linear layers; ``in_backward`` is called when the backward pass has left the layers after the first."""

    def __init__(self, in_backward: Any = lambda: None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
        for layer in self.layers:
            nn.init.normal_(layer.weight, generator=generator)
        self.in_backward = in_backward

    def forward(self, x: Tensor) -> Tensor:
        x = _Gate.apply(self.layers[0](x), self.in_backward)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x.sum()


ONE_LAYER = 64
"""Bytes of a layer of ``Tower``, so that each is a bucket."""


def step(model: Tower, data_parallel: DataParallel, x: Tensor, before_backward: Any = lambda: None) -> None:
    data_parallel.zero_grad()
    loss = model(x)
    before_backward()
    data_parallel.begin_backward(model)
    loss.backward()
    data_parallel.end_backward(model)


def started_in_backward(rank: int, world: int, strategy: str) -> int:
    """Return the bytes sent when the backward pass of the first layer begins."""
    sent = []

    def in_backward() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not data_parallel.traffic.reduced and time.monotonic() < deadline:
            time.sleep(0)  # give the GIL to the thread of the transfers
        sent.append(data_parallel.traffic.reduced)

    model = Tower(in_backward)
    options = DataParallelOptions(sharding=strategy, overlap_gradients="on")
    mesh = ParallelMesh(ParallelConfig(dp=world))
    data_parallel = DataParallel(model, {}, mesh, options, bucket_bytes=ONE_LAYER)
    step(model, data_parallel, torch.ones(1, 4))
    data_parallel.reduce()
    data_parallel.close()
    return sent[0]


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_later_layers_are_sent_before_the_backward_of_the_first_ends(pool2, strategy):
    assert all(sent > 0 for sent in pool2.run(started_in_backward, strategy))


def ahead_of_the_peer(rank: int, world: int, strategy: str) -> list[Tensor]:
    """Rank 1 begins its backward pass, and later its publication, only after rank 0 has ended its own."""
    store = dist.distributed_c10d._get_default_store()
    model = Tower()
    options = DataParallelOptions(sharding=strategy, overlap_gradients="on")
    mesh = ParallelMesh(ParallelConfig(dp=world))
    data_parallel = DataParallel(model, {}, mesh, options, bucket_bytes=ONE_LAYER)
    if isinstance(model, FSDPModule):
        model.set_reshard_after_forward(False)  # backward must not wait for the peer's weights

    def wait_for(part: str) -> None:
        if rank == 1:
            store.wait([f"{strategy} {part}"])

    step(model, data_parallel, torch.full((1, 4), rank + 1.0), lambda: wait_for("backward"))
    store.set(f"{strategy} backward", "")
    data_parallel.reduce()
    wait_for("publish")
    data_parallel.publish()
    store.set(f"{strategy} publish", "")
    model(torch.ones(1, 4))  # waits for the weights
    data_parallel.close()
    return [owned.value.grad for owned in data_parallel.owned()]


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "fsdp"])
def test_backward_and_publication_do_not_wait_for_a_peer(pool2, strategy):
    first, second = pool2.run(ahead_of_the_peer, strategy, timeout=60)
    if strategy == "replicate":
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def discarded(rank: int, world: int, strategy: str) -> list[bool]:
    """Discard steps whose gradients are in flight on all ranks or on rank 1, then reduce the next one."""
    results = []
    for discard in (False, True):
        mesh = ParallelMesh(ParallelConfig(dp=world))
        model = Tower()
        data_parallel = DataParallel(
            model, {}, mesh, DataParallelOptions(sharding=strategy, overlap_gradients="on"), bucket_bytes=ONE_LAYER
        )
        if discard:
            step(model, data_parallel, torch.full((1, 4), 7.0))
            data_parallel.zero_grad()
            data_parallel.begin_backward(model)
            if rank == 1:  # the backward pass of rank 0 fails at once
                model(torch.full((1, 4), 5.0)).backward()
        step(model, data_parallel, torch.ones(1, 4))
        data_parallel.reduce()
        results.append([owned.value.grad for owned in data_parallel.owned()])
        data_parallel.close()
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_a_discarded_step_leaves_no_gradients(pool2, strategy):
    for equal in pool2.run(discarded, strategy):
        assert all(equal)


def partly_used(rank: int, world: int, strategy: str) -> Any:
    """Rank 1's backward reaches only some parameters, in an order that differs from rank 0's."""
    gradients = []
    for overlap in ("off", "on"):
        options = DataParallelOptions(sharding=strategy, overlap_gradients=overlap)
        model, data_parallel = make(ParallelMesh(ParallelConfig(dp=world)), options, bucket_bytes=100)
        params = [param for i, param in enumerate(model.parameters()) if rank == 0 or i % 3]
        for _ in range(2):
            data_parallel.zero_grad()
            data_parallel.begin_backward(model)
            for param in params if rank else reversed(params):
                (param.square().sum() * (rank + 1)).backward()
            data_parallel.end_backward(model)
            data_parallel.reduce()
        gradients.append([owned.value.grad for owned in data_parallel.owned()])
        data_parallel.close()
    return [torch.equal(a, b) for a, b in zip(*gradients, strict=True)]


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_unused_parameters_and_other_orders_of_gradients(pool2, strategy):
    for equal in pool2.run(partly_used, strategy):
        assert len(equal) == len(SHARDINGS)
        assert all(equal)


def freed(rank: int, world: int, keep: bool) -> list[bool]:
    model = Tower()
    options = DataParallelOptions(sharding="zero1", overlap_gradients="on")
    mesh = ParallelMesh(ParallelConfig(dp=world))
    data_parallel = DataParallel(model, {}, mesh, options, bucket_bytes=ONE_LAYER, keep_gradients=keep)
    step(model, data_parallel, torch.ones(1, 4))
    kept = [param.grad is not None for param in model.parameters()]
    data_parallel.reduce()
    data_parallel.close()
    return kept


@pytest.mark.parametrize("keep", [False, True])
def test_zero_frees_gradients_in_backward_unless_they_are_kept(pool2, keep):
    for kept in pool2.run(freed, keep):
        assert kept == [keep] * 3


def closed(rank: int, world: int, strategy: str) -> tuple[int, int]:
    """Return the number of communicators before training with overlap, and after closing it with weights in flight."""
    mesh = ParallelMesh(ParallelConfig(dp=world))
    communicator_of(dist.group.WORLD)  # stays open, whichever test uses it first
    before = len(communicators())
    model = Tower()
    options = DataParallelOptions(sharding=strategy, overlap_gradients="on")
    data_parallel = DataParallel(model, {}, mesh, options, bucket_bytes=ONE_LAYER)
    assert len(communicators()) > before
    step(model, data_parallel, torch.ones(1, 4))
    data_parallel.reduce()
    data_parallel.publish()
    data_parallel.finish()
    for _ in range(2):
        data_parallel.close()
    with pytest.raises(MoeCommError, match="must not be used after close"):
        step(model, data_parallel, torch.ones(1, 4))
    return before, len(communicators())


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_close_releases_the_groups_of_the_threads(pool2, strategy):
    for before, after in pool2.run(closed, strategy):
        assert before == after
