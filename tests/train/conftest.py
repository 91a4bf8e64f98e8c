from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import RankPool


@pytest.fixture(scope="package")
def pool2() -> Iterator[RankPool]:
    """Two ranks for all tests of training: most of their start is the import of transformers."""
    with RankPool(2) as pool:
        yield pool
