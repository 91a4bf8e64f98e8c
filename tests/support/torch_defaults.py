"""Run code under other defaults of torch for the dtype and the device of new tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TorchDefaults:
    """dtype, device: what ``torch.empty(1)`` gets."""

    dtype: torch.dtype
    device: str = "cpu"

    @contextmanager
    def set(self) -> Iterator[None]:
        """Set the defaults in this block."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device(self.device):
                yield
        finally:
            torch.set_default_dtype(before)


OTHER_DEFAULTS = (
    TorchDefaults(torch.bfloat16, "meta"),
    TorchDefaults(torch.float16, "meta"),
    TorchDefaults(torch.float64, "meta"),
)


def run_under(rank: int, world: int, call: tuple[TorchDefaults, Callable[[int, int, Any], Any], Any]) -> Any:
    """Run the function of a rank under other defaults."""
    defaults, work, argument = call
    with defaults.set():
        return work(rank, world, argument)
