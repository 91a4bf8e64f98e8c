"""Arrays of other libraries are exchanged through DLPack, without a copy."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_comm.dispatch import make_dispatcher
from moe_comm.errors import MoeCommError
from tests.pool import RankPool


def dispatch_and_combine(arrays: ModuleType, backend: str) -> None:
    """Dispatch and combine tokens of ``arrays``, and return the result as its array."""
    x_TD = arrays.arange(12, dtype=arrays.float32).reshape(3, 4)
    ids_TK = arrays.asarray([[0, 1], [3, 2], [1, 3]])
    weights_TK = arrays.asarray([[0.5, 0.5], [1.0, 1.0], [2.0, 1.0]], dtype=arrays.float32)
    dispatcher = make_dispatcher(4, None, backend=backend, device=torch.from_dlpack(x_TD).device)
    sent = dispatcher.dispatch(x_TD, ids_TK)
    rows_RD = arrays.from_dlpack(sent.rows_RD)
    assert [int(row[0]) for row in rows_RD] == [0, 0, 8, 4, 4, 8], "by expert"
    y = dispatcher.combine(2 * rows_RD, weights_TK, sent.handle)
    expected_TD = 2 * x_TD * arrays.asarray([[1.0], [2.0], [3.0]], dtype=arrays.float32)
    assert bool((arrays.from_dlpack(y) == expected_TD).all())


def test_numpy_arrays_are_exchanged() -> None:
    dispatch_and_combine(np, "local")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["local", "peer_to_peer"])
def test_cupy_arrays_are_exchanged(backend: str) -> None:
    dispatch_and_combine(pytest.importorskip("cupy"), backend)


class CupyArray:
    """An array that shares its memory as CuPy's do: only through DLPack, on the stream of the reader."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.readers: list[object] = []

    def __dlpack__(self, *, stream: object = None, **versions: object) -> object:
        self.readers.append(stream)
        return self.values.__dlpack__(**versions)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


def test_arrays_are_read_in_place() -> None:
    x_TD, ids_TK = CupyArray(np.ones((2, 3), np.float32)), CupyArray(np.array([[1, 0], [0, 1]]))
    weights_TK = np.full((2, 2), 0.5, np.float32)
    dispatcher = make_dispatcher(2)
    sent = dispatcher.dispatch(x_TD, ids_TK)
    rows = CupyArray(np.from_dlpack(sent.rows_RD))
    rows.values[:] = 7
    assert bool((sent.rows_RD == 7).all()), "the memory is shared"
    y_TD = dispatcher.combine(rows, weights_TK, sent.handle)
    assert bool((y_TD == 7).all())
    assert [len(array.readers) for array in (x_TD, ids_TK, rows)] == [1, 1, 1]


def wrong_arrays(rank: int, world: int, backend: str) -> list[str]:
    """Pass an unusable array on the last rank as each argument, and return the errors of this rank."""
    dispatcher = make_dispatcher(4, dist.group.WORLD if world > 1 else None, backend=backend)
    x_TD, ids_TK = np.ones((2, 3), np.float32), np.array([[1, 0], [0, 1]])
    weights_TK = np.full((2, 2), 0.5, np.float32)
    errors = []
    for wrong in ([[1.0, 2.0]], x_TD.astype(object)):
        for place in range(4):
            sent = dispatcher.dispatch(x_TD, ids_TK)
            arrays: list[Any] = [x_TD, ids_TK, sent.rows_RD, weights_TK]
            if rank == world - 1:
                arrays[place] = wrong
            try:
                if place < 2:
                    dispatcher.dispatch(*arrays[:2])
                else:
                    dispatcher.combine(*arrays[2:], sent.handle)
            except MoeCommError as error:
                errors.append(f"{type(error).__name__}: {error}")
    y_TD = dispatcher.combine(sent.rows_RD, weights_TK, sent.handle)
    assert bool((y_TD == 1).all()), "the group stays usable"
    return errors


@pytest.mark.parametrize("backend", ["local", "shared_memory", "all_to_all"])
def test_unusable_arrays_are_an_error_on_every_rank(backend: str) -> None:
    if backend == "local":
        results = [wrong_arrays(0, 1, backend)]
    else:
        with RankPool(2) as pool:
            results = pool.run(wrong_arrays, backend)
    for errors in results:
        kinds = ["builtins.list"] * 4 + ["numpy.ndarray"] * 4
        assert len(errors) == len(kinds)
        for kind, message in zip(kinds, errors, strict=True):
            assert "expected a tensor, or an array with DLPack; got " + kind in message, message
