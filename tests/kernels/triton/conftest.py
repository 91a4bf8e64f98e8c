"""Ranks in which Triton interprets kernels; ``common.kernels`` enables it before Triton is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="package")
def pools() -> Iterator[dict[int, RankPool]]:
    """Yield a pool of bare ranks for each number of ranks, for all tests here."""
    with ExitStack() as stack:
        yield {world: stack.enter_context(RankPool(world, bare=True)) for world in (1, 2, 4)}


@pytest.fixture
def interpreter(pools: dict[int, RankPool]) -> RankPool:
    return pools[1]
