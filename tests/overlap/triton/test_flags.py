"""Flags and turns, interpreted by 4 processes: data written before a flag is visible after it, and waits end.

A turn is one call of an operator. A flag holds the number of the last turn that raised it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.overlap.triton.common import interpreted, needs_triton
from tests.pool import RankPool

pytestmark = needs_triton
WORLD = 4


def _kernels() -> Any:
    interpreted("flags")
    from tests.overlap.triton import kernels

    return kernels


def _round_the_ring(rank: int, world: int, turns: int) -> bool:
    kernels = _kernels()
    memory = interpreted("memory").memory_of(dist.group.WORLD, torch.device("cpu"))
    x = torch.arange(64.0) + 100 * rank
    for turn in range(turns):
        current = memory.turn(256, 4 + 40 * turn, lambda index: f"number {index}", "a ring")
        kernels.pass_on[(1,)](
            x, memory.peers_W, memory.fault, 64, rank, world, current.number, current.call, current.first_flag,
            current.data, memory.timeout_ns,
        )  # fmt: skip
        memory.finish(current)
    return torch.equal(x, torch.arange(64.0) + 100 * ((rank - turns) % world))


def test_data_written_before_a_flag_is_visible_after_it(pool4: RankPool) -> None:
    """The number of flags grows from turn to turn, so the memory must grow as well."""
    assert pool4.run(_round_the_ring, 11) == [True] * WORLD


def _waits(rank: int, world: int, arg: tuple[list[int], int]) -> tuple[list[int], list[int]]:
    kernels = _kernels()
    values, turn = arg
    ok, fault = torch.full((len(values),), -1), torch.zeros(interpreted("flags").FAULT_WORDS, dtype=torch.int64)
    kernels.wait_each[(1,)](torch.tensor(values), ok, len(values), turn, fault, 20_000_000)
    return ok.tolist(), fault.tolist()


def test_a_flag_of_the_current_or_a_later_turn_ends_a_wait(pool4: RankPool) -> None:
    assert pool4.run(_waits, ([7, 8, 2**40], 7))[0] == ([1, 1, 1], [0, 0, 0, 0, 0])


def test_the_first_wait_that_times_out_is_reported(pool4: RankPool) -> None:
    """A raised flag still ends a wait after another wait failed."""
    assert pool4.run(_waits, ([7, 6, 7, 5], 7))[0] == ([1, 0, 1, 0], [1, 11, 1, 7, 6])


def _rounding(rank: int, world: int, arg: None) -> list[bool]:
    kernels = _kernels()
    import triton.language as tl

    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(rank)).to(torch.int32)
    x = bits.view(torch.float32).clone()
    x[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    x[4:6] = torch.tensor([1.00390625, 1.01171875])  # halfway between two bf16 numbers: round to even
    equal = []
    for dtype, name in ((torch.bfloat16, tl.bfloat16), (torch.float32, tl.float32)):
        y = torch.zeros(4096, dtype=dtype)
        kernels.round_all[(1,)](x, y, COUNT=4096, DTYPE=name)
        equal.append(torch.equal(y.nan_to_num(nan=1.5), x.to(dtype).nan_to_num(nan=1.5)))
    return equal


def test_interpreted_kernels_round_as_torch_does(pool4: RankPool) -> None:
    assert pool4.run(_rounding) == [[True, True]] * WORLD


def test_cpu_tensors_are_refused_without_the_interpreter() -> None:
    from moe_comm.errors import ConfigError
    from moe_comm.overlap.triton.memory import memory_of

    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        memory_of(None, torch.device("cpu"))
