"""Compressed gradients: sent as bf16 and summed in fp32, with half the bytes and one rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_comm.comm.channel import Channel
from moe_comm.layers.parallel.collectives import CollectiveOptions, configure_collectives
from moe_comm.topology import ParallelConfig, ParallelMesh
from moe_comm.train.optim import OptimizerOptions, make_optimizer
from moe_comm.train.parallel import DataParallel, DataParallelOptions

WIDTH = 96


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the bytes that collectives send to other ranks."""
    configure_collectives(CollectiveOptions(shared_memory=False))
    sent = {"bytes": 0}
    gather, swap = Channel.all_gather, Channel.swap

    def counting_gather(self: Channel, tensor: Tensor, description: str) -> Tensor:
        sent["bytes"] += (self.world - 1) * tensor.nbytes
        return gather(self, tensor, description)

    def counting_swap(self: Channel, parts_W: Tensor, description: str) -> Tensor:
        sent["bytes"] += (self.world - 1) * parts_W.nbytes // self.world
        return swap(self, parts_W, description)

    Channel.all_gather, Channel.swap = counting_gather, counting_swap  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        Channel.all_gather, Channel.swap = gather, swap  # type: ignore[method-assign]
        configure_collectives(CollectiveOptions())


def gradient(rank: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + len(name))
    return torch.randn(WIDTH, WIDTH, generator=generator)


def reduced(rank: int, world: int, arg: tuple[str, bool]) -> Any:
    """Return measured and reported bytes of one reduction, and the owned sums."""
    strategy, compress = arg
    mesh = ParallelMesh(ParallelConfig(dp=world))
    model = nn.ParameterDict({"a": torch.zeros(WIDTH, WIDTH), "bb": torch.zeros(WIDTH, WIDTH)})
    data_parallel = DataParallel(model, {}, mesh, DataParallelOptions(sharding=strategy, compress=compress))
    for name, param in model.items():
        param.grad = gradient(rank, name)
    data_parallel.reduce()  # opens the connections, which must not count
    for name, param in model.items():
        param.grad = gradient(rank, name)
    before = data_parallel.traffic.reduced
    with counted() as sent:
        data_parallel.reduce()
    reported = data_parallel.traffic.reduced - before
    return sent["bytes"], reported, {o.name: (o.shard, o.value.grad) for o in data_parallel.owned()}


@pytest.mark.parametrize(("world", "strategy"), [(2, "replicate"), (4, "replicate"), (4, "zero1")])
def test_compressed_gradients_are_half_the_bytes(world, strategy, request):
    pool = request.getfixturevalue(f"pool{world}")
    plain = pool.run(reduced, (strategy, False))
    compressed = pool.run(reduced, (strategy, True))
    numel = 2 * WIDTH * WIDTH
    for rank in range(world):
        sent, reported, _ = plain[rank]
        assert sent == reported == (2 if strategy == "replicate" else 1) * 4 * numel * (world - 1) // world
        assert 2 * compressed[rank][0] == sent
        assert 2 * compressed[rank][1] == reported


@pytest.mark.parametrize("world", [2, 4])
def test_sums_are_in_fp32_of_rounded_addends_and_owned_sums_are_not_rounded(world, request):
    pool = request.getfixturevalue(f"pool{world}")
    for name in ("a", "bb"):
        exact = sum(gradient(r, name).bfloat16().float() for r in range(world))
        for result in pool.run(reduced, ("zero1", True)):
            shard, grad = result[2][name]
            assert torch.equal(grad, shard.of(exact))
        replicas = [result[2][name][1] for result in pool.run(reduced, ("replicate", True))]
        # All replicas of a parameter must have the same bits, or they would drift apart.
        assert all(torch.equal(replica, replicas[0]) for replica in replicas)
        assert torch.equal(replicas[0], exact if world == 2 else exact.bfloat16().float())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up = nn.Parameter(torch.randn(32, 8, generator=generator) / 8**0.5)
        self.down = nn.Parameter(torch.randn(3, 32, generator=generator) / 32**0.5)

    def forward(self, x_TD: Tensor) -> Tensor:
        return torch.tanh(x_TD @ self.up.T) @ self.down.T


def final_loss(rank: int, world: int, arg: tuple[str, bool]) -> list[float]:
    """Return the final loss of 80 steps of a small regression with a batch of 64 over all ranks."""
    strategy, compress = arg
    mesh = ParallelMesh(ParallelConfig(dp=world))
    model = Net()
    data_parallel = DataParallel(model, {}, mesh, DataParallelOptions(sharding=strategy, compress=compress))
    optimizer = make_optimizer(data_parallel.owned(), mesh, OptimizerOptions(kind="adamw", weight_decay=0.0))
    generator = torch.Generator().manual_seed(2)
    teacher = torch.randn(8, 3, generator=generator)
    losses = []
    for _ in range(80):
        x = torch.randn(64, 8, generator=generator)
        y = torch.sin(x @ teacher)
        data_parallel.zero_grad()
        own_rows = slice(rank * 64 // world, (rank + 1) * 64 // world)
        loss = (model(x[own_rows]) - y[own_rows]).square().sum() / 64
        loss.backward()
        data_parallel.reduce()
        optimizer.step(0.02)
        data_parallel.publish()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["replicate", "zero1", "fsdp"])
def test_training_with_compressed_gradients_reaches_the_same_loss(pool4, strategy):
    plain = [sum(step) for step in zip(*pool4.run(final_loss, (strategy, False)), strict=True)]
    compressed = [sum(step) for step in zip(*pool4.run(final_loss, (strategy, True)), strict=True)]
    assert plain != compressed, "nothing was compressed"
    end, end_compressed = sum(plain[-10:]) / 10, sum(compressed[-10:]) / 10
    assert end < 0.25 * plain[0], "the loss did not decrease"
    assert abs(end - end_compressed) < 0.01 * end
