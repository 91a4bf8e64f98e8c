"""Arrays of other libraries are exchanged through DLPack, without a copy."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from moe_comm.dispatch import make_dispatcher


def there_and_back(arrays: ModuleType, backend: str) -> None:
    """Dispatch and combine tokens of ``arrays``, and return the result as its array."""
    x_TD = arrays.arange(12, dtype=arrays.float32).reshape(3, 4)
    ids_TK = arrays.asarray([[0, 1], [3, 2], [1, 3]])
    weights_TK = arrays.asarray([[0.5, 0.5], [1.0, 1.0], [2.0, 1.0]], dtype=arrays.float32)
    x, ids, weights = map(torch.from_dlpack, (x_TD, ids_TK, weights_TK))
    dispatcher = make_dispatcher(4, None, backend=backend, device=x.device)
    sent = dispatcher.dispatch(x, ids)
    rows_RD = arrays.from_dlpack(sent.rows_RD)
    assert [int(row[0]) for row in rows_RD] == [0, 0, 8, 4, 4, 8], "by expert"
    y = dispatcher.combine(torch.from_dlpack(2 * rows_RD), weights, sent.handle)
    expected_TD = 2 * x_TD * arrays.asarray([[1.0], [2.0], [3.0]], dtype=arrays.float32)
    assert bool((arrays.from_dlpack(y) == expected_TD).all())


def test_numpy_arrays_are_exchanged() -> None:
    there_and_back(np, "local")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["local", "peer_to_peer"])
def test_cupy_arrays_are_exchanged(backend: str) -> None:
    there_and_back(pytest.importorskip("cupy"), backend)
