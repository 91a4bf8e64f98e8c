"""gather_matmul and matmul_scatter as Triton kernels, interpreted by 3 processes.

The bits are those of the tiles' arithmetic for any number of programs. If a rank fails or makes a different call, the
others raise an error.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.comm.group_setup import communicator_of, configure_collectives
from moe_comm.overlap.linear import matmul_scatter
from moe_comm.overlap.options import Overlap
from tests.layers.reference import draw
from tests.overlap.triton.common import interpreted, needs_triton, tile_product
from tests.pool import RankPool, with_longer_deadline
from tests.support.gemm_model import COMPILER, model_gemm

pytestmark = needs_triton
WORLD = 3
NAMES = ("gather_matmul", "matmul_scatter")
SHAPES = [(19, 24, 17), (1, 3, 2), (0, 4, 3)]
"""(rows of a rank, inner width, outputs): sizes that tiles do not divide, one row, no rows"""


def _inputs(name: str, rank: int, world: int, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """Return x, weight and the gradient of the result."""
    rows, inner, outputs = shape
    x_rows, grad_rows = (rows, rows * world) if name == "gather_matmul" else (rows * world, rows)
    sizes = ((x_rows, inner), (outputs, inner), (grad_rows, outputs))
    return [draw(*size, seed=seed + rank, dtype=dtype) for size, seed in zip(sizes, (0, 50, 100), strict=True)]


def _kernels(moving: int, computing: int) -> Any:
    """Return the kernels with the smallest tiles."""
    memory, programs = interpreted("memory"), interpreted("programs")
    sizes = programs.Programs(moving, computing, programs.Tiling(16, 16, 16, 4, 3), 128)
    return interpreted("linear").LinearKernels(memory.memory_of(dist.group.WORLD, torch.device("cpu")), sizes)


def _run(rank: int, world: int, arg: tuple[str, list[Any], tuple[int, int]]) -> list[list[Tensor]]:
    """Return results and both gradients for each (shape, dtype)."""
    name, cases, programs = arg
    kernels, results = _kernels(*programs), []
    for shape, dtype in cases:
        x, weight, grad = _inputs(name, rank, world, shape, dtype)
        y = kernels.forward(name, x, weight)
        results.append([y, *kernels.gradients(name, x, weight, grad, True, True)])
    return results


def _sum_in_rank_order(shares: list[Tensor]) -> Tensor:
    total = torch.zeros_like(shares[0], dtype=torch.float32)
    for share in shares:
        total += share.float()
    return total.to(shares[0].dtype)


def _expected(name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return by rank: result and gradient of x with the expected bits, and the gradient of the weight in float64."""
    inputs = [_inputs(name, rank, WORLD, shape, dtype) for rank in range(WORLD)]
    rows, by_rank = shape[0], []
    for rank, (x, weight, grad) in enumerate(inputs):
        own = slice(rank * rows, (rank + 1) * rows)
        if name == "gather_matmul":
            gathered = torch.cat([other[0] for other in inputs])
            y = torch.cat([tile_product(other[0], weight.T) for other in inputs])
            grad_x = _sum_in_rank_order([tile_product(g[own], w) for _, w, g in inputs])
            grad_w = grad.double().T @ gathered.double()
        else:
            gathered = torch.cat([other[2] for other in inputs])
            y = _sum_in_rank_order([tile_product(other[own], w.T) for other, w, _ in inputs])
            grad_x = torch.cat([tile_product(other[2], weight) for other in inputs])
            grad_w = gathered.double().T @ x.double()
        by_rank.append((y, grad_x, grad_w))
    return by_rank


@pytest.mark.parametrize(("name", "dtype"), [*zip(NAMES, (torch.float32, torch.bfloat16), strict=True)])
def test_results_and_input_gradients_have_the_bits_of_the_tiles_arithmetic(
    pool3: RankPool, name: str, dtype: torch.dtype
) -> None:
    results = pool3.run(_run, (name, [(shape, dtype) for shape in SHAPES], (2, 2)))
    for number, shape in enumerate(SHAPES):
        for rank, (y, grad_x, grad_w) in enumerate(_expected(name, shape, dtype)):
            actual = results[rank][number]
            assert torch.equal(actual[0], y), (shape, rank)
            assert torch.equal(actual[1], grad_x), (shape, rank)
            # The weight gradient is computed by torch, so its error bound grows with the length of the sum.
            length = max(1, WORLD * shape[0])
            scale = torch.finfo(dtype).eps * (2 * length**0.5 + 2)
            torch.testing.assert_close(actual[2].double(), grad_w, rtol=scale, atol=scale * 4)


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_do_not_depend_on_programs(pool3: RankPool, name: str) -> None:
    cases = [((35, 8, 5), torch.float32)]
    few_programs = pool3.run(_run, (name, cases, (1, 1)))
    many_programs = pool3.run(_run, (name, cases, (5, 3)))
    for rank in range(WORLD):
        assert all(map(torch.equal, few_programs[rank][0], many_programs[rank][0])), rank


def _whole_numbers(*shape: int, seed: int) -> Tensor:
    """Return small whole numbers, so that every sum of products is exact in any order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


class _Hopper:
    """Lets the GEMMs in CUDA C++ run in their model, and records which ones do."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from moe_comm.kernels import tensor_cores

        self.used, self._model = list[str](), model_gemm(2)
        patch.setenv(tensor_cores.GEMM, "cuda")
        patch.setattr(tensor_cores, "launcher_for", self._launcher_for)

    def _launcher_for(self, rows: Tensor, kernel: str) -> Any:
        self.used.append(kernel)
        return self._model


def _run_on_hopper(rank: int, world: int, arg: None) -> list[str]:
    """Return the kernels of this rank. Rank 1 computes one direction in Triton, beside those in CUDA C++ of others."""
    kernels = interpreted("linear").LinearKernels.of(dist.group.WORLD, torch.ones(1, dtype=torch.bfloat16))
    rows, inner, outputs, used = 130, 72, 264, []
    for name in NAMES:
        in_rows, out_rows = (rows, rows * world) if name == "gather_matmul" else (rows * world, rows)
        x, w, grad = (
            _whole_numbers(*shape, seed=10 * seed + rank)
            for seed, shape in enumerate(((in_rows, inner), (outputs, inner), (out_rows, outputs)))
        )
        expected = [kernels.forward(name, x, w), *kernels.gradients(name, x, w, grad, True, True)]
        with pytest.MonkeyPatch.context() as patch:
            hopper = _Hopper(patch)
            y = kernels.forward(name, x, w)
            if rank == 1:
                patch.undo()
            actual = [y, *kernels.gradients(name, x, w, grad, True, True)]
        assert all(map(torch.equal, actual, expected)), name
        used += hopper.used
    return used


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_kernels_for_hopper_have_the_bits_of_triton_on_whole_numbers(pool3: RankPool) -> None:
    model_gemm()  # compiles the model once
    used = pool3.run(_run_on_hopper)
    assert used[0] == used[2] == ["arrived", "published_transposed", "published", "arrived_transposed"]
    assert used[1] == ["arrived", "published"]


def _run_many_turns(rank: int, world: int, turns: int) -> bool:
    """Run many turns, each one call of an operator. Sizes change, so memory grows and flags move.

    Values are whole numbers, so the order of additions does not matter.
    """
    kernels, correct = _kernels(2, 2), True
    for turn in range(turns):
        rows, columns = 3 + 9 * (turn % 3), 2 + turn
        parts = [torch.full((rows, 4), float(10 * turn + r)) for r in range(world)]
        weight = torch.ones(columns, 4)
        y = kernels.forward("gather_matmul", parts[rank], weight)
        correct &= torch.equal(y, torch.cat([part @ weight.T for part in parts]))
        z = kernels.forward("matmul_scatter", y[:, :2].contiguous(), torch.ones(3, 2))
        correct &= torch.equal(z, torch.full((rows, 3), 2.0 * 4 * (10 * turn + rank) * world))
    open_files = [fd for fd in os.listdir("/proc/self/fd") if _links_to(fd, "moe_comm")]
    return correct and not open_files


def _links_to(fd: str, name: str) -> bool:
    try:
        return f"memfd:{name}" in os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False


def test_many_turns_run_without_resets_and_leave_no_open_file(pool3: RankPool) -> None:
    assert pool3.run(_run_many_turns, 4) == [True] * WORLD


def _make_different_calls(rank: int, world: int, arg: None) -> str:
    outputs = 3 if rank == 1 else 2
    try:
        _kernels(1, 1).forward("gather_matmul", torch.ones(4, 4), torch.ones(outputs, 4))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_ranks_that_make_different_calls_raise_on_every_rank(pool3: RankPool) -> None:
    errors = pool3.run(_make_different_calls)
    assert all(text.startswith("RankMismatch") for text in errors), errors
    assert all("ranks [1] are in another" in errors[rank] for rank in (0, 2)), errors


def _bad_input(rank: int, world: int, arg: None) -> list[str]:
    interpreted("linear")
    errors = []
    for x, weight in (
        (torch.ones(4, 3), torch.ones(2, 4)),
        (torch.ones(6, 4).double(), torch.ones(2, 4).double()),
        (torch.ones(5, 4), torch.ones(2, 4)),
    ):
        try:
            matmul_scatter(x, weight, dist.group.WORLD, Overlap(backend="triton"))
        except Exception as error:
            errors.append(type(error).__name__)
    return errors


def test_bad_input_is_refused_before_rows_move(pool3: RankPool) -> None:
    assert pool3.run(_bad_input) == [["InputError"] * 3] * WORLD


def _lose_rank_2(rank: int, world: int, arg: tuple[str, str, float]) -> list[str]:
    """Rank 2 takes part once, then exits or hangs."""
    name, failure, _ = arg
    with pytest.MonkeyPatch.context() as patch:
        if failure == "is late on Hopper":
            linear, dtype = interpreted("linear"), torch.bfloat16
            hopper, kernels = _Hopper(patch), linear.LinearKernels.of(dist.group.WORLD, torch.ones(1, dtype=dtype))
            errors = _errors_without_rank_2(rank, kernels, name, _inputs(name, rank, world, (17, 8, 16), dtype), arg)
            return errors if len(hopper.used) > 1 or rank == 2 else ["Triton"]
    inputs = _inputs(name, rank, world, (17, 8, 5), torch.float32)
    return _errors_without_rank_2(rank, _kernels(2, 2), name, inputs, arg)


def _errors_without_rank_2(
    rank: int, kernels: Any, name: str, inputs: list[Tensor], arg: tuple[str, str, float]
) -> list[str]:
    _, failure, timeout_s = arg
    x, weight, _ = inputs
    options = CollectiveOptions()
    kernels.forward(name, x, weight)
    configure_collectives(replace(options, timeout_s=timeout_s))  # only now, because setting up may take long
    if rank == 2:
        if failure == "dies":
            os._exit(1)
        return []
    errors = []
    for _ in range(2):
        try:
            kernels.forward(name, x, weight)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    communicator_of(dist.group.WORLD).forget(("symmetric memory", torch.device("cpu")))
    configure_collectives(options)
    return errors


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("gather_matmul", "dies"),
        ("matmul_scatter", "is late"),
        *(pytest.param(name, "is late on Hopper", marks=pytest.mark.slow) for name in NAMES),
    ],
)
def test_a_rank_that_fails_is_named_with_its_flag_on_the_others(name: str, failure: str) -> None:
    def check(timeout_s: float) -> None:
        with RankPool(WORLD, bare=True) as pool:  # a separate pool: the ranks' memory is unusable afterwards
            errors = pool.run(_lose_rank_2, (name, failure, timeout_s), expect_dead={2} if failure == "dies" else ())
        for rank in (0, 1):
            first, again = errors[rank]
            assert first.startswith("PeerTimeout"), errors
            assert "for rank 2" in first and "to raise flag" in first, errors
            assert ("of rank 2 are complete" if name == "gather_matmul" else "of rank 2 is complete") in first, errors
            assert again == first  # the second call raises without a further wait

    with_longer_deadline(check, 3.0, 30.0)
