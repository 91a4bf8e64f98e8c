"""One process in which Triton interprets: what runs there says so before it imports Triton (``common.kernels``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="package")
def interpreter() -> Iterator[RankPool]:
    """A pool of one rank, for all tests here."""
    with RankPool(1, bare=True) as pool:
        yield pool
