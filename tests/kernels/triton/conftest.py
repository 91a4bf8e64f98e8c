"""One process in which Triton interprets kernels; ``common.kernels`` enables it before Triton is imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="package")
def interpreter() -> Iterator[RankPool]:
    """A pool of one rank, for all tests here."""
    with RankPool(1, bare=True) as pool:
        yield pool
