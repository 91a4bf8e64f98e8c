"""Every timeout is checked in the same way, and a huge one does not end at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_comm import DispatchOptions, make_dispatcher
from moe_comm.comm.communicator import CollectiveOptions
from moe_comm.errors import ConfigError
from moe_comm.runtime.launch import init_ranks
from moe_comm.runtime.watch import WatchOptions
from moe_comm.train.checkpoint import Checkpointer
from tests.pool import on_ranks

HUGE: tuple[Any, ...] = (9.3e9, 1e300, 10**400, np.float64(1e30), np.int64(2**62))
WRONG: tuple[Any, ...] = (
    0,
    -1,
    -1e300,
    -(10**400),
    math.inf,
    -math.inf,
    math.nan,
    True,
    "300",
    None,
    1j,
    [300],
    np.float32("nan"),
)


def joined(value: Any) -> None:
    with init_ranks("cpu", value):
        pass


TAKERS: dict[str, Callable[[Any], object]] = {
    "DispatchOptions": lambda value: DispatchOptions(timeout_s=value),
    "CollectiveOptions": lambda value: CollectiveOptions(timeout_s=value),
    "WatchOptions.stuck_s": lambda value: WatchOptions(stuck_s=value),
    "WatchOptions.start_s": lambda value: WatchOptions(start_s=value),
    "Checkpointer": lambda value: Checkpointer(Path("never-written"), timeout_s=value),
    "init_ranks": joined,
}


@pytest.mark.parametrize("taker", TAKERS)
def test_timeouts_are_positive_finite_numbers(taker: str) -> None:
    for value in WRONG:
        with pytest.raises(ConfigError, match="must be a positive, finite number of seconds; got"):
            TAKERS[taker](value)
    for value in (*HUGE, 1, 2.5, 1e-9, np.float32(3)):
        TAKERS[taker](value)


def test_timeouts_fit_into_64_bits_of_nanoseconds() -> None:
    for value in HUGE:
        assert 1e8 < DispatchOptions(timeout_s=value).timeout_s < 2**63 / 1e9 / 2


@on_ranks(2)
@pytest.mark.parametrize("backend", ["shared_memory", "all_to_all", "all_gather"])
def test_ranks_wait_for_each_other_with_a_huge_timeout(backend: str) -> None:
    dispatcher = make_dispatcher(4, dist.group.WORLD, backend=backend, options=DispatchOptions(timeout_s=1e300))
    x_TD, ids_TK = torch.ones(3, 8), torch.tensor([[0], [3], [1]])
    dispatched = dispatcher.dispatch(x_TD, ids_TK)
    assert torch.equal(dispatcher.combine(dispatched.rows_RD, torch.ones(3, 1), dispatched.handle), x_TD)
