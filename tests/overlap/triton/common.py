"""Helpers of the tests of Triton kernels: ranks that interpret them, and the arithmetic of a tile.

Ranks call ``interpreted`` before they import any module that imports Triton.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.interpreter import interpret

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def interpreted(name: str) -> ModuleType:
    """Return ``moe_comm.overlap.triton.<name>`` with interpreted kernels; only in a rank's process."""
    interpret()
    return importlib.import_module(f"moe_comm.overlap.triton.{name}")


def tile_product(a_MK: Tensor, b_KN: Tensor, tile: int = 16) -> Tensor:
    """Return the product with the bits of a kernel: zero-padded tiles whose blocks of K are added in order, in fp32.

    It uses NumPy, as the interpreter does, because torch's fp32 GEMMs add in a different order.
    """
    (rows, inner), columns = a_MK.shape, b_KN.shape[1]
    pad_m, pad_k, pad_n = (-n % tile for n in (rows, inner, columns))
    a = np.pad(a_MK.float().numpy(), ((0, pad_m), (0, pad_k)))
    b = np.pad(b_KN.float().numpy(), ((0, pad_k), (0, pad_n)))
    y = np.zeros((rows + pad_m, columns + pad_n), np.float32)
    for m in range(0, y.shape[0], tile):
        for n in range(0, y.shape[1], tile):
            acc = np.zeros((tile, tile), np.float32)
            for k in range(0, a.shape[1], tile):
                left, right = a[m : m + tile, k : k + tile].copy(), b[k : k + tile, n : n + tile].copy()
                acc = np.matmul(left, right) + acc
            y[m : m + tile, n : n + tile] = acc
    return torch.from_numpy(y[:rows, :columns].copy()).to(a_MK.dtype)
