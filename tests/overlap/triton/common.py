"""Helpers of the tests of Triton kernels: ranks that interpret them, and the arithmetic of a tile.

Triton decides when it is first imported whether it interprets. The process of pytest never imports it that way: ranks
call ``interpreted`` before they import anything that does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

TILES: dict[str, Any] = {"block_m": 16, "block_n": 16, "block_k": 16, "copy": 128}
"""The smallest tiles that kernels support."""


def interpreted(name: str) -> ModuleType:
    """``moe_comm.overlap.triton.<name>`` with kernels that are interpreted; only in a rank's process."""
    os.environ["TRITON_INTERPRET"] = "1"
    return importlib.import_module(f"moe_comm.overlap.triton.{name}")


def tile_product(a_MK: Tensor, b_KN: Tensor, tile: int = 16) -> Tensor:
    """The bits of a kernel's tiles: products of tiles padded with zeros, added block of K after block of K in fp32.

    With NumPy, as the interpreter does; torch's products of fp32 differ in the order of additions.
    """
    (rows, inner), columns = a_MK.shape, b_KN.shape[1]
    up_m, up_k, up_n = (-n % tile for n in (rows, inner, columns))
    a = np.pad(a_MK.float().numpy(), ((0, up_m), (0, up_k)))
    b = np.pad(b_KN.float().numpy(), ((0, up_k), (0, up_n)))
    y = np.zeros((rows + up_m, columns + up_n), np.float32)
    for m in range(0, y.shape[0], tile):
        for n in range(0, y.shape[1], tile):
            acc = np.zeros((tile, tile), np.float32)
            for k in range(0, a.shape[1], tile):
                left, right = a[m : m + tile, k : k + tile].copy(), b[k : k + tile, n : n + tile].copy()
                acc = np.matmul(left, right) + acc
            y[m : m + tile, n : n + tile] = acc
    return torch.from_numpy(y[:rows, :columns].copy()).to(a_MK.dtype)
