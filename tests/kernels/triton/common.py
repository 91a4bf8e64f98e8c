"""Helpers of the tests of the local Triton operators. Checks run in a process that interprets kernels."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_comm.kernels import native
from tests.support.interpreter import interpret

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernels(name: str) -> ModuleType:
    """Return ``moe_comm.kernels.triton.<name>`` with interpreted kernels; only in a rank's process."""
    interpret()
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


def run_plain_and_triton(work: Any) -> tuple[Any, Any, list[str]]:
    """Return the result of ``work`` in plain torch and with the kernels, and the kernels that ran."""
    plain = work()
    kernels("device")
    native.TRITON_DEVICES.add("cpu")
    try:
        return plain, *needed_kernels(work)
    finally:
        native.TRITON_DEVICES.discard("cpu")


def needed_kernels(work: Any, wait: Any = None) -> tuple[Any, list[str]]:
    """Return the result of ``work`` and the kernels that ran. wait: called if the CPU reads all values of a tensor."""
    launched: list[str] = []
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn.__name__)
        return launch(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", counted)
        if wait is not None:
            patch.setattr(Tensor, "tolist", wait)
        return work(), launched
