"""Helpers of the tests of the local Triton operators. Checks run in a process that interprets kernels."""

from __future__ import annotations

import importlib
import os
import warnings
from types import ModuleType

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernels(name: str) -> ModuleType:
    """Return ``moe_comm.kernels.triton.<name>`` with interpreted kernels; only in a rank's process."""
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns of infinities and NaN, which tests use on purpose
    return importlib.import_module(f"moe_comm.kernels.triton.{name}")


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_ids(tokens: int, top_k: int, experts: int, seed: int = 0) -> Tensor:
    """Return [T, K] distinct experts of each token; every fifth slot is dropped."""
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(tokens, experts, generator=generator).topk(top_k).indices
    return ids_TK.masked_fill(torch.rand(tokens, top_k, generator=generator) < 0.2, -1)
