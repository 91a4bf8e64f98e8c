"""One chunk: exactly one transfer and one GEMM, with the bits of several chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import channel_of, configure_collectives
from moe_comm.overlap import chunked, linear
from moe_comm.overlap.linear import gather_matmul, matmul_scatter
from moe_comm.overlap.options import Overlap
from tests.layers.reference import draw
from tests.overlap.measurements import configure_tuning
from tests.pool import RankPool, on_ranks

OPERATORS: dict[str, Callable[..., Tensor]] = {"gather_matmul": gather_matmul, "matmul_scatter": matmul_scatter}
WIDTH, OUTPUTS = 32, 48
TRANSFERS = {("gather_matmul", False): 1, ("gather_matmul", True): 2, ("matmul_scatter", False): 1}
"""Number of transfers by (operator, whether it is the backward pass). gather_matmul's backward gathers x again."""


def _inputs(name: str, rank: int, world: int, rows: int) -> tuple[Tensor, Tensor]:
    x = draw(rows * (world if name == "matmul_scatter" else 1), WIDTH, seed=rank)
    return x.requires_grad_(), draw(OUTPUTS, WIDTH, seed=50 + rank).requires_grad_()


class Recorder:
    """Records the rows of each GEMM and the number of transfers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        self.transfers = 0
        channel, product = channel_of(dist.group.WORLD), chunked.row_invariant_mm

        def record(a_MK: Tensor, *others: Any, **options: Any) -> Tensor:
            self.rows.append(a_MK.shape[0])
            return product(a_MK, *others, **options)

        for module in (chunked, linear):
            monkeypatch.setattr(module, "row_invariant_mm", record)
        for name in ("start_all_gather", "start_all_to_all"):
            monkeypatch.setattr(channel, name, self._counted(getattr(channel, name)))

    def _counted(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.transfers += 1
            return start(*args)

        return counted

    def take(self) -> tuple[list[int], int]:
        counts = self.rows, self.transfers
        self.rows, self.transfers = [], 0
        return counts


@on_ranks(2)
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", OPERATORS)
def test_one_chunk_is_one_gemm_and_one_transfer(rank: int, world: int, name: str, deterministic: bool) -> None:
    configure_collectives(CollectiveOptions(shared_memory=False))
    try:
        for rows in (1, 5, 40):
            x, w = _inputs(name, rank, world, rows)
            OPERATORS[name](x, w, dist.group.WORLD)
            with pytest.MonkeyPatch.context() as patch:
                recorder = Recorder(patch)
                y = OPERATORS[name](x, w, dist.group.WORLD, Overlap(1, deterministic=deterministic))
                assert recorder.take() == ([world * rows], TRANSFERS[name, False])
                y.backward(torch.ones_like(y))
                assert recorder.take() == ([world * rows], TRANSFERS.get((name, True), 1))
    finally:
        configure_collectives(CollectiveOptions())


def _gradients(name: str, rank: int, world: int, rows: int, overlap: Overlap) -> tuple[Tensor, ...]:
    x, w = _inputs(name, rank, world, rows)
    y = OPERATORS[name](x, w, dist.group.WORLD, overlap)
    grads = torch.autograd.grad(y, (x, w), draw(*y.shape, seed=9 + rank))
    return (y.detach(), *grads)


def _compare_chunks(rank: int, world: int, arg: tuple[str, str]) -> None:
    name, folder = arg
    configure_tuning(Path(folder))
    try:
        for options in (CollectiveOptions(), CollectiveOptions(shared_memory=False)):
            configure_collectives(options)
            for rows in (0, 1, 37, 300):
                results = [_gradients(name, rank, world, rows, Overlap(chunks, 1)) for chunks in (1, 3, "auto")]
                for result in results[1:]:
                    assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    finally:
        configure_collectives(CollectiveOptions())
        configure_tuning()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("world", [2, 4])
def test_results_have_the_same_bits_for_one_three_and_auto_chunks(
    world: int, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    pool: RankPool = request.getfixturevalue(f"pool{world}")
    pool.run(_compare_chunks, (name, str(tmp_path)))


def _add_one_chunk(rank: int, world: int, arg: Any) -> None:
    local, received = draw(world, 6, 4), draw(world, 6, 3)
    for deterministic in (True, False):
        order = chunked.cached_ring(rank, world).arrivals
        weight = chunked.WeightGradient(order, local, 3, True, deterministic)
        weight.add(chunked.GatheredRows(slice(None), 0, 6, received))
        if deterministic:
            assert weight._received_WSB is received
        torch.testing.assert_close(weight.result(), local.flatten(0, 1).T @ received.flatten(0, 1))


def test_rows_received_in_one_chunk_are_not_copied_for_the_weight_gradient() -> None:
    _add_one_chunk(0, 2, None)
